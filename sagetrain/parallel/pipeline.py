"""Run micro-batches through the stages of a pipeline, and send messages between stages.

The model is cut into chunks, which are consecutive ranges of blocks. Chunk c is on stage c modulo the number of stages.
parallel/orders.py says what a stage does when.

Between stages travel residual streams and their gradients. The tokens do not travel, because every stage has the
micro-batches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.parallel.orders import Action, order_of
from sagetrain.parallel.topology import ParallelGroups

Streams = Sequence[Tensor]
"""The residual streams of a micro-batch: one, or those of its two halves."""


class Pass:
    """The backward pass of a micro-batch through a chunk, which is about to run.

    Args:
        inputs: the residual streams that came to the chunk.
        made: what the forward pass made of them.
        gradients: the gradients of `made`, from the next chunk. The last chunk has none, and `made` is a loss.
    """

    def __init__(self, inputs: list[Tensor], made: Streams, gradients: list[Tensor]) -> None:
        self._inputs, self._made, self._gradients = inputs, made, gradients

    def run(self) -> None:
        """Run the pass, which adds to the gradients of all parameters."""
        torch.autograd.backward(self._made, self._gradients or None)

    def gradients_of(self, leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Run the pass, and return the gradients of these leaves alone. No parameter's own gradient changes. A leaf
        that the chunk does not use has None."""
        found = torch.autograd.grad(self._made, [*self._inputs, *leaves], self._gradients or None, allow_unused=True)
        for tensor, gradient in zip(self._inputs, found, strict=False):
            tensor.grad = gradient
        return found[len(self._inputs) :]

    def to_send(self) -> list[Tensor]:
        """Return the gradients of the residual streams, after the pass."""
        return [tensor.grad for tensor in self._inputs if tensor.grad is not None]


Backward = Callable[[int, int, int, Pass], Streams]
"""A function of a chunk, a micro-batch, the number of backward passes of this chunk that are still to come, and the
pass, which the function runs. It returns the gradients of the residual streams that came to the chunk."""


