import pytest

from integrations.arctic_rl.backends.contract import BackendContract
from tests.arctic_rl.backends import model_backend
from tests.arctic_rl.backends.attaching import attach_elsewhere
from tests.arctic_rl.server.http.serving import serving


class TestInProcess(BackendContract):
    backend = model_backend.PATH


class TestTheExample(BackendContract):
    backend = "examples.own_backend.OwnBackend"


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

    def test_a_process_that_imports_nothing_of_the_drivers_attaches(self, served):
        import ray

        address = ray.get_runtime_context().gcs_address
        found = attach_elsewhere(served.backend.reconnect_handle(), served.config, address)
        expected = {"weight_norm": served.run("weight_norm", "policy"), "dp_size": 1, "modules": []}
        assert found == expected
