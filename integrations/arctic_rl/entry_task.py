"""A recipe's own remote function, run in our Ray task, its experiment composed with our parts."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .errors import UnsupportedError


def run_entry(
    module_name: str, file: str, entry_name: str, payload: bytes, run_id: str, env_vars: dict[str, str]
) -> Any:
    """The task: import the module, call its function, and stop what its experiment started.

    Args:
        module_name: the entry module's name.
        file: the file that it must come from.
        entry_name: its remote function.
        payload: the function's arguments, pickled; they may be of classes that the module defines.
        run_id: the run's id.
        env_vars: environment variables for every worker.

    Raises:
        UnsupportedError: when the function builds no experiment, or one that cannot run here.
    """
    import ray

    from .spared_imports import spare_vllm

    spare_vllm()
    from .entry_module import require_file
    from .entrypoint import release_semaphores
    from .launched_experiment import composed_experiments

    module = import_module(module_name)
    require_file(module, file)
    args, kwargs = ray.cloudpickle.loads(payload)
    function = vars(module)[entry_name]._function
    try:
        with composed_experiments(module_name, run_id, env_vars) as built:
            result = function(*args, **kwargs)
        if not built:
            raise UnsupportedError(
                f"{module_name}.{entry_name} built no BasePPOExp, so nothing was trained here: build a BasePPOExp "
                "subclass with the recipe's get_trainer, get_generator and datasets, and run() it"
            )
        return result
    finally:
        release_semaphores()
