"""Repacking a batch against the plainest code that could do it: ``python -m benchmarks.layout``.

B=512 rows of log-normal prompt and response lengths with the tensors of an update. The plain way allocates the same
tensors and copies each row's prompt and response with two slices, in a Python loop. Bound: 1.2 times its time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from benchmarks.report import print_line
from integrations.arctic_rl.layout import repack_to_verl

ROWS, MEAN_PROMPT, MEAN_RESPONSE, REPEATS, BOUND = 512, 600, 300, 15, 1.2
RESPONSE_KEYS = ("loss_mask", "advantages", "action_log_probs", "base_action_log_probs", "rollout_logprobs")


def skyrl_batch(seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """A batch in SkyRL's layout with the prompt and response length of each row."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = (
        (torch.randn(ROWS, generator=generator).mul(0.5).exp() * mean).long().clamp(1, 4 * mean)
        for mean in (MEAN_PROMPT, MEAN_RESPONSE)
    )
    total = prompts + responses
    seq_width, response_width = int(total.max()), int(responses.max())
    attention_mask = (torch.arange(seq_width) >= seq_width - total[:, None]).long()
    response_mask = (torch.arange(response_width) >= response_width - responses[:, None]).long()
    batch = {
        "sequences": torch.randint(5, 30000, (ROWS, seq_width), generator=generator) * attention_mask,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        **{key: torch.randn(ROWS, response_width, generator=generator) * response_mask for key in RESPONSE_KEYS},
    }
    return batch, prompts, responses


def plain(batch: dict[str, torch.Tensor], prompts: torch.Tensor, responses: torch.Tensor) -> dict[str, torch.Tensor]:
    """Row by row with slices."""
    P, R = int(prompts.max()), batch["response_mask"].shape[1]
    S = batch["sequences"].shape[1]
    shape = (ROWS, P + R)
    out = {key: torch.zeros(shape, dtype=torch.long) for key in ("input_ids", "attention_mask", "position_ids")}
    out |= {key: torch.zeros(ROWS, R, dtype=batch[key].dtype) for key in ("response_mask", *RESPONSE_KEYS)}
    for row, (p, r) in enumerate(zip(prompts.tolist(), responses.tolist(), strict=True)):
        out["input_ids"][row, P - p : P + r] = batch["sequences"][row, S - p - r :]
        out["attention_mask"][row, P - p : P + r] = 1
        out["position_ids"][row, P - p : P + r] = torch.arange(p + r)
        for key in ("response_mask", *RESPONSE_KEYS):
            out[key][row, :r] = batch[key][row, R - r :]
    out["prompts"] = out["input_ids"][:, :P].contiguous()
    out["responses"] = out["input_ids"][:, P:].contiguous()
    return out


def best_seconds(function: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> int:
    batch, prompts, responses = skyrl_batch(seed=0)
    ours, theirs = repack_to_verl(batch, 0), plain(batch, prompts, responses)
    for key in ("input_ids", "attention_mask", "response_mask", *RESPONSE_KEYS):
        if not torch.equal(ours[key], theirs[key]):
            raise AssertionError(f"{key} differs from the plain copy")
    seconds = best_seconds(lambda: repack_to_verl(batch, 0))
    plain_seconds = best_seconds(lambda: plain(batch, prompts, responses))
    ok = print_line("layout/repack", seconds / plain_seconds, BOUND, "max", rows=ROWS, ms=round(1e3 * seconds, 2))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
