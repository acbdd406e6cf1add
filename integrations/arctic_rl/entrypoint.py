"""``trainer.override_entrypoint=integrations.arctic_rl.entrypoint``: run a SkyRL recipe on a remote backend."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .callback_uses import callback_problems, source_file
from .errors import ArcticError, ConfigError
from .node_watch import check_node, end_node, node_processes, started_node

CANCEL_GRACE_S = 40.0
NODE_CHECK_S = 2.0
"""How often Ray's own processes are looked at."""


def main(experiment_class: type | None = None, config_class: type | None = None) -> None:
    """Parse the command line's recipe, refuse what cannot be honoured, train, clean up.

    Ends the process with status 1 and one message when the recipe is refused or the run fails.

    Args:
        experiment_class: a recipe's ``BasePPOExp`` subclass; None = ``BasePPOExp`` itself.
        config_class: its ``SkyRLTrainConfig`` subclass; None = ``SkyRLTrainConfig`` itself.
    """
    try:
        cfg = load_config(
            sys.argv[1:], config_class, reads_own_data(experiment_class), source=source_file(experiment_class)
        )
        run(cfg, experiment_class)
    except ArcticError as error:
        sys.exit(f"error: {error}")


def reads_own_data(experiment_class: type | None) -> bool:
    """Whether a recipe's experiment makes its training data itself, so that ``data.train_data`` tells nothing."""
    if experiment_class is None:
        return False
    from skyrl.train.entrypoints.main_base import BasePPOExp

    return experiment_class.get_train_dataset is not BasePPOExp.get_train_dataset


def load_config(
    arguments: list[str], config_class: type | None = None, own_data: bool = False, source: str | None = None
) -> Any:
    """The validated config of a recipe.

    Args:
        arguments: ``key=value`` overrides.
        config_class: see ``main``.
        own_data: see ``check_config``.
        source: the file of a recipe's experiment class, which is read for what cannot be honoured.

    Raises:
        ConfigError: with everything that stands against the run, a line each: settings that are unknown, out of range
            or refused, files that are not there, and the first of SkyRL's own checks that fails.
    """
    from .skyrl_config import parse_what_is_known

    cfg, unknown = parse_what_is_known(arguments, config_class)
    check_config(cfg, [*unknown, *callback_problems(cfg, source)], own_data)
    return cfg


def check_config(cfg: Any, unknown: Sequence[str] = (), own_data: bool = False) -> None:
    """Refuse a parsed config that cannot be honoured, and warn of settings without effect.

    SkyRL's own ``validate_cfg`` is run on it, which also rewrites some settings. A dry run ends here: its report is
    printed, and the process ends with status 0, or 1 where the recipe is refused.

    Args:
        cfg: the config.
        unknown: lines about settings that its parser refused, or its code; not repeated where a check names the
            setting too.
        own_data: the recipe may train on other data than ``data.train_data``, whose size then rules nothing.

    Raises:
        ConfigError: with everything that stands against the run, a line each.
    """
    from loguru import logger

    from .dry_run import exit_status, report
    from .inspection import inspect_config
    from .prompt_count import count_prompts, decisive_prompts, with_contents, with_horizon

    findings, dry = inspect_config(cfg, unknown), cfg.trainer.arctic_rl.dry_run
    prompts = count_prompts(cfg) if dry else "of no interest" if own_data else decisive_prompts(cfg)
    if not own_data:
        findings = with_horizon(cfg, with_contents(cfg, findings), prompts)
    if dry:
        print(report(cfg, findings, prompts))
        sys.exit(exit_status(findings))
    problems = [*findings.refused, *findings.missing]
    if problems:
        raise ConfigError("this run cannot start:\n" + "\n".join(f"- {problem}" for problem in problems))
    if findings.ignored:
        lines = "\n".join(f"- {line}" for line in findings.ignored)
        logger.warning(f"settings without effect on this backend:\n{lines}")


def run(cfg: Any, experiment_class: type | None = None) -> None:
    """Run a validated recipe in a Ray task and stop everything that was started.

    Raises:
        ArcticError: when the run fails, with the cause.
    """
    import ray

    with cleaned_up() as run_id:
        env_vars = initialize_ray(cfg, run_id)
        check_placement(cfg)
        task = ray.remote(num_cpus=1, max_retries=0)(experiment).remote(cfg, run_id, env_vars, experiment_class)
        await_task(task)


