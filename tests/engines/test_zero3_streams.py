"""ZeRO 3 with overlap_comm, its default: the host launches ahead of the GPU.

DeepSpeed has only a few gathers under way and waits for the first of them. If that wait were on the stream of the
kernels, the host would wait for all launched kernels, several times in a block.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

import torch

import tiny
from distributed import run_distributed


class Stream:
    """A stream that does nothing and counts the waits for it."""

    waits: collections.Counter[str] = collections.Counter()

    def __init__(self, name: str = "another"):
        self.name = name

    def wait_stream(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        Stream.waits[self.name] += 1


KERNELS, DEVICE = Stream("kernels"), Stream("device")
CURRENT = [KERNELS]


class Event:
    """An event of a GPU that is far behind."""

    def record(self) -> None:
        self.stream = CURRENT[-1]

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.stream.synchronize()


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    CURRENT.append(stream)
    yield
    CURRENT.pop()


def waits(persistent: int) -> dict[str, int]:
    """Count the host's waits by stream, in one step of two micro-batches. DeepSpeed is made to think that there are
    streams."""
    from deepspeed.accelerator import get_accelerator

    groups = tiny.join(1)
    accelerator = type(get_accelerator())
    for name in ("is_synchronized_device", "handles_memory_backpressure", "resolves_data_dependency"):
        setattr(accelerator, name, lambda self: False)
    accelerator.Stream, accelerator.Event = property(lambda self: Stream), property(lambda self: Event)
    accelerator.default_stream = lambda self: KERNELS
    accelerator.current_stream = lambda self: CURRENT[-1]
    accelerator.stream = lambda self, stream: on(stream)
    accelerator.synchronize = lambda self, device=None: DEVICE.synchronize()
    torch.Tensor.record_stream = lambda self, stream: None
    zero = {"stage3_param_persistence_threshold": persistent, "stage3_max_reuse_distance": 0}
    engine = tiny.engine(tiny.config(3, "bf16", deepspeed={"zero_optimization": zero}), groups)
    for step in range(3):  # DeepSpeed learns the order of its modules in the first steps.
        Stream.waits.clear()
        tiny.global_step(engine, step)
    return dict(Stream.waits)


def test_the_host_does_not_wait_for_kernels() -> None:
    for found in run_distributed(waits, 2, 100):
        assert found["another"] > 20  # The gathers wait on this stream, so the counting is at work.
        assert found.get("kernels", 0) == 0, found


def test_the_first_gather_comes_after_the_update() -> None:
    """The streams of the gather and of the update do not know of each other. DeepSpeed waits only where it keeps
    weights gathered."""
    for found in run_distributed(waits, 2, 0):
        assert found["device"] >= 1
