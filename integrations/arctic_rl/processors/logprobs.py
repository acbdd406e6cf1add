"""Log-probs and entropy of given tokens from logits or from hidden states, chunked over tokens.

N positions, V vocabulary, H hidden width. Position i of a model's output predicts the token after it; everything that
leaves the pipeline is aligned to tokens instead (:func:`align_to_tokens`): entry i belongs to token i, and a row's
first token, which nothing predicts, has 0.

With z = logits / temperature and lse = logsumexp(z):  log p(y) = z[y] - lse,  entropy = lse - sum_j p_j z_j.
Their derivatives are  1[j = y] - p_j  and  -p_j (z_j - lse + entropy), each over temperature. A vocabulary entry whose
logit is -inf has probability 0 and adds nothing to entropy and gradients.

From logits both passes work on a few positions at a time, so that beyond the logits and their gradient no [N, V]
tensor is held. From hidden states they work on tiles, a few positions by a few vocabulary entries, carrying the
softmax's maximum and sum along (Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867): the gradient of a block of the LM head is complete before the next one starts, so that no float32
copy of it is held either.
"""

import math

import torch

__all__ = [
    "align_to_tokens",
    "chunk_rows",
    "logprobs_and_entropy",
    "logprobs_and_entropy_chunked",
    "logprobs_and_entropy_from_hidden",
    "next_token_targets",
    "tile_shape",
]

_FLOAT32_COPIES = 2
"""[chunk, V] float32 buffers of the passes below at most, the logits' own chunk included."""

_TILE_BYTES = _FLOAT32_COPIES * 4 + 2
"""The same for an entry of a tile, with one in a 16-bit dtype before it is read in float32."""

_IMPOSSIBLE = -1e4
"""Stands for log-probs below it in products with their probability, which is 0 in every dtype: 0 * -inf = nan."""

_NARROW_BYTES = 12
"""Of a position's or a vocabulary entry's 16-bit gradient: a tile's share of it, that in float32, and the sum."""


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


