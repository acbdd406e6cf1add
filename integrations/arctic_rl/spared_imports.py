"""SkyRL's entry module without vLLM, which it imports for the name of one class.

vLLM's GPU worker is a third of what ``skyrl.train.entrypoints.main_base`` imports (3.5 of 10 s, 230 MB), and neither
the process that starts a run nor the one that trains has an engine.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

ENGINE_WORKER = "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap"
"""SkyRL's module of the class that its engines' workers are extended with; importing it imports and adapts vLLM."""


class Deferred(ModuleType):
    """Stands for a module until an attribute that it is not given is asked for, then imports it in its place."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def spare_vllm() -> None:
    """Leave vLLM out of what SkyRL's entry module imports, until something of SkyRL's engine worker is used.

    Does nothing where that worker is imported already.
    """
    if ENGINE_WORKER not in sys.modules:
        deferred = Deferred(ENGINE_WORKER)
        deferred.VLLM_NEW_INFERENCE_WORKER_EXTENSION_CLS = f"{ENGINE_WORKER}.NewInferenceWorkerWrap"
        sys.modules[ENGINE_WORKER] = deferred