@contextlib.contextmanager
def cleaned_up() -> Iterator[str]:
    """Surrounds a run: gives it an id, and stops at its end every process that carries the id, and Ray if it was not
    there before; removes what the run left in shared memory. SIGTERM interrupts what is inside as ctrl-C does.

    Raises:
        ArcticError: when it is interrupted.
    """
    import ray

    from .server.process import kill_run
    from .server.run_directory import remove_run_directories

    run_id = uuid.uuid4().hex[:12]
    started_ray = not ray.is_initialized()
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield run_id
    except KeyboardInterrupt:
        raise ArcticError("interrupted: the run was stopped and its workers with it") from None
    finally:
        node = started_node() if started_ray else []
        if started_ray:
            ray.shutdown()
        kill_run(run_id)
        end_node(node)
        remove_run_directories(run_id)
        signal.signal(signal.SIGTERM, previous)


def experiment(cfg: Any, run_id: str, env_vars: dict[str, str], experiment_class: type | None = None) -> None:
    """The whole run, in one Ray task, so that the training loop never lives on the head node."""
    from .spared_imports import spare_vllm

    spare_vllm()
    from skyrl.train.entrypoints.main_base import BasePPOExp

    from .compose import with_mixin
    from .experiment import ArcticExpMixin

    composed = with_mixin(ArcticExpMixin, experiment_class or BasePPOExp)
    try:
        composed(cfg, run_id=run_id, env_vars=env_vars).run()
    finally:
        release_semaphores()


def release_semaphores() -> None:
    """Remove what multiprocessing keeps in shared memory for this process: Ray ends it without a chance to do so."""
    from multiprocessing import resource_tracker

    from loguru import logger

    logger.remove()
    resource_tracker._resource_tracker._stop()


def initialize_ray(cfg: Any, run_id: str, extra_env_vars: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Start or join Ray with the run's environment, and sync SkyRL's registries to it.

    Replaces SkyRL's ``initialize_ray`` for its GPU probe; the log file it announces and the registries are kept.

    Args:
        cfg: the validated config.
        run_id: the run's id.
        extra_env_vars: more environment variables for the run's processes; they win.

    Returns:
        The environment variables of the run's processes.
    """
    import ray
    from skyrl.backends.skyrl_train.utils.ppo_utils import sync_registries

    from .runtime_env import runtime_env_vars

    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    Path(cfg.trainer.log_path).mkdir(parents=True, exist_ok=True)
    env_vars = runtime_env_vars(cfg, run_id, extra_env_vars)
    if not ray.is_initialized():
        ray.init(runtime_env={"env_vars": env_vars}, log_to_driver=True, include_dashboard=False)
    sync_registries()
    return env_vars


def check_placement(cfg: Any) -> None:
    """Refuse a recipe whose workers do not fit the cluster, before any of them starts.

    Raises:
        PlacementError: with the settings to change.
    """
    from .backends.builtin import describe_cluster
    from .backends.registry import backend_name
    from .devices import device_of
    from .placement import placement_request, plan_placement
    from .server_config import server_config

    if backend_name(cfg) == "builtin":
        cluster = describe_cluster()
        config = server_config(cfg, run_id="", env_vars={}, device=device_of(cfg, cluster.gpus))
        plan_placement(placement_request(config), cluster)


def await_task(task: Any) -> Any:
    """The result of the run's Ray task.

    Raises:
        ArcticError: when the run fails, with the cause.
        KeyboardInterrupt: when it is interrupted; the task has been cancelled then.
    """
    import ray

    node = node_processes()
    try:
        while not ray.wait([task], timeout=NODE_CHECK_S)[0]:
            check_node(node)
        return ray.get(task)
    except KeyboardInterrupt:
        cancel_task(task)
        raise
    except ray.exceptions.RayTaskError as error:
        check_node(node)
        cause = error.cause if isinstance(error.cause, Exception) else error
        raise ArcticError(f"the run failed: {type(cause).__name__}: {cause}") from error
    except ray.exceptions.RayError as error:
        check_node(node)
        raise ArcticError(f"the run's own process failed: {error}") from error


def cancel_task(task: Any) -> None:
    """Interrupt the run's Ray task, and give it time to stop what it started."""
    import ray

    ray.cancel(task, force=False)
    ray.wait([task], timeout=CANCEL_GRACE_S)


def _interrupt(signal_number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
