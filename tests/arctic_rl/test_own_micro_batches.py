"""Losses that look beyond a row, SkyRL's and a user's: SkyRL's micro-batches, its tensors, its metrics."""

import subprocess
import sys
from types import ModuleType

import cloudpickle
import numpy as np
import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, register_policy_loss
from skyrl.backends.skyrl_train.workers.worker_utils import get_microbatch_iterator
from skyrl.train.config import AlgorithmConfig
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

from integrations.arctic_rl.dispatch import ArcticDispatch
from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.loss_config import loss_request, packed_policy_loss
from integrations.arctic_rl.micro_batches import skyrl_micro_batch_ids
from integrations.arctic_rl.processors import batching
from integrations.arctic_rl.processors.skyrl_losses import load_policy_loss, pack_policy_loss
from integrations.arctic_rl.skyrl_config import parse_config
from integrations.arctic_rl.zorro.attention import register_shared_attention
from tests.arctic_rl.in_process_backend import InProcessBackend, packable
from tests.arctic_rl.processors.helpers import gradients, tiny_model
from tests.arctic_rl.skyrl_reference import (
    PAD_ID,
    MicroBatch,
    action_log_probs,
    policy_loss,
    reordered,
    rollout_batch,
    update_batch,
)

SEED = 11


def spread(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    """Depends on the micro-batch, on its width, and on tokens outside the mask, as a plain mean does."""
    ratio = (log_probs - old_log_probs).exp()
    loss = -(ratio * advantages).mean() + log_probs.mean() * config.eps_clip_low + ratio.std()
    noise = torch.rand(log_probs.shape)
    loss = loss + (noise * log_probs * loss_mask).sum() * 0.01
    drift = (rollout_logprobs - old_log_probs) * loss_mask
    return loss, {
        "ratio_std": ratio.std().item(),
        "ratio_max": (ratio * loss_mask).max().item(),
        "ratio_min": (ratio + 1 - loss_mask).min().item(),
        "drift_loss": drift.sum().item(),
        "entropy": 0.25,
        "not_a_number": "text",
    }


@pytest.fixture(scope="module", autouse=True)
def registered():
    register_policy_loss("spread_of_ratios")(spread)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    PolicyLossRegistry.unregister("spread_of_ratios")


@pytest.fixture(scope="module")
def policy():
    return tiny_model(attention="eager")


@pytest.fixture(scope="module")
def reference():
    return tiny_model(attention="eager", seed=3)


LOSSES = {
    "clip_cov": ("clip_cov.clip_ratio=0.2", "clip_cov.clip_cov_lb=-0.02", "clip_cov.clip_cov_ub=0.01"),
    "kl_cov": ("kl_cov.kl_cov_frac=0.3", "kl_cov.ppo_kl_coef=0.7"),
    "spread_of_ratios": ("eps_clip_low=0.3",),
}
TERMS = ("use_kl_loss=true", "kl_loss_coef=0.2", "use_entropy_loss=true", "entropy_loss_coef=0.1")


def config(tmp_path, loss, *settings, workers=1):
    """``workers`` is SkyRL's data-parallel size."""
    algorithm = [f"trainer.algorithm.{item}" for item in (f"policy_loss_type={loss}", *LOSSES[loss])]
    overrides = ["trainer.logger=console", f"trainer.log_path={tmp_path}", f"trainer.seed={SEED}"]
    overrides += [f"trainer.placement.{model}_num_gpus_per_node={workers}" for model in ("policy", "ref")]
    return parse_config([*overrides, *algorithm, *settings])


def rows_of(policy, reference, seed=0, rows=8):
    return with_log_probs(rollout_batch(rows, seed, prompt_lengths=(11, 13), holes=True), policy, reference, seed)


def with_log_probs(rollouts, policy, reference, seed):
    """Old log-probs as SkyRL's forward pass gives them, prompt tokens included; advantages are 0 outside responses."""
    batch = update_batch(rollouts, policy, reference, temperature=1.0, seed=seed, rollout_drift=0.2)
    mask = batch["response_mask"].bool()
    with torch.no_grad():
        present = action_log_probs(policy, batch, 1.0)[0]
    noise = torch.randn(present.shape, generator=torch.Generator().manual_seed(seed)) * 0.3
    batch["action_log_probs"] = present + noise
    for name in ("advantages", "rollout_logprobs"):
        batch[name] = torch.where(mask, batch[name], 0)
    batch.metadata["global_step"] = 5
    return batch


def skyrls_micro_batches(batch, cfg, workers, place=0):
    """Rows of every micro-batch of SkyRL's workers, one after another, and the seed that ours gives its loss."""
    size = len(batch) // workers
    parts = []
    for worker in range(workers):
        shard = batch[worker * size : (worker + 1) * size]
        shard["row"] = torch.arange(worker * size, (worker + 1) * size)
        iterator = get_microbatch_iterator(
            shard, cfg.trainer.micro_train_batch_size_per_gpu, cfg.trainer.max_tokens_per_microbatch
        )
        for micro_batch in iterator:
            seed = int(np.random.SeedSequence([SEED, 5, place, len(parts)]).generate_state(1)[0])
            parts.append(MicroBatch(sorted(micro_batch["row"].tolist()), seed))
    return parts


def expected_of(policy, batch, cfg, parts):
    policy.zero_grad()
    loss, metrics = policy_loss(policy, batch, cfg.trainer.algorithm, parts)
    loss.backward()
    return gradients(policy), metrics


def run(policy, batch, cfg, ranks, loop, attention=None):
    model = packable(policy)
    if attention is not None:
        model.set_attn_implementation(attention)
    backend = InProcessBackend({"policy": model}, ranks={"policy": ranks})
    dispatch = ArcticDispatch(cfg, backend, loop, pad_token_id=PAD_ID, inference_client=None)
    metrics = dispatch.forward_backward("policy", batch).metrics
    return backend.gradient(), metrics, backend, dispatch


@pytest.mark.parametrize(("workers", "ranks"), [(1, 1), (2, 2), (1, 2), (2, 4)])
@pytest.mark.parametrize("micro", ["1", "2", "4", "tokens"])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_and_metrics_equal_skyrls_worker(loss, micro, workers, ranks, policy, reference, loop, tmp_path):
    """With fewer data-parallel workers than our ranks, as under SkyRL's model-parallel sizes, too."""
    size = "max_tokens_per_microbatch=45" if micro == "tokens" else f"micro_train_batch_size_per_gpu={micro}"
    terms = [f"trainer.algorithm.{item}" for item in TERMS]
    cfg = config(tmp_path, loss, f"trainer.{size}", *terms, workers=workers)
    batch = rows_of(policy, reference)
    parts = skyrls_micro_batches(batch, cfg, workers)
    expected, expected_metrics = expected_of(policy, batch, cfg, parts)
    gradient, metrics, _, _ = run(policy, batch, cfg, ranks, loop)
    for name, values in expected.items():
        assert (gradient[name] - values).norm() <= 1e-5 * values.norm(), name
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def rows_of_one_prompt(policy, reference, rows=8):
    """Two prompts of 12 tokens, four responses each: the windows of the rows begin at other places of a prompt."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(1, 128, 12).tolist() for _ in range(2)]
    responses = [draw.integers(1, 128, length).tolist() for length in (1, 9, 4, 6, 2, 8, 3, 5)]
    given = [prompts[row // 4] for row in range(rows)]
    keep = [[1] * len(response) for response in responses]
    sequences, attention_mask, response_mask, rewards, loss_mask, *_ = convert_prompts_responses_to_batch_tensors(
        PAD_ID, given, responses, [[0.0] * len(response) for response in responses], keep
    )
    rollouts = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention_mask,
            "response_mask": response_mask,
            "loss_mask": loss_mask,
            "rewards": rewards,
        }
    )
    rollouts.metadata = {"response_length": 9, "uids": [str(row // 4) for row in range(rows)]}
    return with_log_probs(rollouts, policy, reference, 0)


@pytest.mark.parametrize("loss", LOSSES)
def test_shared_prompts_change_nothing(loss, policy, reference, loop, tmp_path, monkeypatch):
    shared = []
    plain_share_rows = batching.share_rows

    def noted(ids, mask, groups, prompt_width):
        shared.extend(group for group in groups if len(group.rows) > 1)
        return plain_share_rows(ids, mask, groups, prompt_width)

    monkeypatch.setattr(batching, "share_rows", noted)
    cfg = config(tmp_path, loss, "trainer.micro_train_batch_size_per_gpu=4", "trainer.algorithm.use_kl_loss=false")
    batch = rows_of_one_prompt(policy, reference)
    expected, _ = expected_of(policy, batch, cfg, skyrls_micro_batches(batch, cfg, 1))
    gradient, _, _, _ = run(policy, batch, cfg, 1, loop, register_shared_attention())
    assert shared
    for name, values in expected.items():
        assert (gradient[name] - values).norm() <= 1e-5 * values.norm(), name


@pytest.mark.parametrize("loss", LOSSES)
def test_the_reference_feels_the_micro_batches(loss, policy, reference, tmp_path):
    cfg = config(tmp_path, loss)
    batch = rows_of(policy, reference)
    gradients_of = []
    for size in (1, 2, 8):
        cfg.trainer.micro_train_batch_size_per_gpu = size
        gradients_of.append(expected_of(policy, batch, cfg, skyrls_micro_batches(batch, cfg, 1))[0])
    for one, other in ((0, 1), (1, 2)):
        name = "model.embed_tokens.weight"
        difference = gradients_of[one][name] - gradients_of[other][name]
        assert difference.norm() > 1e-3 * gradients_of[one][name].norm()


def test_every_setting_of_a_covariance_loss_is_felt(policy, reference, loop, tmp_path):
    batch = rows_of(policy, reference)
    size = "trainer.micro_train_batch_size_per_gpu=8"
    for loss in ("clip_cov", "kl_cov"):
        changed = run(policy, batch, config(tmp_path, loss, size), 1, loop)[0]
        for setting in LOSSES[loss]:
            cfg = config(tmp_path, loss, size)
            section, name = setting.split("=")[0].split(".")
            setattr(vars(cfg.trainer.algorithm)[section], name, vars(vars(AlgorithmConfig())[section])[name])
            without = run(policy, batch, cfg, 1, loop)[0]
            assert any(not torch.equal(without[key], changed[key]) for key in changed), setting


def test_random_choices_are_the_same_in_every_run_and_others_in_every_update(policy, reference, loop, tmp_path):
    cfg = config(tmp_path, "clip_cov")
    batch = rows_of(policy, reference)

    def two_updates():
        torch.manual_seed(torch.initial_seed() + 1)
        backend = InProcessBackend({"policy": packable(policy)})
        dispatch = ArcticDispatch(cfg, backend, loop, pad_token_id=PAD_ID, inference_client=None)
        state = torch.get_rng_state()
        taken = []
        for _ in range(2):
            dispatch.forward_backward("policy", batch)
            taken.append({name: values.clone() for name, values in backend.gradient().items()})
            for parameter in backend._engines["policy"].module.parameters():
                parameter.grad = None
        assert torch.equal(torch.get_rng_state(), state), "the loss's choices leave the process's own alone"
        return taken

    (first, second), (again, second_again) = two_updates(), two_updates()
    for name, values in first.items():
        assert torch.equal(values, again[name])
        assert torch.equal(second[name], second_again[name])
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_keys_of_random_choices_never_repeat(loop, tmp_path):
    cfg = config(tmp_path, "clip_cov")
    dispatch = ArcticDispatch(cfg, InProcessBackend(), loop, pad_token_id=PAD_ID, inference_client=None)
    batch = rollout_batch(2, 0)
    keys = []
    for step in (1, 1, 1, 2, 2):
        batch.metadata["global_step"] = step
        keys.append(tuple(dispatch._random_key(batch)))
    assert keys == [(SEED, 1, 0), (SEED, 1, 1), (SEED, 1, 2), (SEED, 2, 0), (SEED, 2, 1)]


def test_rows_that_only_pad_the_batch_change_nothing(policy, reference, loop, tmp_path):
    size = "trainer.micro_train_batch_size_per_gpu=8"
    batch = rows_of(policy, reference, rows=7)
    alone, _, _, _ = run(policy, batch, config(tmp_path, "kl_cov", size), 1, loop)
    padded, _, backend, _ = run(policy, batch, config(tmp_path, "kl_cov", size, workers=7), 7, loop)
    ids = backend.arguments("fwd_bwd")[0][0]["micro_batch_ids"]
    assert ids.tolist() == list(range(7))
    assert any(not torch.equal(alone[name], padded[name]) for name in alone)
    cfg = config(tmp_path, "kl_cov", size, workers=2)
    two, _, backend, _ = run(policy, batch, cfg, 2, loop)
    assert backend.arguments("fwd_bwd")[0][0]["loss_mask"][7].sum() == 0
    parts = [MicroBatch([0, 1, 2, 3], 0), MicroBatch([4, 5, 6], 0)]
    expected, _ = expected_of(policy, batch, cfg, parts)
    for name, values in expected.items():
        assert (two[name] - values).norm() <= 1e-5 * values.norm(), name


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_ids_are_those_of_skyrls_iterator(workers, tmp_path):
    mask = rollout_batch(12, 3, prompt_lengths=(1, 30))["attention_mask"]
    for settings in (("micro_train_batch_size_per_gpu=4",), ("max_tokens_per_microbatch=40",)):
        cfg = config(tmp_path, "kl_cov", *(f"trainer.{item}" for item in settings), workers=workers)
        ids = skyrl_micro_batch_ids(mask, trainer=cfg.trainer)
        batch = rollout_batch(12, 3, prompt_lengths=(1, 30))
        rows = [part.rows for part in skyrls_micro_batches(batch, cfg, workers)]
        assert [torch.nonzero(ids == number)[:, 0].tolist() for number in range(int(ids.max()) + 1)] == rows


LAYOUTS = {
    "sequence_parallel_size": ("trainer.policy.sequence_parallel_size=2", "trainer.ref.sequence_parallel_size=2"),
    **{
        f"megatron {size}": (
            "trainer.strategy=megatron",
            *(f"trainer.{model}.megatron_config.{size}_parallel_size=2" for model in ("policy", "ref")),
        )
        for size in ("tensor_model", "pipeline_model", "context")
    },
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_model_parallel_sizes_leave_skyrls_micro_batches(layout, policy, reference, loop, tmp_path):
    """SkyRL cuts 12 rows 4, 4 and 4 where a second GPU is not a second data-parallel worker."""
    cfg = config(tmp_path, "clip_cov", "trainer.micro_train_batch_size_per_gpu=4", *layout, workers=2)
    batch = rows_of(policy, reference, rows=12)
    expected, expected_metrics = expected_of(policy, batch, cfg, skyrls_micro_batches(batch, cfg, 1))
    gradient, metrics, backend, dispatch = run(policy, batch, cfg, 2, loop)
    assert (dispatch.get_lcm_dp_size(), dispatch.dp_size("policy"), dispatch.dp_size("ref")) == (1, 1, 1)
    assert backend.arguments("fwd_bwd")[0][0]["micro_batch_ids"].bincount().tolist() == [4, 4, 4]
    for name, values in expected.items():
        assert (gradient[name] - values).norm() <= 1e-5 * values.norm(), name
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_counts_of_token_based_micro_batches(policy, reference, loop, tmp_path):
    batch = rows_of(policy, reference)
    for loss in ("kl_cov", "regular"):
        LOSSES.setdefault("regular", ())
        settings = ("trainer.max_tokens_per_microbatch=45", "trainer.algorithm.use_kl_loss=false")
        cfg = config(tmp_path, loss, *settings, workers=2)
        lopsided = reordered(batch, batch["attention_mask"].sum(1).argsort().tolist())
        _, metrics, _, _ = run(policy, lopsided, cfg, 2, loop)
        assert metrics["num_microbatches"] >= 2
        assert metrics["num_padding_microbatches"] in (0.0, 0.5, 1.0)
    _, metrics, _, _ = run(policy, batch, config(tmp_path, "kl_cov"), 2, loop)
    assert "num_microbatches" not in metrics


def test_a_loss_of_the_recipes_is_recognised(tmp_path):
    assert loss_request(config(tmp_path, "spread_of_ratios")).own_micro_batches
    assert packed_policy_loss(config(tmp_path, "spread_of_ratios")) is not None
    cfg = config(tmp_path, "clip_cov")
    cfg.trainer.algorithm.policy_loss_type = "regular"
    assert packed_policy_loss(cfg) is None


def test_a_users_own_regular_is_not_taken_for_skyrls(tmp_path, monkeypatch):
    cfg = config(tmp_path, "clip_cov")
    cfg.trainer.algorithm.policy_loss_type = "regular"
    monkeypatch.setitem(PolicyLossRegistry._functions, "regular", spread)
    assert loss_request(cfg).own_micro_batches


IN_A_BARE_PROCESS = """
import pickle, sys, torch
function, algorithm = pickle.loads(open(sys.argv[1], "rb").read())
assert not [name for name in sys.modules if "recipe_module" in name or name.startswith("tests")]
rows = torch.full((2, 3), -1.0)
loss, metrics = function(rows, rows, rows, config=algorithm, loss_mask=torch.ones(2, 3), rollout_logprobs=None)
print(float(loss), metrics["factor"], algorithm.my_knob)
"""

RECIPE_MODULE = """
import dataclasses
from skyrl.backends.skyrl_train.utils.ppo_utils import register_policy_loss
from skyrl.train.config import AlgorithmConfig
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

FACTOR = 4.0

@dataclasses.dataclass
class MyAlgorithm(AlgorithmConfig):
    my_knob: float = 3.0

def helper(values):
    return values.sum() * FACTOR

@register_policy_loss("loss_of_a_recipe")
def my_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    return helper(log_probs * loss_mask) * config.my_knob, {"factor": FACTOR}
"""


def test_a_worker_that_knows_nothing_of_the_recipes_module_runs_its_loss(tmp_path):
    module = ModuleType("recipe_module")
    sys.modules["recipe_module"] = module
    try:
        exec(compile(RECIPE_MODULE, "recipe_module.py", "exec"), module.__dict__)
        packed = pack_policy_loss(PolicyLossRegistry.get("loss_of_a_recipe"), module.MyAlgorithm(my_knob=2.0))
        assert cloudpickle.list_registry_pickle_by_value() == set()
    finally:
        PolicyLossRegistry.unregister("loss_of_a_recipe")
        del sys.modules["recipe_module"]
    (tmp_path / "loss").write_bytes(packed)
    command = [sys.executable, "-c", IN_A_BARE_PROCESS, str(tmp_path / "loss")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["-48.0", "4.0", "2.0"]


def test_what_cannot_be_sent_or_loaded_is_said():
    stream = sys.stderr

    def holds_a_stream(*args, **kwargs):
        return stream

    with pytest.raises(UnsupportedError, match="holds_a_stream cannot be sent"):
        pack_policy_loss(holds_a_stream, AlgorithmConfig())
    missing = cloudpickle.dumps((spread, None)).replace(b"test_own_micro_batches", b"test_own_micro_batchez")
    with pytest.raises(UnsupportedError, match="processor_modules"):
        load_policy_loss(missing)


def test_the_clipped_surrogate_costs_a_worker_no_import_of_skyrl():
    code = (
        "import sys\n"
        "from integrations.arctic_rl.processors.pipeline import run_pipeline\n"
        "from integrations.arctic_rl.processors.registry import known_loss_fns\n"
        "assert {'grpo', 'gspo', 'skyrl_policy_loss'} <= set(known_loss_fns())\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('skyrl', 'ray', 'cloudpickle')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
