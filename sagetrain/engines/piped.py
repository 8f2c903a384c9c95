"""Micro-batches on their way through the stages of a pipeline, several at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.data.batch import Batch
from sagetrain.engines.hooks import Hooks
from sagetrain.engines.protocol import Observers, Watched
from sagetrain.engines.traversal import Passes, Plain, count, noise_of, watched
from sagetrain.model.tensors import EMBEDDING
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.pipeline import Pass, Pipe


class _MicroBatches:
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


class _Flow:
    """The way through the chunks of a pipeline stage.

    Args:
        place: dtype and device of the residual streams.
        tokens: returns the number of tokens of a micro-batch on this rank.
        inputs: returns the arguments of the model for a micro-batch.
    """

    def __init__(
        self,
        model: Transformer,
        place: dict[str, Any],
        tokens: Callable[[int], int],
        inputs: Callable[[int], dict[str, Any]],
    ) -> None:
        self._model, self._place, self._tokens, self._inputs = model, place, tokens, inputs
        self.chunks = {chunk.number: chunk for chunk in model.chunks}
        """The chunks of this stage, by their numbers in the model."""
        self.outputs: list[Tensor] = []
        """The model's output for each micro-batch, from `collect`."""

    def like(self, micro: int) -> list[Tensor]:
        """Return tensors for the residual streams of a micro-batch."""
        return [torch.empty(shape, **self._place) for shape in self._model.stream_shapes(self._tokens(micro))]

    def run(self, number: int, micro: int, streams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a micro-batch through a chunk. Return the residual streams behind the chunk, or the model's output."""
        chunk = self.chunks[number]
        made = self._model(**self._inputs(micro), chunk=chunk, streams=tuple(streams))
        return [made] if chunk.last else made

    def collect(self, number: int, micro: int, streams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a micro-batch through a chunk, and keep the model's output."""
        made = self.run(number, micro, streams)
        if not self.chunks[number].last:
            return made
        self.outputs.extend(made)
        return []


class _Step:
    """The passes of a step through this stage."""

    def __init__(
        self, flow: _Flow, batches: _MicroBatches, hooks: Hooks, share: Tensor, observers: Observers, masked: bool
    ) -> None:
        self._flow, self._batches, self._hooks, self._share = flow, batches, hooks, share
        self._observers, self._masked, self._first = observers, masked, min(flow.chunks)
        self._watched: list[Watched] = []
        self.total = torch.zeros((), device=share.device, dtype=torch.float64)
        """The sum of the losses so far."""

    def run(self, pipe: Pipe, micro_batches: int) -> None:
        """Run forward and backward over all micro-batches."""
        self._only, self._left = micro_batches == 1, micro_batches * len(self._flow.chunks)
        pipe.run(micro_batches, self._forward, self._flow.like, self._backward)
        for each in self._watched:
            each.end()
        self._batches.take_rest()

    def _forward(self, number: int, micro: int, streams: Sequence[Tensor]) -> Sequence[Tensor]:
        with self._watching(number, micro, backward=False):
            made = self._flow.run(number, micro, streams)
        if not self._flow.chunks[number].last:
            return made
        self.total.add_(made[0].detach())
        return [made[0] * self._share]

    def _backward(self, number: int, micro: int, later: int, run: Pass) -> None:
        self._left -= 1
        self._hooks.expect(last=not self._left)
        if self._left and not later:
            self._hooks.expect_last_of(self._flow.chunks[number], self._only)
        if self._masked and number == self._first:
            count(self._batches[micro], self._observers)
        with self._watching(number, micro, backward=True), noise_of(self._observers):
            run.run()

    def _watching(self, number: int, micro: int, backward: bool) -> AbstractContextManager[None]:
        if len(self._watched) == micro:
            self._watched.append(watched(micro, self._batches[micro], self._observers))
        return self._watched[micro].passing(self._flow.chunks[number].blocks, backward)


class Piped(Plain):
    """Take micro-batches through the chunks of a pipeline stage, in the order of the pipeline.

    Args:
        hooks: FSDP's hooks of the stage's part of the model.
        dtype: the dtype of the residual streams.
        share: the factor of each micro-batch's loss, as a tensor.
    """

    def __init__(self, engine: Passes, pipe: Pipe, hooks: Hooks, dtype: torch.dtype, share: Tensor) -> None:
        super().__init__(engine)
        self._pipe, self._hooks, self._share = pipe, hooks, share
        self._place: dict[str, Any] = {"dtype": dtype, "device": engine.device}

    def _flow(self, batches: _MicroBatches) -> _Flow:
        return _Flow(self._engine.model, self._place, batches.tokens, batches.inputs)

    def run(self, batches: Iterable[Batch], micro_batches: int, observers: Observers, masked: bool) -> Tensor:
        """Run forward and backward over all micro-batches of a step: see Plain."""
        taken = _MicroBatches(self._engine, batches)
        step = _Step(self._flow(taken), taken, self._hooks, self._share, observers, masked)
        step.run(self._pipe, micro_batches)
        return step.total

    def gradients(self, batch: Batch, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a micro-batch apart from a step: see Plain."""
        flow, found = self._flow(_MicroBatches(self._engine, [batch])), dict[int, Tensor]()

        def backward(number: int, micro: int, later: int, run: Pass) -> None:
            for place, gradient in enumerate(run.gradients_of(leaves)):
                # Each leaf belongs to one of the stage's chunks.
                if gradient is not None:
                    found[place] = gradient

        self._pipe.run(1, flow.run, flow.like, backward)
        return [found[place] if place in found else torch.zeros_like(leaf) for place, leaf in enumerate(leaves)]

    def token_losses(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Yield each batch with labels and losses: see Plain."""
        rest = iter(batches)
        # More micro-batches at once would idle less, and a signal to stop would wait for longer.
        while some := list(itertools.islice(rest, 4 * self._pipe.size)):
            taken = _MicroBatches(self._engine, some, by_token=True)
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
        flow = _Flow(model, place, lambda micro: tokens.numel(), lambda micro: {"tokens": tokens, **how})
        self._pipe.run(1, flow.collect, flow.like)
        rows, length = tokens.shape
        shape = rows, 1 if how.get("last") else length, model.every_spec[EMBEDDING].shape[0]
        logits = flow.outputs[0].contiguous() if flow.outputs else torch.empty(shape, **place)
        dist.broadcast(logits, group=model.groups.pp_group, group_src=model.groups.pp_size - 1)
        return logits

    def waits(self) -> str:
        """Return what this rank waits for: see Plain."""
        return self._pipe.waits()