def tile_shape(num_positions: int, vocab_size: int, peak_mem_gib: float, *, narrow_width: int = 0) -> tuple[int, int]:
    """Positions and vocabulary entries of a tile of logits whose temporaries stay within ``peak_mem_gib`` GiB.

    As square as can be: then the fewest sums of gradients go through memory again.

    Args:
        narrow_width: hidden width where hidden states or LM head are in a 16-bit dtype, so that their gradients are
            summed in float32; else 0.
    """
    num_bytes, line_bytes = peak_mem_gib * 2**30, _NARROW_BYTES * narrow_width
    side = (math.sqrt(line_bytes**2 + _TILE_BYTES * num_bytes) - line_bytes) / _TILE_BYTES

    def beside(lines: int) -> int:
        return max(1, int((num_bytes - line_bytes * lines) / (_TILE_BYTES * lines + line_bytes)))

    columns = min(vocab_size, max(1, int(side)))
    rows = max(1, min(num_positions, beside(columns)))
    return rows, min(vocab_size, beside(rows))


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
    return logprobs, -(logp.exp() * logp.clamp(min=_IMPOSSIBLE)).sum(dim=-1) if entropy else None


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
    tile: tuple[int, int],
    upcast: bool = True,
    fp32_inputs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`logprobs_and_entropy` of ``hidden @ weight.T + bias``, a tile of logits at a time, forward and backward.

    Args:
        hidden: [N, H]; ``weight`` [V, H]; ``bias`` [V] or None.
        tile: positions and vocabulary entries of a tile (:func:`tile_shape`).
        fp32_inputs: multiply in float32, on float32 copies of both factors.
    """
    logprobs, entropies = _FromHidden.apply(
        hidden, weight, bias, targets, temperature, entropy, tile, upcast, fp32_inputs
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
            grad_logits[part] = grads.through(part, slice(0, logits.shape[1]), z, space).div_(temperature)
        return grad_logits, None, None, None, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, entropy, tile, upcast, fp32_inputs):
        product = _Product(hidden, weight, bias, tile, fp32_inputs, upcast, second=entropy)
        stats = _RunningStats(targets, product.space.dtype, entropy)
        for columns in _chunks(len(weight), tile[1]):
            product.take(columns)
            for part in _chunks(len(targets), tile[0]):
                stats.add(part, columns, product.scaled_logits(part, temperature), product.space)
        logprobs, lse, entropies = stats.result()
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropies)
        ctx.settings = temperature, tile, upcast, fp32_inputs
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets, lse, entropies = ctx.saved_tensors
        temperature, tile, upcast, fp32_inputs = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grads = _OutputGrads(targets, lse, entropies, grad_logprobs, grad_entropy)
        product = _Product(hidden, weight, bias, tile, fp32_inputs, upcast, second=grads.of_entropy)
        grad_hidden = _Sum(hidden) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        grad_bias = torch.empty_like(bias) if need_bias else None
        for columns in _chunks(len(weight), tile[1]):
            product.take(columns)
            of_weight = _Sum(weight[columns], grad_weight[columns]) if need_weight else None
            of_bias = _Sum(bias[columns], grad_bias[columns]) if need_bias else None
            for part in _chunks(len(targets), tile[0]):
                z = product.scaled_logits(part, temperature)
                grad_z = grads.through(part, columns, z, product.space).div_(temperature)
                grad_z = product.in_its_dtype(grad_z)
                if need_hidden:
                    grad_hidden.add_product(part, grad_z, product.weight)
                if need_weight:
                    of_weight.add_product(slice(None), grad_z.T, product.hidden(part))
                if need_bias:
                    of_bias.add_rows(grad_z)
            for total in (of_weight, of_bias):
                if total is not None:
                    total.finish()
        grad_hidden = grad_hidden.finish() if need_hidden else None
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


class _Workspace:
    """The buffers of a pass, used for one chunk or tile after the other: logits, and if needed probabilities."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, second: bool):
        self.dtype = dtype
        self._first = torch.empty(rows * columns, dtype=dtype, device=device)
        self._second = torch.empty_like(self._first) if second else None

    def first(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] of the first buffer."""
        return self._first[: rows * columns].view(rows, columns)

    def scaled(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """logits / temperature in the first buffer."""
        z = self.first(*logits.shape).copy_(logits)
        return z if temperature == 1.0 else z.div_(temperature)

    def exp(self, z: torch.Tensor) -> torch.Tensor:
        """exp(z): in the second buffer if there is one, else in place of z."""
        return z.exp_() if self._second is None else torch.exp(z, out=self._second[: z.numel()].view(z.shape))


class _Product:
    """hidden @ weight.T + bias of some positions and vocabulary entries, in the dtype that the settings ask for."""

    def __init__(self, hidden, weight, bias, tile: tuple[int, int], fp32_inputs: bool, upcast: bool, *, second: bool):
        self._dtype = _accumulation_dtype(weight.dtype, fp32_inputs)
        rows, columns = min(tile[0], len(hidden)), min(tile[1], len(weight))
        dtype = _accumulation_dtype(self._dtype, upcast)
        self.space = _Workspace(rows, columns, dtype, weight.device, second=second)
        narrow = self._dtype != dtype
        self._narrow = _Workspace(rows, columns, self._dtype, weight.device, second=False) if narrow else None
        self._hidden, self._whole_weight, self._whole_bias = hidden, weight, bias
        self.weight: torch.Tensor = weight
        self._bias: torch.Tensor | None = bias

    def take(self, columns: slice) -> None:
        """Go on with these vocabulary entries."""
        self.weight = self._whole_weight[columns].to(self._dtype)
        self._bias = None if self._whole_bias is None else self._whole_bias[columns].to(self._dtype)

    def hidden(self, part: slice) -> torch.Tensor:
        return self._hidden[part].to(self._dtype)

    def scaled_logits(self, part: slice, temperature: float) -> torch.Tensor:
        space = self.space if self._narrow is None else self._narrow
        logits = space.first(part.stop - part.start, len(self.weight))
        torch.mm(self.hidden(part), self.weight.T, out=logits)
        if self._bias is not None:
            logits.add_(self._bias)
        if self._narrow is not None:
            return self.space.scaled(logits, temperature)
        return logits if temperature == 1.0 else logits.div_(temperature)

    def in_its_dtype(self, grad_z: torch.Tensor) -> torch.Tensor:
        return grad_z if self._narrow is None else self._narrow.first(*grad_z.shape).copy_(grad_z)


class _Sum:
    """A gradient summed over tiles in float32 at least, and rounded to its tensor's dtype once."""

    def __init__(self, like: torch.Tensor, result: torch.Tensor | None = None):
        self._result = torch.empty_like(like) if result is None else result
        dtype = _accumulation_dtype(like.dtype, upcast=True)
        self._total = self._result.zero_() if dtype == like.dtype else torch.zeros_like(like, dtype=dtype)

    def add_product(self, part: slice, left: torch.Tensor, right: torch.Tensor) -> None:
        if self._total.dtype == left.dtype:
            self._total[part].addmm_(left, right)
        else:
            self._total[part] += left @ right

    def add_rows(self, values: torch.Tensor) -> None:
        self._total += values.sum(dim=0, dtype=self._total.dtype)

    def finish(self) -> torch.Tensor:
        return self._result if self._total is self._result else self._result.copy_(self._total)


