"""The grpo loss with mode "sum" against SkyRL's own policy losses, KL term and reductions."""

import pytest
import torch

from integrations.arctic_rl.processors.losses import grpo_loss

pytestmark = pytest.mark.slow


def random_rows(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (6, 9)
    logprobs = -torch.rand(shape, generator=generator, dtype=torch.float64) * 5
    rows = {
        "logprobs": logprobs,
        "old_log_probs": logprobs + torch.randn(shape, generator=generator, dtype=torch.float64) * 0.7,
        "ref_log_prob": logprobs + torch.randn(shape, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(shape, generator=generator, dtype=torch.float64),
        "loss_mask": torch.randint(0, 2, shape, generator=generator).double(),
    }
    rows["old_log_probs"][0, 0] = -60.0
    rows["old_log_probs"][1, 1] = 45.0
    rows["loss_mask"][2] = 0
    return rows


def algorithm(**changes):
    from skyrl.train.config import AlgorithmConfig

    return AlgorithmConfig(eps_clip_low=0.15, eps_clip_high=0.28, clip_ratio_c=2.5, **changes)


@pytest.mark.parametrize("policy_loss_type", ["regular", "dual_clip"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("kl_type", ["k1", "abs", "k2", "k3"])
def test_loss_and_gradient_equal_skyrls(policy_loss_type: str, reduction: str, kl_type: str):
    from skyrl.backends.skyrl_train.utils.ppo_utils import (
        apply_loss_reduction_to_advantages_minibatch,
        compute_approx_kl,
        ppo_policy_loss,
    )
    from skyrl.backends.skyrl_train.utils.torch_utils import masked_mean

    rows = random_rows(len(policy_loss_type) + len(reduction) + len(kl_type))
    logprobs = rows.pop("logprobs").requires_grad_()
    advantages = apply_loss_reduction_to_advantages_minibatch(
        rows["advantages"], rows["loss_mask"], reduction, micro_batch_size=6, max_seq_len=9
    )
    cfg = algorithm(policy_loss_type=policy_loss_type)
    policy_loss, skyrl_metrics = ppo_policy_loss(
        logprobs, rows["old_log_probs"], advantages, cfg, loss_mask=rows["loss_mask"]
    )
    kl = compute_approx_kl(logprobs, rows["ref_log_prob"], rows["loss_mask"], kl_type)
    kl = masked_mean(kl, rows["loss_mask"], dim=-1).mean()
    expected = policy_loss + 0.2 * kl

    num_tokens = float(rows["loss_mask"].sum())
    meta = {"batch_num_tokens": num_tokens, "global_batch_size": 6, "dp_size": 1, "response_len": 9}
    config = {
        "clip_ratio_low": 0.15,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 2.5 if policy_loss_type == "dual_clip" else None,
        "loss_agg_mode": "sum",
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
        "kl_loss_type": kl_type,
        "kl_loss_agg_mode": "seq-mean-token-mean",
    }
    loss, metrics = grpo_loss({"logprobs": logprobs}, rows | {"advantages": advantages}, meta, config, "cpu")

    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["kl_loss"].value.item() == pytest.approx(kl.item(), rel=1e-6)
    total, weight = metrics["pg_clipfrac"]
    assert float(total / weight) == pytest.approx(skyrl_metrics["clip_ratio"], abs=1e-6)
    (ours,) = torch.autograd.grad(loss, logprobs)
    (theirs,) = torch.autograd.grad(expected, logprobs)
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
