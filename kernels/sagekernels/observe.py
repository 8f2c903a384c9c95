"""Measure the errors of INT8 attention while it runs: compare calls of sage_attention with float32, on a bounded sample
of each.

The operators (autograd.py) tell the observer of every call when it runs, in the order of the calls, also under
torch.compile. That changes no graph and no result. The exact attention is computed from the same q, k, v and dO in
float32. The INT8 results are a thousand times further away from it than it is from the truth. The quantized side has
two kinds of tensors:

    O, dQ, dK, dV     are what the kernels gave;
    P, delta, dP, dS  never leave the kernels. They are computed as the backward does it (reference.py): P from the
                      codes and the log-sum-exp that the forward saved, delta = rowsum(dO o O), dP = dO V^T of 16-bit
                      operands, dS = P o (dP - delta), before it is rounded.

The sample of a call consists of some pairs of a sequence and a key/value head, with all query heads of the pair. It has
as many pairs as fit into a number of scores, and other pairs at every turn. If a single pair has more scores, the
sample is the last rows of its sequence, as many as fit (at least a tile). Only the last queries see the last keys, so
these rows of O, delta, P, dP, dS and dQ and these keys of dK and dV are all exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .call import RECIPES, BackwardCall, Call, Gradients, Saved
from .quantize import TILE, Codes, quantize_twin
from .reference import ScoresOfCodes, _chunks, pad_to_tile, softmax_with, tile_codes, visible, without_autocast

# So many scores of a sample are held at once. With all tensors that are made of them they take about 250 MiB.
_CHUNK_SCORES = 1 << 22


class Observer(Protocol):
    """The interface of an observer, which hears of calls. It has to copy a tensor that it wants to keep."""

    def forward(self, call: Call, saved: Saved) -> None:
        """Hear that a forward pass has run."""
        ...

    def backward(self, call: BackwardCall, grads: Gradients) -> None:
        """Hear that a backward pass has run, and gave the gradients of q, k and v."""
        ...


_observers: list[Observer] = []  # There is one inside of `observed`.


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell the observer of all calls in this process, in any thread, because backward passes run in their own."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def listening() -> bool:
    """Return whether calls are observed."""
    return bool(_observers)


def forward(call: Call, saved: Saved) -> None:
    """Tell the observers that a forward pass has run. The operators call this function."""
    for observer in _observers:
        observer.forward(call, saved)


def backward(call: BackwardCall, grads: Gradients) -> None:
    """Tell the observers that a backward pass has run. The operators call this function."""
    for observer in _observers:
        observer.backward(call, grads)


class Sample(NamedTuple):
    """The part of a call of causal attention that is looked at."""

    pairs: list[tuple[int, int, int]]
    """The row of the batch, the sequence within the row, and the key/value head of each pair."""
    kv_heads: int
    length: int
    """The number of tokens of a sequence."""
    first: int
    """The first token of the sequences that is looked at as a query and as a key with a gradient; a multiple of
    TILE."""

    @classmethod
    def of(cls, q: Tensor, k: Tensor, sequences: int, scores: int, turn: int) -> Sample:
        """Choose the sample of a call with q [B, N, H, D] and k [B, N, H_kv, D], rows of so many sequences that no
        document spans. It has `scores` at most, unless a tile of queries has more."""
        (batch, tokens, heads, _), kv_heads = q.shape, k.shape[2]
        if tokens % (sequences * TILE):  # Tiles are counted along the row, and one would lie in two sequences.
            sequences = 1
        length, group = tokens // sequences, heads // kv_heads
        pairs = [(b, s, m) for b in range(batch) for s in range(sequences) for m in range(kv_heads)]
        count = min(len(pairs), max(1, scores // (length * length * group)))
        rows = max(TILE, scores // (count * length * group) // TILE * TILE)
        first = -(-max(0, length - rows) // TILE) * TILE
        return cls([pairs[(turn * count + i) % len(pairs)] for i in range(count)], kv_heads, length, first)

    def take(self, x: Tensor, first: int = 0) -> Tensor:
        """Cut the sample out of x: [B, N, heads, ...] -> [pairs, heads / H_kv, tokens from `first` on, ...]."""
        group = x.shape[2] // self.kv_heads

        def of(b: int, s: int, m: int) -> Tensor:
            start, stop = s * self.length + first, (s + 1) * self.length
            return x[b, start:stop, m * group : (m + 1) * group]

        return torch.stack([of(*pair) for pair in self.pairs]).transpose(1, 2)

    def take_saved(self, saved: Saved) -> Saved:
        """Cut out the queries that are looked at and the keys that they see, as a batch of pairs with one key/value
        head."""

        def codes(whole: Codes, first: int) -> Codes:
            return Codes(*(self.take(x.transpose(1, 2), first) for x in whole))

        k_mean = None if saved.k_mean is None else torch.stack([saved.k_mean[b, m : m + 1] for b, _, m in self.pairs])
        lse = self.take(saved.lse.transpose(1, 2), self.first)
        return Saved(lse, codes(saved.q, self.first), codes(saved.k, 0), k_mean)


class Kept(NamedTuple):
    """Copies of the sample's q and k, in their dtype, kept from a forward pass until its backward pass."""

    sample: Sample
    q: Tensor
    """The queries of the sample, [pairs, H / H_kv, queries, D]."""
    k: Tensor
    """The keys of the sample, [pairs, 1, length, D]."""
    starts: Tensor | None
    """The first key in its sequence that each query sees, int32 [pairs, 1, queries, 1]."""
    sinks: Tensor | None
    """The sink of each query head, float32 [pairs, H / H_kv, 1, 1]."""


