"""sage_attention(): validation, and the custom operators that join forward and backward.

The operators are registered with torch.library and have fake implementations. torch.compile therefore takes a call as
one node of its graph, CUDA graphs capture it (nothing here synchronizes with the host), and activation checkpointing
recomputes it. Results are the same bits from run to run, except dQ of CUDA kernels that add it up in any order (recipe
"scores" on an H100 or H200). Under torch.use_deterministic_algorithms(True) dQ has the same bits too.
"""

import torch
from torch import Tensor

from . import backends, observe, reference
from .backends import NAMED, default_recipe
from .call import RECIPES, BackendName, BackwardArguments, Call, Options, RecipeName, Saved
from .casts import DTYPES
from .forward import document_bounds_triton
from .operators import LIBRARY, autocast_dtype, operator
from .quantize import Codes
from .refusals import differentiated_once, one_of, refuse_transforms

_NAMED = "sage_attention", "attention_reference"


def sage_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    """Compute softmax attention with INT8 matrix products in forward and backward (SageBwd, arXiv 2603.02170).

    Under autocast the inputs are cast to its dtype. Inputs that are not finite give NaN in what depends on them (with
    smoothing that is the whole head).

    Args:
        q: [B, N_q, H, D] with any strides, D from 16 to 256, bfloat16 or float16, and on the twin float32 too.
        k: [B, N_k, H_kv, D] in the dtype of q. H is a multiple of H_kv.
        v: as k.
        causal: query i sees keys up to i + N_k - N_q (aligned to the end; N_k >= N_q). Unlike flash_attn_func's it is
            True by default.
        scale: the factor on the scores. Default: D ** -0.5.
        smooth_k: subtract the mean of K over the row before quantizing.
        cu_seqlens: int32 [documents + 1] from 0 to N over a batch of one: attention stays inside documents. Documents
            of length zero are allowed. On a GPU the values are not checked (that would wait for the device).
        bounds: document_bounds(cu_seqlens, N, window) in the place of cu_seqlens and window, where many calls share
            them. All rows of a batch have these bounds.
            Without causal they may also be int32 [2, N_q + N_k], for queries and keys that are different tokens: the
            first key and one past the last key of each query, then the first query and one past the last query of each
            key. All four rise. The portable kernels and the twin take these.
        window: a query sees so many tokens, its own included: it and the window - 1 before it. Without causal it also
            sees the window - 1 behind it, and there must be as many keys as queries, unless the window reaches over
            all keys.
        sinks: [H], one more score of each head, whose value is zero: attention may leave a part of its weight there.
            They get gradients. float32 or any 16 bits; they are not cast under autocast.
        recipe: "fine" (scales per token, row and column), "paper" (one scale per tile), or "scores" (Q K^T alone
            in INT8, the gradients' products in 16 bits); reference.py specifies them. Default: default_recipe of the
            device, which is "scores" on an H100 or H200 and "fine" elsewhere.
        backend: a name in backends.NAMED. Default: the first of backends.BACKENDS that serves the GPU and takes the
            call: CUDA kernels where there are any for it, "triton" on every other GPU, and "twin", the specification
            in torch, elsewhere. By name, too, "triton" computes what a backend does not take. CUDA kernels are
            compiled at first use. If that fails, a backend by name raises nvrtc.CompilationError, and the default
            warns once and takes "triton".

    Returns:
        o [B, N_q, H, D], contiguous, in the dtype of q.

    Raises:
        TypeError: dtypes that are not supported; the message says which are.
        ValueError: shapes, names or documents that do not fit.
        NotImplementedError: the GPU has no INT8 products, or slow ones; a second derivative, or a transform of
            torch.func.
    """
    refuse_transforms(*_NAMED)
    if (dtype := autocast_dtype(q)) is not None:
        q, k, v = (x.to(dtype) for x in (q, k, v))
    options = settled(q, k, v, causal, scale, smooth_k, cu_seqlens, bounds, window, recipe, backend)
    check_sinks(q, sinks)
    return FORWARD(q, k, v, *options, sinks)[0]


def document_bounds(
    cu_seqlens: Tensor | None, length: int, window: int | None = None, device: torch.device | None = None
) -> Tensor:
    """Return the first key that each token sees, and one past the last query that sees each token, as sage_attention
    takes them: int32 [2, length]. On a GPU the host does not wait.

    Args:
        cu_seqlens: int32 [documents + 1], which rises from 0 to length. None: the row is one document.
        length: the tokens of a row.
        window: the window of sage_attention. None: a token sees its whole document, or that up to itself.
        device: where the bounds are made if cu_seqlens is None.

    Raises:
        ValueError: cu_seqlens or the window are not as described.
    """
    reference.check_window(window)
    if cu_seqlens is None:
        return DOCUMENT_BOUNDS(reference.one_document(length, device), length, window)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens must be int32 [documents + 1], got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        if cu_seqlens[0] != 0 or cu_seqlens[-1] != length or (cu_seqlens.diff() < 0).any():
            raise ValueError(f"cu_seqlens must rise from 0 to {length}, got {cu_seqlens.tolist()}")
    return DOCUMENT_BOUNDS(cu_seqlens, length, window)


