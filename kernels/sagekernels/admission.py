"""Decide which attention functions may be trusted on this device, and time them.

A fast kernel that is silently wrong (a gradient that stays zero, a shape it was never run on) costs a training run. A
function is therefore used only after it has computed the output and all gradients of the same kind of problem, on the
same device, and they were compared with float64.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .testing import Shape, errors, exact_results, random_inputs, random_sinks, results_of

Attend = Callable[..., Tensor]
"""An attention function: (q [B, N_q, H, D], k, v [B, N_k, H_kv, D], cu_seqlens or None) -> o [B, N_q, H, D]. Where the
shape has a window or sinks, it gets them by these names."""

# The limits are rel-L2 against float64 for standard normal inputs: the values that the recipes reach, with a margin of
# a third or more.
LIMITS = {
    "fine": {"o": 0.016, "dq": 0.025, "dk": 0.025, "dv": 0.022, "dsinks": 0.05},
    "scores": {"o": 0.016, "dq": 0.018, "dk": 0.018, "dv": 0.016, "dsinks": 0.05},
    "paper": {"o": 0.03, "dq": 0.07, "dk": 0.07, "dv": 0.06, "dsinks": 0.1},
}


class Admission(NamedTuple):
    """The verdict on one attention function."""

    passed: bool
    reason: str
    errors: dict[str, float]


def admit(
    attend: Attend,
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    limits: Mapping[str, float] = LIMITS["fine"],
) -> Admission:
    """Run `attend` forward and backward on a small problem like `shape` and compare with float64.

    Heads, head_dim, causality, packing and N_k > N_q are those of `shape`; the number of tokens is small and odd, and a
    window hides some of them. With sinks K has a mean, which a sink has to be shifted by. The function passes when the
    output and every gradient are finite, non-zero in each head, and within `limits` (rel-L2).
    An exception is a failure, with its message as the reason.
    """
    n = min(shape.n_q, 517)
    documents = (n // 3, 1, n - n // 3 - 1, 0) if shape.documents and n >= 3 else shape.documents and (n,)
    small = shape._replace(batch=1, n_q=n, n_k=n + min(shape.n_k - shape.n_q, 130), documents=documents)
    small = small._replace(window=shape.window and min(shape.window, max(1, n // 3)))
    inputs = random_inputs(small, k_mean=2.0 * small.sinks, dtype=dtype, device=device)
    cu_seqlens, options = small.cu_seqlens(device), _options(small, device)
    exact = exact_results(*inputs, causal=small.causal, cu_seqlens=cu_seqlens, **options)
    try:
        ours = results_of(lambda *x, **how: attend(*x, cu_seqlens, **how), *inputs, **options)
    except Exception as problem:  # noqa: BLE001 whatever a backend raises is the reason that it is not used
        return Admission(False, f"{type(problem).__name__}: {problem}", {})
    for name, x in zip(ours._fields, ours, strict=True):
        if not torch.isfinite(x).all():
            return Admission(False, f"{name} is not finite", {})
        if (x.double().square().sum((0, 1, 3) if x.dim() == 4 else ()) == 0).any():
            return Admission(False, f"{name} is zero in some head", {})
    judged = errors(ours, exact)
    worst = {name: e for name, e in judged.items() if e > limits[name]}
    reason = ", ".join(f"{name} off by {e:.4f}, limit {limits[name]}" for name, e in worst.items())
    return Admission(not worst, reason or "admitted", judged)


def seconds_per_step(attend: Attend, shape: Shape, *, dtype: torch.dtype, device: torch.device | str) -> float:
    """Return the median time of forward and backward together at `shape`."""
    inputs = random_inputs(shape, dtype=dtype, device=device)
    cu_seqlens, options = shape.cu_seqlens(device), _options(shape, device)

    def both() -> object:
        return results_of(lambda *x, **how: attend(*x, cu_seqlens, **how), *inputs, **options)

    return median_seconds(both, device)


def _options(shape: Shape, device: torch.device | str) -> dict[str, Any]:
    """Return the window and the sinks of a shape, by name, if it has them."""
    found = {"window": shape.window, "sinks": random_sinks(shape, device=device)}
    return {name: value for name, value in found.items() if value is not None}


_CYCLES = 2e9
"""The cycles of a GPU's clock in a second, roughly. On a slower GPU the sleep is longer than needed."""


def median_seconds(action: Callable[[], object], device: torch.device | str) -> float:
    """Return the median time of several calls; the first ones compile and warm up.

    On a GPU the time is that from the first kernel to the last. The GPU sleeps until the host has launched a call, as
    in a run whose host is ahead. Otherwise the number of launches would decide the times of small calls.
    """
    device, times = torch.device(device), []
    if device.type != "cuda":
        for _ in range(8):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:])
    launching = 0.0
    with torch.cuda.device(device):
        for _ in range(8):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(int(_CYCLES * launching))
            start = time.perf_counter()
            first.record()
            action()
            last.record()
            launching = min(1.5 * (time.perf_counter() - start), 0.1)  # The first call compiles.
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
    return statistics.median(times[3:])
