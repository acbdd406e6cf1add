"""Log-probs and entropy of given tokens from logits or from hidden states, chunked over tokens.

N positions, V vocabulary, H hidden width. Position i of a model's output predicts the token after it; everything that
leaves the pipeline is aligned to tokens instead (:func:`align_to_tokens`): entry i belongs to token i, and a row's
first token, which nothing predicts, has 0.

With z = logits / temperature and lse = logsumexp(z):  log p(y) = z[y] - lse,  entropy = lse - sum_j p_j z_j.
Their derivatives are  1[j = y] - p_j  and  -p_j (z_j - lse + entropy), each over temperature; both passes work on one
chunk at a time, so that beyond the logits themselves (or, from hidden states, at all) no [N, V] tensor is held.
"""

import torch

__all__ = [
    "align_to_tokens",
    "chunk_rows",
    "logprobs_and_entropy",
    "logprobs_and_entropy_chunked",
    "logprobs_and_entropy_from_hidden",
    "next_token_targets",
]

_FLOAT32_COPIES = 2
"""[chunk, V] float32 buffers of the passes below at most, the logits' own chunk included."""


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
    z = logits.to(_accumulation_dtype(logits.dtype, upcast))
    z = z if temperature == 1.0 else z / temperature
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
        space = _Workspace(min(chunk, len(targets)), logits.shape[1], dtype, logits.device, second=entropy)
        for part in _chunks(len(targets), chunk):
            stats.fill(part, space.scaled(logits[part], temperature), targets[part], space)
        ctx.save_for_backward(logits, targets, stats.lse, stats.entropy)
        ctx.settings = temperature, chunk, dtype
        ctx.set_materialize_grads(False)
        return stats.logprobs, stats.entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, targets, lse, entropies = ctx.saved_tensors
        temperature, chunk, dtype = ctx.settings
        grads = _OutputGrads(targets, lse, entropies, grad_logprobs, grad_entropy)
        grad_logits = torch.empty_like(logits)
        space = _Workspace(min(chunk, len(targets)), logits.shape[1], dtype, logits.device, second=grads.of_entropy)
        for part in _chunks(len(targets), chunk):
            z = space.scaled(logits[part], temperature)
            grad_logits[part] = grads.through(part, z, space).div_(temperature)
        return grad_logits, None, None, None, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, entropy, chunk, upcast, fp32_inputs):
        product = _Product(hidden, weight, bias, min(chunk, len(targets)), fp32_inputs, upcast, second=entropy)
        stats = _Stats(len(targets), product.space.dtype, hidden.device, entropy)
        for part in _chunks(len(targets), chunk):
            stats.fill(part, product.scaled_logits(part, temperature), targets[part], product.space)
        ctx.save_for_backward(hidden, weight, bias, targets, stats.lse, stats.entropy)
        ctx.settings = temperature, chunk, upcast, fp32_inputs
        ctx.set_materialize_grads(False)
        return stats.logprobs, stats.entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets, lse, entropies = ctx.saved_tensors
        temperature, chunk, upcast, fp32_inputs = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grads = _OutputGrads(targets, lse, entropies, grad_logprobs, grad_entropy)
        product = _Product(
            hidden, weight, bias, min(chunk, len(targets)), fp32_inputs, upcast, second=grads.of_entropy
        )
        total_dtype = _accumulation_dtype(weight.dtype, upcast=True)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=total_dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=total_dtype) if need_bias else None
        for part in _chunks(len(targets), chunk):
            z = product.scaled_logits(part, temperature)
            grad_z = product.in_its_dtype(grads.through(part, z, product.space).div_(temperature))
            if need_hidden:
                grad_hidden[part] = grad_z @ product.weight
            if need_weight:
                _accumulate_outer(grad_weight, grad_z, product.hidden(part))
            if need_bias:
                grad_bias += grad_z.sum(dim=0, dtype=total_dtype)
        if need_weight:
            grad_weight = grad_weight.to(weight.dtype)
        if need_bias:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