def settled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    smooth_k: bool,
    cu_seqlens: Tensor | None,
    bounds: Tensor | None,
    window: int | None,
    recipe: str | None,
    backend: str | None,
) -> Options:
    """Check the arguments of sage_attention but sinks, and return its options, each with its default in the place of
    None."""
    recipe = default_recipe(q.device) if recipe is None else recipe
    check_backend(q, backend)
    if recipe not in RECIPES:
        raise one_of("recipe", recipe, RECIPES)
    apart = bounds is not None and cu_seqlens is None and bounds_apart(q, k, causal, bounds)
    check(q, k, v, causal, cu_seqlens, None if apart else bounds)
    if bounds is not None and window is not None:
        raise ValueError("give bounds or a window, not both: bounds are document_bounds(cu_seqlens, N, window)")
    n_q, n_k = q.shape[1], k.shape[1]
    window = reference.hiding_window(window, n_q, n_k, causal)
    if cu_seqlens is not None or window is not None:
        bounds = document_bounds(cu_seqlens, n_k, window, q.device)
        if n_q != n_k:
            bounds, causal = reference.chunk_bounds(bounds, 1, n_k - n_q, n_q), False
    bounds = None if bounds is None else bounds.contiguous()
    return Options(bounds, causal, scale_of(q, scale), smooth_k, recipe, backend)


def bounds_apart(q: Tensor, k: Tensor, causal: bool, bounds: Tensor) -> bool:
    """Return whether bounds are those of queries and keys that are different tokens (sage_attention)."""
    if causal or q.dim() != 4 or k.dim() != 4 or bounds.shape != (2, q.shape[1] + k.shape[1]) or k.shape[1] == 0:
        return False
    return bounds.dtype == torch.int32 and bounds.device == q.device


def check_backend(q: Tensor, backend: str | None) -> None:
    """Raise ValueError or TypeError if the backend does not exist, or does not take the dtype."""
    if backend is not None and backend not in NAMED:
        raise one_of("backend", backend, NAMED)
    if q.dtype == torch.float32 and (q.is_cuda if backend is None else backend != "twin"):
        name = backend or "GPU"
        raise TypeError(f"the {name} backend takes bfloat16 or float16, got float32 (backend='twin' takes it)")


def scale_of(q: Tensor, scale: float | None) -> float:
    """Return the factor on the scores, D ** -0.5 if none is given. It must be positive and finite."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return scale


def check(q: Tensor, k: Tensor, v: Tensor, causal: bool, cu_seqlens: Tensor | None, bounds: Tensor | None) -> None:
    """Raise TypeError or ValueError on inputs that no backend supports."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, tokens, heads, head_dim], got shape {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device, got q on {q.device} and {name} on {x.device}")
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must have one dtype, got q {q.dtype} and {name} {x.dtype}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q, k and v must be bfloat16, float16 or float32, got {q.dtype}")
    batch, n_q, heads, head_dim = q.shape
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and head_dim")
    if not 16 <= head_dim <= 256:
        raise ValueError(f"head_dim must be from 16 to 256, got {head_dim}")
    n_k, kv_heads = k.shape[1:3]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"the {heads} heads of q must be a multiple of the {kv_heads} heads of k and v")
    if n_k == 0 and n_q > 0:
        raise ValueError("k and v hold no token: softmax over nothing is undefined")
    if causal and n_k < n_q:
        raise ValueError(f"causal attention needs at least as many keys as queries, got {n_k} keys, {n_q} queries")
    if cu_seqlens is None and bounds is None:
        return
    if n_q != n_k or (batch != 1 and cu_seqlens is not None):
        name, rows = ("bounds need", "") if cu_seqlens is None else ("cu_seqlens needs", "batch 1 and ")
        raise ValueError(f"{name} {rows}as many keys as queries, got batch {batch}, {n_q} and {n_k}")
    if cu_seqlens is not None and bounds is not None:
        raise ValueError("give cu_seqlens or bounds, not both: bounds are document_bounds(cu_seqlens, N)")
    if bounds is not None and (bounds.shape != (2, n_q) or bounds.dtype != torch.int32):
        raise ValueError(f"bounds must be int32 [2, {n_q}], got {bounds.dtype} of shape {tuple(bounds.shape)}")
    given = cu_seqlens if bounds is None else bounds
    if given.device != q.device:
        raise ValueError(f"{'cu_seqlens' if bounds is None else 'bounds'} must be on {q.device}, got {given.device}")


