"""All-gather and reduce-scatter inside a host by the GPUs' copy engines. They take no multiprocessors from the matmuls.

NCCL's kernels hold multiprocessors that cuBLAS's persistent kernels count on. Here every rank maps the memory of the
other ranks (torch's symmetric memory), and copies the data on a separate stream. Ranks meet by values that the streams
themselves write and wait for. Only a sum is left to a kernel, on the stream of the caller:

| | separate stream | finish |
|---|---|---|
| all_gather | own shard into the slot and the result; the others' shards, out of their slots | |
| reduce_scatter | the others' parts, into their slots; of more than two ranks the own part too | the parts summed up |

The sum runs over the ranks in fp32 and is rounded once. Its order depends on shapes alone, so that it is deterministic.

The memory has `SLOTS` slots. Collectives take them in turn, so that several collectives may be under way. They start in
the same order on every rank, as all collectives must, and each meets once: an all_gather before it copies from other
ranks, a reduce_scatter behind its copies. A collective sums up the next slot before it meets. So its meeting says that
all ranks have ended the collective before it, and that no rank still uses the slot whose turn comes next: another rank
may write to that slot at once. `finish` is wait_tensor, as for the functional collectives.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sagetrain.parallel.device_memory import DeviceMemory, Step
from sagetrain.parallel.objects import of_every_rank, refused

SLOTS = 3
"""The number of slots: one for each half of a micro-batch, and one for a collective that starts before these are
finished."""
_ALIGNMENT = 512  # the bytes of a slot are a multiple of this
_TRIAL_SECONDS = 20.0


SentEvent = Any
"""An event that marks the end of all copies that had been sent."""


class Memory(Protocol):
    """The symmetric buffers of a group, one buffer for each rank, and the separate stream on which they are copied.

    The tensors of a copy have to live until it has ended.
    """

    def allocate(self, nbytes: int) -> list[Tensor]:
        """Return new buffers, uint8 [nbytes] for each rank, once the streams have ended all earlier work. All ranks
        call it. Raises torch.OutOfMemoryError on all ranks if one has no memory for its buffer."""

    def another(self) -> Memory:
        """Return another memory of the same group."""

    def send(self, steps: Sequence[Step]) -> SentEvent:
        """Run copies and meetings on the separate stream, after all earlier work of the caller's stream. A meeting goes
        on once all ranks have reached it."""

    def wait(self, event: SentEvent) -> None:
        """Let the caller's stream wait for all copies that were sent before the event. An event is waited for once,
        because it is used again."""


class _Work(dist.Work):
    """The work that wait_tensor finds for a result. It waits for `done`, then sums up the slot of a reduce_scatter."""

    __slots__ = ("_done", "_memory", "_parts", "_result", "_sent")

    def __init__(
        self,
        memory: Memory,
        done: SentEvent,
        sent: Tensor,
        parts: tuple[Tensor, ...] = (),
        result: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._memory, self._done = memory, done
        self._sent: Tensor | None = sent
        self._parts, self._result = parts, result

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._done is not None:
            self._memory.wait(self._done)
            if len(self._parts) == 2:
                torch.add(*self._parts, out=self._result)
            elif self._parts:
                torch.sum(self._parts[0], 0, out=self._result)
            # The copies have read `sent`, which had to live until now.
            self._done = self._sent = self._result = None
            self._parts = ()
        return True


class Copies:
    """The collectives of one group over a Memory with this number of slots. Gathers alone need two."""

    def __init__(self, rank: int, size: int, memory: Memory, slots: int = SLOTS) -> None:
        self.rank, self.size, self._memory, self._slots = rank, size, memory, slots
        # The order differs between ranks, so that no two ranks copy from or to the same rank at once.
        self._others = [(rank + step) % size for step in range(1, size)]
        self._slot_bytes = self._count = self._met = 0
        self._clear([])

    def all_gather(self, x: Tensor) -> Tensor:
        """Start to gather the ranks' x along dim 0. x is contiguous."""
        # A slot for the sum of as much is as large.
        slot = self._take(x.nbytes * self.size)
        result = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return self._under_way(result, _Work(self._memory, self._gather(slot, x, result), x))

    def gather_into(self, result: Tensor, x: Tensor) -> None:
        """Gather the ranks' x into result, and let the caller's stream wait for it. Both are contiguous. x may be this
        rank's part of result."""
        self._memory.wait(self._gather(self._take(x.nbytes), x, result))

    def _gather(self, slot: int, x: Tensor, result: Tensor) -> SentEvent:
        nbytes, source, place = x.nbytes, x.data_ptr(), slot * self._slot_bytes
        target = result.data_ptr()
        own = target + self.rank * nbytes
        steps: list[Step] = [(self._addresses[self.rank] + place, source, nbytes), self._next_meeting()]
        steps += [(target + other * nbytes, self._addresses[other] + place, nbytes) for other in self._others]
        steps += [(own, source, nbytes)] if own != source else []
        return self._memory.send(steps)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Start to sum x over the group and keep this rank's part along dim 0. x is contiguous. Raises ValueError if
        the size of the group does not divide dim 0."""
        if x.shape[0] % self.size:
            raise ValueError(f"dim 0 ({x.shape[0]}) is not a multiple of the group's size ({self.size})")
        nbytes, memory = x.nbytes // self.size, self._memory
        slot = self._take(x.nbytes)
        result = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        source, place = x.data_ptr(), slot * self._slot_bytes + self.rank * nbytes
        parts, ranks = self._parts(slot, x), self._others
        if self.size == 2:
            parts = x.narrow(0, self.rank * len(result), len(result)), parts[ranks[0]]
        else:
            ranks = [self.rank, *ranks]
        steps = [(self._addresses[rank] + place, source + rank * nbytes, nbytes) for rank in ranks]
        done = memory.send([*steps, self._next_meeting()])
        work = self._unread[slot] = _Work(memory, done, x, parts, result)
        return self._under_way(result, work)

    def another_memory(self) -> Memory:
        """Return another memory of the same ranks, with a stream of its own."""
        return self._memory.another()

    def align(self) -> None:
        """Let the next meeting be one in the first part of the pads, as in a recording."""
        if self._met:
            self._meet()

    @contextmanager
    def repeatable(self) -> Iterator[None]:
        """Let the collectives inside of the context be the same each time they follow `align`, so that a recording of
        them can be repeated, on any rank. All ranks call it."""
        # No rank uses a slot any more behind a meeting, whichever was the last one.
        self._read_all()
        self._meet()
        self._count = 0
        yield
        self._meet()
        self.align()

    @property
    def addresses(self) -> list[int]:
        """The places of the ranks' buffers. A recording copies from and to these."""
        return self._addresses

    def interrupt(self) -> None:
        """Forget the collectives of a recording that was not ended. It had begun behind `align`."""
        self._forget_unread()
        self._met = 0

    def _meet(self) -> None:
        self._memory.wait(self._memory.send([self._next_meeting()]))

    def _next_meeting(self) -> int:
        met, self._met = self._met, 1 - self._met
        return met

    def _take(self, nbytes: int) -> int:
        """Return the next slot, grown to at least `nbytes`. The caller's stream reads the old content of the slot after
        it, to which other ranks write behind the next meeting."""
        if nbytes > self._slot_bytes:
            self._grow(nbytes)
        slot, self._count = self._count % self._slots, self._count + 1
        self._read(self._count % self._slots)
        return slot

    def _read(self, slot: int) -> None:
        """Sum up the slot now if its reduce_scatter has not been finished, because the slot is needed."""
        work, self._unread[slot] = self._unread[slot], None
        if work is not None:
            work.wait()

    def _read_all(self) -> None:
        for slot in range(self._slots):
            self._read(slot)

    def _grow(self, nbytes: int) -> None:
        self._read_all()
        slot_bytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        # Other ranks may still copy out of the old buffer. Their mappings keep it alive.
        self._clear(self._memory.allocate(self._slots * slot_bytes))
        self._slot_bytes = slot_bytes
        self._met = 0  # The pads are new as well.

    def _clear(self, buffers: list[Tensor]) -> None:
        self._buffers, self._addresses = buffers, [buffer.data_ptr() for buffer in buffers]
        self._views: dict[tuple[int, torch.Size, torch.dtype], tuple[Tensor, ...]] = {}
        self._forget_unread()

    def _forget_unread(self) -> None:
        self._unread: list[_Work | None] = [None] * self._slots

    def _parts(self, slot: int, x: Tensor) -> tuple[Tensor, ...]:
        """Return the ranks' parts in this rank's slot, one tensor [size, dim 0 / size, ...], or two tensors for two
        ranks.

        torch.sum adds two parts at half the memory's rate, so two parts are added one by one. The views are kept
        because the host has little time for launching.
        """
        key, start = (slot, x.shape, x.dtype), slot * self._slot_bytes
        if key not in self._views:
            whole = self._buffers[self.rank][start : start + x.nbytes].view(x.dtype)
            parts = whole.view(self.size, x.shape[0] // self.size, *x.shape[1:])
            self._views[key] = parts.unbind() if self.size == 2 else (parts,)
        return self._views[key]

    @staticmethod
    def _under_way(result: Tensor, work: _Work) -> Tensor:
        torch._C._distributed_c10d._register_work(result, work)
        return result


connected: dict[str, Copies] = {}
"""The groups whose collectives go by copy engines, keyed by the name of the group."""
_refused: dict[str, str] = {}


def connect(group: ProcessGroup, slots: int = SLOTS) -> str:
    """Let the gathers and scatters of a group go by copy engines, between the current devices, if they can, with this
    number of slots. All ranks call it and decide alike. Return the reason why the group stays with NCCL, or an empty
    string."""
    name = group.group_name
    if name not in connected and name not in _refused:
        copies: list[Copies] = []
        for step in (_check, partial(_open, slots), _map, _try):
            _refused[name] = refused(group, step, group, copies)
            if _refused[name]:
                break
        else:
            connected[name] = copies[0]
    return _refused[name]


def memory_of(group: ProcessGroup) -> Memory | None:
    """Return a new memory of a group whose collectives go by copy engines, or None."""
    by_copies = connected.get(group.group_name)
    return by_copies.another_memory() if by_copies else None


def forget() -> None:
    """Forget all groups when torch's process group ends, because a later process group uses their names again."""
    connected.clear()
    _refused.clear()


def _check(group: ProcessGroup, copies: list[Copies]) -> None:
    """Raise RuntimeError for whatever would make the next step fail on some ranks, or wait for ever: the ranks are on
    several hosts, or their GPUs cannot reach each other, or torch's symmetric memory is not CUDA's."""
    boot, own = Path("/proc/sys/kernel/random/boot_id"), torch.cuda.current_device()
    host = (socket.gethostname(), boot.read_text() if boot.exists() else "")
    places = of_every_rank((host, own), group)
    from torch.distributed import _symmetric_memory

    if len({host for host, _ in places}) > 1:
        raise RuntimeError("the group spans several hosts")
    if len(set(places)) < len(places):
        raise RuntimeError("the ranks' GPUs have the same number, so each sees no other's")
    for _, other in places:
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            raise RuntimeError(f"GPU {own} cannot reach GPU {other}")
    backend = _symmetric_memory.get_backend(torch.device("cuda", own))
    if backend != "CUDA":
        raise RuntimeError(f"torch's symmetric memory is set to {backend}, not CUDA")


def _open(slots: int, group: ProcessGroup, copies: list[Copies]) -> None:
    """Open what a rank needs by itself. A rank that cannot must say so before the others wait for it to map memory."""
    copies.append(Copies(group.rank(), group.size(), DeviceMemory(group), slots))


def _map(group: ProcessGroup, copies: list[Copies]) -> None:
    """Map the memory of all ranks, each of which waits for the others."""
    copies[0]._grow(_ALIGNMENT * group.size())
    memory = copies[0]._memory
    assert isinstance(memory, DeviceMemory)
    if memory._symmetric.multicast_ptr:
        raise RuntimeError("symmetric memory came with multicast, which was switched off")


def _try(group: ProcessGroup, copies: list[Copies]) -> None:
    """Run both collectives more often than there are slots, within a time limit. Raises RuntimeError if the trial did
    not end in time, or gave wrong values."""
    size, rank, own = group.size(), group.rank(), copies[0]
    each = torch.arange(size, device="cuda", dtype=torch.float32)
    gathered = [own.all_gather(each[rank : rank + 1] + i) for i in range(2 * SLOTS)]
    summed = [own.reduce_scatter(each + i) for i in range(2 * SLOTS)]
    memory, deadline = own._memory, time.monotonic() + _TRIAL_SECONDS
    assert isinstance(memory, DeviceMemory)
    while not memory._stream.query():
        if time.monotonic() > deadline:
            memory.release()
            raise RuntimeError(f"a trial did not end in {_TRIAL_SECONDS:.0f} s")
        time.sleep(0.001)
    finish = torch.ops._c10d_functional.wait_tensor
    right = [torch.equal(finish(x), each + i) for i, x in enumerate(gathered)]
    right += [torch.equal(finish(x), size * (each[rank : rank + 1] + i)) for i, x in enumerate(summed)]
    if not all(right):
        raise RuntimeError("a trial gave wrong values")


# The collectives are operators, so that torch.compile does not look into them. Inputs are contiguous, and may be
# written only when the collective is finished. Inductor does not know that: model/compile.ORDERED keeps it from writing
# over an input too early.
_library = torch.library.Library("sagetrain", "DEF")
for _name in ("all_gather", "reduce_scatter"):
    _library.define(f"{_name}(Tensor x, int size, str group) -> Tensor")


@torch.library.impl(_library, "all_gather", "CompositeExplicitAutograd")
def _all_gather(x: Tensor, size: int, group: str) -> Tensor:
    return connected[group].all_gather(x)


@torch.library.impl(_library, "reduce_scatter", "CompositeExplicitAutograd")
def _reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    return connected[group].reduce_scatter(x)


@torch.library.register_fake("sagetrain::all_gather", lib=_library)  # type: ignore[untyped-decorator]
def _all_gather_fake(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty((size * x.shape[0], *x.shape[1:]))


@torch.library.register_fake("sagetrain::reduce_scatter", lib=_library)  # type: ignore[untyped-decorator]
def _reduce_scatter_fake(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))
