"""A back end of a library is compared with the plain softmax before it is used; the CPU's stand in for it here."""

import dataclasses

import pytest
import torch

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.zorro import kernel_check
from integrations.arctic_rl.zorro.kernel_check import KERNEL_BOUND, checked_kernel, kernel_error
from integrations.arctic_rl.zorro.kernels import KERNELS, ScoreSettings

SETTINGS = ScoreSettings(64**-0.5)
RIGHT = dataclasses.replace(KERNELS["cpu_flash"], name="some_library", looping=False)


def changed(kernel, forward=lambda out, lse: (out, lse), backward=lambda *grads: grads):
    return dataclasses.replace(
        kernel,
        forward=lambda *args: forward(*kernel.forward(*args)),
        backward=lambda *args: backward(*kernel.backward(*args)),
    )


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, KERNEL_BOUND / 2), (torch.float32, 1e-5)])
def test_a_right_one_is_as_far_off_as_rounding(dtype, bound):
    assert kernel_error(RIGHT, dtype, SETTINGS, (64, 64), "cpu") < bound


WRONG = {
    "log-sum-exp in base 2": changed(RIGHT, forward=lambda out, lse: (out, lse / 0.6931)),
    "log-sum-exp of other queries": changed(RIGHT, forward=lambda out, lse: (out, lse.roll(1, 1))),
    "output of other queries": changed(RIGHT, forward=lambda out, lse: (out.roll(1, 0), lse)),
    "gradient of keys halved": changed(RIGHT, backward=lambda q, k, v: (q, k / 2, v)),
    "gradient not finite": changed(RIGHT, backward=lambda q, k, v: (q, k, v * torch.nan)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_one_is_refused_by_name(monkeypatch, wrong):
    monkeypatch.setattr(kernel_check, "choose_kernel", lambda *_, **__: wrong)
    with pytest.raises(UnsupportedError, match=r"back end 'some_library' is off by .*use_zorro=false"):
        checked_kernel.__wrapped__("cpu", torch.bfloat16, SETTINGS, head_dims=(64, 64))


def test_one_that_does_not_load_is_refused_by_name(monkeypatch):
    def forward(*_):
        raise ImportError("undefined symbol")

    broken = dataclasses.replace(RIGHT, forward=forward)
    monkeypatch.setattr(kernel_check, "choose_kernel", lambda *_, **__: broken)
    with pytest.raises(UnsupportedError, match=r"'some_library' .* cannot be imported \(undefined symbol\)"):
        checked_kernel.__wrapped__("cpu", torch.bfloat16, SETTINGS, head_dims=(64, 64))


def test_a_right_one_is_used_and_random_states_stay(monkeypatch):
    monkeypatch.setattr(kernel_check, "choose_kernel", lambda *_, **__: RIGHT)
    before = torch.get_rng_state()
    with torch.inference_mode():
        kernel = checked_kernel.__wrapped__("cpu", torch.bfloat16, SETTINGS, head_dims=(64, 64))
    assert kernel is RIGHT
    assert torch.equal(torch.get_rng_state(), before)


def test_our_own_is_not_compared(monkeypatch):
    monkeypatch.setattr(kernel_check, "kernel_error", None)
    assert checked_kernel.__wrapped__("cpu", torch.float32, SETTINGS, head_dims=(64, 64)).name == "cpu_flash"