@torch.no_grad()
def keep(call: Call, sample: Sample) -> Kept:
    """Copy the sample of a forward pass. Raise NotImplementedError where attention is not causal."""
    if not call.causal:
        raise NotImplementedError("only causal attention is observed")
    starts = None
    if call.bounds is not None:
        starts = sample.take(call.bounds[0, :, None].expand(len(call.q), -1, sample.kv_heads), sample.first)
        shifts = [s * sample.length for _, s, _ in sample.pairs]
        starts = torch.stack([x - shift for x, shift in zip(starts, shifts, strict=True)])[..., None]
    sinks = None
    if call.sinks is not None:
        heads = [m for _, _, m in sample.pairs]
        sinks = call.sinks.float().view(sample.kv_heads, -1, 1, 1)[heads]
    return Kept(sample, sample.take(call.q, sample.first).contiguous(), sample.take(call.k).contiguous(), starts, sinks)


class Measured(NamedTuple):
    """Sums over a sample, float64, to be added to those of other samples."""

    squares: dict[str, Tensor]
    """The sums ||x - exact||^2, ||x||^2 and ||exact||^2 of O, delta, P, dP, dS, dQ, dK and dV."""
    zeros: dict[str, Tensor]
    """Two counts for dQ and two for dK: the non-zero entries of dS that INT8 rounds to zero, and all non-zero entries.
    The dictionary is empty if a recipe does not round dS to INT8."""
    scales: dict[str, Tensor]
    """The least and the largest scale of the INT8 codes of Q, K, dO and dS. Groups of zeros have none."""
    largest_logit: Tensor
    """The largest exact q k^T * scale."""


