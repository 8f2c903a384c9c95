"""The order in which micro-batches go through a model: `Plain` takes one after the other, forward and backward.

Others are `Piped` (piped.py), through the stages of a pipeline, and `Replayed` (replayed.py), as CUDA graphs.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.data.batch import Batch
from sagetrain.engines.protocol import Observers, Watched
from sagetrain.model.transformer import Transformer, gradients
from sagetrain.parallel.digest import word_sum
from sagetrain.stability.replica_check import Hashes


class Passes(ABC):
    """The passes of an engine through its model, which a traversal puts in order."""

    def __init__(self, model: Transformer, device: torch.device) -> None:
        self.model, self.groups, self.device = model, model.groups, device

    @abstractmethod
    def run(self, inputs: Mapping[str, Any]) -> Tensor:
        """Call the model and return its output."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch's loss to the step's gradient, which is a mean over micro-batches and
        replicas. `last` marks the step's last micro-batch, during which gradients may be reduced."""

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of one micro-batch, an fp32 scalar. Under context parallelism it is the loss of this rank's
        slice."""
        return self.run(self.inputs(batch))

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the model for a micro-batch."""
        return batch.inputs(self.device, self.groups)


class _Unwatched:
    """The observer of a micro-batch that nobody watches."""

    def passing(self, blocks: range, backward: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def end(self) -> None:
        pass


def watched(number: int, batch: Batch, observers: Observers) -> Watched:
    """Return the observer of a micro-batch's passes. The first micro-batch may have one."""
    return observers.watch(*batch.tokens.shape) if observers.watch and number == 0 else _Unwatched()


def counted_of(batch: Batch) -> int:
    """Return how many tokens of a micro-batch count in the loss."""
    return int((batch.labels >= 0).sum())


def count(batch: Batch, observers: Observers) -> None:
    """Note how many tokens of a micro-batch count in the loss, where noise is measured under a loss mask."""
    if observers.noise:
        observers.noise.count(counted_of(batch))


def noise_of(observers: Observers) -> AbstractContextManager[None]:
    """Return the context in which a micro-batch's backward pass runs."""
    return observers.noise.micro_batch() if observers.noise else contextlib.nullcontext()


def hashing(last: bool, observers: Observers) -> AbstractContextManager[Hashes | None]:
    """Return the context of a micro-batch's passes. The last micro-batch may be hashed."""
    return observers.replay.hashing() if observers.replay and last else contextlib.nullcontext()


def until(stop: Callable[[], bool], batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches until any rank is asked to stop: see step.Engine.evaluate."""
    several, asked = dist.get_world_size() > 1, deque[Tensor]()
    for batch in batches:
        asked.append(torch.tensor(stop(), dtype=torch.int32, device=device if several else "cpu"))
        if several:
            dist.all_reduce(asked[-1], op=dist.ReduceOp.MAX)
        if len(asked) > several and asked.popleft():
            raise InterruptedError
        yield batch


class Plain:
    """Take one micro-batch after the other through the whole model."""

    def __init__(self, engine: Passes) -> None:
        self._engine = engine
        self._total = torch.zeros((), device=engine.device, dtype=torch.float64)
        """The sum of the losses of a step's micro-batches. It stays in the same memory."""

    def run(self, batches: Iterable[Batch], micro_batches: int, observers: Observers, masked: bool) -> Tensor:
        """Run forward and backward over all micro-batches of a step, in which some tokens do not count if `masked`.
        Return the sum of their losses, fp64. It is 0 on a pipeline stage without the output projection."""
        self._total.zero_()
        for number, batch in enumerate(batches):
            if masked:
                count(batch, observers)
            self._micro_step(number, batch, number == micro_batches - 1, observers)
        return self._total

    def _micro_step(self, number: int, batch: Batch, last: bool, observers: Observers) -> None:
        """Run forward and backward over one micro-batch, and add its loss to the sum."""
        watch, blocks = watched(number, batch, observers), self._engine.model.chunks[0].blocks
        with hashing(last, observers) as hashes:
            with watch.passing(blocks, backward=False):
                loss = self._engine.forward(batch)
            if hashes is not None:
                hashes["loss"] = word_sum(loss)
            with watch.passing(blocks, backward=True), noise_of(observers):
                self.add(loss, last)
        watch.end()

    def add(self, loss: Tensor, last: bool) -> None:
        """Add the loss of a micro-batch to the sum, and its gradient to the step's gradient."""
        self._engine.backward(loss, last)
        self._total += loss.detach()

    def gradients(self, batch: Batch, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a micro-batch apart from a step: see model/transformer.Gradients."""
        return gradients(partial(self._engine.model, **self._engine.inputs(batch)), leaves)

    def token_losses(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Yield each batch with the labels and the losses of this rank's tokens. A pipeline stage without the output
        projection yields nothing."""
        for batch in batches:
            inputs = self._engine.inputs(batch)
            yield batch, inputs["labels"], self._engine.run({**inputs, "by_token": True})

    def as_whole(self, model: Transformer) -> Callable[..., Tensor]:
        """Return a function that calls a model: see step.Engine."""
        return model

    def waits(self) -> str:
        """Return what this rank waits for: see step.Engine."""
        return ""
