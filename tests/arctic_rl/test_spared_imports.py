"""What stands for an imported module until it is used."""

import subprocess
import sys

import pytest

from integrations.arctic_rl import spared_imports
from integrations.arctic_rl.spared_imports import spare_vllm

CHECK = """
import sys
from integrations.arctic_rl.spared_imports import ENGINE_WORKER, spare_vllm

spare_vllm()
import skyrl.train.entrypoints.main_base
import integrations.arctic_rl.experiment
import integrations.arctic_rl.launched_experiment
from skyrl.backends.skyrl_train.inference_servers import utils

assert "vllm" not in sys.modules
named = utils.VLLM_NEW_INFERENCE_WORKER_EXTENSION_CLS
from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import NewInferenceWorkerWrap

assert "vllm" in sys.modules
assert sys.modules[ENGINE_WORKER].NewInferenceWorkerWrap is NewInferenceWorkerWrap
assert named == f"{NewInferenceWorkerWrap.__module__}.{NewInferenceWorkerWrap.__name__}"
"""


@pytest.mark.slow
def test_a_run_imports_vllm_only_when_it_is_used():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that has the place of SkyRL's engine worker, and leaves a trace when it is imported."""
    (tmp_path / "worker_of_engines.py").write_text("import engines_were_imported\nanswer, other = 42, 'real'\n")
    (tmp_path / "engines_were_imported.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(spared_imports, "ENGINE_WORKER", "worker_of_engines")
    yield "worker_of_engines"
    for name in ("worker_of_engines", "engines_were_imported"):
        sys.modules.pop(name, None)


def test_its_name_costs_nothing_and_anything_else_brings_the_module_itself(module):
    spare_vllm()
    from worker_of_engines import VLLM_NEW_INFERENCE_WORKER_EXTENSION_CLS

    assert VLLM_NEW_INFERENCE_WORKER_EXTENSION_CLS == "worker_of_engines.NewInferenceWorkerWrap"
    deferred = sys.modules[module]
    assert not hasattr(deferred, "__path__") and not hasattr(deferred, "__file__")
    assert "engines_were_imported" not in sys.modules

    from worker_of_engines import answer

    assert answer == 42 and "engines_were_imported" in sys.modules
    assert sys.modules[module] is not deferred and sys.modules[module].other == "real"
    assert deferred.other == "real", "whoever holds what stood for it reaches it too"
    with pytest.raises(AttributeError, match="missing"):
        _ = deferred.missing


def test_a_module_that_is_imported_already_stays(module):
    import worker_of_engines

    spare_vllm()
    assert sys.modules[module] is worker_of_engines
