"""A mixin for SkyRL's gym generators: environment calls run in a process pool and their exposed time is measured.

``class MyGenerator(ArcticGeneratorMixin, SkyRLGymGenerator)`` or ``make_generator_class(SkyRLGymGenerator)``.
Trajectories and outputs stay SkyRL's; what changes is where ``env.init``, ``env.step``, ``env.close`` run, and that
the batched mode scores each row as soon as it is generated.
"""

import contextlib
import contextvars
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from .batched import BatchedRequest, BatchedRow, batched_output, gather_rows, run_row
from .errors import UnsupportedError
from .one_message import OneMessageMixin
from .scoring import (
    EnvPool,
    ScoringClosed,
    ScoringConfig,
    ScoringEnvError,
    ScoringError,
    ScoringMemoryExceeded,
    ScoringStartUpError,
    ScoringTimeout,
)
from .step_wise import StepWiseMixin
from .unjudged import UnjudgedMask, fill_unjudged_rewards

logger = logging.getLogger(__name__)

type _Key = tuple[Any, Any]

_ENV_METHODS = frozenset({"init", "step", "close"})
_INFERENCE_METHODS = frozenset({"generate", "chat_completion", "completion"})
_COUNTED = ("failed", "unjudged")
_COUNTED_BY_POOL = ("timed_out", "out_of_memory", "shared")
_SCORER_FAILED = "scorer_failed"
_MAX_CAUSES_TOLD = 10

# One entry a step of the trajectory (or batch) that the current task runs: False where it could not be judged.
_steps_judged: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar("steps_judged", default=None)
# The trajectory ids of the current ``generate``, for its batched mode, which SkyRL does not tell.
_batch_ids: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("batch_ids", default=None)
# The (instance_id, repetition_id) of the trajectories of the current ``generate`` that could not be judged.
_unjudged_ids: contextvars.ContextVar[set[_Key] | None] = contextvars.ContextVar("unjudged_ids", default=None)


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


