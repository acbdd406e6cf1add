"""A recipe's own ``main()``, run with the few SkyRL functions that it calls replaced by ours."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from .callback_uses import callback_problems
from .entry_module import ENTRY_SHAPE, all_remote_functions, search_path
from .entry_task import run_entry
from .entrypoint import await_task, cancel_task, check_config, check_placement, cleaned_up, initialize_ray
from .errors import UnsupportedError
from .registered_names import stand_ins, unregistered


class EntryMain:
    """One run of an entry module's ``main()``.

    Why ``main()`` itself is run, and not only the function that it calls: its config class, the changes it makes to
    the config, its checks and the arguments it hands over are then the recipe's own, whatever they are. What is
    replaced meanwhile is what every recipe takes from SkyRL, by identity, so that it does not matter under which name
    or in which module the recipe keeps it:

    - ``SkyRLTrainConfig.from_dict_config``, through which ``from_cli_overrides`` of every config class goes;
    - ``validate_cfg`` and ``initialize_ray``, in every loaded module that holds them;
    - ``remote`` and ``options`` of the chosen remote function, on that one object; those of the module's others run as
      they are, and are refused the config, with which they would train on SkyRL's own workers.

    Args:
        module: the entry module.
        entry_name: the name of its remote function that trains.
    """

    def __init__(self, module: ModuleType, entry_name: str) -> None:
        self._module = module
        self._entry_name = entry_name
        self._entry = vars(module)[entry_name]
        self._unknown: list[str] = []
        self._checked: Any = None
        self._checking = False
        self._run_id = ""
        self._task: Any = None

    def run(self) -> None:
        """Run ``main()`` and wait for its task.

        Raises:
            ConfigError: with everything that stands against the recipe.
            UnsupportedError: when ``main()`` does something else than calling the function with its config.
            ArcticError: when the run fails, also where ``main()`` itself only logs that.
        """
        import ray

        with cleaned_up() as self._run_id, contextlib.ExitStack() as stack:
            self._replace(stack)
            try:
                self._module.main()
                if self._task is None:
                    raise UnsupportedError(
                        f"{self._module.__name__}.main() ended without calling {self._entry_name}.remote(cfg), so "
                        f"nothing was trained: a SkyRL entry module looks like\n{ENTRY_SHAPE}"
                    )
            except KeyboardInterrupt:
                if self._task is not None and ray.is_initialized():
                    cancel_task(self._task)
                raise
            except ray.exceptions.RayError:
                if self._task is not None and ray.is_initialized():
                    await_task(self._task)
                raise
            if ray.is_initialized():
                await_task(self._task)

    def _replace(self, stack: contextlib.ExitStack) -> None:
        from skyrl.train.config.config import SkyRLTrainConfig
        from skyrl.train.utils import utils

        parsing = classmethod(lambda cls, overrides: self._parse(cls, overrides))
        stack.enter_context(replaced_attribute(SkyRLTrainConfig, "from_dict_config", parsing))
        self._validate_cfg = utils.validate_cfg
        stack.enter_context(replaced_function(utils.validate_cfg, self._check))
        stack.enter_context(replaced_function(utils.initialize_ray, lambda cfg: None))
        stack.enter_context(replaced_attribute(self._entry, "remote", self._start))
        stack.enter_context(replaced_attribute(self._entry, "options", self._with_options))
        for name, function in all_remote_functions(self._module).items():
            if function is not self._entry:
                self._watch(stack, name, function)

    def _watch(self, stack: contextlib.ExitStack, name: str, function: Any) -> None:
        """Let another remote function than the one that trains run as it is, unless it is given the config."""
        remote, options = function.remote, function.options

        def checked(call: Callable) -> Callable:
            def submit(*args: Any, **kwargs: Any) -> Any:
                if configs_among([*args, *kwargs.values()]):
                    raise UnsupportedError(
                        f"{self._module.__name__}.main() hands its config to {name}, and {self._entry_name} is taken "
                        f"for the function that trains: write --entry {name} before the module's name, or leave the "
                        f"config out of {name}'s arguments if it trains nothing"
                    )
                return call(*args, **kwargs)

            return submit

        def with_options(**values: Any) -> Any:
            return SimpleNamespace(remote=checked(options(**values).remote))

        stack.enter_context(replaced_attribute(function, "remote", checked(remote)))
        stack.enter_context(replaced_attribute(function, "options", with_options))

    def _parse(self, config_class: type, overrides: Any) -> Any:
        """``from_dict_config`` of the recipe's config class with our settings added."""
        from omegaconf import OmegaConf
        from skyrl.train.config.config import BaseConfig

        from .skyrl_config import has_arctic_settings, parse_what_is_known

        from_dict_config = BaseConfig.from_dict_config.__func__
        if has_arctic_settings(config_class):
            return from_dict_config(config_class, overrides)
        values = OmegaConf.to_container(overrides, resolve=True)

        def build(extended: type, known: list[str]) -> Any:
            return from_dict_config(extended, OmegaConf.create(only(values, set(known))))

        cfg, unknown = parse_what_is_known([f"{name}=" for name in leaves(values)], config_class, build)
        self._unknown += unknown
        return cfg

    def _check(self, cfg: Any) -> None:
        """In place of SkyRL's ``validate_cfg``, which our check runs as a part of itself."""
        if self._checking:
            self._validate_cfg(cfg)
            return
        from loguru import logger

        self._require_settings(cfg)
        self._checking = True
        unknown = unregistered(cfg)
        if unknown:
            logger.info(
                f"{', '.join(unknown)}: not registered yet, the task checks them once the recipe has done that"
            )
        try:
            with stand_ins(cfg):
                callbacks = callback_problems(cfg, self._module.__file__)
                check_config(cfg, [*self._unknown, *callbacks], own_data=True)
        finally:
            self._checking = False
        self._checked = cfg

    def _require_settings(self, cfg: Any) -> None:
        if "arctic_rl" not in vars(cfg.trainer):
            raise UnsupportedError(
                f"{self._module.__name__}.main() builds its config without from_cli_overrides or from_dict_config, so "
                "that trainer.arctic_rl cannot be added: build it with one of them and change it afterwards"
            )

    def _start(self, *args: Any, **kwargs: Any) -> Any:
        return self._submit(args, kwargs, {})

    def _with_options(self, **options: Any) -> Any:
        return SimpleNamespace(remote=lambda *args, **kwargs: self._submit(args, kwargs, options))

    def _submit(self, args: tuple, kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
        """Start Ray and the task that runs the function; returns the task's reference, as the function's own would."""
        import ray

        if self._task is not None:
            raise UnsupportedError(f"{self._module.__name__}.main() calls {self._entry_name} twice: one run a command")
        cfg = self._config_among([*args, *kwargs.values()])
        if cfg is not self._checked:
            self._check(cfg)
        payload = ray.cloudpickle.dumps((args, kwargs))
        joined = ray.is_initialized()
        env_vars = initialize_ray(cfg, self._run_id, {"PYTHONPATH": search_path(self._module)})
        with stand_ins(cfg):
            check_placement(cfg)
        options = {"num_cpus": 1, **self._entry._default_options, **options, "max_retries": 0}
        if joined:
            options = {"runtime_env": {"env_vars": env_vars}, **options}
        module = self._module
        arguments = (module.__name__, module.__file__, self._entry_name, payload, self._run_id, env_vars)
        self._task = start_task(options, *arguments)
        return self._task

    def _config_among(self, values: list[Any]) -> Any:
        configs = configs_among(values)
        if len(configs) != 1:
            raise UnsupportedError(
                f"{self._module.__name__}.main() hands {len(configs)} configs to {self._entry_name}: it must be the "
                "one SkyRLTrainConfig of the run"
            )
        self._require_settings(configs[0])
        return configs[0]


def configs_among(values: Iterable[Any]) -> list[Any]:
    """The values that are a run's config."""
    from skyrl.train.config.config import SkyRLTrainConfig

    return [value for value in values if isinstance(value, SkyRLTrainConfig)]


def start_task(options: Mapping[str, Any], *arguments: Any) -> Any:
    """Run ``run_entry`` in a Ray task with these options; returns its reference."""
    import ray

    return ray.remote(**options)(run_entry).remote(*arguments)


def leaves(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the values of nested mappings."""
    names = []
    for key, value in values.items():
        nested = isinstance(value, Mapping) and len(value) > 0
        names += leaves(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]
    return names


def only(values: Mapping[str, Any], kept: set[str], prefix: str = "") -> dict[str, Any]:
    """Nested mappings with the leaves whose ``"dotted.name="`` is kept."""
    result = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and len(value) > 0:
            below = only(value, kept, f"{prefix}{key}.")
            result |= {key: below} if below else {}
        elif f"{prefix}{key}=" in kept:
            result[key] = value
    return result


@contextlib.contextmanager
def replaced_function(original: Callable, replacement: Callable) -> Iterator[None]:
    """Meanwhile, every global of a loaded module that is ``original`` is ``replacement``."""
    holders = [
        (vars(module), name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if value is original
    ]
    for namespace, name in holders:
        namespace[name] = replacement
    try:
        yield
    finally:
        for namespace, name in holders:
            namespace[name] = original


@contextlib.contextmanager
def replaced_attribute(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Meanwhile, ``owner`` has an attribute of its own in place of the one it has or inherits."""
    own = name in vars(owner)
    original = vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