@without_autocast
@torch.no_grad()
def measure(call: BackwardCall, grads: Gradients, kept: Kept) -> Measured:
    """Compare the sample of a call with exact attention."""
    sample, first, rules, scale = kept.sample, kept.sample.first, RECIPES[call.recipe], call.scale
    found = Measured({}, {}, {}, torch.full((), -math.inf, dtype=torch.float64, device=call.do.device))
    q, k, v = kept.q.float(), kept.k.float(), sample.take(call.v).float()
    do, o, dq, dk, dv = (sample.take(x, first).float() for x in (call.do, call.o, *grads))
    part = sample.take_saved(call.saved)
    codes = ScoresOfCodes(call._replace(bounds=None), part)
    q_scale, k_scale = part.q.scale, part.k.scale
    _add_range(found.scales, "Q", q_scale)
    _add_range(found.scales, "K", k_scale)
    if rules.int8_gradients:
        _add_range(found.scales, "dO", quantize_twin(do.transpose(1, 2), per_tile=rules.per_tile).scale)
    delta = (do * o).sum(-1, keepdim=True)
    exact_dk, exact_dv = torch.zeros_like(dk), torch.zeros_like(dv)
    for rows in _chunks(q.shape[2], k.shape[2], q.shape[0] * q.shape[1], _CHUNK_SCORES):
        here, seen = slice(rows.start, rows.stop), codes.seen(rows)
        mask = visible(rows, seen, codes.n_k - codes.n_q, True, None, do.device)
        assert mask is not None, "causal"
        if kept.starts is not None:
            mask = mask & (torch.arange(seen, device=do.device) >= kept.starts[:, :, here])
        logits = (q[:, :, here] @ k[:, :, :seen].mT * scale).masked_fill(~mask, -math.inf)
        exact_p = softmax_with(kept.sinks, logits)
        p = torch.exp(codes(rows)[:, 0] - part.lse[:, :, here, None]).masked_fill(~mask, 0)
        dp = (do[:, :, here] @ v[:, :, :seen].mT).masked_fill(~mask, 0)
        exact_o = exact_p @ v[:, :, :seen]
        exact_delta = (do[:, :, here] * exact_o).sum(-1, keepdim=True)
        ds, exact_ds = p * (dp - delta[:, :, here]), exact_p * (dp - exact_delta)
        exact_dk[:, :, : seen - first] += (exact_ds[..., first:].mT @ q[:, :, here]).sum(1, keepdim=True) * scale
        exact_dv[:, :, : seen - first] += (exact_p[..., first:].mT @ do[:, :, here]).sum(1, keepdim=True)
        _add(found.squares, "O", o[:, :, here], exact_o)
        _add(found.squares, "delta", delta[:, :, here], exact_delta)
        _add(found.squares, "P", p, exact_p)
        _add(found.squares, "dP", dp, dp)  # dP has the same 16-bit operands in every recipe.
        _add(found.squares, "dS", ds, exact_ds)
        _add(found.squares, "dQ", dq[:, :, here], exact_ds @ k[:, :, :seen] * scale)
        if rules.int8_gradients:
            along_queries, along_keys = rules.scale_axes
            _add_rounding(found, "dQ", ds * k_scale[:, :, None, :seen], along_keys)
            _add_rounding(found, "dK", ds * q_scale[:, :, here, None], along_queries)
        torch.maximum(found.largest_logit, logits.max(), out=found.largest_logit)
    _add(found.squares, "dK", dk, exact_dk)
    _add(found.squares, "dV", dv, exact_dv)
    return found


def _add(squares: dict[str, Tensor], name: str, x: Tensor, exact: Tensor) -> None:
    norms = [torch.linalg.vector_norm(y, dtype=torch.float64) for y in (x - exact, x, exact)]
    squares[name] = squares.get(name, 0) + torch.stack(norms).square()


def _add_range(scales: dict[str, Tensor], name: str, scale: Tensor) -> None:
    least, largest = torch.where(scale > 0, scale, math.inf).min().double(), scale.max().double()
    if name in scales:
        least, largest = torch.minimum(least, scales[name][0]), torch.maximum(largest, scales[name][1])
    scales[name] = torch.stack((least, largest))


def _add_rounding(found: Measured, name: str, ds: Tensor, axes: tuple[int, ...]) -> None:
    """Record the effect of rounding dS, with the folded scale of its partner, for a gradient."""
    padded = pad_to_tile(pad_to_tile(ds, -1), -2)
    codes, scale = tile_codes(padded, axes)
    total = torch.count_nonzero(padded)
    counts = torch.stack((total - torch.count_nonzero(codes), total)).double()
    found.zeros[name] = found.zeros.get(name, 0) + counts
    _add_range(found.scales, "dS", scale)


def pooled_rel_l2(error: float, square: float, exact: float) -> float:
    """Return ||x - exact|| / ||exact|| from sums of Measured.squares; 0 where both vanish."""
    return math.sqrt(error / exact) if exact else (math.inf if error else 0.0)


def pooled_cosine(error: float, square: float, exact: float) -> float:
    """Return <x, exact> / (||x|| ||exact||) from the same sums: 2 <x, exact> = ||x||^2 + ||exact||^2 - ||x -
    exact||^2."""
    size = math.sqrt(square * exact)
    return (square + exact - error) / (2 * size) if size else float(not error)
