"""A mixin for SkyRL's gym generators: environment calls run in a process pool and their exposed time is measured.

``class MyGenerator(ArcticGeneratorMixin, SkyRLGymGenerator)`` or ``make_generator_class(SkyRLGymGenerator)``.
Trajectories, batching and outputs stay SkyRL's; what changes is where ``env.init``, ``env.step``, ``env.close`` run.
"""

import contextlib
import contextvars
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from .scoring import (
    EnvPool,
    ScoringClosed,
    ScoringConfig,
    ScoringError,
    ScoringMemoryExceeded,
    ScoringStartUpError,
    ScoringTimeout,
)

logger = logging.getLogger(__name__)

_ENV_METHODS = frozenset({"init", "step", "close"})
_INFERENCE_METHODS = frozenset({"generate", "chat_completion", "completion"})
_FAILURE_CAUSES = ("timed_out", "out_of_memory", "failed")

# One entry a step of the trajectory (or batch) that the current task runs: True where the scorer itself failed.
_step_failures: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar("step_failures", default=None)


class ScoringFailureLimit(ScoringError):
    """More infrastructure failures than ``max_failures`` allows."""

    cause = "failure_limit"


class OverlapClock:
    """Measures the time in which environments are at work and no inference request is.

    For one thread (an event loop). ``now`` gives seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._scoring = 0
        self._inference = 0
        self._exposed_s = 0.0
        self._since = 0.0

    def _settle(self) -> None:
        now = self._now()
        if self._scoring > 0 and self._inference == 0:
            self._exposed_s += now - self._since
        self._since = now

    @property
    def exposed_s(self) -> float:
        """Seconds up to now with at least one environment call outstanding and no inference request in flight."""
        self._settle()
        return self._exposed_s

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """Surrounds one environment call."""
        self._settle()
        self._scoring += 1
        try:
            yield
        finally:
            self._settle()
            self._scoring -= 1

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Surrounds one inference request."""
        self._settle()
        self._inference += 1
        try:
            yield
        finally:
            self._settle()
            self._inference -= 1


class TimedInferenceClient:
    """Stands before an inference client, tells the clock of each request, and passes everything else through."""

    def __init__(self, client: Any, clock: OverlapClock) -> None:
        # Own attributes are set past __setattr__, which writes to the client.
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_clock", clock)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        if name not in _INFERENCE_METHODS:
            return value
        clock = self._clock

        async def timed(*args: Any, **kwargs: Any) -> Any:
            with clock.inference():
                return await value(*args, **kwargs)

        return timed

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._client, name, value)


@functools.cache
def _inherited_no_ops() -> frozenset[Callable[..., Any]]:
    from skyrl_gym.core import Env
    from skyrl_gym.envs.base_text_env import BaseTextEnv

    return frozenset({BaseTextEnv.init, BaseTextEnv.close, Env.close})


