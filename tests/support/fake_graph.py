"""A CUDA graph for CPUs. It records the operators of a function once, and replays them without the function's Python,
in the memory of the recording, which is poisoned before.

What a real capture would do wrong in silence, or end with an opaque error, is a named error or a wrong number here:

- `item()`, `bool(tensor)` and `nonzero` raise HostRead at the recording, with the line.
- A tensor from outside whose memory is gone or has moved raises Stale at the replay, with its shape and first reader.
- Memory of the recording that is read before it is written holds NaN, or the integer -1.
- Python that has an effect has none in a replay, so the caller's numbers are wrong.
- What the function does while it is recorded is undone, as a capture runs nothing.
- `differences` finds the numbers that two recordings hold.

Collectives of gloo are recorded as operators. Compiled code cannot be recorded: torch.compile leaves out every function
that it meets under a dispatch mode, and with `fullgraph` that is an error then and ever after.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from sagetrain.parallel import copies

_READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
_EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


class HostRead(RuntimeError):
    """The host reads a value of the device while a recording is made."""


class Stale(RuntimeError):
    """A recording reads memory that is gone."""


def _where() -> str:
    """Return the line of this project that runs. `traceback.extract_stack` would look each file of the stack up."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/sagetrain/" in path or "/sagekernels/" in path:
            return f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _in_a_collective() -> bool:
    """Return whether torch.distributed waits for a collective, which calls operators of its own."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "/torch/_" in frame.f_code.co_filename:
        frame = frame.f_back  # a wrapper around __torch_dispatch__
    return frame.f_code.co_filename.endswith("/distributed_c10d.py")


class _Place:
    """A tensor of the program: a strided view of a storage, which belongs to the recording or to somebody else."""

    def __init__(self, graph: FakeGraph, x: Tensor) -> None:
        storage = x.untyped_storage()
        self.key, self.graph, self.reader = storage._cdata, graph, _where()
        self.view = x.storage_offset(), tuple(x.shape), x.stride()
        self.dtype = x.dtype
        self.outside = None
        if self.key not in graph.pool:
            known = graph.outside.get(self.key)
            if known is None or known[0].expired():
                graph.outside[self.key] = StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()
                graph._before[self.key] = storage.clone()
            self.outside = graph.outside[self.key]

    def tensor(self) -> Tensor:
        storage = self.graph.pool.get(self.key)
        if self.outside is not None:
            reference, address, size = self.outside
            storage = None if reference.expired() else UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None or storage.data_ptr() != address or storage.nbytes() != size:
                what = f"{self.dtype} {list(self.view[1])}, first read at {self.reader}"
                raise Stale(f"{what}, was freed or has moved since the recording")
        assert storage is not None
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.view)

    def told(self, order: dict[int, int]) -> tuple[Any, ...]:
        """Describe the tensor in a way that does not depend on addresses."""
        return self.outside is None, order.setdefault(self.key, len(order)), self.view, self.dtype


class _Call(NamedTuple):
    operator: Any
    arguments: list[Any]
    form: Any
    made: list[_Place | None]
    line: str


class FakeGraph(TorchDispatchMode):
    """The operators that ran in the context."""

    def __init__(self) -> None:
        super().__init__()
        self.program: list[_Call] = []
        self.pool: dict[int, UntypedStorage] = {}
        self.outside: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._before: dict[int, UntypedStorage] = {}
        self.under_way: list[Any] = []
        """The events that nobody has waited for yet."""
        self.constants: list[str] = []
        """The lines that make tensors of the host's numbers, which a replay would not make again."""

    @classmethod
    def of(cls, function: Callable[[], None]) -> FakeGraph:
        """Record a function. The tensors from outside have the values from before behind it."""
        graph = cls()
        try:
            with graph:
                function()
            assert not graph.under_way, "a recording ends before its copies"
        finally:
            for key, values in graph._before.items():
                reference, _, _ = graph.outside[key]
                if not reference.expired():
                    UntypedStorage._new_with_weak_ptr(reference.cdata).copy_(values)
        return graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace != "c10d" and _in_a_collective():
            return func(*args, **(kwargs or {}))  # Gloo's own copies in `wait` come with the collective again.
        if name in _READS:
            raise HostRead(f"{func} at {_where()}: the host waits for a value of the device")
        flat, form = tree_flatten((args, kwargs or {}))
        if name == "lift_fresh":
            self.constants.append(_where())
        arguments = [_Place(self, x) if isinstance(x, Tensor) else x for x in flat]
        before = {x.untyped_storage()._cdata for x in flat if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        made: list[_Place | None] = []
        for x in tree_flatten(out)[0]:
            fresh = isinstance(x, Tensor) and x.untyped_storage()._cdata not in before
            if fresh:
                self.pool[x.untyped_storage()._cdata] = x.untyped_storage()
            made.append(_Place(self, x) if fresh else None)
        if any(made) or func._schema.is_mutable or func.namespace == "c10d":
            self.program.append(_Call(func, arguments, form, made, _where()))
        return out

    def poison(self) -> None:
        """Spoil what the memory of the recording holds."""
        for storage in self.pool.values():
            if storage.nbytes():
                torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).fill_(255)

    @torch.autocast("cpu", enabled=False)  # The recording holds what autocast made of the operators.
    def replay(self) -> None:
        """Run the operators once more, on what the tensors from outside hold now."""
        self.poison()
        for operator, arguments, form, made, _ in self.program:
            if operator.overloadpacket.__name__ in {*_EMPTY, "wait_tensor"}:
                continue
            args, kwargs = tree_unflatten([x.tensor() if isinstance(x, _Place) else x for x in arguments], form)
            out = operator(*args, **kwargs)
            for x, place in zip(tree_flatten(out)[0], made, strict=True):
                if place is None:
                    if hasattr(x, "wait") and not isinstance(x, Tensor):
                        x.wait()
                    continue
                if operator.namespace == "_c10d_functional":
                    x = torch.ops._c10d_functional.wait_tensor(x)
                place.tensor().copy_(x)


