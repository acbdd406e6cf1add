"""SkyRL's own policy worker, ``forward_backward`` unchanged on a CPU, beside our dispatch: metrics and gradients."""

from types import SimpleNamespace

import pytest
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.backends.skyrl_train.utils.torch_utils import chunked_entropy_from_logits, logprobs_from_logits
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase

from integrations.arctic_rl.dispatch import ArcticDispatch
from integrations.arctic_rl.skyrl_config import parse_config
from tests.arctic_rl.in_process_backend import InProcessBackend, packable
from tests.arctic_rl.processors.helpers import gradients, tiny_model
from tests.arctic_rl.skyrl_reference import PAD_ID, rollout_batch, update_batch

LOSS = "trainer.algorithm.policy_loss_type"
CORRECTION = "trainer.algorithm.off_policy_correction"
RECIPES = {
    "regular": (),
    "no kl": ("trainer.algorithm.use_kl_loss=false",),
    "entropy": ("trainer.algorithm.use_entropy_loss=true",),
    "dual_clip": (f"{LOSS}=dual_clip",),
    "gspo": (f"{LOSS}=gspo",),
    "sapo": (f"{LOSS}=sapo",),
    "cispo": (f"{LOSS}=cispo",),
    "rollout_is": (f"{LOSS}=rollout_is",),
    "dppo": (f"{LOSS}=dppo",),
    "importance_sampling": (f"{LOSS}=importance_sampling",),
    "cross_entropy": (f"{LOSS}=cross_entropy",),
    "clip_cov": (f"{LOSS}=clip_cov",),
    "kl_cov": (f"{LOSS}=kl_cov",),
    "tokens": ("trainer.max_tokens_per_microbatch=60",),
    "kl_cov of tokens": (f"{LOSS}=kl_cov", "trainer.max_tokens_per_microbatch=60"),
    "weights of tokens": (f"{CORRECTION}.tis_ratio_type=token",),
    "weights of sequences": (f"{CORRECTION}.tis_ratio_type=sequence", f"{LOSS}=gspo"),
    "geometric": (f"{CORRECTION}.sequence_mask_metric=geometric", f"{CORRECTION}.geo_mask_high=1.2"),
    "product": (f"{CORRECTION}.sequence_mask_metric=product", f"{LOSS}=sapo"),
    "outliers": (f"{CORRECTION}.outlier_token_is_threshold_high=1.4", f"{LOSS}=dual_clip"),
    "token mask": (
        f"{CORRECTION}.token_mask_is_threshold_low=0.7",
        f"{CORRECTION}.token_mask_is_threshold_high=1.3",
        f"{LOSS}=cispo",
    ),
}
OURS_ALONE = {"loss_metrics/ppo_kl", "loss_metrics/clip_ratio_lower", "loss_metrics/ratio_deviation_max"}
"""What our clipped surrogate reports and SkyRL's does not."""


class PlainModel:
    """SkyRL's ``HFModelWrapper`` without its GPU kernels."""

    def __init__(self, model):
        self.model = model

    def train(self):
        self.model.train()

    def __call__(self, sequences, num_actions, attention_mask, temperature, entropy_requires_grad, **_):
        positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        logits = self.model(
            input_ids=sequences, attention_mask=attention_mask, position_ids=positions, use_cache=False
        ).logits
        logits = logits / temperature
        log_probs = logprobs_from_logits(logits, sequences.roll(-1, dims=1), inplace_backward=False)
        entropy = chunked_entropy_from_logits(logits, requires_grad=entropy_requires_grad)
        return log_probs[:, -num_actions - 1 : -1], {"entropy": entropy}


class OneRank:
    """Of SkyRL's strategy: backward, and an all-reduce over one rank."""

    def backward(self, loss, model, optimizer):
        loss.backward()

    def all_reduce(self, metrics, op, group):
        return dict(metrics)