class _RunningStats:
    """Per-position results of a forward pass that sees the vocabulary block by block (online softmax)."""

    def __init__(self, targets: torch.Tensor, dtype: torch.dtype, entropy: bool):
        self._targets = targets
        self._dtype = dtype
        shape, like = (len(targets), 1), {"dtype": _accumulation_dtype(dtype, upcast=True), "device": targets.device}
        self._top = torch.full(shape, torch.finfo(dtype).min, **like)
        self._total = torch.zeros(shape, **like)
        self._at_target = torch.zeros(shape, **like)
        self._weighted = torch.zeros(shape, **like) if entropy else None

    def add(self, part: slice, columns: slice, z: torch.Tensor, space: _Workspace) -> None:
        """The logits of one tile, over the temperature; ``z`` is overwritten."""
        inside, place = _inside(self._targets[part], columns)
        self._at_target[part] = torch.where(inside, z.gather(1, place), self._at_target[part])
        top = torch.maximum(self._top[part], z.amax(dim=-1, keepdim=True))
        lower = self._top[part] - top
        self._top[part] = top
        centred = z.sub_(top)
        p = space.exp(centred)
        shrunk = self._total[part] * lower.exp()
        self._total[part] = shrunk + p.sum(dim=-1, keepdim=True)
        if self._weighted is not None:
            before = self._weighted[part] * lower.exp() + shrunk * lower
            self._weighted[part] = before + p.mul_(centred.clamp_(min=_IMPOSSIBLE)).sum(dim=-1, keepdim=True)

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """log-probs, logsumexp and entropy (or None), [N] each."""
        log_total = self._total.log()
        entropies = None if self._weighted is None else log_total - self._weighted / self._total
        values = (self._at_target - self._top - log_total, self._top + log_total, entropies)
        return tuple(None if value is None else value.squeeze(1).to(self._dtype) for value in values)


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
            weighted = p.mul_(centred.clamp_(min=_IMPOSSIBLE)).sum(dim=-1, keepdim=True)
            self.entropy[part] = (total.log() - weighted / total).squeeze(1)


class _OutputGrads:
    """The gradients of log-probs and entropy that come in, and their way to the scaled logits."""

    def __init__(self, targets, lse, entropies, grad_logprobs, grad_entropy):
        self._targets = targets
        self._lse = lse[:, None]
        self._entropies = None if entropies is None else entropies[:, None]
        self._grad_logprobs = None if grad_logprobs is None else grad_logprobs[:, None]
        self._grad_entropy = None if grad_entropy is None else grad_entropy[:, None]

    @property
    def of_entropy(self) -> bool:
        return self._grad_entropy is not None

    def through(self, part: slice, columns: slice, z: torch.Tensor, space: _Workspace) -> torch.Tensor:
        """d loss / d z of some positions and vocabulary entries; ``z`` is overwritten."""
        grad_logprobs = None if self._grad_logprobs is None else self._grad_logprobs[part]
        if self._grad_entropy is None and grad_logprobs is None:
            return z.zero_()
        centred = z.sub_(self._lse[part])
        p = space.exp(centred)
        if self._grad_entropy is None:
            grad = p.mul_(-grad_logprobs)
        else:
            factor = centred.clamp_(min=_IMPOSSIBLE).add_(self._entropies[part]).mul_(self._grad_entropy[part])
            if grad_logprobs is not None:
                factor.add_(grad_logprobs)
            grad = factor.mul_(p).neg_()
        if grad_logprobs is not None:
            inside, place = _inside(self._targets[part], columns)
            grad.scatter_add_(1, place, torch.where(inside, grad_logprobs, 0).to(grad.dtype))
        return grad


def _inside(targets: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets [rows] are among some vocabulary entries, and their place there (0 if not), [rows, 1]."""
    place = targets[:, None] - columns.start
    inside = (place >= 0) & (place < columns.stop - columns.start)
    return inside, place.where(inside, 0)


def _accumulation_dtype(dtype: torch.dtype, upcast: bool) -> torch.dtype:
    return torch.float32 if upcast and dtype in (torch.bfloat16, torch.float16) else dtype


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]
