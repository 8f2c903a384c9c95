"""CUDA graphs: what a function launches is recorded once, and replayed without the host's work for each launch."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import nn
from torch.nn.modules import module as hooks_of_all

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# transformers registers this one for recomputation. It lets a result require gradients, which a recording keeps.
_HARMLESS = "make_inputs_require_grads"


class Recording(Protocol):
    """The launches of a function, on memory that stays where it was."""

    def replay(self) -> None:
        """Launch all of it once more on the current stream."""
        ...


Record = Callable[[Callable[[], None]], Recording]
"""A function that records what another function launches. Nothing of it runs meanwhile."""


class Pool:
    """The memory of recordings. Their replays must come one after the other, and may leave results only in tensors from
    outside of the recordings."""

    def __init__(self) -> None:
        _pools.add(self)
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        # An invalid capture may still be known to the allocator, so its object is never freed.
        self._failed: list[torch.cuda.CUDAGraph] = []
        self._stream: torch.cuda.Stream | None = None

    def record(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record what a function launches on the current stream, which is not the default stream. Raises the function's
        own error, or CUDA's if the function does what cannot be captured.

        The function has run before on this stream: kernels are compiled and workspaces allocated then, which is not
        possible while a graph is captured.
        """
        if not self._graphs:
            # The allocator of pinned memory has ended a pool with its last graph, and refuses to begin it again.
            self._handle = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with no_collection():
            # Threads of loaders and of NCCL may go on meanwhile.
            graph.capture_begin(self._handle, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # The first error says more.
                    self._end(graph)
                    # The error's traceback keeps the graph, and NCCL ends no group that a graph uses.
                    graph.reset()
                raise
            self._end(graph)
        self._graphs.add(graph)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._failed.append(graph)
            raise

    def record_aside(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record what a function launches, on another stream than the current one, which may be the default stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return self.record(function)

    def forget(self) -> None:
        """Drop all recordings. They cannot be replayed any more."""
        for graph in list(self._graphs):
            graph.reset()
        self._graphs.clear()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def forget() -> None:
    """Drop all recordings. Groups of processes cannot end before: NCCL keeps what recordings may use."""
    for pool in list(_pools):
        pool.forget()


def hooks_of(modules: Iterable[tuple[str, nn.Module]]) -> str:
    """Return which of the modules, given with their names, has what hooks, or that all modules have. No replay runs
    them. An empty string: there are none."""
    for name, module in modules:
        hooks = ((kind, hook) for kind in _HOOKS for hook in getattr(module, kind).values())
        if kind := next((kind for kind, hook in hooks if getattr(hook, "__name__", "") != _HARMLESS), None):
            return f"{name or 'the model'} has {kind.strip('_').replace('_', ' ')}"
    return "all modules have hooks" if any(getattr(hooks_of_all, f"_global{kind}") for kind in _HOOKS) else ""


def leave_default_stream() -> None:
    """Let the calling thread launch on a stream of its own from now on, if it launches on the default stream. The
    default stream cannot be captured."""
    if torch.cuda.current_stream() != torch.cuda.default_stream():
        return
    torch.cuda.synchronize()
    # The caching allocator keeps free memory for the stream that had it.
    torch.cuda.empty_cache()
    torch.cuda.set_stream(torch.cuda.Stream())


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Answer code that asks whether a graph is being captured as a capture would. What runs before a capture then takes
    the same branches, so that torch.compile has compiled them: transformers makes other masks inside of a capture."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from running: it would free CUDA's events and graphs, which makes a capture invalid,
    and it takes time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