class ArcticGeneratorMixin:
    """Sends a gym generator's environment calls to an ``EnvPool``; composes with any ``SkyRLGymGenerator`` subclass.

    Replaces ``_run_in_executor_if_available`` for ``init``, ``step`` and ``close`` of skyrl-gym environments, so the
    trainer's process neither runs their code nor waits for it, and SkyRL's ``max_env_workers`` threads stay unused.

    What a failing call means:
        - ``step`` past the time or memory limit: the policy wrote that action, so the step earns 0 and ends the
          trajectory; counted in ``generate/scoring_timed_out`` and ``generate/scoring_out_of_memory``.
        - a worker that died twice, an exception in the environment's code, or a limit broken by ``close``: counted in
          ``generate/scoring_failed`` and logged; the sample leaves the loss (loss mask 0). One more of them than
          ``scoring_config.max_failures`` raises ``ScoringFailureLimit``.
        - a worker that cannot start, or a failing ``init`` (there is no prompt to go on with): raised at once.

    Adds to ``rollout_metrics``, all of this ``generate`` call:
        generate/scoring_busy_s: seconds spent running environment calls, summed over workers.
        generate/scoring_exposed_s: wall seconds with an environment call outstanding and no inference in flight.
        generate/scoring_timed_out, generate/scoring_out_of_memory, generate/scoring_failed: counts as above.
    """

    scoring_config: ScoringConfig = ScoringConfig()
    """Settings of the pool; read when the first environment call is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attach_scoring(self.scoring_config)

    def attach_scoring(self, scoring_config: ScoringConfig) -> None:
        """Set up what the mixin needs; called by hand on a generator that got the mixin after it was built."""
        self.scoring_config = scoring_config
        self._overlap_clock = OverlapClock()
        self._env_pool: EnvPool | None = None
        self._scoring_failures: Counter[str] = Counter()
        self.inference_engine_client = TimedInferenceClient(self.inference_engine_client, self._overlap_clock)

    async def _run_in_executor_if_available(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from skyrl_gym.core import Env

        env = getattr(func, "__self__", None)
        if not isinstance(env, Env) or func.__name__ not in _ENV_METHODS:
            return await super()._run_in_executor_if_available(func, *args, **kwargs)
        if func.__func__ in _inherited_no_ops():
            return func(*args, **kwargs)
        with self._overlap_clock.scoring():
            return await self._call_env(env, func.__name__, args, kwargs)

    async def _call_env(self, env: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._env_pool is None:
            self._env_pool = EnvPool(self.scoring_config)
        try:
            result = await self._env_pool.call(env, method, *args, **kwargs)
        except (ScoringClosed, ScoringStartUpError):
            raise
        except Exception as error:
            if method == "step" and isinstance(error, (ScoringTimeout, ScoringMemoryExceeded)):
                self._scoring_failures[error.cause] += 1
                logger.warning("scored 0: %s", error)
                return self._failed_step(error.cause, leaves_loss=False)
            self._count_scorer_failure(env, method, error)
            return self._failed_step("failed", leaves_loss=True) if method == "step" else None
        if method == "step" and (failures := _step_failures.get()) is not None:
            failures.append(False)
        return result

    @staticmethod
    def _failed_step(cause: str, *, leaves_loss: bool) -> dict[str, Any]:
        if (failures := _step_failures.get()) is not None:
            failures.append(leaves_loss)
        return {"observations": [], "reward": 0.0, "done": True, "metadata": {"scoring_failure": cause}}

    def _count_scorer_failure(self, env: Any, method: str, error: Exception) -> None:
        self._scoring_failures["failed"] += 1
        count, limit = self._scoring_failures["failed"], self.scoring_config.max_failures
        label = f"{type(env).__qualname__}.{method}()"
        logger.error("scorer failure %d (%d tolerated) in %s", count, limit, label, exc_info=error)
        # Without a prompt there is no trajectory, and a trajectory that nobody tracks cannot be taken out of the loss.
        if method == "init" or _step_failures.get() is None:
            raise error
        if count > limit:
            raise ScoringFailureLimit(
                f"{label} failed with {type(error).__qualname__}: {error}. This is scorer failure {count} of the run "
                f"and max_failures={limit}; find the cause above, or raise the limit to leave such samples out of the "
                "loss"
            ) from error

    async def agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's agent loop; the trajectory leaves the loss when the scorer itself failed in it."""
        failures: list[bool] = []
        token = _step_failures.set(failures)
        try:
            output = await super().agent_loop(*args, **kwargs)
        finally:
            _step_failures.reset(token)
        if any(failures):
            for part in getattr(output, "step_outputs", [output]):
                part.loss_mask = [0] * len(part.loss_mask)
        return output

    async def generate_batched(self, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's batched generation; rows whose scoring itself failed leave the loss."""
        failures: list[bool] = []
        token = _step_failures.set(failures)
        try:
            output = await super().generate_batched(*args, **kwargs)
        finally:
            _step_failures.reset(token)
        masks = output["loss_masks"]
        output["loss_masks"] = [
            [0] * len(mask) if failed else mask for mask, failed in zip(masks, failures, strict=True)
        ]
        return output

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's ``generate`` with the scoring metrics added to ``rollout_metrics``."""
        busy_before, exposed_before = self._busy_seconds(), self._overlap_clock.exposed_s
        failures_before = self._scoring_failures.copy()
        output = await super().generate(*args, **kwargs)
        metrics = {
            "generate/scoring_busy_s": self._busy_seconds() - busy_before,
            "generate/scoring_exposed_s": self._overlap_clock.exposed_s - exposed_before,
        }
        for cause in _FAILURE_CAUSES:
            metrics[f"generate/scoring_{cause}"] = self._scoring_failures[cause] - failures_before[cause]
        rollout_metrics = output["rollout_metrics"]
        output["rollout_metrics"] = metrics if rollout_metrics is None else {**rollout_metrics, **metrics}
        return output

    def _busy_seconds(self) -> float:
        return 0.0 if self._env_pool is None else self._env_pool.busy_seconds

    def close(self) -> None:
        """End the scoring workers. May be called twice; a later environment call starts new ones."""
        if self._env_pool is not None:
            pool, self._env_pool = self._env_pool, None
            pool.close()

    async def aclose(self) -> None:
        """``close`` without blocking the event loop."""
        if self._env_pool is not None:
            pool, self._env_pool = self._env_pool, None
            await pool.aclose()


def make_generator_class(base: type, scoring_config: ScoringConfig | None = None) -> type:
    """A subclass of the generator class ``base`` with ``ArcticGeneratorMixin`` in front.

    Args:
        base: SkyRL's ``SkyRLGymGenerator`` or any subclass; one that has the mixin already only gets the settings.
        scoring_config: settings of its process pool. None = ``ScoringConfig()``, or what ``base`` already has.
    """
    bases = (base,) if issubclass(base, ArcticGeneratorMixin) else (ArcticGeneratorMixin, base)
    namespace = {} if scoring_config is None else {"scoring_config": scoring_config}
    return type(f"Arctic{base.__name__}", bases, {**namespace, "__module__": base.__module__, "__doc__": base.__doc__})
