"""Micro-batches on their way through the stages of a pipeline, several at a time."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.data.batch import Batch
from sagetrain.engines.protocol import Observers, Watched
from sagetrain.engines.traversal import Passes, Plain, count, noise_of, watched
from sagetrain.model.chunks import ModelChunk
from sagetrain.model.tensors import EMBEDDING
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.orders import Action
from sagetrain.parallel.pipeline import Pass, Pipe


class StagePasses(Passes):
    """The passes of an engine through the chunks of a pipeline stage."""

    @abstractmethod
    def expect(self, last: bool, ended: ModelChunk | None = None, only: bool = False) -> None:
        """Prepare for a backward pass, which may be the last one of a step.

        Args:
            ended: the chunk that has its last pass, if others have not.
            only: the step has a single micro-batch.
        """

    @abstractmethod
    def add(self) -> None:
        """Add the gradients that a backward pass has left."""


class MicroBatches:
    """The micro-batches of one run, which are taken when the first chunk of this stage needs them."""

    def __init__(self, engine: Passes, batches: Iterable[Batch], **how: Any) -> None:
        self._engine, self._rest, self._how, self._seen = engine, iter(batches), how, list[Batch]()

    def __getitem__(self, micro: int) -> Batch:
        """Return a micro-batch by its number."""
        while len(self._seen) <= micro:
            batch = next(self._rest, None)
            if batch is None:
                raise RuntimeError(f"the loader gave {len(self._seen)} micro-batches, and more are needed")
            self._seen.append(batch)
        return self._seen[micro]

    def inputs(self, micro: int) -> dict[str, Any]:
        """Return the arguments of the model for a micro-batch."""
        return {**self._engine.inputs(self[micro]), **self._how}

    def tokens(self, micro: int) -> int:
        """Return the number of tokens of a micro-batch on this rank."""
        return self[micro].tokens.numel() // self._engine.groups.cp_size

    def take_rest(self) -> None:
        """Take what is left of the micro-batches, so that they are counted."""
        self._seen.extend(self._rest)


class Flow:
    """The way through the chunks of a pipeline stage.

    Args:
        call: calls the model with its arguments.
        place: dtype and device of the residual streams.
        tokens: returns the number of tokens of a micro-batch on this rank.
        inputs: returns the arguments of the model for a micro-batch.
    """

    def __init__(
        self,
        model: Transformer,
        call: Callable[[dict[str, Any]], Any],
        place: dict[str, Any],
        tokens: Callable[[int], int],
        inputs: Callable[[int], dict[str, Any]],
    ) -> None:
        self._model, self._call, self._place, self._tokens, self._inputs = model, call, place, tokens, inputs
        self.chunks = {chunk.number: chunk for chunk in model.chunks}
        """The chunks of this stage, by their numbers in the model."""
        self.outputs: list[Tensor] = []
        """The model's output for each micro-batch, from `collect`."""

    def like(self, action: Action) -> list[Tensor]:
        """Return tensors for the residual streams of a micro-batch, or their gradients."""
        shapes = self._model.stream_shapes(self._tokens(action.micro))
        return [torch.empty(shape, **self._place) for shape in shapes]

    def run(self, number: int, micro: int, streams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a micro-batch through a chunk. Return the residual streams behind the chunk, or the model's output."""
        return self.through(number, self._inputs(micro), streams)

    def through(self, number: int, inputs: dict[str, Any], streams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Do what `run` does, with these arguments of the model."""
        chunk = self.chunks[number]
        streams = [x.requires_grad_(torch.is_grad_enabled()) for x in streams]
        made = self._call({**inputs, "chunk": chunk, "streams": streams})
        return [made] if chunk.last else made

    def collect(self, number: int, micro: int, streams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a micro-batch through a chunk, and keep the model's output."""
        made = self.run(number, micro, streams)
        if not self.chunks[number].last:
            return made
        self.outputs.extend(made)
        return []


class StageStep:
    """The passes of a step through this stage, with the sum of their losses so far."""

    def __init__(
        self,
        flow: Flow,
        batches: MicroBatches,
        passes: StagePasses,
        total: Tensor,
        observers: Observers,
        masked: bool,
    ) -> None:
        self.flow, self.batches, self.observers = flow, batches, observers
        self._passes, self._total, self._masked, self._first = passes, total, masked, min(flow.chunks)
        self._watched: dict[int, Watched] = {}

    def run(self, pipe: Pipe, micro_batches: int) -> None:
        """Run forward and backward over all micro-batches."""
        self._only, self._left = micro_batches == 1, micro_batches * len(self.flow.chunks)
        pipe.run(micro_batches, self.forward, self.like, self.backward)
        for each in self._watched.values():
            each.end()
        self.batches.take_rest()

    def like(self, action: Action) -> list[Tensor]:
        """Return the tensors that receive what an action needs."""
        return self.flow.like(action)

    def forward(self, number: int, micro: int, streams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the forward pass of a micro-batch through a chunk: see Pipe.run."""
        with self._watching(number, micro, backward=False):
            return self.through(number, self.batches.inputs(micro), streams)

    def through(self, number: int, inputs: dict[str, Any], streams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a chunk with these arguments of the model. Return what the backward pass begins with."""
        made = self.flow.through(number, inputs, streams)
        if not self.flow.chunks[number].last:
            return made
        self._total.add_(made[0].detach())
        return [made[0] * self._passes.model.share]

    def backward(self, number: int, micro: int, later: int, run: Pass) -> Sequence[Tensor]:
        """Run the backward pass of a micro-batch through a chunk: see Pipe.run."""
        self.expect(number, later)
        if self._masked and number == self._first:
            count(self.batches[micro], self.observers)
        with self._watching(number, micro, backward=True), noise_of(self.observers):
            run.run()
        self._passes.add()
        return run.to_send()

    def expect(self, number: int, later: int) -> None:
        """Prepare for a backward pass through a chunk, which so many follow."""
        self._left -= 1
        ended = self.flow.chunks[number] if self._left and not later else None
        self._passes.expect(not self._left, ended, self._only)

    def _watching(self, number: int, micro: int, backward: bool) -> AbstractContextManager[None]:
        if micro not in self._watched:
            self._watched[micro] = watched(micro, self.batches[micro], self.observers)
        return self._watched[micro].passing(self.flow.chunks[number].blocks, backward)


class Piped(Plain):
    """Take micro-batches, as residual streams in a dtype, through the chunks of a pipeline stage, in the order of the
    pipeline."""

    def __init__(self, engine: StagePasses, pipe: Pipe, dtype: torch.dtype) -> None:
        super().__init__(engine)
        self._passes, self._pipe = engine, pipe
        self._place: dict[str, Any] = {"dtype": dtype, "device": engine.device}

    def _step(self, *parts: Any) -> StageStep:
        """Return the passes of a step."""
        return StageStep(*parts)

    def _flow(self, batches: MicroBatches) -> Flow:
        return Flow(self._engine.model, self._engine.run, self._place, batches.tokens, batches.inputs)

    def run(self, batches: Iterable[Batch], micro_batches: int, observers: Observers, masked: bool) -> Tensor:
        """Run forward and backward over all micro-batches of a step: see Plain."""
        self._total.zero_()
        taken = MicroBatches(self._engine, batches)
        self._step(self._flow(taken), taken, self._passes, self._total, observers, masked).run(
            self._pipe, micro_batches
        )
        return self._total

    def gradients(self, batch: Batch, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a micro-batch apart from a step: see Plain."""
        flow, found = self._flow(MicroBatches(self._engine, [batch])), dict[int, Tensor]()

        def backward(number: int, micro: int, later: int, run: Pass) -> Sequence[Tensor]:
            for place, gradient in enumerate(run.gradients_of(leaves)):
                # Each leaf belongs to one of the stage's chunks.
                if gradient is not None:
                    found[place] = gradient
            return run.to_send()

        self._pipe.run(1, flow.run, flow.like, backward)
        return [found[place] if place in found else torch.zeros_like(leaf) for place, leaf in enumerate(leaves)]

    def token_losses(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Yield each batch with labels and losses: see Plain."""
        rest = iter(batches)
        # More micro-batches at once would idle less, and a signal to stop would wait for longer.
        while some := list(itertools.islice(rest, 4 * self._pipe.size)):
            taken = MicroBatches(self._engine, some, by_token=True)
            flow = self._flow(taken)
            self._pipe.run(len(some), flow.collect, flow.like)
            for micro, losses in enumerate(flow.outputs):
                yield some[micro], taken.inputs(micro)["labels"], losses

    def as_whole(self, model: Transformer) -> Callable[..., Tensor]:
        """Return a function that calls a model, for which all stages have the same tokens: see Plain."""
        return partial(self._logits, model)

    @torch.no_grad()
    def _logits(self, model: Transformer, tokens: Tensor, **how: Any) -> Tensor:
        place = {**self._place, "device": tokens.device}
        given = lambda micro: {"tokens": tokens, **how}  # noqa: E731
        flow = Flow(model, lambda inputs: model(**inputs), place, lambda micro: tokens.numel(), given)
        self._pipe.run(1, flow.collect, flow.like)
        rows, length = tokens.shape
        shape = rows, 1 if how.get("last") else length, model.every_spec[EMBEDDING].shape[0]
        logits = flow.outputs[0].contiguous() if flow.outputs else torch.empty(shape, **place)
        dist.broadcast(logits, group=model.groups.pp_group, group_src=model.groups.pp_size - 1)
        return logits

    def waits(self) -> str:
        """Return what this rank waits for: see Plain."""
        return self._pipe.waits()
