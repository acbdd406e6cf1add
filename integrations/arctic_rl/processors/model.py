"""One call of the engine, and log-probs and entropy of its tokens from logits or hidden states."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ..errors import PackingError, UnsupportedError
from ..zorro.attention import SHARED_ATTENTION
from ..zorro.layout import SharedRows
from .attention import VARLEN_ATTENTION, attention_use, keeps_segments_apart, varlen_kwargs
from .logprobs import (
    chunk_rows,
    logprobs_and_entropy,
    logprobs_and_entropy_chunked,
    logprobs_and_entropy_from_hidden,
    tile_shape,
)
from .outputs import TEMPERATURE_REQUIRED, LogitsSettings, ModelOutputs
from .packing import PackedRows
from .places import ModelRows, PaddedRows, Places
from .value_loss import is_value_model

__all__ = ["ModelCall", "run_model"]


@dataclass(frozen=True)
class ModelCall:
    """How the rows of a call go through the engine."""

    engine: Any
    args: tuple
    settings: LogitsSettings
    temperature: float | None
    """None = no log-probs can be asked for."""
    entropy: bool
    """Compute the entropy in the log-probs' pass."""
    entropy_has_grad: bool
    """Whether the entropy may carry gradient."""
    late_entropy: bool
    """Whether a processor may ask for an entropy that was not computed: a pass of its own."""
    module: Any = field(init=False)
    head: nn.Linear | None = field(init=False)
    mode: str = field(init=False)
    reads: str = field(init=False)
    """``values`` of a value model, else ``logprobs``: what every micro-batch computes."""

    def __post_init__(self) -> None:
        module = getattr(self.engine, "module", self.engine)
        head = _linear_head(module)
        mode = self.settings.logits_optimization
        if mode is None:
            mode = "compute" if head is None or self.temperature is None else "memory"
        if head is None and mode == "memory":
            raise UnsupportedError(
                f"meta['logits_optimization']='memory' needs a model with a plain linear LM head, "
                f"{type(module).__name__} has none; write 'compute'"
            )
        if head is None and self.settings.logits_compute_from_fp32_inputs:
            raise UnsupportedError(
                f"meta['logits_compute_from_fp32_inputs']=True needs a model with a plain linear LM head, "
                f"{type(module).__name__} has none; leave it out"
            )
        if self.temperature is None and mode == "memory":
            raise ValueError(TEMPERATURE_REQUIRED)
        reads = "values" if is_value_model(module) else "logprobs"
        for name, value in (("module", module), ("head", head), ("mode", mode), ("reads", reads)):
            object.__setattr__(self, name, value)


def run_model(call: ModelCall, rows: ModelRows) -> ModelOutputs:
    """Forward pass of one micro-batch; gradients flow if they are enabled.

    Rows that share prefixes have log-probs, entropy and logits of their scored tokens alone, 0 elsewhere.

    Raises:
        UnsupportedError: the model cannot keep packed rows apart, or changes its logits after the LM head in mode
            memory.
        ValueError: the engine's result has no logits of the right shape.
    """
    inputs = _model_inputs(call.module, rows)
    places = Places(rows)
    if call.head is None and places.selected is not None:
        inputs["logits_to_keep"] = places.selected
    if call.reads == "values":
        return _value_outputs(call, places, call.engine(*call.args, **inputs))
    reader = _Reader(call, places)
    with reader.attached(), attention_use(shared=isinstance(rows, SharedRows)) as use:
        result = call.engine(*call.args, **inputs)
    use.check(call.module, _longest_row(rows))
    logits = _logits_of(result, places.shape)
    reader.finish(logits)
    to_tokens = places.to_tokens

    def entropy() -> torch.Tensor:
        values = reader.entropy()
        return to_tokens(values if call.entropy_has_grad else values.detach())

    lazy: dict[str, Callable[[], Any]] = {"logprobs": lambda: to_tokens(reader.logprobs())}
    if call.entropy or call.late_entropy:
        lazy["entropy"] = entropy
    if call.head is not None:
        lazy["hidden_states"] = lambda: places.all_to_rows(_flat(reader.hidden))
        lazy["lm_head"] = lambda: call.head
    if call.mode == "none":
        lazy["logits"] = lambda: places.to_rows(_flat(logits))
    return ModelOutputs(
        lazy,
        {
            "entropy": "nothing asked for it; set meta['calculate_entropy']=True",
            "logits": f"they are kept in meta['logits_optimization']='none' only, this is {call.mode!r}",
            "hidden_states": f"{type(call.module).__name__} has no plain linear LM head to take them from",
        },
    )


def vocabulary_size(module: Any) -> int | None:
    """Rows of the model's input embedding; None where it has no such table."""
    if not isinstance(module, nn.Module) or not hasattr(module, "get_input_embeddings"):
        return None
    embedding = module.get_input_embeddings()
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None


