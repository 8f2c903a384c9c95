"""The ordered list of backends, and the choice of the one that runs a call."""

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from . import observe
from .backward import triton_backward
from .call import RECIPES, Backend, BackwardCall, Call, Gradients, Projection, ProjectionGradients, Saved
from .forward import triton_forward
from .hopper import HOPPER
from .launch import capability
from .mma import MMA
from .nvrtc import CompilationError
from .qk_norm_rope import projection_gradients
from .reference import twin_backward, twin_forward

ANY_HEAD_DIM = range(16, 257)
TRITON = Backend(
    "triton", lambda found: found > (0, 0), ANY_HEAD_DIM, lambda call: True, triton_forward, triton_backward
)
TWIN = Backend("twin", lambda found: True, ANY_HEAD_DIM, lambda call: True, twin_forward, twin_backward)

BACKENDS = (HOPPER, MMA, TRITON, TWIN)
"""A call that names no backend goes to the first of these that serves its GPU and takes it."""
NAMED = {backend.name: backend for backend in reversed(BACKENDS)}
"""The backends that a call may name. TRITON computes what a named one does not take."""

_failed: set[str] = set()
"""The names of the backends whose kernels NVRTC did not compile in this process."""

_Result = TypeVar("_Result")


def forward(call: Call) -> tuple[Tensor, Saved]:
    """Run the forward pass of a call, as reference.twin_forward specifies it."""
    return _run(call, lambda backend: backend.forward(call))


def backward(call: BackwardCall) -> Gradients:
    """Run the backward pass of a call, as reference.twin_backward specifies it."""
    return _run(call, lambda backend: backend.backward(call))


def projection(call: BackwardCall, made_from: Projection) -> ProjectionGradients:
    """Run the backward pass of a call and then that of the QK-norm and rotary embedding that made its q and k: in fewer
    passes over memory where the backend has kernels for that, and otherwise one after the other."""

    def run(backend: Backend) -> ProjectionGradients:
        if backend.projection is not None and not RECIPES[call.recipe].int8_gradients:
            return backend.projection(call, made_from)
        grads = backend.backward(call)
        observe.backward(call, grads)
        return projection_gradients(grads, made_from)

    return _run(call, run)


def _run(call: Call | BackwardCall, run: Callable[[Backend], _Result]) -> _Result:
    """Run the first backend that takes the call. A compilation that fails is an error for a backend by name;
    otherwise there is one warning, and the next one in the list takes over."""
    *specialized, last = BACKENDS if call.backend is None else (NAMED[call.backend], TRITON)
    found, head_dim = capability(call.v.device), call.v.shape[3]
    for backend in specialized:
        if not (backend.serves(found) and head_dim in backend.head_dims and backend.takes(call)):
            continue
        if call.backend is not None:
            return run(backend)
        if backend.name not in _failed:
            try:
                return run(backend)
            except CompilationError as failure:
                _failed.add(backend.name)
                message = f"sagekernels does without its {backend.name} kernels, slower ones take over: {failure}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
    return run(last)


def default_recipe(device: torch.device) -> str:
    """Return the recipe that sage_attention takes on a device when none is named: the fastest that is level with 16-bit
    attention in loss, and `fine` where none was measured to be."""
    return next(backend for backend in BACKENDS if backend.serves(capability(device))).fastest or "fine"


# The function must be a constant to torch.compile, which would look into a cache. This mark is all that
# torch.compiler.assume_constant_result sets, but that function imports the compiler, for a second.
default_recipe._dynamo_marked_constant = True  # type: ignore[attr-defined]


def serving(found: tuple[int, int], head_dim: int) -> Backend:
    """Return the first backend that serves GPUs of a compute capability and has kernels for heads of this size."""
    return next(backend for backend in BACKENDS if backend.serves(found) and head_dim in backend.head_dims)