class Counted:
    """A function that records (sagekernels.graphs.Record), and counts its recordings, their replays, and pools."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.pools = 0

    def __call__(self, function: Callable[[], None]) -> Any:
        return self.pool()(function)

    def pool(self) -> Callable[[Callable[[], None]], Any]:
        """Return a function that records in a pool of its own. A replay spoils all memory of its pool."""
        graphs, outer = list[FakeGraph](), self
        self.pools += 1

        def record(function: Callable[[], None]) -> Any:
            graph = FakeGraph.of(function)
            graphs.append(graph)
            outer.recorded += 1

            class Recording:
                def replay(self) -> None:
                    outer.replayed += 1
                    for other in graphs:
                        other.poison()
                    graph.replay()

            return Recording()

        return record


class CopiedMemory:
    """A memory of files that all ranks map (copies.Memory). Its copies and meetings are operators, which a FakeGraph
    records. An event is waited for where it was made: inside of the same recording, or outside of all."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._word = group, torch.zeros(1)
        self._parts: dict[tuple[int, int], Tensor] = {}

    def allocate(self, nbytes: int) -> list[Tensor]:
        folder: list[Any] = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder, group=self._group, group_src=0)
        files = [f"{folder[0]}/{rank}" for rank in range(self._group.size())]
        torch.from_file(files[self._group.rank()], shared=True, size=nbytes, dtype=torch.uint8).fill_(255)
        dist.barrier(self._group)
        return [torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8) for file in files]

    def another(self) -> CopiedMemory:
        return CopiedMemory(self._group)

    def send(self, steps: Sequence[Any]) -> Any:
        for step in steps:
            if isinstance(step, int):
                dist.all_reduce(self._word, group=self._group)
            else:
                target, source, nbytes = step
                self._part(target, nbytes).copy_(self._part(source, nbytes))
        event = SimpleNamespace(inside=_get_current_dispatch_mode())
        if event.inside:
            event.inside.under_way.append(event)
        return event

    def wait(self, event: Any) -> None:
        assert event.inside is _get_current_dispatch_mode(), "a recording waits for what was sent outside of it"
        if event.inside:
            event.inside.under_way.remove(event)

    def _part(self, address: int, nbytes: int) -> Tensor:
        if (address, nbytes) not in self._parts:
            place = (ctypes.c_uint8 * nbytes).from_address(address)
            self._parts[address, nbytes] = torch.frombuffer(place, dtype=torch.uint8)
        return self._parts[address, nbytes]


def copy_between(group: ProcessGroup) -> None:
    """Let the ranks of a group copy from and to each other's memory."""
    copies.connected[group.group_name] = copies.Copies(group.rank(), group.size(), CopiedMemory(group), slots=2)


def differences(a: FakeGraph, b: FakeGraph) -> list[str]:
    """Return where two recordings differ, up to the first place where they part: line, operator and both values."""
    found: list[str] = []
    left: dict[int, int] = {}
    right: dict[int, int] = {}
    for p, q in zip(a.program, b.program, strict=False):
        if p.operator is not q.operator:
            return [*found, f"{p.line}: {p.operator}, or {q.operator} at {q.line}"]
        for x, y in zip(p.arguments, q.arguments, strict=True):
            one = x.told(left) if isinstance(x, _Place) else x
            other = y.told(right) if isinstance(y, _Place) else y
            if one != other and not (isinstance(one, type(other)) and repr(one) == repr(other)):
                found.append(f"{p.line}: {p.operator} of {one}, or {other}")
    if len(a.program) != len(b.program):
        found.append(f"{len(a.program)} operators, or {len(b.program)}")
    return found
