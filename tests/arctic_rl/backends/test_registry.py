import os
import pickle
import subprocess
import sys

import pytest

from integrations.arctic_rl.backends import BackendHandle, RemoteBackend, RemoteBackendRegistry
from integrations.arctic_rl.backends.forwarder import BackendForwarder
from integrations.arctic_rl.errors import ConfigError, UnsupportedError
from tests.arctic_rl.in_process_backend import InProcessBackend


@pytest.fixture
def registry(monkeypatch):
    """The registry with tables of its own, the built-in backend in them."""
    for table in ("_loaders", "_workers", "_loaded"):
        monkeypatch.setattr(RemoteBackendRegistry, table, dict(vars(RemoteBackendRegistry)[table]))
    return RemoteBackendRegistry


def test_an_unknown_backend_lists_the_known_and_says_how_to_register():
    with pytest.raises(ConfigError) as caught:
        RemoteBackendRegistry.get("bultin")
    assert "did you mean 'builtin'? known names: arctic-platform, builtin, http" in str(caught.value)
    assert "RemoteBackendRegistry.register" in str(caught.value)
    with pytest.raises(ConfigError, match=r"known names: .*builtin"):
        RemoteBackendRegistry.check_name("something else")


def test_a_loader_runs_once_and_when_asked(registry):
    calls = []

    @registry.register("lazy")
    def loader():
        calls.append(1)
        return InProcessBackend

    registry.check_name("lazy")
    assert calls == []
    assert registry.get("lazy") is registry.get("lazy") is InProcessBackend
    assert calls == [1]


def test_a_taken_name_is_refused_and_the_same_entry_is_not(registry):
    def loader():
        return InProcessBackend

    registry.register("mine")(loader)
    registry.register("mine")(loader)
    registry.register("mine too")(InProcessBackend)
    registry.register("mine too")(InProcessBackend)
    with pytest.raises(ConfigError, match="registered already"):
        registry.register("mine")(lambda: InProcessBackend)
    with pytest.raises(ConfigError, match="registered already"):
        registry.register("builtin")(InProcessBackend)
    registry.register_worker("mine", loader)
    with pytest.raises(ConfigError, match="forwarding worker named 'mine' is registered already"):
        registry.register_worker("mine", lambda: dict)