class ArcticGeneratorMixin(OneMessageMixin, StepWiseMixin):
    """Sends a gym generator's environment calls to an ``EnvPool``; composes with any ``SkyRLGymGenerator`` subclass.

    Replaces ``_run_in_executor_if_available`` for ``init``, ``step`` and ``close`` of skyrl-gym environments, so the
    trainer's process neither runs their code nor waits for it, and SkyRL's ``max_env_workers`` threads stay unused.

    What an environment may add to skyrl-gym's interface, each of it optional:
        max_step_s: attribute, the time limit of its ``step`` in seconds, in place of ``scoring_config.time_limit_s``.
        step_failed(action, cause, error): called here instead of a ``step`` that was killed or lost, so that the
            environment's metrics count it; returns a step output. ``cause`` is timed_out, out_of_memory or
            scorer_failed. Without it such a step earns 0 and ends the trajectory.
        metadata["judged"] of a step output: False = the reward says nothing about the response.
        metadata["outcome"], metadata["error"]: why. The outcome scorer_failed counts as a failure of the scorer.

    What a failing call means:
        - ``step`` past the time or memory limit: the policy wrote that action, so the step is scored, by
          ``step_failed`` or with 0; counted in ``generate/scoring_timed_out`` and ``generate/scoring_out_of_memory``.
        - a worker that died twice, an exception in the environment's code, an outcome scorer_failed, or a failing
          ``close``: counted in ``generate/scoring_failed`` and logged; a step of that kind is not judged. One more of
          them than ``scoring_config.max_failures`` raises ``ScoringFailureLimit``.
        - a worker that cannot start, or a failing ``init`` (there is no prompt to go on with): raised at once.

    A trajectory with a step that was not judged leaves the loss (loss mask 0) and is given the mean reward of the
    judged samples of its prompt, or 0 where there is none, in training and in evaluation. SkyRL's reward metrics
    (``reward/avg_raw_reward``, ``reward/mean_positive_reward``, ``loss/avg_final_rewards``, evaluation scores) are
    computed from these filled rewards: a prompt with judged samples counts with their mean, one without counts with 0.
    Prompts are told apart by ``trajectory_ids``; without them such a trajectory earns 0. Advantages leave these rows
    out altogether where the trainer has ``JudgedBaselineMixin``.

    With ``generator.batched=true`` each row is a request of its own, with the row's session id, and is scored as soon
    as its response is there; a recipe's own ``generate_batched`` is left as it is.

    What ends a run with ``UnsupportedError``, because SkyRL's agent loop has no way on: a prompt that is longer than
    ``generator.max_input_length`` before its first turn, and a step's ``postprocessed_action`` where log-probs of
    rollouts are kept, which would be those of other tokens.

    Adds to ``rollout_metrics``, all of this ``generate`` call, or, where calls overlap, of the time since another one
    ended:
        generate/scoring_busy_s: seconds spent running environment calls, summed over workers.
        generate/scoring_exposed_s: wall seconds with an environment call outstanding and no inference in flight.
        generate/scoring_timed_out, generate/scoring_out_of_memory: calls, or parts of steps, whose worker was killed
            for it.
        generate/scoring_failed: failures of the scorer, as above.
        generate/scoring_shared: parts of steps answered by the run of an equal one.
        generate/scoring_unjudged: trajectories that left the loss for want of a judgement.
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
        self._scoring_counts: Counter[str] = Counter()
        self._scoring_told: dict[str, float] = {}
        self._scorer_failures: Counter[str] = Counter()
        self._causes_told: set[tuple[str, str]] = set()
        self.inference_engine_client = TimedInferenceClient(self.inference_engine_client, self._overlap_clock)

    def start_scoring(self) -> None:
        """Start the scoring workers in the background, before the first environment call needs them."""
        self._pool().start()

    def _pool(self) -> EnvPool:
        if self._env_pool is None:
            self._env_pool = EnvPool(self.scoring_config)
        return self._env_pool

    async def _run_in_executor_if_available(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from skyrl_gym.core import Env

        env = getattr(func, "__self__", None)
        if not isinstance(env, Env) or func.__name__ not in _ENV_METHODS:
            return await super()._run_in_executor_if_available(func, *args, **kwargs)
        if func.__name__ == "close":
            self._check_turns(env)
        if func.__func__ in _inherited_no_ops():
            return func(*args, **kwargs)
        with self._overlap_clock.scoring():
            return await self._call_env(env, func.__name__, args, kwargs)

    async def _call_env(self, env: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            result = await self._pool().call(env, method, *args, **kwargs)
        except (ScoringClosed, ScoringStartUpError):
            raise
        except Exception as error:
            if method != "step":
                self._count_scorer_failure(env, method, f"{type(error).__qualname__}: {error}", error)
                if method == "init":
                    raise
                return None
            result = self._failed_step(env, error, *args, **kwargs)
        else:
            if method != "step":
                return result
            self._check_action(env, result)
            outcome, text = _why(result)
            if outcome == _SCORER_FAILED:
                self._count_scorer_failure(env, method, text, None)
        self._note_verdict(env, result)
        return result

    def _check_turns(self, env: Any) -> None:
        if _steps_judged.get() == [] and not self._recipe_overrides("agent_loop"):
            raise UnsupportedError(
                f"a prompt of {type(env).__qualname__} is longer than generator.max_input_length="
                f"{self.generator_cfg.max_input_length} tokens with what its init and generator.chat_template_kwargs "
                "add, so that there is no turn to train on: raise that, or lower trainer.max_prompt_length"
            )

    def _check_action(self, env: Any, result: dict[str, Any]) -> None:
        if result.get("postprocessed_action") is not None and self.generator_cfg.sampling_params.logprobs is not None:
            raise UnsupportedError(
                f"{type(env).__qualname__}.step() returned a postprocessed_action, whose tokens the model did not "
                "sample and have no log-probs: return None, or write generator.sampling_params.logprobs=null"
            )

    def _failed_step(self, env: Any, error: Exception, action: str, **kwargs: Any) -> dict[str, Any]:
        if isinstance(error, (ScoringTimeout, ScoringMemoryExceeded)):
            cause = error.cause
            logger.warning("scored as %s: %s", cause, error)
        else:
            cause = _SCORER_FAILED
            self._count_scorer_failure(env, "step", f"{type(error).__qualname__}: {error}", error)
        if hasattr(env, "step_failed"):
            return env.step_failed(action, cause, str(error))
        metadata = {"outcome": cause, "error": str(error), "judged": cause != _SCORER_FAILED}
        return {"observations": [], "reward": 0.0, "done": True, "metadata": metadata}

    def _note_verdict(self, env: Any, result: dict[str, Any]) -> None:
        judged, why, verdicts = _is_judged(result), _why(result), _steps_judged.get()
        if not judged and why not in self._causes_told:
            self._causes_told.add(why)
            logger.warning("not judged, so out of the loss (each cause is told once): %s: %s", *why)
        if verdicts is not None:
            verdicts.append(judged)
        elif not judged:
            raise ScoringEnvError(
                f"{type(env).__qualname__}.step() was not judged ({why[0]}: {why[1]}), and its sample cannot be taken "
                "out of the loss, because neither agent_loop() nor generate_batched() called it"
            )

    def _count_scorer_failure(self, env: Any, method: str, text: str, error: Exception | None) -> None:
        label = f"{type(env).__qualname__}.{method}()"
        self._scoring_counts["failed"] += 1
        self._scorer_failures[f"{label}: {text}"] += 1
        count, limit = self._scorer_failures.total(), self.scoring_config.max_failures
        logger.error("scorer failure %d (%d tolerated) in %s: %s", count, limit, label, text, exc_info=error)
        if method != "init" and count > limit:
            causes = [f"{n} x {cause}" for cause, n in self._scorer_failures.most_common(_MAX_CAUSES_TOLD)]
            raise ScoringFailureLimit(
                f"scorer failure {count} of the run, and max_failures={limit}. Remove the cause, or raise the limit "
                "to leave such samples out of the loss. The causes so far:\n" + "\n".join(causes)
            ) from error

    async def agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's agent loop; a trajectory with a step that was not judged leaves the loss."""
        judged: list[bool] = []
        token = _steps_judged.set(judged)
        try:
            output = await super().agent_loop(*args, **kwargs)
        finally:
            _steps_judged.reset(token)
        if not all(judged):
            self._scoring_counts["unjudged"] += 1
            for part in output.step_outputs if hasattr(output, "step_outputs") else [output]:
                part.loss_mask = UnjudgedMask(len(part.loss_mask))
            trajectory_id, ids = kwargs.get("trajectory_id"), _unjudged_ids.get()
            if trajectory_id is not None and ids is not None:
                ids.add(_key(trajectory_id))
        return output

    async def generate_batched(
        self,
        prompts: Any,
        env_classes: list[str],
        env_extras: list[dict[str, Any]],
        max_tokens: int,
        sampling_params: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        training_phase: str = "train",
    ) -> Any:
        """SkyRL's batched generation, each row scored while others are generated; see the class."""
        if self._recipe_overrides("generate_batched"):
            return await self._recipes_batched(
                prompts,
                env_classes,
                env_extras,
                max_tokens,
                sampling_params,
                cache_salt=cache_salt,
                training_phase=training_phase,
            )
        import skyrl_gym

        engine, captures = self.generator_cfg.inference_engine, training_phase != "eval"
        request = BatchedRequest(
            max_tokens=max_tokens,
            sampling_params=sampling_params,
            cache_salt=cache_salt,
            captures_sample_support=engine.enable_return_sample_support_set and captures,
            captures_routed_experts=engine.enable_return_routed_experts and captures,
        )
        envs = []
        for env_class, extras in zip(env_classes, env_extras, strict=True):
            extras["max_turns"] = self.max_turns
            settings = getattr(self.skyrl_gym_cfg, env_class) if hasattr(self.skyrl_gym_cfg, env_class) else {}
            envs.append(skyrl_gym.make(env_class, env_config=settings, extras=extras))
        rows = await gather_rows(
            [
                self._batched_row(env, prompt, request, session_id)
                for env, prompt, session_id in zip(envs, prompts, self._session_ids(len(envs)), strict=True)
            ]
        )
        self._scoring_counts["unjudged"] += sum(not row.judged for row in rows)
        return batched_output(
            rows,
            env_classes,
            filter_overlong=self.generator_cfg.apply_overlong_filtering,
            unjudged_mask=UnjudgedMask,
        )

    async def _batched_row(self, env: Any, prompt: Any, request: BatchedRequest, session_id: str) -> BatchedRow:
        judged: list[bool] = []
        # Runs as a task, whose context is its own.
        _steps_judged.set(judged)
        return await run_row(self, env, prompt, request, session_id, judged)

    def _session_ids(self, rows: int) -> list[str]:
        """What tells the rows' requests apart, so that a seed gives each rollout of a prompt a text of its own."""
        ids = _batch_ids.get()
        if ids is None or len(ids) != rows:
            return [f"row_{row}" for row in range(rows)]
        return [f"{trajectory_id.instance_id}_{trajectory_id.repetition_id}" for trajectory_id in ids]

    def _recipe_overrides(self, name: str) -> bool:
        """Whether a class between this mixin and SkyRL's own generator defines the method."""
        order = type(self).__mro__
        behind = order[order.index(OneMessageMixin) + 1 :]
        owner = next(cls for cls in behind if name in vars(cls))
        return owner.__module__ != "skyrl.train.generators.skyrl_gym_generator"

    async def _recipes_batched(self, *args: Any, **kwargs: Any) -> Any:
        judged: list[bool] = []
        token = _steps_judged.set(judged)
        try:
            output = await super().generate_batched(*args, **kwargs)
        finally:
            _steps_judged.reset(token)
        self._scoring_counts["unjudged"] += judged.count(False)
        output["loss_masks"] = [
            mask if known else UnjudgedMask(len(mask))
            for mask, known in zip(output["loss_masks"], judged, strict=True)
        ]
        return output

    async def generate(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's ``generate``, with rows that were not judged marked, and the scoring metrics added."""
        unjudged_ids: set[_Key] = set()
        tokens = _unjudged_ids.set(unjudged_ids), _batch_ids.set(input_batch.get("trajectory_ids"))
        try:
            output = await super().generate(input_batch, *args, **kwargs)
        finally:
            _unjudged_ids.reset(tokens[0])
            _batch_ids.reset(tokens[1])
        _leave_out_unjudged(output, input_batch.get("trajectory_ids"), unjudged_ids)
        metrics = self._scoring_metrics()
        rollout_metrics = output["rollout_metrics"]
        output["rollout_metrics"] = metrics if rollout_metrics is None else {**rollout_metrics, **metrics}
        return output

    def _scoring_metrics(self) -> dict[str, float]:
        """What has come since the last call: the sum over calls is right also where ``generate`` calls overlap."""
        totals = {"busy_s": self._busy_seconds(), "exposed_s": self._overlap_clock.exposed_s}
        totals |= {name: self._scoring_counts[name] for name in _COUNTED} | self._pool_counts()
        before, self._scoring_told = self._scoring_told, totals
        return {f"generate/scoring_{name}": total - before.get(name, 0) for name, total in totals.items()}

    def _forget_pool(self) -> EnvPool | None:
        pool, self._env_pool = self._env_pool, None
        self._scoring_told = {
            name: total for name, total in self._scoring_told.items() if name in ("exposed_s", *_COUNTED)
        }
        return pool

    def _busy_seconds(self) -> float:
        return 0.0 if self._env_pool is None else self._env_pool.busy_seconds

    def _pool_counts(self) -> dict[str, int]:
        counters = {} if self._env_pool is None else self._env_pool.counters
        return {name: counters.get(name, 0) for name in _COUNTED_BY_POOL}

    def close(self) -> None:
        """End the scoring workers. May be called twice; a later environment call starts new ones."""
        pool = self._forget_pool()
        if pool is not None:
            pool.close()

    async def aclose(self) -> None:
        """``close`` without blocking the event loop."""
        pool = self._forget_pool()
        if pool is not None:
            await pool.aclose()


def _metadata(step_output: dict[str, Any]) -> dict[str, Any]:
    metadata = step_output.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _is_judged(step_output: dict[str, Any]) -> bool:
    return _metadata(step_output).get("judged") is not False


def _why(step_output: dict[str, Any]) -> tuple[str, str]:
    metadata = _metadata(step_output)
    return str(metadata.get("outcome", "no outcome given")), str(metadata.get("error", "no error given"))


def _key(trajectory_id: Any) -> _Key:
    return trajectory_id.instance_id, trajectory_id.repetition_id


def _leave_out_unjudged(output: Any, input_ids: Any, unjudged_ids: set[_Key]) -> None:
    """Mark the rows of a generator output that could not be judged and fill their rewards, in place."""
    masks, ids = output["loss_masks"], output.get("trajectory_ids")
    ids = input_ids if ids is None else ids
    known = ids is not None and len(ids) == len(masks)
    unjudged = [
        isinstance(mask, UnjudgedMask) or (known and _key(ids[row]) in unjudged_ids) for row, mask in enumerate(masks)
    ]
    if not any(unjudged):
        return
    # SkyRL's overlong filtering copies masks.
    output["loss_masks"] = [
        UnjudgedMask(len(mask)) if left_out else mask for mask, left_out in zip(masks, unjudged, strict=True)
    ]
    groups = [row_id.instance_id for row_id in ids] if known else range(len(masks))
    output["rewards"] = fill_unjudged_rewards(output["rewards"], unjudged, groups, output.get("is_last_step"))


def make_generator_class(base: type, scoring_config: ScoringConfig | None = None) -> type:
    """A subclass of the generator class ``base`` with ``ArcticGeneratorMixin`` in front.

    Args:
        base: SkyRL's ``SkyRLGymGenerator`` or any subclass; one that has the mixin already only gets the settings.
        scoring_config: settings of its process pool. None = ``ScoringConfig()``, or what ``base`` already has.
    """
    bases = (base,) if issubclass(base, ArcticGeneratorMixin) else (ArcticGeneratorMixin, base)
    namespace = {} if scoring_config is None else {"scoring_config": scoring_config}
    return type(f"Arctic{base.__name__}", bases, {**namespace, "__module__": base.__module__, "__doc__": base.__doc__})
