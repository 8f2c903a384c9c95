"""The backend `hopper`: CUDA kernels where they take a call, the portable kernels for everything else."""

import functools
import warnings
from collections.abc import Callable

from torch import Tensor

from . import nvrtc
from .backward import triton_backward
from .forward import triton_forward
from .reference import Saved


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    smooth_k: bool,
    smooth_q: bool,
    bounds: Tensor | None,
    recipe: str,
) -> tuple[Tensor, Saved]:
    """reference.twin_forward: same arguments, same results up to the order of float32 sums."""
    from .hopper_forward import hopper_forward, supported

    taken = supported(q, k, smooth_q=smooth_q, recipe=recipe)
    run = hopper_forward if taken else triton_forward
    return run(q, k, v, causal=causal, scale=scale, smooth_k=smooth_k, smooth_q=smooth_q, bounds=bounds, recipe=recipe)


def backward(
    do: Tensor,
    k: Tensor | None,
    v: Tensor,
    o: Tensor,
    saved: Saved,
    *,
    causal: bool,
    scale: float,
    bounds: Tensor | None,
    recipe: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """reference.twin_backward: same arguments, same results up to the order of float32 sums."""
    from .hopper_backward import hopper_backward, supported

    taken = supported(do, v, saved, recipe=recipe)
    run = hopper_backward if taken else triton_backward
    return run(do, k, v, o, saved, causal=causal, scale=scale, bounds=bounds, recipe=recipe)


_failures: list[nvrtc.CompilationError] = []  # of this process, at most one


def _or_portable(run: Callable, portable: Callable) -> Callable:
    """`run` until NVRTC fails: from then on `portable`, after one warning."""

    @functools.wraps(run)
    def _either(*arguments, **options):
        if not _failures:
            try:
                return run(*arguments, **options)
            except nvrtc.CompilationError as failure:
                _failures.append(failure)
                warnings.warn(f"sagekernels uses its slower portable kernels: {failure}", RuntimeWarning, stacklevel=2)
        return portable(*arguments, **options)

    return _either


# What runs on an H100 or H200 unless another backend is named.
DEFAULT = (_or_portable(forward, triton_forward), _or_portable(backward, triton_backward))