class _Workspace:
    """The [chunk, V] buffers of a pass, used for one chunk after the other: logits, and if needed probabilities."""

    def __init__(self, rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device, *, second: bool):
        self.dtype = dtype
        self._first = torch.empty(rows, vocab_size, dtype=dtype, device=device)
        self._second = torch.empty_like(self._first) if second else None

    def first(self, rows: int) -> torch.Tensor:
        """[rows, V] of the first buffer."""
        return self._first[:rows]

    def scaled(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """logits / temperature in the first buffer, [rows, V]."""
        z = self.first(len(logits)).copy_(logits)
        return z if temperature == 1.0 else z.div_(temperature)

    def exp(self, z: torch.Tensor) -> torch.Tensor:
        """exp(z): in the second buffer if there is one, else in place of z."""
        return z.exp_() if self._second is None else torch.exp(z, out=self._second[: len(z)])


class _Product:
    """hidden @ weight.T + bias of some positions, in the dtype that the settings ask for."""

    def __init__(self, hidden, weight, bias, rows: int, fp32_inputs: bool, upcast: bool, *, second: bool):
        dtype = _accumulation_dtype(weight.dtype, fp32_inputs)
        self.weight = weight.to(dtype)
        self.space = _Workspace(rows, len(weight), _accumulation_dtype(dtype, upcast), weight.device, second=second)
        self._bias = None if bias is None else bias.to(dtype)
        self._hidden = hidden
        narrow = dtype != self.space.dtype
        self._narrow = torch.empty(rows, len(weight), dtype=dtype, device=weight.device) if narrow else None

    def hidden(self, part: slice) -> torch.Tensor:
        return self._hidden[part].to(self.weight.dtype)

    def scaled_logits(self, part: slice, temperature: float) -> torch.Tensor:
        rows = part.stop - part.start
        logits = self.space.first(rows) if self._narrow is None else self._narrow[:rows]
        torch.mm(self.hidden(part), self.weight.T, out=logits)
        if self._bias is not None:
            logits.add_(self._bias)
        if self._narrow is not None:
            return self.space.scaled(logits, temperature)
        return logits if temperature == 1.0 else logits.div_(temperature)

    def in_its_dtype(self, grad_z: torch.Tensor) -> torch.Tensor:
        return grad_z if self._narrow is None else self._narrow[: len(grad_z)].copy_(grad_z)


class _Stats:
    """Per-position results of the forward pass."""

    def __init__(self, num_positions: int, dtype: torch.dtype, device: torch.device, entropy: bool):
        self.logprobs, self.lse = torch.empty(2, num_positions, dtype=dtype, device=device).unbind()
        self.entropy = torch.empty(num_positions, dtype=dtype, device=device) if entropy else None

    def fill(self, part: slice, z: torch.Tensor, targets: torch.Tensor, space: _Workspace) -> None:
        """Results of one chunk; ``z`` is overwritten."""
        top = z.amax(dim=-1, keepdim=True)
        centred = z.sub_(top)
        at_target = centred.gather(1, targets[:, None])
        p = space.exp(centred)
        total = p.sum(dim=-1, keepdim=True)
        self.logprobs[part] = (at_target - total.log()).squeeze(1)
        self.lse[part] = (top + total.log()).squeeze(1)
        if self.entropy is not None:
            self.entropy[part] = (total.log() - p.mul_(centred).sum(dim=-1, keepdim=True) / total).squeeze(1)


class _OutputGrads:
    """The gradients of log-probs and entropy that come in, and their way to the scaled logits."""

    def __init__(self, targets, lse, entropies, grad_logprobs, grad_entropy):
        self._targets = targets[:, None]
        self._lse = lse[:, None]
        self._entropies = None if entropies is None else entropies[:, None]
        self._grad_logprobs = None if grad_logprobs is None else grad_logprobs[:, None]
        self._grad_entropy = None if grad_entropy is None else grad_entropy[:, None]

    @property
    def of_entropy(self) -> bool:
        return self._grad_entropy is not None

    def through(self, part: slice, z: torch.Tensor, space: _Workspace) -> torch.Tensor:
        """d loss / d z of one chunk, [rows, V]; ``z`` is overwritten."""
        grad_logprobs = None if self._grad_logprobs is None else self._grad_logprobs[part]
        if self._grad_entropy is None and grad_logprobs is None:
            return z.zero_()
        centred = z.sub_(self._lse[part])
        p = space.exp(centred)
        if self._grad_entropy is None:
            grad = p.mul_(-grad_logprobs)
        else:
            factor = centred.add_(self._entropies[part]).mul_(self._grad_entropy[part])
            if grad_logprobs is not None:
                factor.add_(grad_logprobs)
            grad = factor.mul_(p).neg_()
        if grad_logprobs is not None:
            grad.scatter_add_(1, self._targets[part], grad_logprobs.to(grad.dtype))
        return grad


def _accumulate_outer(total: torch.Tensor, grad_z: torch.Tensor, hidden: torch.Tensor) -> None:
    """total += grad_z.T @ hidden, summed over chunks in ``total``'s dtype."""
    if total.dtype == grad_z.dtype:
        total.addmm_(grad_z.T, hidden)
    else:
        total += grad_z.T @ hidden


def _accumulation_dtype(dtype: torch.dtype, upcast: bool) -> torch.dtype:
    return torch.float32 if upcast and dtype in (torch.bfloat16, torch.float16) else dtype


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]
