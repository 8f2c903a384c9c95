"""Exact attention, and the INT8 twin of every kernel here: same rounding, same granularity, torch arithmetic.

The twin is the specification. A kernel is right when it agrees with the twin up to the order of float32 sums.
Everything that decides a code or a scale is therefore written here once, in terms of *tiles* of `TILE` consecutive
tokens counted from the start of the row. Papers: A = SageBwd (arXiv 2603.02170), B = SageAttention3 (arXiv 2505.11594).

Shapes: q, o, do [B, N_q, H, D]; k, v [B, N_k, H_kv, D]; codes int8 [B, heads, N, D]; scales, lse float32 [B, heads, N].
"""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .call import RECIPES, BackwardCall, Call, Gradients, Saved
from .quantize import TILE, quantize_twin, scale_and_inverse, token_mean

# So many scores are held at once, over batch and heads. This bounds the memory of everything in this file to O(N x
# tile).
CHUNK_SCORES = 1 << 23


_AnyCall = TypeVar("_AnyCall", Call, BackwardCall)
_Others = ParamSpec("_Others")
_Result = TypeVar("_Result")


def without_autocast(
    function: Callable[Concatenate[_AnyCall, _Others], _Result],
) -> Callable[Concatenate[_AnyCall, _Others], _Result]:
    """Switch autocast off in a function of a call: it would narrow the float32 products of the twins. (The kernels of a
    GPU do not know autocast.)"""

    @functools.wraps(function)
    def _run(call: _AnyCall, *arguments: _Others.args, **options: _Others.kwargs) -> _Result:
        with torch.autocast(call.v.device.type, enabled=False):
            return function(call, *arguments, **options)

    return _run


def document_bounds(cu_seqlens: Tensor, length: int, window: int | None = None) -> Tensor:
    """Return the first token and one past the last token of each token's document: int32 [2, length], without a host
    sync. With a window they are the first key that the token sees as a query, and one past the last query that sees the
    token as a key.

    Zero-length documents (repeated values in cu_seqlens) own no token, wherever they stand.
    """
    positions = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    following = torch.searchsorted(cu_seqlens, positions, right=True).clamp_(1, cu_seqlens.numel() - 1)
    bounds = torch.stack((cu_seqlens[following - 1], cu_seqlens[following])).int()
    return bounds if window is None else windowed(bounds, window)


def one_document(length: int, device: torch.device | None) -> Tensor:
    """Return the cu_seqlens of a row that is one document. The host neither waits nor copies."""
    return length * torch.arange(2, dtype=torch.int32, device=device)


def windowed(bounds: Tensor, window: int) -> Tensor:
    """Return the bounds, int32 [2, length], where a query sees no key that is `window` tokens away or more. Causal
    attention then sees `window` tokens, the query's own included; other attention sees as many on either side."""
    starts, ends = bounds.unbind()
    window = min(window, bounds.shape[1])  # int32 has no room for any number.
    tokens = torch.arange(bounds.shape[1], dtype=bounds.dtype, device=bounds.device)
    return torch.stack((starts.maximum(tokens - window + 1), ends.minimum(tokens + window)))


def check_window(window: int | None) -> None:
    """Raise an error if the window is not a whole number above 0, or None."""
    if isinstance(window, (bool, float, str)):
        raise TypeError(f"window must be a whole number of tokens, got {window!r}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (a query sees its own token), got {window}")


def hiding_window(window: int | None, n_q: int, n_k: int, causal: bool) -> int | None:
    """Return the window, or None if it hides no key. Raises TypeError if it is no whole number, and ValueError if it is
    below 1, or hides keys from queries whose places among them are not known."""
    check_window(window)
    if window is None or window >= n_k:
        return None
    if n_q != n_k and not causal:
        raise ValueError(f"without causal a window of {window} needs as many keys as queries, got {n_k} and {n_q}")
    return window


def check_shape_of_sinks(q: Tensor, sinks: Tensor) -> None:
    """Raise ValueError unless there is one sink for each head of q."""
    if sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks must be [{q.shape[2]}], one for each head of q, got shape {tuple(sinks.shape)}")


