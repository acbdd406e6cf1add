"""Log-probs and entropy of given tokens from logits or from hidden states, chunked over tokens.

N positions, V vocabulary, H hidden width. Position i of a model's output predicts the token after it; everything that
leaves the pipeline is aligned to tokens instead (:func:`align_to_tokens`): entry i belongs to token i, and a row's
first token, which nothing predicts, has 0.

With z = logits / temperature and lse = logsumexp(z):  log p(y) = z[y] - lse,  entropy = lse - sum_j p_j z_j.
Their derivatives are  1[j = y] - p_j  and  -p_j (z_j - lse + entropy), each over temperature; both passes work on one
chunk at a time, so that beyond the logits themselves (or, from hidden states, at all) no [N, V] tensor is held.
"""

import torch
from torch.nn.functional import linear

__all__ = [
    "align_to_tokens",
    "chunk_rows",
    "logprobs_and_entropy",
    "logprobs_and_entropy_chunked",
    "logprobs_and_entropy_from_hidden",
    "next_token_targets",
]

_FLOAT32_COPIES = 2
"""[chunk, V] float32 tensors alive at once in the passes below, the logits' own chunk included."""


def next_token_targets(input_ids_T: torch.Tensor, position_ids_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token that each packed position predicts.

    Args:
        input_ids_T: [T], int64.
        position_ids_T: [T], int64, 0 where a segment starts.

    Returns:
        targets [T] (0 where there is none) and ``predicts`` [T] bool, False at every segment's last position.
    """
    predicts = torch.zeros_like(input_ids_T, dtype=torch.bool)
    predicts[:-1] = position_ids_T[1:] != 0
    targets = torch.zeros_like(input_ids_T)
    targets[:-1] = input_ids_T[1:]
    return targets.where(predicts, 0), predicts


def align_to_tokens(values_T: torch.Tensor, predicts_T: torch.Tensor) -> torch.Tensor:
    """Move the value of the position that predicts a token to that token; every segment's first token gets 0."""
    kept = values_T.where(predicts_T, 0)
    return torch.cat([kept.new_zeros(1), kept[:-1]])


def chunk_rows(vocab_size: int, peak_mem_gib: float) -> int:
    """Positions a chunk may hold so that its float32 [chunk, V] temporaries stay within ``peak_mem_gib`` GiB."""
    return max(1, int(peak_mem_gib * 2**30 / (vocab_size * 4 * _FLOAT32_COPIES)))


def logprobs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, entropy: bool, upcast: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log p(target) and, if asked for, the entropy of every position, over the full logits at once.

    Args:
        logits: [N, V].
        targets: [N], int64.
        temperature: > 0; divides the logits.
        upcast: compute in float32 if the logits are narrower; False = in their own dtype.

    Returns:
        [N] and [N] (or None), float32 unless the logits are float64 or ``upcast`` is False.
    """
    z = _scaled(logits, temperature, upcast)
    logp = torch.log_softmax(z, dim=-1)
    logprobs = logp.gather(1, targets[:, None]).squeeze(1)
    return logprobs, -(logp.exp() * logp).sum(dim=-1) if entropy else None


def logprobs_and_entropy_chunked(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    *,
    entropy: bool,
    chunk: int,
    upcast: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`logprobs_and_entropy` over logits [N, V], ``chunk`` positions at a time, forward and backward."""
    logprobs, entropies = _FromLogits.apply(logits, targets, temperature, entropy, chunk, upcast)
    return logprobs, entropies if entropy else None


def logprobs_and_entropy_from_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    *,
    entropy: bool,
    chunk: int,
    upcast: bool = True,
    fp32_inputs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`logprobs_and_entropy` of ``hidden @ weight.T + bias``, a chunk of logits at a time, forward and backward.

    Args:
        hidden: [N, H]; ``weight`` [V, H]; ``bias`` [V] or None.
        fp32_inputs: multiply in float32, on float32 copies of both factors.
    """
    logprobs, entropies = _FromHidden.apply(
        hidden, weight, bias, targets, temperature, entropy, chunk, upcast, fp32_inputs
    )
    return logprobs, entropies if entropy else None


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, entropy, chunk, upcast):
        dtype = _accumulation_dtype(logits.dtype, upcast)
        stats = _Stats(len(targets), dtype, logits.device, entropy)
        for part in _chunks(len(targets), chunk):
            stats.fill(part, _own(logits[part], temperature, upcast), targets[part])
        ctx.save_for_backward(logits, targets, stats.lse, stats.entropy)
        ctx.settings = temperature, chunk, upcast
        ctx.set_materialize_grads(False)
        return stats.logprobs, stats.entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, targets, lse, entropies = ctx.saved_tensors
        temperature, chunk, upcast = ctx.settings
        grad_logits = torch.empty_like(logits)
        for part in _chunks(len(targets), chunk):
            z = _own(logits[part], temperature, upcast)
            grad_logits[part] = _grad_z(z, part, targets, lse, entropies, grad_logprobs, grad_entropy).div_(
                temperature
            )
        return grad_logits, None, None, None, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, entropy, chunk, upcast, fp32_inputs):
        product = _Product(hidden, weight, bias, fp32_inputs)
        stats = _Stats(len(targets), _accumulation_dtype(product.dtype, upcast), hidden.device, entropy)
        for part in _chunks(len(targets), chunk):
            stats.fill(part, _own(product.logits(part), temperature, upcast, fresh=True), targets[part])
        ctx.save_for_backward(hidden, weight, bias, targets, stats.lse, stats.entropy)
        ctx.settings = temperature, chunk, upcast, fp32_inputs
        ctx.set_materialize_grads(False)
        return stats.logprobs, stats.entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets, lse, entropies = ctx.saved_tensors
        temperature, chunk, upcast, fp32_inputs = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        product = _Product(hidden, weight, bias, fp32_inputs)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=product.grad_dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=product.grad_dtype) if need_bias else None
        for part in _chunks(len(targets), chunk):
            z = _own(product.logits(part), temperature, upcast, fresh=True)
            grad_z = _grad_z(z, part, targets, lse, entropies, grad_logprobs, grad_entropy).div_(temperature)
            grad_z = grad_z.to(product.dtype)
            if need_hidden:
                grad_hidden[part] = grad_z @ product.weight
            if need_weight:
                _accumulate_outer(grad_weight, grad_z, product.hidden(part))
            if need_bias:
                grad_bias += grad_z.sum(dim=0, dtype=grad_bias.dtype)
        if need_weight:
            grad_weight = grad_weight.to(weight.dtype)
        if need_bias:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


class _Product:
    """hidden @ weight.T + bias of some positions, in the dtype that the settings ask for."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fp32_inputs: bool):
        self.dtype = _accumulation_dtype(weight.dtype, fp32_inputs)
        self.grad_dtype = _accumulation_dtype(weight.dtype, upcast=True)
        self.weight = weight.to(self.dtype)
        self._bias = None if bias is None else bias.to(self.dtype)
        self._hidden = hidden

    def hidden(self, part: slice) -> torch.Tensor:
        return self._hidden[part].to(self.dtype)

    def logits(self, part: slice) -> torch.Tensor:
        return linear(self.hidden(part), self.weight, self._bias)


class _Stats:
    """Per-position results of the forward pass."""

    def __init__(self, num_positions: int, dtype: torch.dtype, device: torch.device, entropy: bool):
        self.logprobs, self.lse = torch.empty(2, num_positions, dtype=dtype, device=device).unbind()
        self.entropy = torch.empty(num_positions, dtype=dtype, device=device) if entropy else None

    def fill(self, part: slice, z: torch.Tensor, targets: torch.Tensor) -> None:
        """Results of one chunk; ``z`` is overwritten."""
        top = z.amax(dim=-1, keepdim=True)
        centred = z.sub_(top)
        at_target = centred.gather(1, targets[:, None])
        p = centred.exp()
        total = p.sum(dim=-1, keepdim=True)
        self.logprobs[part] = (at_target - total.log()).squeeze(1)
        self.lse[part] = (top + total.log()).squeeze(1)
        if self.entropy is not None:
            self.entropy[part] = (total.log() - p.mul_(centred).sum(dim=-1, keepdim=True) / total).squeeze(1)


def _grad_z(z, part, targets, lse, entropies, grad_logprobs, grad_entropy):
    """d loss / d z of one chunk, [chunk, V]; ``z`` is overwritten."""
    centred = z.sub_(lse[part, None])
    if grad_entropy is None and grad_logprobs is None:
        return centred.zero_()
    if grad_entropy is None:
        grad = centred.exp_().mul_(-grad_logprobs[part, None])
    else:
        p = centred.exp()
        factor = centred.add_(entropies[part, None]).mul_(grad_entropy[part, None])
        if grad_logprobs is not None:
            factor.add_(grad_logprobs[part, None])
        grad = factor.mul_(p).neg_()
    if grad_logprobs is not None:
        grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None].to(grad.dtype))
    return grad


def _accumulate_outer(total: torch.Tensor, grad_z: torch.Tensor, hidden: torch.Tensor) -> None:
    """total += grad_z.T @ hidden, summed over chunks in ``total``'s dtype."""
    if total.dtype == grad_z.dtype:
        total.addmm_(grad_z.T, hidden)
    else:
        total += grad_z.T @ hidden


def _own(logits: torch.Tensor, temperature: float, upcast: bool, *, fresh: bool = False) -> torch.Tensor:
    """Scaled logits that may be overwritten; ``fresh`` logits already are nobody else's."""
    z = logits.to(_accumulation_dtype(logits.dtype, upcast))
    if z is logits and not fresh:
        return z.clone() if temperature == 1.0 else z / temperature
    return z if temperature == 1.0 else z.div_(temperature)


def _scaled(logits: torch.Tensor, temperature: float, upcast: bool) -> torch.Tensor:
    z = logits.to(_accumulation_dtype(logits.dtype, upcast))
    return z if temperature == 1.0 else z / temperature


def _accumulation_dtype(dtype: torch.dtype, upcast: bool) -> torch.dtype:
    return torch.float32 if upcast and dtype in (torch.bfloat16, torch.float16) else dtype


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]
