"""Settings that cannot work together, or with what is registered: known before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from .config import PREFIX, nearest
from .environments import register_environments
from .errors import ConfigError, PlacementError
from .support.entries import refusal

_ENGINE = "generator.inference_engine.engine_init_kwargs.max_model_len"


def import_recipe_modules(cfg: Any) -> list[str]:
    """Import the modules that a recipe names, so that what they register is known; a line for each that fails."""
    problems = []
    for module in cfg.trainer.arctic_rl.env_modules:
        try:
            register_environments([module])
        except ConfigError as error:
            problems.append(str(error))
        except Exception as error:
            problems.append(_failed_import("env_modules", module, error))
    for module in cfg.trainer.arctic_rl.processor_modules:
        try:
            import_module(module)
        except Exception as error:
            problems.append(_failed_import("processor_modules", module, error))
    register_environments([])
    return problems


def _failed_import(setting: str, module: str, error: Exception) -> str:
    return f"{PREFIX}.{setting}: {module!r} cannot be imported: {type(error).__name__}: {error}"


def recipe_problems(cfg: Any) -> list[str]:
    """What a recipe's settings make impossible, a line each.

    Args:
        cfg: a ``SkyRLTrainConfig`` with ``trainer.arctic_rl`` whose values are of their types;
            ``import_recipe_modules`` has been called with it.
    """
    checks = (_strategy, _model, _environment, _estimator, _lengths)
    return [line for check in checks for line in check(cfg)]


STRATEGIES = ("fsdp", "fsdp2", "megatron")


def _strategy(cfg: Any) -> Iterator[str]:
    if cfg.trainer.strategy not in STRATEGIES:
        names = ", ".join(STRATEGIES)
        yield refusal("trainer.strategy", cfg.trainer.strategy, "SkyRL has no such strategy", f"write one of {names}")


def _model(cfg: Any) -> Iterator[str]:
    path = cfg.trainer.policy.model.path
    if not path:
        yield refusal(
            "trainer.policy.model.path",
            path,
            "SkyRL drops its default where a setting beside it is written",
            "write it",
        )


def _environment(cfg: Any) -> Iterator[str]:
    from skyrl_gym.envs.registration import registry

    env_class = cfg.environment.env_class
    if env_class not in registry:
        yield refusal(
            "environment.env_class",
            env_class,
            f"no such environment is registered ({nearest(env_class, registry)})",
            f"name the module that registers it in {PREFIX}.env_modules",
        )
    if env_class == "bird_multi_turn" and cfg.generator.max_turns == 1:
        yield refusal(
            "generator.max_turns",
            1,
            "it leaves environment.env_class=bird_multi_turn no turn before the answer",
            "write 2 or more, or choose the environment bird",
        )


def _estimator(cfg: Any) -> Iterator[str]:
    trainer = cfg.trainer
    if trainer.algorithm.advantage_estimator == "gae" and not trainer.critic.model.path:
        yield refusal(
            "trainer.algorithm.advantage_estimator",
            "gae",
            "it needs a critic",
            "write trainer.critic.model.path, or one of grpo, rloo, reinforce++ and maxrl",
        )


def tokens_of_a_rollout(cfg: Any) -> int:
    """The longest input of an engine and response together that a recipe asks for, in tokens."""
    generator = cfg.generator
    sections = ["sampling_params"] + (["eval_sampling_params"] if cfg.trainer.eval_interval > 0 else [])
    response = max(vars(generator)[section].max_generate_length for section in sections)
    prompt = max(cfg.trainer.max_prompt_length, generator.max_input_length if generator.max_turns > 1 else 0)
    return prompt + response


def _lengths(cfg: Any) -> Iterator[str]:
    longest = cfg.generator.inference_engine.engine_init_kwargs.get("max_model_len")
    needed = tokens_of_a_rollout(cfg)
    if isinstance(longest, int) and longest < needed:
        yield refusal(
            _ENGINE,
            longest,
            "trainer.max_prompt_length and max_generate_length are longer together, and responses would be cut off",
            f"write at least {needed}",
        )


def worker_count_problems(cfg: Any) -> Iterator[str]:
    """Whether the recipe's processes would fit a cluster without GPUs, where it is to run without any."""
    from .backends.registry import backend_name
    from .devices import device_here
    from .placement import ClusterDescription, Node, placement_request, plan_placement
    from .server_config import server_config

    if backend_name(cfg) != "builtin" or device_here(cfg) == "cuda":
        return
    try:
        config = server_config(cfg, run_id="", env_vars={})
    except (ValueError, TypeError, IndexError):
        return  # setting_problems tells why
    try:
        plan_placement(placement_request(config), ClusterDescription((Node("this machine", 1, 0),)))
    except PlacementError as error:
        yield f"{error}; for a cluster with GPUs that is not seen from here write trainer.arctic_rl.device=cuda"


def gpu_placement_problems(cfg: Any) -> Iterator[str]:
    """Why there is no plan for the recipe's GPUs on the cluster that it describes, where it is to run on GPUs.

    What the nodes of the real cluster have is seen when the run starts.
    """
    from .backends.registry import backend_name
    from .described_placement import gpu_plan
    from .devices import device_here

    if backend_name(cfg) != "builtin" or device_here(cfg) == "cpu":
        return
    try:
        gpu_plan(cfg)
    except PlacementError as error:
        yield str(error)
    except (ValueError, TypeError, ArithmeticError, LookupError):
        return  # setting_problems tells why