def chunk_bounds(bounds: Tensor, sequences: int, first: int, size: int) -> Tensor:
    """Return the bounds, int32 [2, B size + B (first + size)], of a chunk of `size` queries from `first` on, and of the
    keys up to the last of them, from those of all tokens of B sequences. Causality is in them too."""
    end = first + size
    length = bounds.shape[1] // sequences
    rows = torch.arange(sequences, dtype=torch.int32, device=bounds.device).unsqueeze(1)
    tokens = torch.arange(length, dtype=torch.int32, device=bounds.device)
    starts, ends = (bounds.view(2, sequences, length) - length * rows).unbind()  # in the sequence of each token
    of_queries = [end * rows + x[..., first:end] for x in (starts, (tokens + 1).expand_as(starts))]
    seen = tokens[:end].expand(sequences, -1), ends[:, :end]
    of_keys = [size * rows + (x - first).clamp(0, size) for x in seen]
    return torch.stack([torch.cat((a.flatten(), b.flatten())) for a, b in zip(of_queries, of_keys, strict=True)])


def visible(
    rows: range, columns: int, offset: int, causal: bool, bounds: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return which keys each query sees, boolean [len(rows), columns], or None when it sees them all. offset = N_k -
    N_q."""
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = torch.arange(columns, device=device)[None, :]
    mask = (j <= i + offset) if causal else None
    if bounds is not None:
        starts, ends = bounds[:, rows.start : rows.stop, None]
        same = (j >= starts) & (j < ends)
        mask = same if mask is None else mask & same
    return mask


def _chunks(length: int, columns: int, batch_heads: int, scores: int | None = None) -> list[range]:
    """Return query ranges of whole tiles such that one range's scores stay within `scores` (None: CHUNK_SCORES)."""
    step = max(1, (scores or CHUNK_SCORES) // max(1, columns * batch_heads * TILE)) * TILE
    return [range(a, min(a + step, length)) for a in range(0, length, step)]


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Lay query heads beside the key head that they share: [B, H, ...] -> [B, H_kv, H / H_kv, ...]."""
    return x.unflatten(1, (kv_heads, -1))


def softmax_with(sinks: Tensor | None, scores: Tensor) -> Tensor:
    """Return the softmax of scores [..., queries, keys] and of sinks [..., 1, 1], without that of the sinks."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    bounds: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute exact softmax attention in plain torch, differentiable by autograd: the judge of everything else.

    q [B, N_q, H, D], k and v [B, N_k, H_kv, D] of any floating dtype; returns o [B, N_q, H, D] in q's dtype. The
    other arguments are those of sage_attention. Scores and softmax are float32 for 16-bit inputs, and have the inputs'
    precision otherwise (pass float64 to judge). The backward pass recomputes scores chunk by chunk, so memory is linear
    in the sequence length.
    """
    n_q, n_k, h_kv = q.shape[1], k.shape[1], k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)

    def attend(q_chunk: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, own: Tensor | None) -> Tensor:
        scores = q_chunk.to(wide) @ keys.to(wide).mT * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return softmax_with(own, scores) @ values.to(wide)

    qg = _grouped(q.transpose(1, 2), h_kv)
    kg, vg = k.transpose(1, 2).unsqueeze(2), v.transpose(1, 2).unsqueeze(2)
    window = hiding_window(window, n_q, n_k, causal)
    if bounds is None and (cu_seqlens is not None or window is not None):
        bounds = document_bounds(one_document(n_k, q.device) if cu_seqlens is None else cu_seqlens, n_k, window)
        bounds = bounds[:, n_k - n_q :]
    if sinks is not None:
        check_shape_of_sinks(q, sinks)
    own = None if sinks is None else sinks.view(h_kv, -1, 1, 1)
    outputs = []
    chunks = _chunks(n_q, n_k, q.shape[0] * q.shape[2])
    for rows in chunks:
        seen = min(n_k, rows.stop + n_k - n_q) if causal else n_k
        mask = visible(rows, seen, n_k - n_q, causal, bounds, q.device)
        arguments = (qg[..., rows.start : rows.stop, :], kg[..., :seen, :], vg[..., :seen, :], mask, own)
        if len(chunks) > 1:
            outputs.append(checkpoint(attend, *arguments, use_reentrant=False))
        else:
            outputs.append(attend(*arguments))
    out = torch.cat(outputs, -2) if outputs else qg
    return out.flatten(1, 2).transpose(1, 2).to(q.dtype)


def rounded_tiles(x: Tensor, axes: tuple[int, ...], steps: int = 1) -> Tensor:
    """Return psi(x) dequantized, for x [..., M, N] with M and N multiples of TILE: one scale per tile along `axes`.

    The axes are those of [..., M / TILE, TILE, N / TILE, TILE]: (-3,) is one scale per column of a tile, (-1,) per row.
    Values that are never negative take twice the `steps`: their codes 0 .. 254 are stored shifted, as -127 .. 127.
    """
    codes, scale = tile_codes(x, axes, steps)
    return (codes * (scale / steps)).flatten(-2, -1).flatten(-3, -2)


def tile_codes(x: Tensor, axes: tuple[int, ...], steps: int = 1) -> tuple[Tensor, Tensor]:
    """Return the codes (whole float32 numbers) and scales of rounded_tiles, as tiles: [..., M / TILE, TILE, N / TILE,
    TILE]."""
    tiles = x.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))
    scale, inverse = scale_and_inverse(tiles.abs().amax(axes, keepdim=True))
    return torch.round(tiles * (steps * inverse)), scale


def pad_to_tile(x: Tensor, dim: int, value: float = 0.0) -> Tensor:
    """Pad `dim` (negative) at its end to a multiple of TILE."""
    missing = -x.shape[dim] % TILE
    return x if missing == 0 else torch.nn.functional.pad(x, [0, 0] * (-dim - 1) + [0, missing], value=value)


class ScoresOfCodes:
    """The scores of a chunk of queries against the keys it can see, from the codes, in both directions alike."""

    def __init__(self, call: Call | BackwardCall, saved: Saved) -> None:
        self.n_q, (self.h_kv, self.n_k) = saved.q.scale.shape[2], saved.k.scale.shape[1:]
        self.causal, self.scale, self.bounds = call.causal, call.scale, call.bounds
        self.q8, self.q_scale = _grouped(saved.q.codes, self.h_kv), _grouped(saved.q.scale, self.h_kv)
        self.k8, self.k_scale = saved.k.codes.unsqueeze(2), saved.k.scale.unsqueeze(2)

    def seen(self, rows: range) -> int:
        return min(self.n_k, rows.stop + self.n_k - self.n_q) if self.causal else self.n_k

    def __call__(self, rows: range) -> Tensor:
        """Return float32 [B, H_kv, G, rows, seen], -inf where masked. Integer products are exact in float32 (D <=
        256)."""
        seen = self.seen(rows)
        part = slice(rows.start, rows.stop)
        s = self.q8[..., part, :].float() @ self.k8[..., :seen, :].float().mT
        s = s * (self.q_scale[..., part] * self.scale)[..., None] * self.k_scale[..., None, :seen]
        mask = visible(rows, seen, self.n_k - self.n_q, self.causal, self.bounds, s.device)
        return s if mask is None else s.masked_fill(~mask, float("-inf"))


@without_autocast
def twin_forward(call: Call) -> tuple[Tensor, Saved]:
    """Compute the INT8 attention forward (A, Algorithm 1). Return o [B, N_q, H, D] in q's dtype, and the tensors that
    the backward needs."""
    q, k, v, rules = call.q, call.k, call.v, RECIPES[call.recipe]
    k_mean = token_mean(k) if call.smooth_k else None
    q_codes = quantize_twin(q, per_tile=rules.per_tile)
    k_codes = quantize_twin(k, mean=k_mean, per_tile=rules.per_tile)
    lse = torch.empty(q_codes.scale.shape, dtype=torch.float32, device=q.device)
    own = None if call.sinks is None else sink_scores(q, k_mean, call.sinks, call.scale)
    saved = Saved(lse, q_codes, k_codes, None if own is None else k_mean, own)
    scores = ScoresOfCodes(call, saved)

    values = v.transpose(1, 2)
    values = quantize_twin(v, per_tile=True).dequantized() if rules.int8_pv else values.float()
    values = values.unsqueeze(2)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    o_heads = _grouped(o.transpose(1, 2), k.shape[2])
    lse_heads = _grouped(lse, k.shape[2])
    for rows in _chunks(q.shape[1], k.shape[1], q.shape[0] * q.shape[2]):
        s = scores(rows)
        m = s.amax(-1, keepdim=True)
        p = torch.exp(s - m)
        l = p.sum(-1, keepdim=True)
        if rules.int8_pv:
            tiles = pad_to_tile(s, -1, float("-inf")).unflatten(-1, (-1, TILE))
            tile_max = tiles.amax(-1, keepdim=True)
            relative = torch.where(tile_max == float("-inf"), 0.0, torch.exp(tiles - tile_max))
            p = torch.round(relative * 127.0) * (torch.exp(tile_max - m[..., None]) / 127.0)
            p = p.flatten(-2)[..., : s.shape[-1]]
        else:
            p = p.to(v.dtype).float()
        rows_o, rows_lse = p @ values[..., : s.shape[-1], :] / l, (m + torch.log(l)).squeeze(-1)
        if own is not None:
            both = torch.logaddexp(rows_lse, _grouped(own, k.shape[2])[..., rows.start : rows.stop])
            rows_o, rows_lse = rows_o * torch.exp(rows_lse - both)[..., None], both
        o_heads[..., rows.start : rows.stop, :] = rows_o.to(o.dtype)
        lse_heads[..., rows.start : rows.stop] = rows_lse
    return o, saved


def sink_scores(q: Tensor, mean: Tensor | None, sinks: Tensor, scale: float) -> Tensor:
    """Return the score s of a head's sink beside those of each query, float32 [B, H, N_q].

        s_i = sink - scale q_i . mean     lse' = logaddexp(lse, s)     o' = o exp(lse - lse')

    The scores of the kernels are those of K less its mean, if that was smoothed: of query i they are scale q_i . mean
    too low. A softmax forgets such a constant. A sink does not, so it is lowered by the same.

    Args:
        q: [B, N_q, H, D].
        mean: the mean that was taken from K before the scores, float32 [B, H_kv, 1, D], or None.
        sinks: [H].
    """
    own = sinks.float()[None, :, None]
    if mean is None:
        return own.expand(len(q), -1, q.shape[1]).contiguous()
    queries = _grouped(q.transpose(1, 2).float(), mean.shape[1])
    return own - scale * (queries * mean.unsqueeze(2)).sum(-1).flatten(1, 2)


@without_autocast
def twin_backward(call: BackwardCall) -> Gradients:
    """Compute the INT8 attention backward (A, Algorithm 2). Return dq, dk, dv in the dtype of v.

    Scales must be constant along the contracted dimension (the scope law). Per-token scales of Q, K and dO are
    therefore folded into the other operand before that is rounded:

        dV_j = sum_i psi_i(P_ij s_dO_i) dO8_i        psi_i: one scale per key j over a tile of queries; 255 codes
        dK_j = sum_i psi_i(dS_ij s_Q_i) Q8_i         psi_i: one scale per key j over a tile of queries
        dQ_i = sum_j psi_j(dS_ij s_K_j) K8_j         psi_j: one scale per query i over a tile of keys

    With `per_tile` s_dO, s_Q and s_K are constant on a tile and psi has one scale per tile: the papers' scheme. Without
    `int8_gradients` the three products are P^T dO, dS^T Q and dS K of values rounded to 16 bits. dP = dO V^T stays in
    16 bits, delta = rowsum(dO o O). The mean that was taken from K is not added back (A section 6).

    With sinks lse and O know of them, and the sink's share of query i is p_i = exp(s_i - lse_i) (sink_scores):

        d sink = -sum_i p_i delta_i     dQ_i += scale p_i delta_i mean

    Without a sink a row of dS sums to zero, so that the mean of K plays no part in dQ. With one it sums to p_i delta_i.
    dK lacks nothing. p_i delta_i goes to call.sink_terms.
    """
    do, v, saved, rules = call.do, call.v, call.saved, RECIPES[call.recipe]
    h_kv, n_q, n_k = v.shape[2], do.shape[1], v.shape[1]
    scores = ScoresOfCodes(call, saved)
    along_queries, along_keys = rules.scale_axes

    if rules.int8_gradients:
        do_codes = quantize_twin(do, per_tile=rules.per_tile)
        do8, do_scale = _grouped(do_codes.codes, h_kv), _grouped(do_codes.scale, h_kv)
        q_partner, q_scale = _grouped(saved.q.codes.float(), h_kv), _grouped(saved.q.scale, h_kv)
        k_partner, k_scale = saved.k.codes.float().unsqueeze(2), saved.k.scale.unsqueeze(2)
    else:
        narrow = torch.float32 if v.dtype == torch.float32 else torch.bfloat16
        q_partner = _grouped(saved.q.dequantized().to(narrow).float(), h_kv)
        k_partner = saved.k.dequantized().to(narrow).float().unsqueeze(2)
    do_heads, values = _grouped(do.transpose(1, 2).float(), h_kv), v.transpose(1, 2).unsqueeze(2).float()
    delta = _grouped((do.float() * call.o.float()).sum(-1).transpose(1, 2), h_kv)
    lse = _grouped(saved.lse, h_kv)

    dq = torch.zeros(do_heads.shape, dtype=torch.float32, device=do.device)
    dk = torch.zeros(saved.k.codes.shape, dtype=torch.float32, device=do.device)
    dv = torch.zeros_like(dk)
    for rows in _chunks(n_q, n_k, do.shape[0] * do.shape[2]):
        part = slice(rows.start, rows.stop)
        s = scores(rows)
        seen = s.shape[-1]
        p = torch.exp(s - lse[..., part, None])
        dp = do_heads[..., part, :] @ values[..., :seen, :].mT
        ds = p * (dp - delta[..., part, None])

        if rules.int8_gradients:

            def rounded(x: Tensor, axes: tuple[int, ...], steps: int = 1, shape: torch.Size = s.shape) -> Tensor:
                return rounded_tiles(pad_to_tile(pad_to_tile(x, -1), -2), axes, steps)[..., : shape[-2], : shape[-1]]

            steps = 1 if rules.per_tile else 2
            for_dv, dv_partner = rounded(p * do_scale[..., part, None], along_queries, steps), do8[..., part, :].float()
            for_dk, dk_partner = rounded(ds * q_scale[..., part, None], along_queries), q_partner[..., part, :]
            for_dq, dq_partner = rounded(ds * k_scale[..., None, :seen], along_keys), k_partner[..., :seen, :]
        else:
            for_dv, dv_partner = p.to(v.dtype).float(), do_heads[..., part, :]
            for_dk, dk_partner = ds.to(narrow).float(), q_partner[..., part, :]
            for_dq, dq_partner = for_dk, k_partner[..., :seen, :]
        dv[..., :seen, :] += (for_dv.mT @ dv_partner).sum(2)
        dk[..., :seen, :] += (for_dk.mT @ dk_partner).sum(2)
        dq[..., part, :] = for_dq @ dq_partner

    if saved.sink_scores is not None:
        assert call.sink_terms is not None, "sinks have terms"
        terms = call.sink_terms.copy_(torch.exp(saved.sink_scores - saved.lse) * delta.flatten(1, 2))
        if saved.k_mean is not None:
            dq += _grouped(terms, h_kv)[..., None] * saved.k_mean.unsqueeze(2)
    dq = (dq * call.scale).flatten(1, 2)
    dq, dk, dv = (x.transpose(1, 2).to(v.dtype) for x in (dq, dk * call.scale, dv))
    return dq, dk, dv
