"""Updates of real DeepSpeed engines against SkyRL's own arithmetic in one plain process.

Payloads come out of our dispatch; the reference sees SkyRL's batch. A run is one engine that takes several updates.
"""

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, register_policy_loss

from integrations.arctic_rl.backends.loop_thread import LoopThread
from integrations.arctic_rl.dispatch import ArcticDispatch
from integrations.arctic_rl.loss_config import packed_policy_loss, skyrl_metrics
from integrations.arctic_rl.processors.packing import plan_micro_batches
from integrations.arctic_rl.server.specs import LoraSpec, OptimizerSpec
from integrations.arctic_rl.skyrl_config import parse_config
from tests.arctic_rl.in_process_backend import InProcessBackend
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.server import update_runs
from tests.arctic_rl.skyrl_reference import (
    PAD_ID,
    MicroBatch,
    ReferenceTrainer,
    reordered,
    rollout_batch,
    update_batch,
    with_adapters,
)
from tests.arctic_rl.specs import training_spec

pytestmark = pytest.mark.slow

SEED = 0
STAGES = (0, 2, 3)
WORLD_SIZES = (1, 2)
NO_CLIPPING = 1e9
"""A gradient norm that is never reached: it is reported and changes nothing."""
PLAIN = OptimizerSpec(
    lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01, max_grad_norm=NO_CLIPPING, scheduler="constant", num_warmup_steps=0
)
KL = ("trainer.algorithm.use_kl_loss=true", "trainer.algorithm.kl_loss_coef=0.2")
NO_KL = ("trainer.algorithm.use_kl_loss=false",)
ENTROPY = ("trainer.algorithm.use_entropy_loss=true", "trainer.algorithm.entropy_loss_coef=0.1")


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """Rows and the settings of the loss on them."""

    seed: int
    rows: int = 8
    temperature: float = 1.0
    settings: tuple[str, ...] = NO_KL
    holes: bool = False
    drift: float = 0.3
    loss_reduction: str = "token_mean"
    scale: float = 1.0
    """Factor of the advantages."""
    masked: bool = False
    """No token carries loss."""
    rollout_drift: float | None = None
    """Noise between the sampler's log-probs and the old ones; None = no log-probs of the sampler."""


MINI_BATCHES = {
    "plain": MiniBatch(0),
    "kl": MiniBatch(1, 7, 0.6, KL, holes=True, loss_reduction="sequence_mean"),
    "entropy, dual clip": MiniBatch(
        6,
        8,
        1.3,
        (*NO_KL, *ENTROPY, "trainer.algorithm.policy_loss_type=dual_clip"),
        holes=True,
        drift=1.0,
        loss_reduction="seq_mean_token_sum_norm",
    ),
    "kl, entropy": MiniBatch(
        5, 7, 0.6, (*KL, *ENTROPY, "trainer.algorithm.kl_estimator_type=k2", "trainer.algorithm.eps_clip_high=0.4")
    ),
    "many rows": MiniBatch(8, rows=64),
    "no advantage": MiniBatch(4, scale=0.0),
    "all masked": MiniBatch(5, 7, 0.6, (*KL, *ENTROPY), masked=True),
}
LOSS = "trainer.algorithm.policy_loss_type"
CORRECTION = "trainer.algorithm.off_policy_correction"
OWN_LOSS = "squares_around_the_mean"


