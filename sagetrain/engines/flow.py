"""The micro-batches of a step on their way through the chunks of a pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sagetrain.data.loader import Batch
from sagetrain.engines.step import BaseEngine


class Flow:
    """The micro-batches of one run through a pipeline.

    Args:
        dtype: the dtype of the residual streams.
        batches: the micro-batches, which are taken when the first chunk of this stage needs them.
        how: further arguments of the model.
    """

    def __init__(self, engine: BaseEngine, dtype: torch.dtype, batches: Iterable[Batch], **how: Any) -> None:
        self._engine, self._dtype, self._rest, self._how = engine, dtype, iter(batches), how
        self._seen: list[Batch] = []
        self.chunks = {chunk.number: chunk for chunk in engine.model.chunks}
        """The chunks of this stage, by their numbers in the model."""

    def batch(self, micro: int) -> Batch:
        """Return a micro-batch by its number."""
        while len(self._seen) <= micro:
            batch = next(self._rest, None)
            if batch is None:
                raise RuntimeError(f"the loader gave {len(self._seen)} micro-batches, and more are needed")
            self._seen.append(batch)
        return self._seen[micro]

    def take_rest(self) -> None:
        """Take what is left of the micro-batches, so that they are counted."""
        self._seen.extend(self._rest)

    def inputs(self, micro: int) -> dict[str, Any]:
        """Return the arguments of the model for a micro-batch."""
        return self._engine.inputs(self.batch(micro))

    def like(self, micro: int) -> list[Tensor]:
        """Return tensors for the residual streams of a micro-batch."""
        engine, tokens = self._engine, self.batch(micro).tokens.numel() // self._engine.groups.cp_size
        place: dict[str, Any] = {"dtype": self._dtype, "device": engine.device}
        return [torch.empty(shape, **place) for shape in engine.model.stream_shapes(tokens)]

    def run(self, number: int, micro: int, streams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a micro-batch through a chunk. Return the residual streams behind the chunk, or the model's output."""
        chunk = self.chunks[number]
        made = self._engine.model(**self.inputs(micro), **self._how, chunk=chunk, streams=tuple(streams))
        return [made] if chunk.last else made
