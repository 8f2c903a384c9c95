"""FP4 attention for inference (SageAttention3, arXiv 2505.11594); its quantizers are in quantize.py.

    S = phi(Q - mean) phi(K - mean)^T + mean_Q (K - mean)^T       one mean of Q per tile, one of K per row
    O = sum over tiles of s1 phi(P / s1) phi(V) / sum of P        s1 = largest P of a row of the tile / 2688

A tile is TILE (64) queries or keys, as everywhere in this package. The paper's kernel has tiles of 128.
"""

from typing import Literal

import torch
from torch import Tensor

from ..autograd import autocast, bounds_of, check, scale_of
from ..call import Call
from ..quantize import TILE, tile_means, token_mean
from ..reference import _chunks, _grouped, pad_to_tile, visible, without_autocast
from ..refusals import one_of, refuse_transforms
from .kernels import triton_fp4_attention
from .quantize import FORMATS, head_unit, quantize_fp4, quantize_probabilities


def fp4_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    smooth_k: bool = True,
    smooth_q: bool = True,
    two_level: bool = True,
    cu_seqlens: Tensor | None = None,
    bounds: Tensor | None = None,
    format: Literal["nvfp4", "mxfp4"] = "nvfp4",
    backend: Literal["twin", "triton"] | None = None,
) -> Tensor:
    """Compute softmax attention with both matrix products in FP4, forward only: SageAttention3 for inference.

    q [B, N_q, H, D], k and v [B, N_k, H_kv, D] with any strides, H a multiple of H_kv, D from 16 to 256, one dtype
    (bfloat16, float16 or float32). Returns o [B, N_q, H, D] in that dtype, contiguous.

    causal, scale, cu_seqlens, bounds: as sage_attention takes them.
    smooth_k, smooth_q: subtract the mean of K over the row, and of Q over tiles of 64 tokens, before quantizing. The
        product of the means of Q with K is added to the scores; FP4 does not touch it.
    two_level: multiply P per row and tile up to the full range of the format first (quantize_probabilities).
    format: "nvfp4" or "mxfp4".
    backend: "triton" (bfloat16 and float16, two-level P), or "twin" in torch, with the values that a tensor core would
        take and float32 sums. None takes "triton" on a GPU where it can.

    Under autocast the inputs are cast to its dtype. Groups are counted from the start of the row, so the rounding of V
    depends on up to 15 later tokens; the exact result does not. Raises TypeError and ValueError, and
    NotImplementedError where gradients are wanted.
    """
    refuse_transforms("fp4_attention", "attention_reference")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError(
            "fp4_attention is forward only and an input requires a gradient: call it under torch.no_grad(), "
            "or train with sage_attention"
        )
    if format not in FORMATS:
        raise one_of("format", format, FORMATS)
    if backend not in (None, "twin", "triton"):
        raise one_of("backend", backend, ("twin", "triton"))
    q, k, v = autocast(q, k, v)
    check(q, k, v, causal, cu_seqlens, bounds)
    scale, bounds = scale_of(q, scale), bounds_of(q, cu_seqlens, bounds)
    if q.numel() == 0:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    fits = two_level and q.dtype != torch.float32
    if backend == "triton" and not fits:
        raise ValueError(
            "backend 'triton' takes bfloat16 or float16 and two-level P; leave out backend, or name 'twin'"
        )
    chosen = backend or ("triton" if q.is_cuda and fits else "twin")
    call = Call(q, k, v, bounds, causal, scale, smooth_k, smooth_q, format, chosen)
    return triton_fp4_attention(call) if chosen == "triton" else twin_fp4_attention(call, two_level)


@without_autocast
def twin_fp4_attention(call: Call, two_level: bool) -> Tensor:
    """Compute fp4_attention in torch on any device: the specification, for quality and not for speed. The recipe of the
    call is a key of FORMATS."""
    q, k, v, format = call.q, call.k, call.v, call.recipe
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    n_q, n_k = q.shape[1], k.shape[1]
    queries, keys, values = (x.transpose(1, 2).float() for x in (q, k, v))
    if call.smooth_k:
        keys = keys - token_mean(k)
    q_mean = tile_means(q) if call.smooth_q else None
    if q_mean is not None:
        queries = queries - q_mean.repeat_interleave(TILE, 2)[:, :, :n_q]

    def rounded(x: Tensor) -> Tensor:
        return quantize_fp4(x, format=format, unit=head_unit(x)).dequantized()

    q4 = _grouped(rounded(queries), k.shape[2])
    k4 = rounded(keys).unsqueeze(2)
    v4 = pad_to_tile(rounded(values.mT).mT, -2).unsqueeze(2)
    o_heads = _grouped(o.transpose(1, 2), k.shape[2])
    for rows in _chunks(n_q, n_k, q.shape[0] * q.shape[2]):
        seen = min(n_k, rows.stop + n_k - n_q) if call.causal else n_k
        s = q4[..., rows.start : rows.stop, :] @ k4[..., :seen, :].mT
        if q_mean is not None:
            means = _grouped(q_mean, k.shape[2])[..., rows.start // TILE : (rows.stop - 1) // TILE + 1, :]
            added = means @ keys.unsqueeze(2)[..., :seen, :].mT
            s = s + added.repeat_interleave(TILE, -2)[..., : len(rows), :]
        mask = visible(rows, seen, n_k - n_q, call.causal, call.bounds, q.device)
        if mask is not None:
            s = s.masked_fill(~mask, float("-inf"))
        p = torch.exp((s - s.amax(-1, keepdim=True)) * call.scale)
        total = p.sum(-1, keepdim=True)
        p4 = quantize_probabilities(pad_to_tile(p, -1), format=format, two_level=two_level)
        o_heads[..., rows.start : rows.stop, :] = (p4 @ v4[..., : p4.shape[-1], :] / total).to(o.dtype)
    return o