def check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    """Raise TypeError or ValueError on sinks that do not fit q."""
    if sinks is None:
        return
    reference.check_shape_of_sinks(q, sinks)
    if sinks.dtype not in DTYPES:
        raise TypeError(f"sinks must be float32, bfloat16 or float16, got {sinks.dtype}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on {q.device}, got {sinks.device}")


# Schemas have no lists (operators.py), so an optional tensor that a call does not use is an empty tensor.
Eight = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def _forward(*arguments) -> Eight:
    """Return (o, lse, q codes, q scale, k codes, k scale, k mean, scores of the sinks), with the shapes of
    call.Saved."""
    call = Call(*arguments)
    if call.q.numel() == 0:
        return _forward_fake(*call)
    o, saved = backends.forward(call)
    observe.forward(call, saved)
    return o, *saved.tensors


def _forward_fake(*arguments) -> Eight:
    call = Call(*arguments)
    o, lse, q_codes = call.empty_results()
    mean = own = None
    if call.sinks is not None:
        batch, _, kv_heads, head_dim = call.k.shape
        mean = lse.new_empty(batch, kv_heads, 1, head_dim) if call.smooth_k else None
        own = torch.empty_like(lse)
    return o, *Saved(lse, q_codes, Codes.empty_for(call.k), mean, own).tensors


def _backward(*arguments) -> Four:
    """Return dq, dk and dv, contiguous, and the gradient of the sinks, which is empty if there are none."""
    given = BackwardArguments(*arguments)
    do, v, of_sinks = given.do, given.v, _empty_of_sinks(given.do, given.sink_scores)
    if do.numel() == 0:  # Without a query, the gradients of keys and values are zeros.
        return *(torch.zeros(x.shape, dtype=v.dtype, device=v.device) for x in (do, v, v)), of_sinks.zero_()
    call = given.call()
    grads = backends.backward(call)
    if call.sink_terms is not None:
        of_sinks = -call.sink_terms.sum((0, 2))
    observe.backward(call, grads)
    return *(grad.contiguous() for grad in grads), of_sinks


def _backward_fake(do: Tensor, v: Tensor, *others) -> Four:
    grads = (torch.empty(x.shape, dtype=v.dtype, device=v.device) for x in (do, v, v))
    return *grads, _empty_of_sinks(do, others[7])


def _empty_of_sinks(do: Tensor, sink_scores: Tensor) -> Tensor:
    """Return memory for the gradient of the sinks. Without sinks the scores are one empty dim, and so is the memory."""
    return do.new_empty(do.shape[2] * (sink_scores.dim() > 1), dtype=torch.float32)


def _document_bounds(cu_seqlens: Tensor, length: int, window: int | None = None) -> Tensor:
    on_gpu = cu_seqlens.is_cuda and length > 0
    return (document_bounds_triton if on_gpu else reference.document_bounds)(cu_seqlens, length, window)


DOCUMENT_BOUNDS = operator(_document_bounds, lambda cu_seqlens, length, window=None: cu_seqlens.new_empty(2, length))
FORWARD = operator(_forward, _forward_fake, Call)
BACKWARD = operator(_backward, _backward_fake, BackwardArguments)


class _Attention(torch.autograd.Function):
    """The operator FORWARD with its derivative."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            outputs = FORWARD(*inputs)
        call, (o, *saved) = Call(*inputs), outputs
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)  # Materialized gradients would be zeros as large as `saved`.
        ctx.save_for_backward(call.v, call.bounds, o, *saved)
        ctx.options = call.causal, call.scale, call.recipe, call.backend
        ctx.of_sinks = None if call.sinks is None else call.sinks.dtype
        return outputs

    @staticmethod
    @differentiated_once(*_NAMED)
    def backward(ctx, do, *_):
        if do is None:
            return (None,) * 10
        v, bounds, *saved = ctx.saved_tensors
        *grads, of_sinks = BACKWARD(do, v, *saved, bounds, *ctx.options)
        return *grads, *(None,) * 6, None if ctx.of_sinks is None else of_sinks.to(ctx.of_sinks)


@torch._disable_dynamo
def _differentiable_forward(*inputs) -> Eight:
    differentiated = (*inputs[:3], *inputs[9:10])  # The dispatcher leaves out sinks that are None.
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiated):
        return _Attention.apply(*inputs)
    with torch._C._AutoDispatchBelowAutograd():  # Compiled code comes this way, and its derivative is compiled too.
        return FORWARD(*inputs)


LIBRARY.impl("forward", _differentiable_forward, "Autograd")
