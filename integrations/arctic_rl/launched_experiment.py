"""The experiment of a recipe's own entry module, composed with our parts wherever the recipe builds it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from loguru import logger
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.trainer import RayPPOTrainer

from .checks import setting_problems
from .compose import with_mixin
from .errors import ConfigError, UnsupportedError
from .experiment import ArcticExpMixin
from .recipe_checks import import_recipe_modules, recipe_problems
from .support import refusals

OWN_ENGINES = ("get_inference_client", "_get_new_inference_client")
"""Methods of an experiment that start inference engines."""

SIMULATED_TRAINERS = ("FullyAsyncTrainerSim",)
"""Trainer classes of SkyRL's that have no workers."""


EVALUATION_ALONE = "EvalOnlyEntrypoint"
"""SkyRL's experiment that has engines and no trainer."""


class LaunchedExpMixin(ArcticExpMixin):
    """``ArcticExpMixin`` for an experiment whose class and config are seen for the first time in the task.

    A recipe's own ``_setup_trainer`` runs, and its call of ``super()`` reaches ours; ``composed_experiments`` puts
    ours on ``BasePPOExp`` for that.

    Raises:
        UnsupportedError: for a config that is not the run's.
        ConfigError: for what stands against the config as the function has changed it, a line each.
    """

    _entry_module: str

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        self._open = False
        problems = task_problems(cfg)
        self._environment_problems = [line for line in problems if line.startswith("environment.env_class=")]
        raise_problems([line for line in problems if line not in self._environment_problems])
        super().__init__(cfg, *args, **kwargs)
        self._open = True

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        """The experiment's own generator; environments of the entry module itself run in threads, as they would if it
        were ``__main__``: a scoring process would have to import the trainer for them.

        Raises:
            ConfigError: for a gym generator whose environment nobody has registered.
        """
        generator = super().get_generator(cfg, tokenizer, inference_engine_client)
        if isinstance(generator, SkyRLGymGenerator):
            raise_problems(self._environment_problems)
            scoring = generator.scoring_config
            mains = (*scoring.main_modules, self._entry_module)
            generator.scoring_config = dataclasses.replace(scoring, main_modules=mains)
        return generator

    def _setup_trainer(self) -> Any:
        return super(ArcticExpMixin, self)._setup_trainer()

    def close(self) -> None:
        """Stop the scoring pool and the backend; may be called twice."""
        if self._open:
            self._open = False
            super().close()


def recipe_method(cls: type, name: str, base: type) -> str | None:
    """``Class.method`` of a recipe's override of a method of ``base``, a class of SkyRL's; None where it has none."""
    order = cls.__mro__[: cls.__mro__.index(base)]
    return next((f"{owner.__name__}.{name}" for owner in order if name in vars(owner)), None)


def refuse_own_engines(cls: type) -> None:
    """Refuse an experiment class that starts inference engines, and say what of it has no effect.

    Raises:
        UnsupportedError: naming the method.
    """
    for name in OWN_ENGINES:
        method = recipe_method(cls, name, BasePPOExp)
        if method is not None:
            raise UnsupportedError(
                f"{method} starts inference engines of its own, which this backend would never bring new weights to: "
                "leave it out; the generator is given a client of the backend's engines"
            )
    method = recipe_method(cls, "get_colocate_pg", BasePPOExp)
    if method is not None:
        logger.warning(f"{method} has no effect: the backend places its own workers")


def refuse_evaluation_alone(cls: type) -> None:
    """Refuse SkyRL's experiment that evaluates without a trainer, with which this backend starts its engines.

    Raises:
        UnsupportedError: with what to write.
    """
    for base in cls.__mro__:
        if base.__name__ == EVALUATION_ALONE and base.__module__.startswith("skyrl."):
            raise UnsupportedError(
                f"{cls.__name__} evaluates without a trainer, and this backend starts its engines with one: run "
                "skyrl.train.entrypoints.main_base with trainer.eval_before_train=true, and leave the training with "
                "trainer.max_training_steps=1"
            )