@pytest.mark.parametrize("name", ["InProcessBackend", "load_in_process"])
def test_a_dotted_path_is_a_class_or_a_loader(registry, monkeypatch, name):
    module = sys.modules[InProcessBackend.__module__]
    monkeypatch.setattr(module, "load_in_process", lambda: InProcessBackend, raising=False)
    path = f"{InProcessBackend.__module__}.{name}"
    registry.check_name(path)
    assert registry.get(path) is InProcessBackend


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no.such.module.Backend", "does not import"),
        ("tests.arctic_rl.in_process_backend.InProcesBackend", "did you mean 'InProcessBackend'"),
        ("tests.arctic_rl.in_process_backend.CANNED_METRICS", "write the path of a RemoteBackend class"),
        ("collections.Counter", "write the path of a RemoteBackend class"),
    ],
)
def test_a_path_that_leads_nowhere_says_why(path, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        RemoteBackendRegistry.check_name(path)
    assert f"trainer.arctic_rl.backend='{path}'" in str(caught.value)


def test_what_a_loader_returns_must_be_a_class(registry):
    registry.register("wrong")(lambda: InProcessBackend())
    with pytest.raises(ConfigError, match="not a class"):
        registry.get("wrong")
    with pytest.raises(ConfigError, match="a class or a function"):
        registry.register("worse")(InProcessBackend())


def test_a_loader_that_fails_says_why_and_is_asked_again(registry, monkeypatch):
    def broken():
        raise ImportError("libfoo.so is not there")

    module = sys.modules[InProcessBackend.__module__]
    monkeypatch.setattr(module, "broken", broken, raising=False)
    monkeypatch.setattr(module, "with_argument", lambda argument: InProcessBackend, raising=False)
    registry.register("broken")(broken)
    registry.register_worker("broken", broken)
    for load, kind in ((registry.get, "backend"), (registry.get_worker, "worker")) * 2:
        with pytest.raises(ConfigError, match=f"loader of the {kind} 'broken' failed: ImportError: libfoo.so"):
            load("broken")
    for name, reason in (("broken", "ImportError: libfoo.so"), ("with_argument", "TypeError: .*argument")):
        path = f"{InProcessBackend.__module__}.{name}"
        with pytest.raises(ConfigError, match=f"^trainer.arctic_rl.backend='{path}': the loader failed: {reason}"):
            registry.check_name(path)


def test_a_class_that_is_no_backend_is_refused_under_a_name_too(registry):
    registry.register("number")(lambda: int)
    with pytest.raises(ConfigError, match="'number' returned <class 'int'>, not a RemoteBackend class"):
        registry.get("number")


def test_a_handle_attaches_another_backend_by_name(registry):
    built = []

    class Attaching(InProcessBackend):
        @classmethod
        def from_config(cls, config, handle=None):
            built.append((config, handle))
            return cls()

    registry.register("in_process")(Attaching)
    handle = pickle.loads(pickle.dumps(InProcessBackend().reconnect_handle()))
    assert handle == BackendHandle(backend="in_process")
    assert isinstance(registry.attach(handle, "the config"), Attaching)
    assert built == [("the config", handle)]


def test_a_name_that_a_module_of_the_recipe_registers_is_known_in_its_ray_task(tmp_path):
    """The task is a process of its own, which has not checked the recipe."""
    (tmp_path / "names_of_mine.py").write_text(
        "from integrations.arctic_rl.backends import RemoteBackendRegistry\n"
        "@RemoteBackendRegistry.register('mine')\n"
        "def load():\n    from tests.arctic_rl.in_process_backend import InProcessBackend\n\n"
        "    return InProcessBackend\n"
    )
    code = (
        "import sys\nfrom types import SimpleNamespace as Namespace\n"
        "from integrations.arctic_rl.backends.registry import backend_class\n"
        "from integrations.arctic_rl.config import ArcticRLConfig\n"
        "def chosen(**settings):\n"
        "    return backend_class(Namespace(trainer=Namespace(arctic_rl=ArcticRLConfig(**settings)))).__name__\n"
        "print(chosen(processor_modules=['names_of_mine']), 'names_of_mine' in sys.modules)\n"
        "print(chosen(backend='mine', processor_modules=['names_of_mine']))"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert output.stdout.split("\n")[:2] == ["BuiltinBackend False", "InProcessBackend"]


def test_a_forwarder_makes_the_calls_of_the_contract_and_no_other(registry):
    registry.register("in_process")(InProcessBackend)
    assert registry.get_worker("in_process") is BackendForwarder
    forwarder = registry.get_worker("in_process")("config", BackendHandle(backend="in_process"))
    try:
        assert forwarder.call("dp_size", "policy") == 1
        assert forwarder.call("sync_weights") == 1
        assert forwarder.call("update_weights") == 2
        for name in ("shutdown", "_record", "calls", "from_config", "no_such_call"):
            with pytest.raises(UnsupportedError, match="not a call that is forwarded"):
                forwarder.call(name)
    finally:
        forwarder.close()
    with pytest.raises(UnsupportedError, match="give the group one member"):
        BackendForwarder("config", BackendHandle(backend="in_process"), world_size=2)


def test_a_worker_of_a_backends_own_is_loaded_when_asked(registry):
    class Worker:
        pass

    registry.register("in_process")(InProcessBackend)
    registry.register_worker("in_process", lambda: Worker)
    assert registry.get_worker("in_process") is Worker
    with pytest.raises(ConfigError, match="is not registered"):
        registry.get_worker("nobody")


def test_the_contract_names_every_call():
    lifecycle = {"from_config", "reconnect_handle", "destroy", "shutdown", "initialize", "requires_single_forwarder"}
    training = {"fwd_no_grad", "fwd_bwd", "step", "log_probs", "weight_norm", "save_weights", "empty_training_cache"}
    sampling = {"generate", "sync_weights", "update_weights", "reset_prefix_cache"}
    checkpoints = {"save_checkpoint", "load_checkpoint"}
    sleep = {f"{verb}_{job}" for verb in ("sleep", "wake") for job in ("training", "sampling", "log_prob")}
    assert lifecycle | training | sampling | checkpoints | sleep <= set(dir(RemoteBackend))


PURITY = """
import os, sys
from integrations.arctic_rl.backends import RemoteBackendRegistry

OF = {
    "builtin": ("integrations.arctic_rl.backends.builtin", "ray", "deepspeed", "vllm"),
    "http": ("integrations.arctic_rl.backends.http", "httpx", "fastapi", "uvicorn"),
    "arctic-platform": ("integrations.arctic_rl.backends.arctic_platform", "arctic_platform", "arctic_rl"),
}
assert sorted(OF) == RemoteBackendRegistry.names(), RemoteBackendRegistry.names()
for name in (None, *OF):
    if os.fork() == 0:
        if name is None:
            RemoteBackendRegistry.check_name("builtin")
        else:
            RemoteBackendRegistry.get(name)
        foreign = [module for other, modules in OF.items() if other != name for module in modules]
        foreign += ["skyrl", "torch"] if name is None else ["skyrl"]
        print(name, sorted(set(foreign) & set(sys.modules)), flush=True)
        os._exit(0)
    os.wait()
"""


def test_choosing_a_backend_imports_nothing_of_the_others():
    printed = subprocess.run([sys.executable, "-c", PURITY], capture_output=True, text=True)
    assert printed.stdout.splitlines() == [f"{name} []" for name in (None, "builtin", "http", "arctic-platform")], (
        printed.stderr[-2000:]
    )
