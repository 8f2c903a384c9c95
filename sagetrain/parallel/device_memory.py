"""The memory of GPUs of one host that reach each other, and how their streams meet, by calls of CUDA's driver."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sagetrain.parallel.objects import refused

Step = tuple[int, int, int] | int
"""A copy, by target address, source address and number of bytes, or a meeting in one of the two parts of the pads."""


class PadOperation(NamedTuple):
    """One operation of a meeting, on the word with this place in the pad of a rank."""

    waits: bool
    """Wait until the word has the value. Otherwise write the value."""
    rank: int
    place: int
    value: int


def meeting(rank: int, size: int, parity: int) -> list[PadOperation]:
    """Return what the stream of a rank does at a meeting.

    Meetings take two parts of the pads in turn. Each rank tells the others, waits for them, and takes back what they
    told, so that no number counts up: a CUDA graph repeats a meeting as it was recorded. A rank tells again in the same
    part two meetings later, and has passed the one between only after all others have taken back what it told. So a
    graph holds an even number of meetings, and begins with the first part (tests/parallel/test_copies.py runs all
    interleavings).
    """
    others, first = [other for other in range(size) if other != rank], parity * size
    tell = [PadOperation(False, other, first + rank, 1) for other in others]
    hear = [PadOperation(True, rank, first + other, 1) for other in others]
    return [*tell, *hear, *(PadOperation(False, rank, first + other, 0) for other in others)]


class _Operation(ctypes.Structure):
    """CUDA's CUstreamBatchMemOpParams: a stream writes 32 bits, or waits for this very value (flags of 1)."""

    WAIT, WRITE = 1, 2
    _fields_ = [
        ("kind", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("unused", ctypes.c_uint64 * 2),
    ]


class DeviceMemory:
    """Memory on the GPUs of one host that reach each other.

    CUDA's driver is called directly, because torch's copies, streams and events take the host several times as long.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank, self._own = group, group.rank(), torch.empty(0)
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

    def allocate(self, nbytes: int) -> list[Tensor]:
        """Return new buffers, as Memory.allocate does. The ranks agree that each has its own buffer before they map
        those of the others, because a rank that maps waits for all."""
        torch.cuda.synchronize(self._device)
        own = self._own
        if complaint := refused(self._group, self._reserve, nbytes):
            self._own = own  # What this rank has got is of no use, and is lacking elsewhere.
            raise torch.OutOfMemoryError(
                f"no memory for {nbytes:,} bytes that GPUs of a host copy through: {complaint}"
            )
        return self._map(nbytes)

    def _reserve(self, nbytes: int) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        # Nothing here uses multicast. Setting multicast up can fail, or do worse, on hosts that share their NVSwitches.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        name = self._group.group_name
        self._own = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self._device, name)

    def _map(self, nbytes: int) -> list[Tensor]:
        from torch._C._distributed_c10d import _SymmetricMemory

        self._symmetric = _SymmetricMemory.rendezvous(self._own)
        # Pads start as zeros.
        pads = self._symmetric.signal_pad_ptrs
        meetings = [meeting(self._rank, len(pads), parity) for parity in (0, 1)]
        self._meetings = [_operations(pads, each) for each in meetings]
        heard = [each._replace(waits=False) for both in meetings for each in both if each.waits]
        self._release = _operations(pads, heard)
        return [self._symmetric.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(len(pads))]

    def another(self) -> DeviceMemory:
        """Return another memory of the same group, as Memory.another does."""
        return DeviceMemory(self._group)

    def send(self, steps: Sequence[Step]) -> int:
        """Send copies and meetings, as Memory.send does. All earlier work of the stream is visible to every GPU before
        a meeting's writes."""
        beside = self._beside
        self._record(self._started, self._caller())
        self._wait(beside, self._started, 0)
        for step in steps:
            if isinstance(step, int):
                self._order(beside, self._meetings[step])
            else:
                self._copy(*step, beside)
        event = self._events.pop() if self._events else self._event()
        self._record(event, beside)
        return event

    def wait(self, event: int) -> None:
        """Wait for an event, as Memory.wait does. The stream waits for the last recording before this call, so the
        event can be used again at once."""
        self._wait(self._caller(), event, 0)
        self._events.append(event)

    def release(self) -> None:
        """Release the streams that wait for ranks which do not come. The caller's stream waits for their events and
        goes on as well."""
        self._order(torch.cuda.Stream(self._device).cuda_stream, self._release)

    def _order(self, stream: int, operations: ctypes.Array[_Operation]) -> None:
        self._operate(stream, len(operations), operations, 0)

    def _event(self) -> int:
        event = ctypes.c_void_p()
        self._create(event, 2)  # 2 is the flag CU_EVENT_DISABLE_TIMING
        assert event.value is not None
        return event.value

    def _caller(self) -> int:
        """Return the caller's stream. The caller may be a thread of autograd that has launched nothing yet, so it gets
        a CUDA context first."""
        self._enter(self._context)
        return torch._C._cuda_getCurrentRawStream(self._device.index)


def _operations(pads: Sequence[int], every: Sequence[PadOperation]) -> ctypes.Array[_Operation]:
    """Return operations on the words of the ranks' pads as CUDA takes them."""
    kinds = {True: _Operation.WAIT, False: _Operation.WRITE}
    made = [_Operation(kinds[x.waits], pads[x.rank] + 4 * x.place, x.value, int(x.waits)) for x in every]
    return (_Operation * len(made))(*made)


def _checked(function: Any, *types: type) -> Callable[..., int]:
    """Declare a function of CUDA's driver, and let it raise its errors."""
    function.argtypes, function.errcheck = types, _raise
    checked: Callable[..., int] = function
    return checked


def _raise(error: int, function: Callable[..., int], arguments: tuple[Any, ...]) -> int:
    if error:
        raise RuntimeError(f"{function.__name__}: CUDA error {error}")
    return error
