"""The backend `hopper`, for an H100 or H200: CUDA kernels by TMA and wgmma for head_dim 64 and 128."""

from . import hopper_backward as of_backward
from . import hopper_forward as of_forward
from . import nvrtc, quantize_keys
from .backward import triton_backward
from .call import RECIPES, Backend, BackwardCall, Gradients, scores_by_token
from .hopper_backward import hopper_backward
from .hopper_forward import ARCHITECTURE, SCHEDULES, hopper_forward
from .hopper_projection import hopper_projection


def backward(call: BackwardCall) -> Gradients:
    """Compute the gradients of `scores` by the CUDA kernel, those of `fine` by the portable ones: hopper_backward.py
    says why INT8 gradients have no kernel here."""
    return (triton_backward if RECIPES[call.recipe].int8_gradients else hopper_backward)(call)


def begin(head_dim: int, smooth: bool, bounds: bool, sinks: bool, half: bool) -> None:
    """Begin to compile the CUDA kernels of both passes of `scores`, the slowest ones first. A backward pass in clusters
    is compiled by its first call, in 0.7 s, because the batch and the length decide about it."""
    nvrtc.begin(of_forward.SOURCE, of_forward.defines_of(head_dim, True, bounds, half, sinks), ARCHITECTURE)
    nvrtc.begin(of_backward.SOURCE, of_backward.defines_of(head_dim, half), ARCHITECTURE)
    nvrtc.begin(quantize_keys.SOURCE, quantize_keys.defines_of(head_dim, smooth, half), ARCHITECTURE)


HOPPER = Backend(
    "hopper",
    serves=lambda capability: capability == (9, 0),
    head_dims=frozenset(SCHEDULES),
    takes=scores_by_token,
    forward=hopper_forward,
    backward=backward,
    projection=hopper_projection,
    fastest="scores",
    begin=begin,
)
