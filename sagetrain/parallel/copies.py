"""All-gather and reduce-scatter inside a host by the GPUs' copy engines: they take no multiprocessors from the matmuls.

NCCL's kernels hold multiprocessors that cuBLAS's persistent kernels count on. Here every rank maps the others' memory
(torch's symmetric memory), copies on a stream of its own are all that travels, and ranks meet by values that the
streams themselves write and wait for. What is left to a kernel, on the stream of the caller, is a sum:

| | beside | finish |
|---|---|---|
| all_gather | own shard into the slot and the result; the others' shards, out of their slots | |
| reduce_scatter | own part into the slot; the others' parts, into their slots | the slot summed up |

The sum runs over the ranks in fp32 and is rounded once: its order depends on shapes alone, so that it is deterministic.

The memory has `SLOTS` slots, which collectives take in turn, so that several may be under way. They start in the same
order on every rank (as all collectives must), each meets once before it copies from or to others, and so its meeting
says that all ranks have ended the one before it: a slot that comes round again is nobody's. `finish` is wait_tensor, as
for the functional collectives.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

SLOTS = 3
"""One for each half of a micro-batch, and one for what starts before they are finished."""
_ALIGNMENT = 512  # bytes, of a slot
_TRIAL_SECONDS = 20.0


SentEvent = Any
"""The end of all that had been sent."""


class Memory(Protocol):
    """One buffer of every rank in a group, and the stream beside the caller's on which they are copied.

    What is copied is given by target, source (addresses) and bytes; it has to live until its copy has ended.
    """

    def allocate(self, nbytes: int) -> list[Tensor]:
        """New buffers, uint8 [nbytes] of each rank, once the streams have ended all they were given. Collective."""

    def send(self, steps: Sequence[tuple[int, int, int] | None]) -> SentEvent:
        """Beside, after all that the caller's stream has: copies, and meetings (None), where a rank goes on once all
        are there."""

    def wait(self, event: SentEvent) -> None:
        """Let the caller's stream wait for all that was sent until then. Once: it is used again."""


class _Work(dist.Work):
    """What wait_tensor finds under the result: `done`, then the sum of the slot if there is one."""

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
            # `sent` had to live until now: it was being copied.
            self._done = self._sent = self._result = None
            self._parts = ()
        return True


