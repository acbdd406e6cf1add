"""``trainer.fully_async``, and what SkyRL's asynchronous trainer demands of the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .entries import Entry, PartOf, Refused, ours, refusal, skyrls

_TRAINER = "skyrl.train.fully_async_trainer:FullyAsyncRayPPOTrainer"
_TESTS = "tests/arctic_rl/test_fully_async.py::"
_ALONE = "trainer.fully_async.enabled=true"


def _demands(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    """What SkyRL's trainer asserts one after the other when it is built, a line each."""
    if not value:
        return
    trainer, generator = cfg.trainer, cfg.generator
    yield from _sizes(trainer)
    yield from _policy_loss(cfg)
    if trainer.algorithm.dynamic_sampling.type is not None:
        yield refusal(
            "trainer.algorithm.dynamic_sampling.type",
            trainer.algorithm.dynamic_sampling.type,
            f"{_ALONE} has no such sampling",
            "write null, and trainer.fully_async.sample_full_batch=true to drop groups of equal rewards",
        )
    if trainer.fully_async.sample_full_batch and not trainer.algorithm.zero_variance_filter:
        yield refusal(
            "trainer.fully_async.sample_full_batch",
            True,
            "it drops the groups that the zero-variance filter names",
            "write trainer.algorithm.zero_variance_filter=true",
        )
    if generator.batched:
        why = "a batched request cannot be paused and continued"
        yield refusal("generator.batched", True, f"{_ALONE}: {why}", "write false")
    if trainer.placement.colocate_all:
        why = "engines generate while the policy trains"
        yield refusal("trainer.placement.colocate_all", True, f"{_ALONE}: {why}", "write false")


def _sizes(trainer: Any) -> Iterable[str]:
    mini_batch, asynchronous = trainer.policy_mini_batch_size, trainer.fully_async
    if trainer.train_batch_size != mini_batch:
        yield refusal(
            "trainer.train_batch_size",
            trainer.train_batch_size,
            f"{_ALONE} takes one mini-batch a step, of trainer.policy_mini_batch_size={mini_batch} prompts",
            "write the same number for both",
        )
    staleness, workers = asynchronous.max_staleness_steps, asynchronous.num_parallel_generation_workers
    if staleness < 0:
        yield refusal("trainer.fully_async.max_staleness_steps", staleness, "it counts steps", "write 0 or more")
    elif not mini_batch <= workers <= mini_batch * (staleness + 1):
        yield refusal(
            "trainer.fully_async.num_parallel_generation_workers",
            workers,
            f"with trainer.policy_mini_batch_size={mini_batch} fewer leave a step short, and with "
            f"trainer.fully_async.max_staleness_steps={staleness} more would always wait",
            f"write a number from {mini_batch} to {mini_batch * (staleness + 1)}",
        )


def _policy_loss(cfg: Any) -> Iterable[str]:
    from skyrl.backends.skyrl_train.utils.ppo_utils import LOSSES_WITH_OLD_LOGPROBS

    from ..loss_config import reads_rollout_logprobs

    algorithm = cfg.trainer.algorithm
    name = algorithm.policy_loss_type
    anchored = name == "cispo" and algorithm.cispo.cispo_anchor == "rollout"
    if name in LOSSES_WITH_OLD_LOGPROBS and not anchored:
        yield refusal(
            "trainer.algorithm.policy_loss_type",
            name,
            f"{_ALONE}: it is a ratio to the policy that sampled, which is not kept",
            "write rollout_is, dppo, or cispo with trainer.algorithm.cispo.cispo_anchor=rollout, which take the "
            "sampler's log-probs",
        )
    if cfg.generator.sampling_params.logprobs is None and not reads_rollout_logprobs(cfg):
        why = f"{_ALONE} compares with the sampler's log-probs"
        yield refusal("generator.sampling_params.logprobs", None, why, "write 1")


def without_async(cfg: Any) -> str | None:
    return None if cfg.trainer.fully_async.enabled else "read with trainer.fully_async.enabled=true only"


_SIMULATION = PartOf("trainer.fully_async.simulate_training", "trainer.fully_async.simulate_training=false")

FULLY_ASYNC: dict[str, Entry] = {
    "fully_async.enabled": ours(
        "SkyRL's fully asynchronous trainer; requests under way are kept in mid-generation while weights change",
        f"{_TESTS}TestTenSteps::test_generation_and_training_overlap",
        f"{_TESTS}TestTenSteps::test_no_sample_is_lost_and_none_twice",
        "tests/arctic_rl/test_dispatch.py::TestWeightSync::"
        "test_requests_are_kept_in_mid_generation_where_training_is_asynchronous",
        "tests/arctic_rl/test_callback_uses.py::test_code_that_adds_some_is_told_with_its_line",
        limit=_demands,
    ),
    "fully_async.max_staleness_steps": skyrls(
        "steps that generation may be ahead of training",
        f"{_TRAINER}.__init__",
        f"{_TESTS}TestTenSteps::test_no_more_groups_are_begun_than_the_capacity_allows",
        idle=without_async,
    ),
    "fully_async.num_parallel_generation_workers": skyrls(
        "groups that are generated at once", f"{_TRAINER}.__init__", idle=without_async
    ),
    "fully_async.sample_full_batch": skyrls(
        "groups of equal rewards are replaced",
        f"{_TRAINER}.__init__",
        f"{_TESTS}TestRewards::test_groups_of_equal_rewards_are_replaced",
        idle=without_async,
    ),
    "fully_async.clear_kv_cache_on_weight_sync": ours(
        "prompts and requests under way are computed anew with each step's weights",
        "tests/arctic_rl/server/test_sampling_worker.py::test_frozen_requests_go_on_with_the_new_weights",
        "tests/arctic_rl/test_dispatch.py::TestWeightSync::"
        "test_requests_are_kept_in_mid_generation_where_training_is_asynchronous",
        idle=without_async,
    ),
    "fully_async.simulate_training": Refused("this backend trains", "write false"),
    "fully_async.simulate_training_step_seconds": _SIMULATION,
    "fully_async.simulate_weight_sync_seconds": _SIMULATION,
}
