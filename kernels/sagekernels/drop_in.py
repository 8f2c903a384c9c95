"""INT8 attention under the signatures of torch and of flash-attn, to replace nothing but the call in a trainer.

What sage_attention does not compute is refused, with its name. Options come by keyword, because the versions of
flash-attn have them in different orders.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from .autograd import sage_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute INT8 attention with the signature of torch.nn.functional.scaled_dot_product_attention.

    Args:
        query: [batch, heads, tokens, head_dim], bfloat16 or float16.
        key: [batch, kv_heads, tokens, head_dim].
        value: as key.
        attn_mask: must be None.
        dropout_p: must be 0.
        is_causal: query i sees keys up to i. There have to be as many keys as queries.
        scale: the factor on the scores. Default: head_dim ** -0.5.
        enable_gqa: whether key and value may have fewer heads.

    Returns:
        [batch, heads, tokens, head_dim], a view of sage_attention's result.

    Raises:
        NotImplementedError: a mask, dropout, or causal attention to more keys than queries is asked for.
        ValueError: shapes do not fit.
    """
    if attn_mask is not None:
        _refuse("attn_mask", "documents are cu_seqlens of sagekernels.sage_attention")
    if dropout_p:
        _refuse(f"dropout_p {dropout_p}", "set it to 0")
    if is_causal and query.shape[2] != key.shape[2]:
        _refuse("is_causal with other keys than queries", "sagekernels.sage_attention aligns them to the end")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"{query.shape[1]} heads of query and {key.shape[1]} of key need enable_gqa=True")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return sage_attention(q, k, v, causal=is_causal, scale=scale).transpose(1, 2)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    learnable_sink: Tensor | None = None,
) -> Tensor:
    """Compute INT8 attention with the signature of flash-attn's function of this name.

    Args:
        q: [batch, tokens, heads, head_dim], bfloat16 or float16.
        k: [batch, keys, kv_heads, head_dim].
        v: as k.
        dropout_p: must be 0.
        softmax_scale: the factor on the scores. Default: head_dim ** -0.5.
        causal: query i sees keys up to i + keys - tokens.
        window_size: (n, 0), which is causal, lets a query see n tokens before its own, (n, n) as many on both sides,
            and -1 or None all of them. Others are refused. A window on both sides that leaves out keys needs as many of
            them as queries.
        softcap: must be 0.
        deterministic: must be False where torch.use_deterministic_algorithms is not set, which decides.
        learnable_sink: [heads], one more score of each head, whose value is zero. It gets a gradient.

    Returns:
        [batch, tokens, heads, head_dim].

    Raises:
        NotImplementedError: dropout, a cap or another window is asked for.
    """
    seen = _seen(causal, window_size, k.shape[1], dropout_p, softcap, deterministic)
    return sage_attention(q, k, v, scale=softmax_scale, sinks=learnable_sink, **seen)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    learnable_sink: Tensor | None = None,
) -> Tensor:
    """Compute INT8 attention inside packed documents, with the signature of flash-attn's function of this name.

    Args:
        q: [tokens, heads, head_dim], bfloat16 or float16.
        k: [tokens, kv_heads, head_dim].
        v: as k.
        cu_seqlens_q: int32 [documents + 1], from 0 to tokens.
        cu_seqlens_k: the same numbers.
        max_seqlen_q: the most tokens of a document.
        max_seqlen_k: as max_seqlen_q.
        causal: a token sees those before it in its document, not those behind it.

    The other arguments are those of flash_attn_func.

    Returns:
        [tokens, heads, head_dim].

    Raises:
        NotImplementedError: dropout, a cap, another window, or other keys than queries are asked for.
    """
    seen = _seen(causal, window_size, int(max_seqlen_k), dropout_p, softcap, deterministic)
    if cu_seqlens_k.shape != cu_seqlens_q.shape or len(q) != len(k):
        _refuse("documents of other keys than queries", "give one cu_seqlens")
    if cu_seqlens_k is not cu_seqlens_q:
        torch._assert_async((cu_seqlens_k == cu_seqlens_q).all(), "sagekernels: cu_seqlens_k is not cu_seqlens_q")
    options = {"cu_seqlens": cu_seqlens_q, "sinks": learnable_sink, **seen}
    return sage_attention(q[None], k[None], v[None], scale=softmax_scale, **options)[0]


def _seen(
    causal: bool,
    window_size: tuple[int | None, int | None],
    keys: int,
    dropout_p: float,
    softcap: float,
    deterministic: bool,
) -> dict[str, Any]:
    """Return `causal` and `window` of sage_attention, after refusing what it does not compute."""
    left, right = (-1 if side is None else side for side in window_size)  # Version 4 says None where others say -1.
    if dropout_p:
        _refuse(f"dropout_p {dropout_p}", "set it to 0")
    if softcap:
        _refuse(f"softcap {softcap}", "set it to 0")
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        _refuse("deterministic=True by itself", "call torch.use_deterministic_algorithms(True)")
    causal = causal or right == 0
    hides_left, hides_right = 0 <= left < keys - 1, not causal and 0 <= right < keys - 1
    if not (hides_left or hides_right):
        return {"causal": causal, "window": None}
    if not causal and left != right:
        _refuse(
            f"window_size {window_size} over {keys} keys", f"take ({max(left, right)}, 0) or the same on both sides"
        )
    return {"causal": causal, "window": left + 1}


def _refuse(what: str, fix: str) -> NoReturn:
    raise NotImplementedError(f"sagekernels does not compute {what}; {fix}")
