"""INT8 attention behind QK-norm and rotary embedding, as one node of autograd.

Forward it is qk_norm_rope and then sage_attention, by their operators. Backward it is one operator. A backend may then
compute the gradient of the projection without writing those of q and k in between (call.Backend.projection).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from . import backends
from .autograd import FORWARD, sage_attention, settled
from .call import BackendName, BackwardArguments, Options, Projection, ProjectionGradients, RecipeName
from .operators import autocast_dtype, operator
from .qk_norm_rope import QK_NORM_ROPE, check_projection, projection_gradients, qk_norm_rope
from .refusals import differentiated_once, refuse_transforms


def normed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    *,
    batch: int = 1,
    causal: bool = True,
    scale: float | None = None,
    smooth_k: bool = True,
    cu_seqlens: Tensor | None = None,
    bounds: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    recipe: RecipeName | None = None,
    backend: BackendName | None = None,
) -> Tensor:
    """Compute sage_attention of what qk_norm_rope makes of q, k and v.

    Positional arguments are those of qk_norm_rope, the others those of sage_attention. The tokens are those of `batch`
    sequences of one length. Results are the same as those of the two functions. Gradients are as well, but where a
    kernel does not round dQ on its way (recipe `scores` on an H100 or H200).

    Returns:
        o [batch, tokens / batch, heads, head_dim], contiguous.

    Raises:
        TypeError, ValueError or NotImplementedError: see qk_norm_rope and sage_attention.
    """
    refuse_transforms(*_NAMED)
    check_projection(q, k, v, q_gain, k_gain, cos, sin)
    if q.shape[0] % batch:
        raise ValueError(f"{q.shape[0]} tokens are not {batch} sequences of one length")
    # Autocast may change the dtype between the two, and sinks change dQ before it goes on.
    if sinks is not None or autocast_dtype(q) is not None:
        rows = (x.unflatten(0, (batch, -1)) for x in qk_norm_rope(q, k, v, q_gain, k_gain, cos, sin, eps))
        seen = {"cu_seqlens": cu_seqlens, "bounds": bounds, "window": window, "sinks": sinks}
        how = {"causal": causal, "scale": scale, "smooth_k": smooth_k, "recipe": recipe, "backend": backend}
        return sage_attention(*rows, **seen, **how)
    sequences = (_rows(x, batch, len(q_gain)) for x in (q, k, v))
    options = settled(*sequences, causal, scale, smooth_k, cu_seqlens, bounds, window, recipe, backend)
    return _NormedAttention.apply(q, k, v, q_gain, k_gain, cos, sin, eps, batch, *options)


def _rows(x: Tensor, batch: int, head_dim: int) -> Tensor:
    """View columns [tokens, heads head_dim] as sequences [batch, N, heads, head_dim]."""
    return x.unflatten(1, (-1, head_dim)).unflatten(0, (batch, -1))


def _normed_backward(*arguments) -> ProjectionGradients:
    given, projection = BackwardArguments(*arguments[:-7]), Projection(*arguments[-7:])
    if given.do.numel() == 0:
        return projection_gradients((given.do, torch.zeros_like(given.v), torch.zeros_like(given.v)), projection)
    return backends.projection(given.call(), projection)


def _normed_backward_fake(do: Tensor, v: Tensor, *arguments) -> ProjectionGradients:
    (batch, tokens, heads, head_dim), kv_heads = do.shape, v.shape[2]
    q_gain = Projection(*arguments[-7:]).q_gain
    return v.new_empty(batch * tokens, (heads + 2 * kv_heads) * head_dim), q_gain.new_empty(2, head_dim)


NORMED_BACKWARD = operator(_normed_backward, _normed_backward_fake, BackwardArguments, Projection)


_NAMED = "normed_attention", "F.rms_norm, the rotation in torch and attention_reference"


class _NormedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor,
        eps: float, batch: int, *options: Any,
    ) -> Tensor:  # fmt: skip
        normed = QK_NORM_ROPE(q, k, q_gain, k_gain, cos, sin, eps)
        rows_q, rows_k = (x.unflatten(0, (batch, -1)) for x in normed)
        rows_v = _rows(v, batch, len(q_gain))
        o, *saved = FORWARD(rows_q, rows_k, rows_v, *options)
        call = Options(*options)
        ctx.save_for_backward(v, o, *saved, call.bounds, q, k, q_gain, k_gain, cos, sin)
        ctx.options = batch, call.causal, call.scale, call.recipe, call.backend, eps
        return o

    @staticmethod
    @differentiated_once(*_NAMED)
    def backward(ctx: FunctionCtx, do: Tensor) -> tuple[Tensor | None, ...]:
        v, o, *saved, q, k, q_gain, k_gain, cos, sin = ctx.saved_tensors
        batch, *options, eps = ctx.options
        projected = q, k, q_gain, k_gain, cos, sin, eps
        of_qkv, of_gains = NORMED_BACKWARD(do, _rows(v, batch, o.shape[-1]), o, *saved, *options, *projected)
        # The split names the sizes as in qk_norm_rope, because torch.compile then knows that the pieces, joined again,
        # are the whole.
        of_q, of_k, of_v = of_qkv.split([q.shape[1], k.shape[1], k.shape[1]], 1)
        return of_q, of_k, of_v, *of_gains.unbind(), *(None,) * 10
