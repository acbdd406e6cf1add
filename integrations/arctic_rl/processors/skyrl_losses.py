"""SkyRL's own policy loss functions on the server, for losses that may look at a micro-batch as a whole.

Such a loss (the covariance ones, and any that a user registers with SkyRL's ``register_policy_loss``) is called as
SkyRL's policy worker calls it: on right-aligned tensors [b, R] of one of SkyRL's own micro-batches.
"""

import functools
import logging
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedError
from ..layout import response_to_skyrl
from .loss_settings import mask_of, required
from .metrics import LossShare, Maximum, Minimum
from .registry import register_loss_fn

__all__ = ["LOSS_METRICS", "load_policy_loss", "pack_policy_loss", "skyrl_policy_loss"]

LOSS_METRICS = "loss_metrics/"
"""Prefix of the loss's own metrics, SkyRL's name."""
_logger = logging.getLogger(__name__)
_REPORTED: set[str] = set()


def pack_policy_loss(function: Callable[..., Any], algorithm: Any) -> bytes:
    """A policy loss and its settings for processes that know neither of the user's modules.

    Args:
        function: as SkyRL's ``PolicyLossRegistry`` holds it.
        algorithm: the recipe's ``AlgorithmConfig``, or a subclass.

    Raises:
        UnsupportedError: the loss refers to something that cannot be sent to another process.
    """
    import cloudpickle

    modules = {value.__module__ for value in (function, type(algorithm))} - {"__main__"}
    own = [sys.modules[name] for name in sorted(modules) if name.split(".")[0] != "skyrl" and name in sys.modules]
    try:
        with _by_value(own):
            return cloudpickle.dumps((function, algorithm))
    except (TypeError, AttributeError, pickle.PicklingError):
        _logger.info("the policy loss is sent by name: what its module holds cannot be sent to another process")
    try:
        return cloudpickle.dumps((function, algorithm))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise UnsupportedError(
            f"the policy loss {function.__module__}.{function.__qualname__} cannot be sent to the training workers "
            f"({type(error).__name__}: {error}): make what it needs inside the function instead of at its module's top"
        ) from error


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    """What modules define is pickled whole, for processes that cannot import them."""
    import cloudpickle

    added = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


@functools.lru_cache(maxsize=8)
def load_policy_loss(packed: bytes) -> tuple[Callable[..., Any], Any]:
    """What :func:`pack_policy_loss` packed; the first call imports SkyRL.

    Raises:
        UnsupportedError: a module that the loss needs is not there.
    """
    try:
        return pickle.loads(packed)
    except ImportError as error:
        raise UnsupportedError(
            f"the policy loss does not load in a training worker ({error}): name its module in "
            "trainer.arctic_rl.processor_modules, and have it on the Python path of every node"
        ) from error


@register_loss_fn("skyrl_policy_loss")
def skyrl_policy_loss(
    model_outputs: Mapping[str, Any], batch: dict, meta: dict, config: Mapping[str, Any], device: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A policy loss of SkyRL's registry on one micro-batch; its value is summed over micro-batches and ranks.

    Random choices of the loss are seeded by ``meta["random_key"]`` and the micro-batch, whichever rank runs it.

    Args:
        model_outputs: ``logprobs`` [b, S].
        batch: ``loss_mask``, ``advantages``, ``response_mask`` (how many of a row's last tokens the loss sees), and
            where there are some ``old_log_probs`` and ``rollout_logprobs``, each [b, S] with the response in the last
            R columns; ``micro_batch_ids`` [b], the micro-batch's number in the mini-batch.
        meta: ``own_response_len`` R, ``dp_size``, and ``random_key``, a list of numbers of the mini-batch.
        config: ``packed``, from :func:`pack_policy_loss`.

    Returns:
        The loss, and the function's own metrics below ``loss_metrics/``, reduced as SkyRL does: ``_max`` and ``_min``
        are extremes, ``_loss`` is a sum, anything else a mean over micro-batches.
    """
    if set(config) != {"packed"}:
        raise UnsupportedError(
            f"config holds {', '.join(config) or 'nothing'}: the skyrl_policy_loss takes 'packed' only"
        )
    function, algorithm = load_policy_loss(config["packed"])
    width = meta["own_response_len"]
    window = (required(batch, "response_mask", "skyrl_policy_loss")[:, -width:] != 0).sum(dim=1, keepdim=True)
    places = torch.arange(width, device=window.device) >= width - window

    def right_aligned(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else response_to_skyrl(values[:, -width:], places)

    with _seeded(meta, batch, torch.device(device)):
        loss, metrics = function(
            right_aligned(model_outputs["logprobs"]),
            right_aligned(batch.get("old_log_probs")),
            right_aligned(required(batch, "advantages", "skyrl_policy_loss")),
            config=algorithm,
            loss_mask=right_aligned(mask_of(batch, "skyrl_policy_loss")),
            rollout_logprobs=right_aligned(batch.get("rollout_logprobs")),
        )
    return loss * meta["dp_size"], dict(_reductions(metrics, meta["dp_size"]))


@contextmanager
def _seeded(meta: Mapping[str, Any], batch: Mapping[str, Any], device: torch.device) -> Iterator[None]:
    number = int(required(batch, "micro_batch_ids", "skyrl_policy_loss")[0])
    key = np.random.SeedSequence([*meta["random_key"], number])
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(key.generate_state(1)[0]))
        yield


def _reductions(metrics: Mapping[str, Any], dp_size: int) -> Iterator[tuple[str, Any]]:
    """SkyRL's ``reduce_metrics`` and ``all_reduce_metrics`` in the pipeline's terms; like it, leaves out what is no
    number."""
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, int | float):
            if name not in _REPORTED:
                _REPORTED.add(name)
                _logger.warning("metric %r of the policy loss is %r, not a number: it is left out", name, value)
            continue
        if name.endswith("_max"):
            reduced = Maximum(value)
        elif name.endswith("_min"):
            reduced = Minimum(value)
        elif name.endswith("_loss"):
            reduced = LossShare(value * dp_size)
        else:
            reduced = (value, 1.0)
        yield f"{LOSS_METRICS}{name}", reduced