class Copies:
    """The collectives of one group over a Memory."""

    def __init__(self, rank: int, size: int, memory: Memory) -> None:
        self.rank, self.size, self._memory = rank, size, memory
        self._others = [(rank + step) % size for step in range(1, size)]  # no two ranks go to the same one at once
        self._slot_bytes = self._count = 0
        self._clear([])

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' x (contiguous) along dim 0, on its way."""
        nbytes, memory = x.nbytes, self._memory
        slot = self._take(nbytes * self.size)
        result = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        source, target, place = x.data_ptr(), result.data_ptr(), slot * self._slot_bytes
        steps = [(self._addresses[self.rank] + place, source, nbytes), None]
        steps += [(target + other * nbytes, self._addresses[other] + place, nbytes) for other in self._others]
        steps.append((target + self.rank * nbytes, source, nbytes))
        return self._under_way(result, _Work(memory, memory.send(steps), x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Own part along dim 0 of the sum of x (contiguous) over the group, on its way."""
        if x.shape[0] % self.size:
            raise ValueError(f"dim 0 ({x.shape[0]}) is not a multiple of the group's size ({self.size})")
        nbytes, memory = x.nbytes // self.size, self._memory
        slot = self._take(x.nbytes)
        result = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        source, place = x.data_ptr(), slot * self._slot_bytes + self.rank * nbytes
        steps = [(self._addresses[rank] + place, source + rank * nbytes, nbytes) for rank in (self.rank, *self._others)]
        done = memory.send([None, *steps, None])
        work = self._unread[slot] = _Work(memory, done, x, self._parts(slot, x), result)
        return self._under_way(result, work)

    def _take(self, nbytes: int) -> int:
        """The next slot, at least so large. What it held has been read, or will have been by the caller's stream."""
        if nbytes > self._slot_bytes:
            self._grow(nbytes)
        slot, self._count = self._count % SLOTS, self._count + 1
        self._read(slot)
        return slot

    def _read(self, slot: int) -> None:
        """Sum up what waits in the slot, if its reduce_scatter has not been finished: its place is needed."""
        work, self._unread[slot] = self._unread[slot], None
        if work is not None:
            work.wait()

    def _grow(self, nbytes: int) -> None:
        for slot in range(SLOTS):
            self._read(slot)
        self._slot_bytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        # The others' mappings keep the old buffer alive for what they still copy out of it.
        self._clear(self._memory.allocate(SLOTS * self._slot_bytes))

    def _clear(self, buffers: list[Tensor]) -> None:
        self._buffers, self._addresses = buffers, [buffer.data_ptr() for buffer in buffers]
        self._views: dict[tuple[int, torch.Size, torch.dtype], tuple[Tensor, ...]] = {}
        self._unread: list[_Work | None] = [None] * SLOTS

    def _parts(self, slot: int, x: Tensor) -> tuple[Tensor, ...]:
        """The ranks' parts in own slot, [size, dim 0 / size, ...]; two of them one by one, for torch.sum adds two at
        half the memory's rate. (Kept: the host has little time for launching.)"""
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


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams: a stream writes 32 bits, or waits for them or a later value (flags of 0)."""

    WAIT, WRITE = 1, 2
    _fields_ = [
        ("kind", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("unused", ctypes.c_uint64 * 2),
    ]


class DeviceMemory:
    """Memory on the GPUs of a host that reach each other.

    CUDA's driver is called directly: torch's copies, streams and events take the host several times as long.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank = group, group.rank()
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)
        self._beside = self._stream.cuda_stream
        library, handle, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p, ctypes.c_uint64
        self._copy = _checked(library.cuMemcpyDtoDAsync_v2, address, address, ctypes.c_size_t, handle)
        self._create = _checked(library.cuEventCreate, ctypes.POINTER(handle), ctypes.c_uint)
        self._record = _checked(library.cuEventRecord, handle, handle)
        self._wait = _checked(library.cuStreamWaitEvent, handle, handle, ctypes.c_uint)
        operations = ctypes.POINTER(_Operation)
        self._operate = _checked(library.cuStreamBatchMemOp_v2, handle, ctypes.c_uint, operations, ctypes.c_uint)
        self._enter = _checked(library.cuCtxSetCurrent, handle)
        self._context = handle()
        _checked(library.cuCtxGetCurrent, ctypes.POINTER(handle))(self._context)
        self._events: list[int] = []
        self._started = self._event()
        self._turn = 0

    def allocate(self, nbytes: int) -> list[Tensor]:
        """See Memory."""
        from torch._C._distributed_c10d import _SymmetricMemory

        # Nothing here multicasts, and setting multicast up can fail, or worse, on hosts that share their NVSwitches.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        torch.cuda.synchronize(self._device)
        name = self._group.group_name
        self._own = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self._device, name)
        self._symmetric, self._turn = _SymmetricMemory.rendezvous(self._own), 0
        # At [own rank] of another's pad we write, at [other's rank] of our own we wait. Pads start as zeros.
        pads = self._symmetric.signal_pad_ptrs
        others = [rank for rank in range(len(pads)) if rank != self._rank]
        awaited = [pads[self._rank] + 4 * other for other in others]
        meeting = [_Operation(_Operation.WRITE, pads[other] + 4 * self._rank) for other in others]
        meeting += [_Operation(_Operation.WAIT, address) for address in awaited]
        self._meeting = (_Operation * len(meeting))(*meeting)
        self._release = (_Operation * len(awaited))(*[_Operation(_Operation.WRITE, address) for address in awaited])
        return [self._symmetric.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(len(pads))]

    def send(self, steps: Sequence[tuple[int, int, int] | None]) -> int:
        """See Memory. A meeting's writes come after all that the stream was given before it, for every GPU to see."""
        beside = self._beside
        self._record(self._started, self._caller())
        self._wait(beside, self._started, 0)
        for step in steps:
            if step is None:
                self._turn += 1
                self._order(beside, self._meeting)
            else:
                self._copy(*step, beside)
        event = self._events.pop() if self._events else self._event()
        self._record(event, beside)
        return event

    def wait(self, event: int) -> None:
        """See Memory. (A stream waits for what was recorded when it was told to.)"""
        self._wait(self._caller(), event, 0)
        self._events.append(event)

    def release(self) -> None:
        """Let go on what waits for ranks that do not come: the caller's stream too, by its events."""
        self._order(torch.cuda.Stream(self._device).cuda_stream, self._release)

    def _order(self, stream: int, operations: ctypes.Array[_Operation]) -> None:
        for operation in operations:
            operation.value = self._turn
        self._operate(stream, len(operations), operations, 0)

    def _event(self) -> int:
        event = ctypes.c_void_p()
        self._create(event, 2)  # CU_EVENT_DISABLE_TIMING
        assert event.value is not None
        return event.value

    def _caller(self) -> int:
        """The caller's stream. Its thread may be one of autograd's, which has launched nothing yet: no context then."""
        self._enter(self._context)
        return torch._C._cuda_getCurrentRawStream(self._device.index)


