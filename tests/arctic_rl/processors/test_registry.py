"""Names, dotted paths, and the errors that say what was meant."""

import importlib
import pickle
import subprocess
import sys

import pytest

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.processors import registry
from integrations.arctic_rl.processors.pipeline import run_pipeline
from tests.arctic_rl.processors.helpers import FakeEngine, ragged_batch, tiny_model

HERE = "tests.arctic_rl.processors"


def test_built_in_names():
    assert registry.get_loss_fn("grpo") is registry.get_loss_fn("verl_grpo")
    assert {"grpo", "verl_grpo", "sft"} <= set(registry.known_loss_fns())
    names = {"compute_logprobs", "compute_entropy", "compute_entropy_and_logprobs", "apply_temperature", "identity"}
    assert names <= set(registry.known_post_processors())


def test_several_names_for_one_function_and_a_taken_name():
    def one(model_outputs, batch, meta, device):
        return {}

    def other(model_outputs, batch, meta, device):
        return {}

    registry.register_post_processor("name_test_a", "name_test_b")(one)
    registry.register_post_processor("name_test_a")(one)
    assert registry.get_post_processor("name_test_a") is registry.get_post_processor("name_test_b") is one
    with pytest.raises(UnsupportedError, match=r"'name_test_b' is registered already, by .*one"):
        registry.register_post_processor("name_test_c", "name_test_b")(other)
    with pytest.raises(UnsupportedError, match="unknown post-processor 'name_test_c'"):
        registry.get_post_processor("name_test_c")
    registry.register_loss_fn("loss_name_test")(other)
    with pytest.raises(UnsupportedError, match="under one or more names"):
        registry.register_loss_fn()


def test_a_reloaded_module_may_register_again():
    module = importlib.import_module(f"{HERE}.user_module")
    importlib.reload(module)
    assert registry.get_loss_fn("loss_of_a_user_module") is module.loss


def test_the_alias_package_shares_the_table():
    other = importlib.import_module("skyrl_arctic_rl.processors.registry")
    assert other is not registry
    assert other.get_loss_fn("grpo") is registry.get_loss_fn("grpo")
    other.register_loss_fn("alias_test")(len)
    assert registry.get_loss_fn("alias_test") is len


def test_dotted_paths():
    function = registry.get_loss_fn(f"{HERE}.user_module.undecorated")
    assert function.__name__ == "undecorated"
    assert registry.get_loss_fn(f"{HERE}.user_module.undecorated") is function


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grop", "unknown loss function 'grop'; did you mean 'grpo'.*known: .*sft.*or give the dotted path"),
        ("zzzz", "unknown loss function 'zzzz'; known"),
        ("", "given by its name"),
        (None, "given by its name"),
        ("no_such_package_at_all.module.loss", "there is no module 'no_such_package_at_all'"),
        (f"{HERE}.no_such_module.loss", f"there is no module '{HERE}.no_such_module'"),
        (f"{HERE}.user_module.undecoratd", "has no 'undecoratd'; did you mean 'undecorated'"),
        (f"{HERE}.user_module.NUMBER", "is a int, not a function"),
        (f"{HERE}.broken_module.loss", "broken_module' fails to import: .*a_package_that_is_not_installed"),
    ],
)
def test_unknown_names_say_what_failed(name, message: str):
    with pytest.raises(UnsupportedError, match=message) as caught:
        registry.get_loss_fn(name)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_import_processor_modules():
    registry.import_processor_modules([f"{HERE}.user_module", "json"])
    with pytest.raises(UnsupportedError, match=r"processor module 'no_such_thing' does not import \(ModuleNotFound"):
        registry.import_processor_modules(["no_such_thing"])
    with pytest.raises(UnsupportedError, match="must be a list of module names"):
        registry.import_processor_modules("json")


def test_a_loss_of_a_user_module_runs():
    registry.import_processor_modules([f"{HERE}.user_module"])
    for name in ("loss_of_a_user_module", f"{HERE}.user_module.undecorated"):
        engine = FakeEngine(tiny_model())
        result = run_pipeline(engine, (), ragged_batch(4, 1), {"temperature": 1.0}, {"loss_fn": name}, "cpu")
        assert set(result["metrics"]) == {"advantage"}
        assert engine.module.lm_head.weight.grad.abs().sum() > 0


def test_imports_are_light():
    code = (
        "import sys, integrations.arctic_rl.processors.registry as r\n"
        "assert 'torch' not in sys.modules, 'registry alone needs no torch'\n"
        "r.known_loss_fns(); r.known_post_processors()\n"
        "heavy = {'vllm', 'deepspeed', 'ray', 'skyrl', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
