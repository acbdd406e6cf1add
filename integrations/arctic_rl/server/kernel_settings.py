"""Which attention and which kernels a recipe may ask for, by the device that they run on."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..errors import ConfigError, UnsupportedError
from . import liger

if TYPE_CHECKING:
    from .specs import TrainingSpec

ATTENTION_SETTING = "trainer.arctic_rl.attention"

ATTENTIONS: dict[str, tuple[str, ...]] = {
    "cpu": ("arctic_varlen", "sdpa", "eager"),
    "cuda": ("flash_attention_2", "flash_attention_3", "sdpa", "eager"),
}
"""Names of attentions that keep packed rows apart, the usual one of a device first."""

_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def check_kernels(spec: TrainingSpec) -> None:
    """Refuse attentions and kernels that the device does not have.

    Raises:
        ConfigError: a line for each setting, with what to write instead.
    """
    problems = list(_problems(spec))
    if problems:
        raise ConfigError("\n".join(problems))


def check_attention_package(name: str) -> None:
    """Refuse an attention whose package is not installed.

    Raises:
        UnsupportedError: with what to install, or to write instead.
    """
    package = _PACKAGES.get(name)
    if package is not None and find_spec(package) is None:
        raise UnsupportedError(
            f"{ATTENTION_SETTING}={name}: there is no module {package}; run uv sync --extra arctic-rl, or write sdpa, "
            "or leave out trainer.arctic_rl.use_zorro=false where the model can share prompts"
        )


def _problems(spec: TrainingSpec) -> Iterator[str]:
    if spec.use_liger and spec.device == "cpu":
        yield (
            f"{liger.SETTING}=true: Liger's kernels run on GPUs, and this run is on CPUs (trainer.arctic_rl.device); "
            "write false"
        )
    if spec.attention is None:
        return
    names = ATTENTIONS[spec.device]
    if spec.attention not in names:
        where = "GPUs" if spec.device == "cuda" else "CPUs (trainer.arctic_rl.device)"
        yield (
            f"{ATTENTION_SETTING}={spec.attention}: on {where} packed rows are kept apart by {', '.join(names)}; "
            "write one of these, or leave it out"
        )
    elif spec.use_zorro is not False:
        yield (
            f"{ATTENTION_SETTING}={spec.attention}: prompts that are shared between rollouts have an attention of "
            "their own; write trainer.arctic_rl.use_zorro=false too, or leave it out"
        )
