"""The stress test of `sagetrain doctor --stress`: products and copies whose bits are known, on all GPUs of a host at
once.

Sums of whole numbers below 2^24 are exact in fp32, in any order, so products of such matrices have the bits that the
CPU computes. Products of normal numbers have the bits of the first product, because a kernel gives the same bits each
time. A copy has the bits of its source.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sagetrain.doctor import Check
from sagetrain.parallel.digest import digest

_ROUND = 8
"""The number of times that each piece of work is done before its results are read."""
_SHARE = 0.7
"""The share of a GPU's free memory that copies go through."""
_LARGEST = 31
"""The largest whole number in a matrix: 4096 products of two are below 2^24."""
_SLOW = 0.85
_START, _LATE = 300.0, 60.0
"""Seconds that a GPU may take for its start, and longer than it was told."""
_FIX = "leave this host out, and test the GPU: dcgmi diag -r 3"


@dataclass
class Stressed:
    """The work that a device has done, and the wrong results."""

    device: torch.device
    products: int = 0
    operations: float = 0.0
    """Floating-point and integer operations of the products."""
    seconds: float = 0.0
    """The seconds that the products took."""
    copied: int = 0
    """Bytes."""
    wrong: Counter[str] = field(default_factory=Counter)
    """The number of wrong results by kind."""
    error: str = "no answer in time"
    """The reason why the test did not end; empty: it did."""

    @property
    def rate(self) -> float:
        """The operations of products in a second."""
        return self.operations / max(self.seconds, 1e-9)


def stress_host(seconds: float) -> list[Check]:
    """Test all GPUs of this host at once, or its CPU if torch sees no GPU. Return a check for each."""
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    every = [Stressed(device) for device in gpus or [torch.device("cpu")]]
    size = 4096 if gpus else 128
    # With bf16 sums of bf16, products of whole numbers would be rounded on the way.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    whole = _whole(size)
    neighbours = [*gpus[1:], *gpus[:1]] if len(gpus) > 1 else [None]
    threads = [
        threading.Thread(target=_run, args=(found, seconds, whole, neighbour), daemon=True)
        for found, neighbour in zip(every, neighbours, strict=True)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _START + seconds + _LATE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    middle = median(found.rate for found in every)
    return [_check(found, middle) for found in every]


def _check(found: Stressed, middle: float) -> Check:
    """Return what was found on a device. `middle` is the median of the rates of all devices."""
    name = "CPU"
    if found.device.type == "cuda":
        known: Any = torch.cuda.get_device_properties(found.device)
        name = f"GPU {found.device.index} ({known.name}, GPU-{known.uuid})"
    where = f"{socket.gethostname()}, {name}"
    did = (
        f"{found.products:,} products at {found.rate / 1e12:.3g} tera-operations/s, {found.copied / 1e9:,.1f} GB copied"
    )
    if found.error:
        return Check("stress", where, "bad", f"{found.error}, after {did}", _FIX)
    if found.wrong:
        wrong = ", ".join(f"{number} of {kind}" for kind, number in found.wrong.items())
        return Check("stress", where, "bad", f"wrong bits: {wrong}; {did}", _FIX)
    did += ", no wrong bit"
    if found.rate < _SLOW * middle:
        fix = "its clocks: nvidia-smi -q -d PERFORMANCE,TEMPERATURE"
        return Check("stress", where, "look", f"{did}: {found.rate / middle:.2f} times the host's median", fix)
    if found.device.type == "cpu":
        return Check("stress", where, "look", f"no GPU; {did}", "install an NVIDIA driver")
    return Check("stress", where, "ok", did)


def _run(found: Stressed, seconds: float, whole: Sequence[Tensor], neighbour: torch.device | None) -> None:
    try:
        _stress(found, seconds, whole, neighbour)
        found.error = ""
    # A device that fails is what the test looks for, in whatever way it fails.
    except Exception as error:  # noqa: BLE001
        found.error = f"{type(error).__name__}: {error}".partition("\n")[0]


def _stress(found: Stressed, seconds: float, whole: Sequence[Tensor], neighbour: torch.device | None) -> None:
    """Multiply and copy for some seconds, and compare the bits of all results.

    Args:
        found: takes the results.
        whole: two matrices of whole numbers and their product, on the CPU.
        neighbour: another GPU that copies go through; None: there is none.
    """
    device, on_gpu = found.device, found.device.type == "cuda"
    wait: Callable[[], None] = partial(torch.cuda.synchronize, device) if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.set_device(device)
    work = _products(device, whole)
    blocks = _blocks(device, 2**28 if on_gpu else 2**20)
    first, place, size = blocks[0], 0, len(whole[0])
    expected = digest(first)
    stops = [torch.empty(first.shape, dtype=first.dtype, pin_memory=on_gpu)]
    stops += [torch.empty_like(first, device=neighbour)] if neighbour else []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for kind, multiply, bits in work:
            wait()
            begin = time.perf_counter()
            wrong = int(sum((digest(multiply()) != bits).long() for _ in range(_ROUND)))
            found.seconds += time.perf_counter() - begin
            found.products, found.operations = found.products + _ROUND, found.operations + 2 * size**3 * _ROUND
            found.wrong += Counter({kind: wrong})
        for _ in range(_ROUND):
            source, place = blocks[place], (place + 1) % len(blocks)
            _copy(source, blocks[place])
        # The way leads through the host and through another GPU once a round.
        for stop in stops:
            _copy(blocks[place], stop)
            _copy(stop, blocks[place])
        found.copied += (_ROUND + 2 * len(stops)) * first.nbytes
        found.wrong += Counter({"rounds of copies": int(digest(blocks[place]) != expected)})


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _whole(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return two matrices of whole numbers and their product."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-_LARGEST, _LARGEST + 1, (size, size), generator=draw).float() for _ in range(2))
    return a, b, a @ b


def _products(device: torch.device, whole: Sequence[Tensor]) -> list[tuple[str, Callable[[], Tensor], Tensor]]:
    """Return kinds of products, each with the function that computes one and the hash that it has to have."""
    draw, (*pair, exact) = torch.Generator().manual_seed(0), whole
    normal = [torch.randn(each.shape, generator=draw) for each in pair]

    def there(pair: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a, b = (each.to(device, dtype) for each in pair)
        # Products of 8-bit integers take the second matrix by columns.
        return a, b.t().contiguous().t() if dtype == torch.int8 else b

    work: list[tuple[str, Callable[[], Tensor], Tensor]] = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        multiply = partial(torch.matmul, *there(pair, dtype))
        work.append((f"{name} products of whole numbers", multiply, digest(exact.to(dtype)).to(device)))
        again = partial(torch.matmul, *there(normal, dtype))
        work.append((f"{name} products", again, digest(again())))
    integers = partial(torch._int_mm, *there(pair, torch.int8))
    return [*work, ("INT8 products", integers, digest(exact.to(torch.int32)).to(device))]


def _blocks(device: torch.device, size: int) -> list[Tensor]:
    """Return blocks of `size` bytes, of which the first one has random bits."""
    number = 4
    if device.type == "cuda":
        number = max(2, int(_SHARE * torch.cuda.mem_get_info(device)[0]) // size)
    blocks = [torch.empty(size // 8, dtype=torch.int64, device=device) for _ in range(number)]
    blocks[0].copy_(torch.randint(-(2**63), 2**63 - 1, (size // 8,), generator=torch.Generator().manual_seed(1)))
    return blocks
