import subprocess
import sys

import pytest

from integrations.arctic_rl.backends import registry
from integrations.arctic_rl.errors import ConfigError


def test_an_unknown_backend_lists_the_known_and_says_how_to_register():
    with pytest.raises(ConfigError) as caught:
        registry.get("bultin")
    assert "did you mean 'builtin'" in str(caught.value)
    assert "registry.register" in str(caught.value)


def test_a_loader_runs_once_and_a_taken_name_is_refused():
    calls = []

    def loader():
        calls.append(1)
        return dict

    registry.register("test-backend")(loader)
    try:
        assert registry.get("test-backend") is registry.get("test-backend") is dict
        assert calls == [1]
        registry.register("test-backend")(loader)
        with pytest.raises(ConfigError, match="registered already"):
            registry.register("test-backend")(lambda: dict)
    finally:
        registry._LOADERS.pop("test-backend")
        registry._load.cache_clear()


def test_the_registry_loads_no_backend():
    code = (
        "import sys, integrations.arctic_rl.backends.registry; "
        "print([m for m in ('ray', 'vllm', 'deepspeed', 'skyrl', 'integrations.arctic_rl.backends.builtin') "
        "if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
