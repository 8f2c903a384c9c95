"""Quantize K for the CUDA forwards: quantize.quantize_twin in one pass over global memory (quantize_keys.cu)."""

import torch
from torch import Tensor

from .launch import multiprocessors
from .nvrtc import load, mappable
from .quantize import Codes

SOURCE = "quantize_keys.cu"


def defines_of(head_dim: int, smooth: bool, half: bool, pairs: bool = False) -> dict[str, int]:
    """Return the macros of quantize_keys.cu."""
    return {"HEAD_DIM": head_dim, "SMOOTH": int(smooth), "FP16": int(half), "PAIRS": int(pairs)}


def chunks_of(tokens: int, head_dim: int, processors: int) -> tuple[int, int]:
    """Return the number of chunks that quantize_keys.cu makes of so many tokens of a head, and the tokens of a chunk.

    A chunk waits for the others of its head, which must fit the GPU, two to a multiprocessor. They take a quarter of
    that, so that calls on four streams never wait for each other.
    """
    held = 32768 // head_dim
    per_chunk = held * max(1, -(-tokens // (held * max(1, processors // 2))))
    return -(-tokens // per_chunk), per_chunk


def quantize_keys(
    k: Tensor, smooth: bool, padded: int, architecture: str, *, pairs: bool = False, mean: bool = False
) -> tuple[Codes, Tensor, Tensor, Tensor | None]:
    """Quantize k [B, N, heads, D] per token, less its mean over tokens if `smooth`.

    Returns:
        The codes and scales; the scales in the order that the forward reads, [B * heads * padded], or with `pairs`
        twice as many; an int32 zero; and with `mean`, if K was smoothed, its mean [B, heads, 1, D] in float32. The
        memory of the codes has room for another tile of tokens at its end.
    """
    batch, n, heads, head_dim = k.shape
    k = mappable(k)
    codes = torch.empty((batch * heads * n + 64) * head_dim, dtype=torch.int8, device=k.device)
    codes = codes[: k.numel()].view(batch, heads, n, head_dim)
    scale = torch.empty((batch, heads, n), dtype=torch.float32, device=k.device)
    ordered = torch.empty(batch * heads * padded * (1 + pairs), dtype=torch.float32, device=k.device)
    chunks, per_chunk = chunks_of(padded, head_dim, multiprocessors(k.device))
    sums = torch.empty(batch * heads * chunks * head_dim, dtype=torch.float32, device=k.device) if smooth else None
    means = torch.empty((batch, heads, 1, head_dim), dtype=torch.float32, device=k.device) if smooth and mean else None
    zeros = torch.zeros(2 + batch * heads, dtype=torch.int32, device=k.device)
    strides = [s // 8 for s in k.stride()[:3]]
    load(SOURCE, "quantize", defines_of(head_dim, smooth, k.dtype == torch.float16, pairs), architecture).launch(
        (batch * heads * chunks,), (512,), 8192 + 4 * head_dim + 4,
        k, codes, scale, ordered, means, sums, zeros[1:], heads, n, padded, chunks, per_chunk, *strides,
    )  # fmt: skip
    return Codes(codes, scale), ordered, zeros[:1], means
