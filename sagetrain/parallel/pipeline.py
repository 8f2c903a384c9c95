"""Run micro-batches through the stages of a pipeline, and send messages between stages.

The model is cut into chunks, which are consecutive ranges of blocks. Chunk c is on stage c modulo the number of stages.
parallel/orders.py says what a stage does when.

Between stages travel residual streams and their gradients. The tokens do not travel, because every stage has the
micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.parallel.orders import Action, orders
from sagetrain.parallel.topology import ParallelGroups

Streams = Sequence[Tensor]
"""The residual streams of a micro-batch: one, or those of its two halves."""


class Pipe:
    """The stages of this rank's pipeline; collective.

    An edge between two stages has a process group for each direction, and groups of their own for the edge from the
    last stage to the first one. Messages of a group then go one way, and arrive in the order in which they are sent.

    Args:
        per_rank: the number of chunks on each stage.
    """

    def __init__(self, groups: ParallelGroups, per_rank: int) -> None:
        ranks = groups.topology.pipeline_ranks(groups.rank)
        self.rank, self.size, self._last = groups.pp_rank, len(ranks), len(ranks) * per_rank - 1
        self._per_rank, self._sent = per_rank, list[tuple[Any, Tensor]]()
        self._groups = {
            (kind, wraps): groups.subgroup(ranks, f"pipeline, {kind}{', last stage to first' if wraps else ''}")
            for kind in ("forward", "backward")
            for wraps in (False, True)[: min(2, per_rank)]
        }

    def _group(self, kind: str, chunk: int, other: int) -> dist.ProcessGroup:
        return self._groups[kind, min(chunk, other) % self.size == self.size - 1]

    def _receive(self, action: Action, like: Callable[[int], list[Tensor]]) -> tuple[list[Any], list[Tensor]]:
        """Start to receive the input of an action from another stage. The first and the last chunk need none."""
        kind, chunk, micro = action
        source = chunk - 1 if kind == "forward" else chunk + 1
        if not 0 <= source <= self._last:
            return [], []
        group, tensors = self._group(kind, chunk, source), like(micro)
        return [dist.irecv(tensor, group=group, group_src=source % self.size) for tensor in tensors], tensors

    def _send(self, action: Action, tensors: Streams) -> None:
        kind, chunk, _ = action
        target = chunk + 1 if kind == "forward" else chunk - 1
        group = self._group(kind, chunk, target)
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            self._sent.append((dist.isend(whole, group=group, group_dst=target % self.size), whole))

    def run(
        self,
        micros: int,
        forward: Callable[[int, int, list[Tensor]], Streams],
        like: Callable[[int], list[Tensor]],
        backward: Callable[[int, int, int, Callable[[], None]], None] | None = None,
    ) -> None:
        """Run micro-batches through the pipeline; collective.

        Args:
            micros: the number of micro-batches, the same on all stages.
            forward: called with a chunk, a micro-batch and the residual streams before the chunk (none for the first
                one). It returns the streams behind the chunk. For the last chunk it returns what the backward pass
                begins with.
            like: returns empty tensors with the shapes of a micro-batch's streams on this rank.
            backward: called with a chunk, a micro-batch, the number of backward passes of this chunk that are still to
                come, and a function that runs the backward pass. None: there are only forward passes.
        """
        actions = orders(self.size, self._per_rank, micros, backward is not None)[self.rank]
        left = Counter(action.chunk for action in actions if action.kind == "backward")
        kept: dict[tuple[int, int], tuple[list[Tensor], Streams]] = {}
        coming = self._receive(actions[0], like) if actions else ([], [])
        for number, action in enumerate(actions):
            kind, chunk, micro = action
            works, received = coming
            # The next message is on its way while this action runs.
            if number + 1 < len(actions):
                coming = self._receive(actions[number + 1], like)
            for work in works:
                work.wait()
            if kind == "forward":
                inputs = [tensor.requires_grad_(backward is not None) for tensor in received]
                made = forward(chunk, micro, inputs)
                if chunk < self._last:
                    self._send(action, made)
                if backward:
                    kept[chunk, micro] = inputs, made
                del made
                continue
            assert backward is not None, "an order without backward passes has none"
            inputs, made = kept.pop((chunk, micro))
            left[chunk] -= 1
            backward(chunk, micro, left[chunk], _backward_of(made, received))
            del made
            if chunk:
                self._send(action, [tensor.grad for tensor in inputs if tensor.grad is not None])
        for work, _ in self._sent:
            work.wait()
        self._sent = []


def _backward_of(made: Streams, gradients: list[Tensor]) -> Callable[[], None]:
    return lambda: torch.autograd.backward(made, gradients or None)