def skyrls(cfg, model, batch, monkeypatch, ranks=1):
    """Metrics of the last rank, and the gradient averaged over ranks."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    model.zero_grad()
    size = len(batch) // ranks
    for rank in range(ranks):
        worker = object.__new__(PolicyWorkerBase)
        worker.cfg = cfg.trainer
        worker.model = PlainModel(model)
        worker.optimizer = None
        worker.scheduler = SimpleNamespace(get_last_lr=lambda: [1e-2])
        worker.strategy = OneRank()
        worker.mesh_rank = SimpleNamespace(dp_size=ranks)
        worker.device_mesh = SimpleNamespace(get_group=lambda name: None)
        worker.policy_loss_fn = PolicyLossRegistry.get(cfg.trainer.algorithm.policy_loss_type)
        metrics = worker.forward_backward(batch[rank * size : (rank + 1) * size]).metrics
    return metrics, {name: values / ranks for name, values in gradients(model).items()}


@pytest.fixture(scope="module")
def policy():
    return tiny_model(attention="eager")


@pytest.fixture(scope="module")
def batch(policy):
    return update_batch(
        rollout_batch(8, 0, prompt_lengths=(11, 13), holes=True),
        policy,
        tiny_model(attention="eager", seed=3),
        temperature=1.0,
        seed=0,
        rollout_drift=0.2,
    )


def config(tmp_path, *settings):
    return parse_config(
        [
            "trainer.logger=console",
            f"trainer.log_path={tmp_path}",
            "trainer.micro_train_batch_size_per_gpu=2",
            "trainer.algorithm.kl_loss_coef=0.2",
            *settings,
        ]
    )


def ours(cfg, policy, batch, loop, ranks=1):
    cfg.trainer.placement.policy_num_gpus_per_node = ranks
    backend = InProcessBackend({"policy": packable(policy)}, ranks={"policy": ranks})
    dispatch = ArcticDispatch(cfg, backend, loop, pad_token_id=PAD_ID, inference_client=None)
    return dispatch.forward_backward("policy", batch).metrics, backend.gradient()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_names_of_metrics_are_skyrls(recipe, policy, batch, loop, tmp_path, monkeypatch):
    cfg = config(tmp_path, *RECIPES[recipe])
    names, _ = skyrls(cfg, policy, batch, monkeypatch)
    our_names, _ = ours(cfg, policy, batch, loop)
    surrogate = cfg.trainer.algorithm.policy_loss_type in ("regular", "dual_clip")
    assert sorted(our_names.keys() - names.keys()) == sorted(OURS_ALONE if surrogate else [])
    assert sorted(names.keys() - our_names.keys()) == []


WITHOUT_SPLIT = ("final_loss", "policy_loss", "loss", "response_length", "_max", "_min", "lr")
"""SkyRL's metrics that its micro-batches do not change."""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("entropy", "clip_cov")])
def test_gradient_and_metrics_of_two_rows_a_micro_batch(recipe, ranks, policy, batch, loop, tmp_path, monkeypatch):
    """Without the entropy bonus, whose mean is another, and chance."""
    cfg = config(tmp_path, *RECIPES[recipe])
    expected, expected_gradient = skyrls(cfg, policy, batch, monkeypatch, ranks)
    metrics, gradient = ours(cfg, policy, batch, loop, ranks)
    for name, values in expected_gradient.items():
        assert (gradient[name] - values).norm() <= 1e-5 * values.norm(), name
    if ranks == 1:
        for name, value in expected.items():
            if name.endswith(WITHOUT_SPLIT) and "is_ratio" not in name:
                assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_every_metric_of_one_micro_batch(policy, batch, loop, tmp_path, monkeypatch):
    """With one micro-batch SkyRL's means are those of the mini-batch too."""
    for recipe in set(RECIPES) - {"clip_cov", "tokens", "kl_cov of tokens"}:
        cfg = config(tmp_path, *RECIPES[recipe], "trainer.micro_train_batch_size_per_gpu=8")
        expected, expected_gradient = skyrls(cfg, policy, batch, monkeypatch)
        metrics, gradient = ours(cfg, policy, batch, loop)
        for name, values in expected_gradient.items():
            assert (gradient[name] - values).norm() <= 1e-5 * values.norm(), name
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (recipe, name)