def _checked(function: Any, *types: type) -> Callable[..., int]:
    """A function of CUDA's driver that raises its errors."""
    function.argtypes, function.errcheck = types, _raise
    checked: Callable[..., int] = function
    return checked


def _raise(error: int, function: Callable[..., int], arguments: tuple[Any, ...]) -> int:
    if error:
        raise RuntimeError(f"{function.__name__}: CUDA error {error}")
    return error


connected: dict[str, Copies] = {}
"""By the name of the group: those whose collectives go this way."""
_refused: dict[str, str] = {}


def connect(group: ProcessGroup) -> str:
    """Let the gathers and scatters of a group go this way, between the current devices, if they can.

    Collective: all ranks decide alike. Returns why not (empty: they do), and warns of it, once on every rank.
    """
    name = group.group_name
    if name not in connected and name not in _refused:
        copies: list[Copies] = []
        for step in (_check, _connect, _try):
            _refused[name] = _on_all_ranks(group, step, group, copies)
            if _refused[name]:
                warnings.warn(
                    f"tensor-parallel collectives go through NCCL, which slows the matmuls beside them: "
                    f"{_refused[name]}",
                    stacklevel=2,
                )
                break
        else:
            connected[name] = copies[0]
    return _refused[name]


def forget() -> None:
    """Forget all groups, when torch's process group ends: a later one uses their names again."""
    connected.clear()
    _refused.clear()


def _on_all_ranks(group: ProcessGroup, step: Callable[..., None], *arguments: object) -> str:
    """Take a step; the first rank's complaint."""
    try:
        step(*arguments)
        complaint = ""
    except Exception as error:  # noqa: BLE001 - whatever it is, NCCL is left
        complaint = f"rank {group.rank()}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    complaints = [""] * group.size()
    dist.all_gather_object(complaints, complaint, group=group)
    return next(filter(None, complaints), "")


def _check(group: ProcessGroup, copies: list[Copies]) -> None:
    """What would make the next step fail on some ranks, or wait for ever."""
    boot, own = Path("/proc/sys/kernel/random/boot_id"), torch.cuda.current_device()
    host = (socket.gethostname(), boot.read_text() if boot.exists() else "")
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, (host, own), group=group)
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


def _connect(group: ProcessGroup, copies: list[Copies]) -> None:
    memory = DeviceMemory(group)
    copies.append(Copies(group.rank(), group.size(), memory))
    copies[0]._grow(_ALIGNMENT * group.size())
    if memory._symmetric.multicast_ptr:
        raise RuntimeError("symmetric memory came with multicast, which was switched off")


def _try(group: ProcessGroup, copies: list[Copies]) -> None:
    """Both collectives, more often than there are slots, within a time limit."""
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


# As operators that torch.compile does not look into. Inputs are contiguous, and may be written only when the collective
# is finished. Inductor does not know that: model/compile.ORDERED keeps it from writing over what it has read.
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