def _value_outputs(call: ModelCall, places: Places, result: Any) -> ModelOutputs:
    """A value model's one number a position, at the token that follows it: the value of the state it is chosen in."""
    values = _flat(_logits_of(result, places.shape))
    lazy: dict[str, Callable[[], Any]] = {"values": lambda: places.to_tokens(_float(values[:, 0]))}
    if call.mode == "none":
        lazy["logits"] = lambda: places.to_rows(values)
    what = f"{type(call.module).__name__} is a value model"
    return ModelOutputs(lazy, dict.fromkeys(("logprobs", "entropy", "logits", "hidden_states"), what))


def _float(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


class _Reader:
    """Takes hidden states and log-probs from one engine call, at the LM head or from the logits."""

    def __init__(self, call: ModelCall, places: Places):
        self._call = call
        self._places = places
        self._targets = places.targets
        self._predicts = places.predicts
        self._logits: torch.Tensor | None = None
        self._from_head: torch.Tensor | None = None
        self._version = 0
        self._logprobs: torch.Tensor | None = None
        self._entropy: torch.Tensor | None = None
        self.hidden: torch.Tensor | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Stand in for the LM head's forward, inside the module call that DeepSpeed gathers the weight for."""
        call = self._call
        if call.head is None:
            yield
            return
        if call.mode == "memory":
            with _forward_replaced(call.head, self._head_stats):
                yield
        else:
            with _forward_replaced(call.head, self._head_logits):
                yield

    def finish(self, logits: torch.Tensor) -> None:
        """Take the engine's logits, or what stands in their place."""
        call = self._call
        if call.mode != "memory":
            self._logits = _flat(logits)
            return
        at_head = self._from_head
        if (
            at_head is None
            or logits.data_ptr() != at_head.data_ptr()
            or logits.shape != at_head.shape
            or _version(at_head) != self._version
        ):
            raise UnsupportedError(
                f"meta['logits_optimization']='memory': {type(call.module).__name__} changes its logits after the LM "
                "head (soft-capping, scaling, masking or slicing); write 'compute'"
            )
        stats = _flat(logits)
        self._logprobs = stats[:, 0]
        self._entropy = stats[:, 1] if call.entropy else None

    def logprobs(self) -> torch.Tensor:
        """[N], at the position that predicts the token."""
        if self._logprobs is None:
            self._logprobs, self._entropy = self._read_logits(entropy=self._call.entropy)
        return self._logprobs

    def entropy(self) -> torch.Tensor:
        """[N], at the position that predicts the token."""
        if self._entropy is None and self._call.mode == "memory":
            with _forward_replaced(self._call.head, lambda hidden: self._read_hidden(hidden, entropy=True)):
                self._entropy = _flat(self._call.head(self.hidden))[:, 1]
        elif self._entropy is None:
            logprobs, self._entropy = self._read_logits(entropy=True)
            self._logprobs = logprobs if self._logprobs is None else self._logprobs
        return self._entropy

    def _head_stats(self, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden = hidden
        self._from_head = self._read_hidden(hidden, entropy=self._call.entropy)
        self._version = _version(self._from_head)
        return self._from_head

    def _head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden = hidden
        hidden = self._places.select(hidden)
        head = self._call.head
        if not self._call.settings.logits_compute_from_fp32_inputs:
            return linear(hidden, head.weight, head.bias)
        bias = None if head.bias is None else head.bias.float()
        return linear(hidden.float(), head.weight.float(), bias)

    def _read_logits(self, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        call = self._call
        if call.temperature is None:
            raise ValueError(TEMPERATURE_REQUIRED)
        upcast = call.settings.logits_compute_in_fp32
        if call.mode == "none":
            return logprobs_and_entropy(self._logits, self._targets, call.temperature, entropy=entropy, upcast=upcast)
        chunk = chunk_rows(self._logits.shape[-1], self._peak_gib())
        return logprobs_and_entropy_chunked(
            self._logits, self._targets, call.temperature, entropy=entropy, chunk=chunk, upcast=upcast
        )

    def _read_hidden(self, hidden: torch.Tensor, *, entropy: bool) -> torch.Tensor:
        """(log-prob, entropy or 0) of every position, [..., 2], in place of the logits; nothing is read at padding."""
        hidden = self._places.select(hidden)
        call = self._call
        settings = call.settings
        index = self._predicts.nonzero().squeeze(1)
        if not len(index):
            # The LM head takes part in every micro-batch: a rank that left it out would miss its collective calls.
            index = index.new_zeros(1)
        weight = call.head.weight
        narrow_width = weight.shape[1] if weight.element_size() == 2 else 0
        values = logprobs_and_entropy_from_hidden(
            _flat(hidden).index_select(0, index),
            weight,
            call.head.bias,
            self._targets.index_select(0, index),
            call.temperature,
            entropy=entropy,
            tile=tile_shape(len(index), len(weight), self._peak_gib(), narrow_width=narrow_width),
            upcast=settings.logits_compute_in_fp32,
            fp32_inputs=settings.logits_compute_from_fp32_inputs,
        )
        logprobs, entropies = values
        if entropies is None:
            entropies = torch.zeros_like(logprobs)
        elif not call.entropy_has_grad:
            entropies = entropies.detach()
        pair = torch.stack([logprobs, entropies], dim=1)
        stats = pair.new_zeros(len(self._targets), 2).index_copy(0, index, pair)
        return stats.view(*hidden.shape[:-1], 2)

    def _peak_gib(self) -> float:
        return self._call.settings.peak_gib(self._targets.device.type)


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable) -> Iterator[None]:
    previous = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if previous is None:
            del module.forward
        else:
            module.forward = previous


def _linear_head(module: Any) -> nn.Linear | None:
    """The output embedding if it is a plain linear layer."""
    get_head = getattr(module, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)
    return head if plain else None


def _model_inputs(module: Any, rows: ModelRows) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": rows.input_ids, "position_ids": rows.position_ids}
    config = getattr(module, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    if isinstance(rows, PaddedRows):
        inputs["attention_mask"] = rows.attention_mask
    elif isinstance(rows, SharedRows):
        inputs |= {"attention_mask": None, "shared_segments": rows.segments}
    else:
        _check_can_pack(module, config, implementation)
        inputs["attention_mask"] = None
        takes_borders = implementation in (VARLEN_ATTENTION, SHARED_ATTENTION)
        if takes_borders or (implementation or "").startswith("flash_attention"):
            inputs |= varlen_kwargs(rows.cu_seqlens, rows.max_length)
    inputs["use_cache"] = False
    accepted = _accepted_parameters(getattr(module, "forward", module))
    if accepted is None:
        return inputs
    needed = {"input_ids", "attention_mask"} if isinstance(rows, PaddedRows) else {"input_ids", "position_ids"}
    needed |= inputs.keys() & {"cu_seq_lens_q", "shared_segments"}
    if missing := sorted(needed - accepted):
        raise PackingError(
            f"{type(module).__name__}.forward takes no {', '.join(missing)}, without which rows cannot be kept apart",
            f"give it such parameters{', or pass pack=False' if isinstance(rows, PackedRows) else ''}",
        )
    return {name: value for name, value in inputs.items() if name in accepted}


def _longest_row(rows: ModelRows) -> int:
    """Tokens of the longest row; of padded rows their width."""
    if isinstance(rows, SharedRows):
        return rows.segments.longest_row
    return rows.max_length if isinstance(rows, PackedRows) else rows.input_ids.shape[1]


def _check_can_pack(module: Any, config: Any, implementation: str | None) -> None:
    advice = "pass pack=False"
    if implementation is not None and not keeps_segments_apart(implementation):
        raise PackingError(
            f"attn_implementation={implementation!r} gets no mask from transformers, so packed rows would see each "
            "other",
            f"{advice}, or load the model with attention_implementation(device type)",
        )
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    mixing = sorted(layer_types - {"full_attention", "sliding_attention", "chunked_attention"})
    if mixing or getattr(module, "_is_stateful", False):
        what = f"layers of type {', '.join(mixing)}" if mixing else "a recurrent state"
        raise PackingError(f"{type(module).__name__} has {what}, which mix packed rows", advice)
    if "chunked_attention" in layer_types and implementation in (VARLEN_ATTENTION, SHARED_ATTENTION):
        raise PackingError(
            f"{type(module).__name__} has layers of type chunked_attention, whose chunks {implementation!r} does not "
            "mask",
            "load it with attn_implementation='sdpa'",
        )


def _accepted_parameters(function: Callable) -> set[str] | None:
    """Names of the parameters; None = any."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return set(parameters)


def _logits_of(result: Any, shape: tuple[int, int]) -> torch.Tensor:
    if isinstance(result, torch.Tensor):
        logits = result
    elif isinstance(result, Mapping) and "logits" in result:
        logits = result["logits"]
    elif hasattr(result, "logits"):
        logits = result.logits
    elif isinstance(result, tuple) and result:
        logits = result[0]
    else:
        raise ValueError(f"the engine returned a {type(result).__name__} without logits")
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3 or logits.shape[:2] != shape:
        got = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ValueError(f"the engine's logits must be [{shape[0]}, {shape[1]}, vocabulary], got {got}")
    return logits


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, values.shape[-1])
