"""Whether a call of the pipeline shares prompts between its rows, from ``meta``.

zorro_train_enable   True = share, or be refused by name; "where_possible" = share if the model can; else not
zorro_self_check     False = do not compare the first use of a model with its unshared log-probs
"""

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError
from ..zorro import WHERE_POSSIBLE
from ..zorro.self_check import check_draws, check_once, check_rows
from ..zorro.support import SWITCH_OFF, check_can_share, longest_exact_row, reasons_against
from .isolation import Direct
from .model import ModelCall, run_model
from .outputs import LogitsSettings
from .places import ModelRows

__all__ = ["Sharing", "check_by_running", "check_first_use", "shares_prompts"]

_logger = logging.getLogger(__name__)
_NAMED: weakref.WeakSet = weakref.WeakSet()


@dataclass(frozen=True)
class Sharing:
    """What sharing asks of the rows."""

    longest_row: int | None
    """Tokens of a row up to which the model is exact; None = any."""

    def check_lengths(self, lengths: torch.Tensor) -> None:
        """Refuse rows [B] whose rotary frequencies would depend on the rows beside them."""
        if self.longest_row is not None and len(lengths) and int(lengths.max()) > self.longest_row:
            raise UnsupportedError(
                f"a row has {int(lengths.max())} tokens, and beyond {self.longest_row} the model's rotary frequencies "
                f"are those of the longest row of a micro-batch: make rows shorter, or {SWITCH_OFF}"
            )


def shares_prompts(engine: Any, meta: Mapping[str, Any], *, pack: bool, training: bool) -> Sharing | None:
    """Whether rows share their prompts in this call; None if not.

    Raises:
        UnsupportedError: ``zorro_train_enable`` has another value, or is True and the model or the call cannot.
    """
    wanted = meta.get("zorro_train_enable")
    if wanted is None or wanted is False:
        return None
    if wanted is not True and wanted != WHERE_POSSIBLE:
        raise UnsupportedError(f"meta['zorro_train_enable']={wanted!r} must be True, False or {WHERE_POSSIBLE!r}")
    module = getattr(engine, "module", engine)
    if not pack and wanted is True:
        raise UnsupportedError("meta['zorro_train_enable']=True lays rows out without padding: pass pack=True")
    reasons = list(reasons_against(module, training=training)) if wanted == WHERE_POSSIBLE else []
    if not pack or reasons:
        if reasons and module not in _NAMED:
            _NAMED.add(module)
            _logger.warning("prompts are not shared between rollouts: %s", "; ".join(reasons))
        return None
    check_can_share(module, training=training)
    return Sharing(longest_exact_row(module))


def check_first_use(call: ModelCall, meta: Mapping[str, Any], device: torch.device, *, training: bool) -> None:
    """Compare shared and unshared log-probs of a small group, once a model and process; every rank calls this."""
    wanted = meta.get("zorro_self_check", True)
    if not isinstance(wanted, bool):
        raise UnsupportedError(f"meta['zorro_self_check']={wanted!r} must be True or False")
    if wanted:
        plain = dataclasses.replace(call, temperature=1.0, entropy=False)
        with _refusing(call.module):
            check_once(call.module, *_runner(plain), device, training=training)


def check_by_running(model: torch.nn.Module, device: torch.device | str, *, training: bool) -> None:
    """The same comparison for a model without an engine yet, or a DeepSpeed engine, each time that it is called.

    Raises:
        ArcticError: the model cannot run rows that share prompts, or not exactly, or draws at random in training.
    """
    settings = LogitsSettings(logits_optimization="compute")
    engine = model if hasattr(model, "module") else Direct(model)
    call = ModelCall(engine, (), settings, 1.0, entropy=False, entropy_has_grad=False, late_entropy=False)
    with _refusing(call.module):
        check_rows(call.module, *_runner(call), torch.device(device))
        if training:
            check_draws(call.module, *_runner(call), torch.device(device))


@contextmanager
def _refusing(module: Any) -> Iterator[None]:
    """Name the model, and the setting that helps, where it fails in code of its own."""
    try:
        yield
    except (AttributeError, TypeError, LookupError) as error:
        raise UnsupportedError(
            f"{type(module).__name__} cannot run rows that share their prompts ({type(error).__name__}: {error}). To "
            f"compute every rollout's prompt separately, {SWITCH_OFF}"
        ) from error


def _runner(call: ModelCall) -> tuple[Callable[[Any], torch.Tensor], int]:
    """From laid-out rows to log-probs, or to values, without gradient, and the vocabulary's size."""

    def numbers(rows: ModelRows) -> torch.Tensor:
        with torch.no_grad():
            return _comparable(run_model(call, rows)[call.reads], call)

    return numbers, call.module.config.get_text_config().vocab_size


def _comparable(numbers: torch.Tensor, call: ModelCall) -> torch.Tensor:
    """Log-probs as they are, values in units of their standard deviation: a fresh value head's are of any size."""
    if call.reads == "logprobs":
        return numbers
    deviation = numbers[numbers != 0].double().std()
    return numbers / deviation if deviation > 0 else numbers