class Pipe:
    """The stages of this rank's pipeline, with `per_rank` chunks on each; collective.

    An edge between two stages has a process group for each direction, and groups of their own for the edge from the
    last stage to the first one. Messages of a group then go one way, and arrive in the order in which they are sent.
    """

    def __init__(self, groups: ParallelGroups, per_rank: int) -> None:
        self._ranks = groups.topology.pipeline_ranks(groups.rank)
        self.rank, self.size, self._last = groups.pp_rank, len(self._ranks), len(self._ranks) * per_rank - 1
        self._per_rank, self._sent = per_rank, list[tuple[Action, int, Any, Tensor]]()
        self._untaken = ""
        self._awaited: deque[tuple[Action, list[Any]]] = deque()
        self._groups = {
            (kind, wraps): groups.subgroup(
                self._ranks, f"pipeline, {kind}{', last stage to first' if wraps else ''}", messages=True
            )
            for kind in ("forward", "backward")
            for wraps in (False, True)[: min(2, per_rank)]
        }
        self._connect(groups)

    def _connect(self, groups: ParallelGroups) -> None:
        """Send one number over each edge in each direction. NCCL connects two ranks in their first message, for which
        both of them wait. In a step one of the two would wait for the other's whole forward pass."""
        device = groups.device
        for (kind, wraps), group in self._groups.items():
            edges = [(self.size - 1, 0)] if wraps else [(stage, stage + 1) for stage in range(self.size - 1)]
            # Every second edge comes first, so that edges are connected at the same time.
            for edge in sorted(edges, key=lambda edge: edge[0] % 2):
                source, target = edge if kind == "forward" else edge[::-1]
                number = torch.zeros(1, device=device)
                if self.rank == source:
                    dist.send(number, group=group, group_dst=target)
                elif self.rank == target:
                    dist.recv(number, group=group, group_src=source)

    def _group(self, kind: str, chunk: int, other: int) -> dist.ProcessGroup:
        return self._groups[kind, min(chunk, other) % self.size == self.size - 1]

    def _receive(self, action: Action, like: Callable[[Action], list[Tensor]]) -> list[Tensor]:
        """Receive the input of an action from another stage. The first and the last chunk need none.

        NCCL receives by a kernel that holds a part of the GPU until the message is there. A message that were asked for
        one action ahead would hold that part during the whole action.
        """
        source = _source(action)
        if not 0 <= source <= self._last:
            return []
        group, tensors = self._group(action.kind, action.chunk, source), like(action)
        while self._awaited and all(work.is_completed() for work in self._awaited[0][1]):
            self._awaited.popleft()
        with self._said(action, source):
            works: list[Any] = [dist.irecv(tensor, group=group, group_src=source % self.size) for tensor in tensors]
            self._awaited.append((action, works))
            for work in works:
                work.wait()
        return tensors

    def _send(self, action: Action, tensors: Streams) -> None:
        kind, chunk, _ = action
        target = chunk + 1 if kind == "forward" else chunk - 1
        group = self._group(kind, chunk, target)
        self._sent = [message for message in self._sent if not message[2].is_completed()]
        with self._said(action, target):
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                work = dist.isend(whole, group=group, group_dst=target % self.size)
                self._sent.append((action, target, work, whole))

    @contextmanager
    def _said(self, action: Action, other: int) -> Iterator[None]:
        """Name the stages and the action in an error that comes from a message to or from the chunk `other`."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"pipeline {self._stage(self.rank)} has lost {self._stage(other % self.size)}, in {_words(action)}: "
                f"{error}"
            ) from error

    def _stage(self, stage: int) -> str:
        return f"stage {stage} (rank {self._ranks[stage]})"

    def waits(self) -> str:
        """Return a sentence about the oldest message that has not arrived, or "". Another thread may call it."""
        for action, works in [*self._awaited]:
            if not all(work.is_completed() for work in works):
                source = self._stage(_source(action) % self.size)
                return f"pipeline {self._stage(self.rank)} waits for {source}, for {_words(action)}"
        return self._untaken

    def run(
        self,
        micros: int,
        forward: Callable[[int, int, list[Tensor]], Streams],
        like: Callable[[Action], list[Tensor]],
        backward: Backward | None = None,
    ) -> None:
        """Run micro-batches through the pipeline; collective.

        Args:
            micros: the number of micro-batches, the same on all stages.
            forward: called with a chunk, a micro-batch and the residual streams before the chunk (none for the first
                one). It returns the streams behind the chunk. For the last chunk it returns what the backward pass
                begins with.
            like: returns the tensors that receive the streams, or their gradients, which an action needs.
            backward: called for every backward pass. None: there are only forward passes.
        """
        actions = order_of(self.rank, self.size, self._per_rank, micros, backward is not None)
        left = Counter(action.chunk for action in actions if action.kind == "backward")
        kept: dict[tuple[int, int], tuple[list[Tensor], Streams]] = {}
        for action in actions:
            kind, chunk, micro = action
            received = self._receive(action, like)
            if kind == "forward":
                made = forward(chunk, micro, received)
                if chunk < self._last:
                    self._send(action, made)
                if backward:
                    kept[chunk, micro] = received, made
                del made
                continue
            assert backward is not None, "an order without backward passes has none"
            left[chunk] -= 1
            run = Pass(*kept.pop((chunk, micro)), received)
            gradients = backward(chunk, micro, left[chunk], run)
            if chunk:
                self._send(action, gradients)
            del run, received, gradients
        for action, target, work, _ in self._sent:
            taker = self._stage(target % self.size)
            self._untaken = f"pipeline {self._stage(self.rank)} waits for {taker} to take {_words(action)}"
            with self._said(action, target):
                work.wait()
        self._sent, self._untaken = [], ""


def _source(action: Action) -> int:
    """Return the chunk whose result the action needs. It may be none of the model's."""
    return action.chunk - 1 if action.kind == "forward" else action.chunk + 1


def _words(action: Action) -> str:
    return f"the {action.kind} pass of micro-batch {action.micro} through chunk {action.chunk}"