def refuse_trainer(cls: type, cfg: Any) -> None:
    """Refuse a trainer class that this backend cannot serve.

    Args:
        cls: the recipe's class.
        cfg: the experiment's config.

    Raises:
        UnsupportedError: naming the class, and what to write.
    """
    for base in cls.__mro__:
        if base.__name__ in SIMULATED_TRAINERS and base.__module__.startswith("skyrl."):
            raise UnsupportedError(f"{cls.__name__} only simulates training: use a FullyAsyncRayPPOTrainer")
    method = recipe_method(cls, "build_models", RayPPOTrainer)
    if method is not None:
        raise UnsupportedError(
            f"{method} starts training workers of its own, which this backend does not have: leave it out, and "
            "compute in the trainer, or in a policy loss registered with SkyRL"
        )
    method = recipe_method(cls, "update_ref_with_policy", RayPPOTrainer)
    if method is not None and cfg.trainer.update_ref_every_epoch:
        raise UnsupportedError(
            f"{method} would not be called, since this backend updates the reference model itself: write "
            "trainer.update_ref_every_epoch=false, or leave it out"
        )


def task_problems(cfg: Any) -> list[str]:
    """What stands against the config that the function builds its experiment with, now that it has registered, a line
    each.

    Raises:
        UnsupportedError: when it is not a config that ``main()`` has parsed.
    """
    if "arctic_rl" not in vars(cfg.trainer):
        raise UnsupportedError(
            "the remote function builds its experiment with a config of its own, without trainer.arctic_rl: hand on "
            "the one that main() gave it, and change that"
        )
    imports = import_recipe_modules(cfg)
    return list(dict.fromkeys([*imports, *refusals(cfg), *recipe_problems(cfg), *setting_problems(cfg)]))


def raise_problems(problems: list[str]) -> None:
    """Raise ConfigError with all of them, if there are any."""
    if problems:
        raise ConfigError("this run cannot start:\n" + "\n".join(f"- {problem}" for problem in problems))


@contextlib.contextmanager
def composed_experiments(entry_module: str, run_id: str, env_vars: dict[str, str]) -> Iterator[list[Any]]:
    """Meanwhile, building a ``BasePPOExp`` or any subclass gives it with our parts in front.

    ``BasePPOExp.__new__`` is where every experiment class passes, whichever module or function it is defined in and
    under whatever name it is called, and it decides nothing but the object's class: ``MyExp(cfg)`` makes an object of
    ``class ArcticMyExp(mixin, MyExp)``, whose ``__init__`` Python then calls with the recipe's own arguments.
    ``isinstance``, ``super()`` and every method of the recipe's hold as they did.

    Args:
        entry_module: name of the recipe's entry module.
        run_id: the run's id.
        env_vars: environment variables for every worker.

    Yields:
        The experiments built; they are closed at the end.

    Raises:
        UnsupportedError: for an experiment or trainer class that cannot run here, a second experiment, and a trainer
            that no experiment builds.
    """
    built: list[Any] = []

    class RunMixin(LaunchedExpMixin):
        _entry_module = entry_module

        def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(cfg, *args, run_id=run_id, env_vars=env_vars, **kwargs)

    def new_experiment(cls: type, *args: Any, **kwargs: Any) -> Any:
        if built:
            raise UnsupportedError(
                f"the remote function builds a second experiment, {cls.__name__}: one a run; start another command"
            )
        refuse_own_engines(cls)
        refuse_evaluation_alone(cls)
        built.append(object.__new__(with_mixin(RunMixin, cls)))
        return built[0]

    def new_trainer(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not built:
            raise UnsupportedError(
                f"the remote function builds a {cls.__name__} by itself: return it from get_trainer of a BasePPOExp "
                "subclass, and run() that"
            )
        refuse_trainer(cls, built[0].cfg)
        return object.__new__(cls)

    setup_trainer = BasePPOExp._setup_trainer
    BasePPOExp._setup_trainer = ArcticExpMixin._setup_trainer
    BasePPOExp.__new__ = staticmethod(new_experiment)
    RayPPOTrainer.__new__ = staticmethod(new_trainer)
    try:
        yield built
    finally:
        BasePPOExp._setup_trainer = setup_trainer
        # A deleted __new__ leaves the class with a slot that refuses arguments.
        BasePPOExp.__new__ = RayPPOTrainer.__new__ = staticmethod(_plain_new)
        for experiment in built:
            experiment.close()


def _plain_new(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(cls)
