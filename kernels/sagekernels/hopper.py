"""The backend `hopper`, for an H100 or H200: CUDA kernels by TMA and wgmma for head_dim 64 and 128."""

from . import observe
from .backward import triton_backward
from .call import RECIPES, Backend, BackwardCall, Gradients, Projection, ProjectionGradients, scores_by_token
from .hopper_backward import hopper_backward
from .hopper_forward import SCHEDULES, hopper_forward
from .hopper_projection import hopper_projection
from .qk_norm_rope import projection_gradients


def backward(call: BackwardCall) -> Gradients:
    """Compute the gradients of `scores` by the CUDA kernel, those of `fine` by the portable ones: hopper_backward.py
    says why INT8 gradients have no kernel here."""
    return (triton_backward if RECIPES[call.recipe].int8_gradients else hopper_backward)(call)


def projection(call: BackwardCall, made_from: Projection) -> ProjectionGradients:
    """Compute the gradients behind QK-norm and rotary embedding, those of `fine` in two steps."""
    if not RECIPES[call.recipe].int8_gradients:
        return hopper_projection(call, made_from)
    grads = triton_backward(call)
    observe.backward(call, grads)
    return projection_gradients(grads, made_from)


HOPPER = Backend(
    "hopper",
    serves=lambda capability: capability == (9, 0),
    head_dims=frozenset(SCHEDULES),
    takes=scores_by_token,
    forward=hopper_forward,
    backward=backward,
    projection=projection,
    fastest="scores",
)
