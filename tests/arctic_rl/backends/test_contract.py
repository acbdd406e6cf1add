import pytest

from integrations.arctic_rl.backends.contract import BackendContract
from tests.arctic_rl.backends import model_backend
from tests.arctic_rl.server.http.serving import serving


class TestInProcess(BackendContract):
    backend = model_backend.PATH


class TestOverHttp(BackendContract):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls, tmp_path_factory):
        with serving(storage_root=str(tmp_path_factory.getbasetemp())) as url:
            cls.settings = {"server_url": url}
            yield


@pytest.mark.slow
class TestBuiltin(BackendContract):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def cluster(cls):
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()