def squares_around_the_mean(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    """A user's loss: a row's terms depend on all rows of its micro-batch, and on chance."""
    ratio = (log_probs - old_log_probs).exp() * loss_mask
    mean = ratio.sum() / loss_mask.sum().clamp(min=1)
    kept = torch.rand(loss_mask.shape) < 0.5
    loss = ((ratio - mean) ** 2 * loss_mask * kept).sum() - (ratio * advantages).sum() * config.eps_clip_low
    return loss, {"mean": mean.item(), "kept_max": kept.float().mean().item()}


def with_loss(name, seed, *settings, **fields):
    fields = {"rows": 7, "holes": True, "rollout_drift": 0.2, "drift": 0.4} | fields
    return MiniBatch(seed, settings=(*KL, *ENTROPY, f"{LOSS}={name}", *settings), **fields)


LOSS_MINI_BATCHES = {
    "gspo": with_loss("gspo", 11, "trainer.algorithm.eps_clip_low=0.05", "trainer.algorithm.eps_clip_high=0.05"),
    "sapo": with_loss("sapo", 12, temperature=0.7),
    "cispo": with_loss("cispo", 13, "trainer.algorithm.cispo.cispo_eps_clip_high=0.3", drift=0.8),
    "cispo, rollout": with_loss("cispo", 14, "trainer.algorithm.cispo.cispo_anchor=rollout"),
    "rollout_is": with_loss("rollout_is", 15, "trainer.algorithm.eps_clip_high=0.5"),
    "dppo": with_loss("dppo", 16, "trainer.algorithm.dppo.delta_low=0.002", "trainer.algorithm.dppo.delta_high=0.002"),
    "importance_sampling": with_loss("importance_sampling", 17, loss_reduction="sequence_mean"),
    "cross_entropy": with_loss("cross_entropy", 18),
    "weights of sequences": with_loss(
        "dual_clip", 19, f"{CORRECTION}.tis_ratio_type=sequence", f"{CORRECTION}.sequence_tis_ratio_clip_high=1.3"
    ),
    "weights of tokens": with_loss(
        "regular",
        20,
        f"{CORRECTION}.tis_ratio_type=token",
        f"{CORRECTION}.token_tis_ratio_clip_high=1.1",
        f"{CORRECTION}.token_mask_is_threshold_low=0.8",
        f"{CORRECTION}.token_mask_is_threshold_high=1.5",
    ),
    "masks of sequences": with_loss(
        "gspo", 21, f"{CORRECTION}.sequence_mask_metric=product", f"{CORRECTION}.product_mask_high=1.4"
    ),
    "token_mean_legacy": with_loss("regular", 22, rows=8, loss_reduction="token_mean_legacy"),
    "prompt_mean": with_loss("regular", 23, rows=8, loss_reduction="prompt_mean"),
}
MICRO_BATCH = "trainer.micro_train_batch_size_per_gpu=2"
OWN_MICRO_BATCH_MINI_BATCHES = {
    "kl_cov": with_loss("kl_cov", 31, MICRO_BATCH, rows=8),
    "clip_cov": with_loss(
        "clip_cov",
        32,
        MICRO_BATCH,
        "trainer.algorithm.clip_cov.clip_ratio=0.2",
        "trainer.algorithm.clip_cov.clip_cov_lb=-0.02",
        "trainer.algorithm.clip_cov.clip_cov_ub=0.02",
        rows=8,
    ),
    "a user's loss": with_loss(OWN_LOSS, 33, MICRO_BATCH, rows=8),
}
HALVES = {
    "first half": MiniBatch(41, drift=0.0, rollout_drift=0.2),
    "second half": MiniBatch(42, drift=0.0, rollout_drift=0.2),
}
LOSSES, BEYOND_A_ROW = tuple(LOSS_MINI_BATCHES), tuple(OWN_MICRO_BATCH_MINI_BATCHES)
MINI_BATCHES |= LOSS_MINI_BATCHES | OWN_MICRO_BATCH_MINI_BATCHES | HALVES
SEQUENCE = ("plain", "kl", "entropy, dual clip", "kl, entropy")


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What the reference does, whatever the ranks, the stage and the micro-batches are."""

    mini_batches: tuple[str, ...] = SEQUENCE
    optimizer: OptimizerSpec = PLAIN
    tied: bool = True
    """Whether the LM head is the embedding."""
    micro_batches_of: int | None = None
    """The ranks whose micro-batches of two rows the policy loss sees; None = one micro-batch."""
    lora: LoraSpec | None = None
    """Adapters that are trained; None = all weights are."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """How our engine does it."""

    scenario: Scenario
    micro_batches: tuple[int, ...]
    """Micro-batches of each update on the rank that has the most."""
    shuffled: bool = False
    checkpointing: str | None = None
    dtype: str = "float32"


CLIPPED = Scenario(optimizer=dataclasses.replace(PLAIN, max_grad_norm=0.05), tied=False)
ACCUMULATION = Scenario(
    ("plain", "kl", "kl, entropy", "no advantage", "all masked"),
    # Without momentum and weight decay a step on a zero gradient leaves every weight as it is.
    dataclasses.replace(PLAIN, betas=(0.0, 0.95), weight_decay=0.0),
)
PLAIN_UPDATE = Scenario(("plain",))
WITHOUT_MOMENTUM = dataclasses.replace(PLAIN, lr=1e-9, betas=(0.0, 0.95))
"""AdamW's first moment is the gradient itself, and steps are too small to matter."""
TWO_PASSES = Scenario(tuple(HALVES) * 2, dataclasses.replace(PLAIN, lr=0.02, betas=(0.9, 0.999)))
WARM_UP = Scenario(
    ("plain",) * 6,
    dataclasses.replace(PLAIN, scheduler="constant_with_warmup", num_warmup_steps=4, max_grad_norm=0.0),
)
FRESH = LoraSpec(
    rank=4, alpha=12, dropout=0.0, target_modules="all-linear", exclude_modules=None, init_method="kaiming"
)
BOTH_FACTORS = dataclasses.replace(
    FRESH, target_modules=("q_proj", "v_proj", "up_proj"), exclude_modules=("1.mlp.up_proj",), init_method="orthogonal"
)
"""Both A and B have a gradient from the first update on."""
ADAPTERS_LOSSES = Scenario(("plain", "kl", "entropy, dual clip", "kl, entropy"), WITHOUT_MOMENTUM, lora=BOTH_FACTORS)
ADAPTERS = {
    "adapters, reentrant checkpoints": Variant(Scenario(lora=FRESH), (1, 2, 4, 3), checkpointing="reentrant"),
    "adapters, every term of a loss": Variant(ADAPTERS_LOSSES, (2, 1, 3, 2)),
}
VARIANTS = {
    "1, 2, 4 and 3 micro-batches": Variant(Scenario(), (1, 2, 4, 3)),
    "shuffled, checkpointed": Variant(Scenario(), (2, 4, 1, 1), shuffled=True, checkpointing="non-reentrant"),
    "clipped, untied, reentrant checkpoints": Variant(CLIPPED, (4, 1, 2, 2), checkpointing="reentrant"),
    "3, then 1, then 2, then nothing to learn": Variant(ACCUMULATION, (3, 1, 2, 2, 1)),
    "warm-up": Variant(WARM_UP, (1, 1, 1, 1, 1, 1)),
}
LOSS_VARIANTS = {
    f"every loss, {number} micro-batches": Variant(
        Scenario(LOSSES, WITHOUT_MOMENTUM), (number,) * len(LOSSES), shuffled=number == 3
    )
    for number in (1, 3)
}
VARIANTS |= LOSS_VARIANTS | ADAPTERS | {"2 passes x 2 mini-batches": Variant(TWO_PASSES, (2, 1, 3, 2))}
OWN_MICRO_BATCHES = {
    world: Variant(Scenario(BEYOND_A_ROW, WITHOUT_MOMENTUM, micro_batches_of=world), (4 // world,) * 3)
    for world in WORLD_SIZES
}
OWN = "losses that look beyond a row"
BFLOAT16 = "bfloat16"
ADAPTERS_UPDATE = Scenario(("plain",), lora=BOTH_FACTORS)
BFLOAT16_VARIANTS = {
    BFLOAT16: Variant(PLAIN_UPDATE, (4,), dtype="bfloat16"),
    f"{BFLOAT16} adapters": Variant(ADAPTERS_UPDATE, (4,), dtype="bfloat16"),
}
SPLIT_VARIANTS = {f"bfloat16 in {n}": Variant(Scenario(("many rows",)), (n,), dtype="bfloat16") for n in (1, 64)}
VARIANTS_OF = {
    1: (
        "1, 2, 4 and 3 micro-batches",
        "3, then 1, then 2, then nothing to learn",
        "every loss, 3 micro-batches",
        "2 passes x 2 mini-batches",
        *ADAPTERS,
    ),
    2: tuple(VARIANTS),
}
RUNS = [(world, stage, variant) for world in WORLD_SIZES for stage in STAGES for variant in VARIANTS_OF[world]]


class Outcome:
    """References, and what every run did."""

    def __init__(self, tmp_path):
        self._folder = tmp_path
        self._loop = LoopThread("dispatch")
        models = {tied: tiny_model(attention="eager", tie_word_embeddings=tied) for tied in (True, False)}
        for tied, model in models.items():
            model.save_pretrained(self._model_path(tied))
        self._models = models
        self.configs = {name: self._config(mini) for name, mini in MINI_BATCHES.items()}
        self.batches = {
            (tied, name): self._batch(mini, model)
            for tied, model in models.items()
            for name, mini in MINI_BATCHES.items()
        }
        contexts = {world: self._start(world) for world in WORLD_SIZES}
        try:
            scenarios = {PLAIN_UPDATE, ADAPTERS_UPDATE, *(variant.scenario for variant in VARIANTS.values())}
            scenarios |= {variant.scenario for variant in OWN_MICRO_BATCHES.values()}
            self.references = {scenario: self.reference(scenario) for scenario in scenarios}
            self.autocast = {of: self.reference(of, autocast=True) for of in (PLAIN_UPDATE, ADAPTERS_UPDATE)}
            self.runs = {
                (world, *run): steps
                for world, context in contexts.items()
                for run, steps in update_runs.results(context, self._folder / f"world-{world}").items()
            }
        finally:
            for process in itertools.chain.from_iterable(context.processes for context in contexts.values()):
                process.kill()
            self._loop.close()

    def reference(self, scenario, *, autocast=False, changed=lambda config, batch: None):
        """The reference's updates; ``changed`` may alter copies of each step's config and batch."""
        settings = dataclasses.asdict(scenario.optimizer)
        assert settings.pop("lr_warmup_ratio") is None and settings.pop("min_lr_ratio") is None
        assert settings.pop("section") == "trainer.policy.optimizer_config"
        model = copy.deepcopy(self._models[scenario.tied])
        trainer = ReferenceTrainer(
            model if scenario.lora is None else with_adapters(model, scenario.lora, SEED),
            **settings,
            num_training_steps=update_runs.HORIZON,
            autocast=autocast,
        )
        updates = []
        for name in scenario.mini_batches:
            config, batch = copy.deepcopy((self.configs[name], self.batches[scenario.tied, name]))
            changed(config, batch)
            parts = micro_batches(batch, config, scenario.micro_batches_of) if scenario.micro_batches_of else None
            updates.append(trainer.update(batch, config.trainer.algorithm, parts))
        return updates

    def pairs(self, world, stage, variant):
        """(our step, the reference's update) of every update of a run."""
        return zip(self.runs[world, stage, variant], self.references[VARIANTS[variant].scenario], strict=True)

    def _model_path(self, tied):
        return self._folder / ("tied" if tied else "untied")

    def _config(self, mini):
        return parse_config(
            [
                "trainer.logger=console",
                f"trainer.log_path={self._folder}/log",
                f"trainer.algorithm.temperature={mini.temperature}",
                *mini.settings,
            ]
        )

    def _batch(self, mini, policy):
        rollouts = rollout_batch(mini.rows, mini.seed, prompt_lengths=(11, 13), holes=mini.holes)
        if mini.masked:
            rollouts["loss_mask"] = torch.zeros_like(rollouts["loss_mask"])
        batch = update_batch(
            rollouts,
            policy,
            tiny_model(attention="eager", seed=3),
            temperature=mini.temperature,
            seed=mini.seed,
            drift=mini.drift,
            loss_reduction=mini.loss_reduction,
            micro_batch_size=2,
            prompts=4 if mini.rows == 8 else 1,
            rollout_drift=mini.rollout_drift,
        )
        batch["advantages"] = batch["advantages"] * mini.scale
        return batch

    def _start(self, world_size):
        variants = {name: VARIANTS[name] for name in VARIANTS_OF[world_size]}
        variants |= {OWN: OWN_MICRO_BATCHES[world_size]}
        variants |= BFLOAT16_VARIANTS | (SPLIT_VARIANTS if world_size == 1 else {})
        payloads = {name: self._payloads(variant, world_size) for name, variant in variants.items()}
        runs = [
            update_runs.Run((stage, name), self._spec(variant, stage), payloads[name])
            for stage in STAGES
            for name, variant in variants.items()
        ]
        return update_runs.start(runs, world_size, self._folder / f"world-{world_size}")

    def _spec(self, variant, stage):
        return training_spec(
            self._model_path(variant.scenario.tied),
            dtype=variant.dtype,
            zero_stage=stage,
            optimizer=variant.scenario.optimizer,
            gradient_checkpointing=variant.checkpointing is not None,
            gradient_checkpointing_use_reentrant=variant.checkpointing == "reentrant",
            seed=SEED,
            policy_loss=packed_policy_loss(self.configs[variant.scenario.mini_batches[-1]]),
            lora=variant.scenario.lora,
        )

    def _payloads(self, variant, world_size):
        names = variant.scenario.mini_batches
        return tuple(
            self._payload(name, variant, world_size, micro_batches)
            for name, micro_batches in zip(names, variant.micro_batches, strict=True)
        )

    def _payload(self, name, variant, world_size, micro_batches):
        batch = self.batches[variant.scenario.tied, name]
        if variant.shuffled:
            order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(len(name))).tolist()
            batch = reordered(batch, order)
        config = copy.deepcopy(self.configs[name])
        if variant.scenario.micro_batches_of is None:
            config.trainer.max_tokens_per_microbatch = budget(batch["attention_mask"], world_size, micro_batches)
        config.trainer.placement.policy_num_gpus_per_node = world_size
        backend = InProcessBackend(ranks={"policy": world_size})
        dispatch = ArcticDispatch(config, backend, self._loop, pad_token_id=PAD_ID, inference_client=None)
        dispatch.forward_backward("policy", batch)
        return update_runs.Payload(*backend.arguments("fwd_bwd")[0])


def micro_batches(batch, config, world_size):
    """SkyRL's: runs of two rows within each rank; with the seeds that ours gives the loss."""
    pairs = torch.arange(len(batch)).view(-1, 2).tolist()
    return [
        MicroBatch(pair, int(np.random.SeedSequence([config.trainer.seed, 0, 0, number]).generate_state(1)[0]))
        for number, pair in enumerate(pairs)
    ]


def budget(attention_mask, world_size, micro_batches):
    """The smallest token budget with which the busiest rank runs that many micro-batches."""
    lengths = attention_mask.sum(dim=1)
    lengths = torch.cat([lengths, lengths[:1].repeat(-len(lengths) % world_size)])
    for tokens in range(int(lengths.max()), int(lengths.sum()) + 1):
        if max(len(plan_micro_batches(rank, tokens)) for rank in lengths.chunk(world_size)) == micro_batches:
            return tokens
    raise ValueError(f"no token budget cuts rows of {lengths.tolist()} tokens into {micro_batches} micro-batches")


def distance(ours, expected):
    """Norm of the difference over the norm of what is expected, over all tensors together."""
    assert ours.keys() == expected.keys()
    difference = sum(float((ours[name] - expected[name]).double().norm()) ** 2 for name in ours) ** 0.5
    norm = sum(float(values.double().norm()) ** 2 for values in expected.values()) ** 0.5
    return difference / norm if norm else difference


def worst_tensor(ours, expected):
    """The largest ``distance`` of a single tensor."""
    assert ours.keys() == expected.keys()
    return max(distance({name: ours[name]}, {name: expected[name]}) for name in ours)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    register_policy_loss(OWN_LOSS)(squares_around_the_mean)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield Outcome(tmp_path_factory.mktemp("updates"))
    PolicyLossRegistry.unregister(OWN_LOSS)
    torch.set_num_threads(before)


OF_THE_DISPATCH = tuple(f"loss_metrics/{name}" for name in ("is_ratio", "tis_", "token_mask", "product_sequence"))
"""Metrics of the off-policy correction, which the workers do not see."""


@pytest.mark.parametrize(("world", "stage", "variant"), RUNS)
class TestFloat32:
    def test_gradient_of_every_tensor(self, outcome, world, stage, variant):
        for ours, expected in outcome.pairs(world, stage, variant):
            assert worst_tensor(ours["gradient"], expected.gradient) <= 1e-4

    def test_weight_change_of_every_tensor(self, outcome, world, stage, variant):
        for ours, expected in outcome.pairs(world, stage, variant):
            assert distance(ours["change"], expected.change) <= 1e-3
            assert worst_tensor(ours["change"], expected.change) <= 1e-3

    def test_gradient_norm_before_clipping(self, outcome, world, stage, variant):
        for ours, expected in outcome.pairs(world, stage, variant):
            assert ours["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)

    def test_metrics_under_skyrls_names(self, outcome, world, stage, variant):
        names = VARIANTS[variant].scenario.mini_batches
        for name, (ours, expected) in zip(names, outcome.pairs(world, stage, variant), strict=True):
            result = {"avg_loss": ours["loss"], "metrics": ours["metrics"], "lr": ours["lr"]}
            metrics = skyrl_metrics(outcome.configs[name], result, response_length=9)
            for key, value in expected.metrics.items():
                if not key.startswith(OF_THE_DISPATCH):
                    assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key

    def test_one_optimizer_step_and_one_step_of_the_schedule_an_update(self, outcome, world, stage, variant):
        steps = outcome.runs[world, stage, variant]
        assert [step["micro_batches"] for step in steps] == list(VARIANTS[variant].micro_batches)
        assert [step["steps"] for step in steps] == list(range(1, len(steps) + 1))
        assert [step["scheduler_steps"] for step in steps] == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", WORLD_SIZES)
class TestLosses:
    """Gradients to 1e-5 of the reference's norm, tensor by tensor."""

    def test_every_loss(self, outcome, world, stage):
        for variant in LOSS_VARIANTS.keys() & set(VARIANTS_OF[world]):
            for name, (ours, expected) in zip(LOSSES, outcome.pairs(world, stage, variant), strict=True):
                assert worst_tensor(ours["gradient"], expected.gradient) <= 1e-5, name

    def test_losses_that_look_beyond_a_row(self, outcome, world, stage):
        steps = outcome.runs[world, stage, OWN]
        references = outcome.references[OWN_MICRO_BATCHES[world].scenario]
        for name, ours, expected in zip(BEYOND_A_ROW, steps, references, strict=True):
            assert worst_tensor(ours["gradient"], expected.gradient) <= 1e-5, name
            assert ours["micro_batches"] == 4 // world
            result = {"avg_loss": ours["loss"], "metrics": ours["metrics"], "lr": ours["lr"]}
            metrics = skyrl_metrics(outcome.configs[name], result, response_length=9)
            for key, value in expected.metrics.items():
                assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key

    def test_clipping_bites_in_the_second_pass(self, outcome, world, stage):
        """Old log-probs are those of the start in both passes over two mini-batches."""
        first, second, *again = outcome.runs[world, stage, "2 passes x 2 mini-batches"]
        assert first["metrics"]["pg_clipfrac"] == 0
        assert second["metrics"]["ratio_max_deviation"] > 1e-3
        assert all(step["metrics"]["pg_clipfrac"] > 0.05 for step in again)


def test_micro_batches_are_felt(outcome):
    one = outcome.references[OWN_MICRO_BATCHES[1].scenario]
    (whole,) = outcome.reference(Scenario(("kl_cov",), WITHOUT_MOMENTUM))
    assert distance(one[0].gradient, whole.gradient) > 1e-3


@pytest.mark.parametrize("stage", STAGES)
class TestSteps:
    @pytest.mark.parametrize("world", WORLD_SIZES)
    def test_no_gradient_is_left_over(self, outcome, world, stage):
        no_advantage, all_masked = outcome.runs[world, stage, "3, then 1, then 2, then nothing to learn"][3:]
        for step in (no_advantage, all_masked):
            assert step["grad_norm"] == 0
            assert not any(values.any() for values in step["gradient"].values())
            assert not any(values.any() for values in step["change"].values())
        assert all_masked["loss"] == 0

    def test_learning_rates_of_a_warm_up(self, outcome, stage):
        rates = [step["lr"] for step in outcome.runs[2, stage, "warm-up"]]
        assert rates == pytest.approx([0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3], rel=1e-12)

    def test_clipping_acts_on_what_the_optimizer_gets(self, outcome, stage):
        for step in outcome.runs[2, stage, "clipped, untied, reentrant checkpoints"]:
            norm = sum(float(values.norm()) ** 2 for values in step["gradient"].values()) ** 0.5
            assert norm == pytest.approx(0.05, rel=1e-4)
            assert step["grad_norm"] > 0.1


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", WORLD_SIZES)
class TestAdapters:
    def test_gradient_of_every_tensor(self, outcome, world, stage):
        for ours, expected in outcome.pairs(world, stage, "adapters, every term of a loss"):
            assert all(".lora_A." in name or ".lora_B." in name for name in expected.gradient)
            assert all(values.any() for values in expected.gradient.values())
            assert worst_tensor(ours["gradient"], expected.gradient) <= 1e-5

    @pytest.mark.parametrize("variant", [*ADAPTERS, f"{BFLOAT16} adapters"])
    def test_the_base_model_stays_as_it_is(self, outcome, world, stage, variant):
        assert all(step["frozen"] for step in outcome.runs[world, stage, variant])


@pytest.mark.parametrize("variant", BFLOAT16_VARIANTS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", WORLD_SIZES)
class TestBfloat16:
    """No further from float32 than twice what PyTorch's own bfloat16 autocast of the reference is.

    Autocast keeps the weights and some operations in float32, so that a pure bfloat16 model may be off by more, but by
    roundings of the same size.
    """

    def test_gradient_weight_change_and_loss(self, outcome, world, stage, variant):
        (step,) = outcome.runs[world, stage, variant]
        scenario = BFLOAT16_VARIANTS[variant].scenario
        (expected,), (autocast,) = outcome.references[scenario], outcome.autocast[scenario]
        for ours, theirs, right in (
            (step["gradient"], autocast.gradient, expected.gradient),
            (step["change"], autocast.change, expected.change),
        ):
            assert 1e-4 < distance(ours, right) <= 2 * distance(theirs, right)
            assert worst_tensor(ours, right) <= 2 * worst_tensor(theirs, right)

    def test_the_norm_is_that_of_the_gradient_used(self, outcome, world, stage, variant):
        (step,) = outcome.runs[world, stage, variant]
        norm = sum(float(values.norm()) ** 2 for values in step["gradient"].values()) ** 0.5
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16_gradients_are_accumulated_in_float32(outcome, stage):
    """One micro-batch and 64 differ by less than where DeepSpeed has to accumulate in bfloat16, in stage 0."""

    def split(stage):
        (one,), (many,) = (outcome.runs[1, stage, name] for name in SPLIT_VARIANTS)
        assert (one["micro_batches"], many["micro_batches"]) == (1, 64)
        return distance(many["gradient"], one["gradient"])

    assert split(stage) < 0.6 * split(0)


@pytest.mark.parametrize(
    ("mini_batch", "field", "other"),
    [
        ("kl", "use_kl_loss", False),
        ("kl", "temperature", 1.0),
        ("entropy, dual clip", "use_entropy_loss", False),
        ("entropy, dual clip", "policy_loss_type", "regular"),
        ("entropy, dual clip", "temperature", 1.0),
        ("kl, entropy", "kl_estimator_type", "k3"),
        ("kl, entropy", "eps_clip_high", 0.2),
    ],
)
def test_the_reference_feels_every_setting(outcome, mini_batch, field, other):
    def changed(config, batch):
        setattr(config.trainer.algorithm, field, other)

    assert_felt(outcome, mini_batch, changed)


def test_the_reference_feels_the_holes_of_a_loss_mask(outcome):
    def changed(config, batch):
        batch["loss_mask"] = batch["response_mask"]

    assert_felt(outcome, "kl", changed)


def assert_felt(outcome, mini_batch, changed):
    scenario = Scenario((mini_batch,))
    (as_it_is,) = outcome.reference(scenario)
    (without_it,) = outcome.reference(scenario, changed=changed)
    assert distance(without_it.gradient, as_it_is.gradient) > 1e-2
