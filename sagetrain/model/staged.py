"""A pipeline stage's part of a model, called as if it were the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.model.tensors import EMBEDDING
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.pipeline import Pipe


class Staged:
    """A model in a pipeline that returns its logits on all stages. All stages call it with the same tokens.

    Args:
        dtype: the dtype of the residual streams.
    """

    def __init__(self, model: Transformer, pipe: Pipe, dtype: torch.dtype) -> None:
        self._model, self._pipe, self._dtype = model, pipe, dtype
        self._chunks = {chunk.number: chunk for chunk in model.chunks}

    @torch.no_grad()
    def __call__(self, tokens: Tensor, **how: Any) -> Tensor:
        """Return logits: see Transformer.forward."""
        model, found = self._model, list[Tensor]()
        place: dict[str, Any] = {"dtype": self._dtype, "device": tokens.device}

        def like(micro: int) -> list[Tensor]:
            return [torch.empty(shape, **place) for shape in model.stream_shapes(tokens.numel())]

        def run(number: int, micro: int, streams: Sequence[Tensor]) -> Sequence[Tensor]:
            chunk = self._chunks[number]
            made = model(tokens, **how, chunk=chunk, streams=tuple(streams))
            if not chunk.last:
                streams_behind: tuple[Tensor, ...] = made
                return streams_behind
            found.append(made.contiguous())
            return []

        self._pipe.run(1, run, like)
        rows, length = tokens.shape
        shape = rows, 1 if how.get("last") else length, model.every_spec[EMBEDDING].shape[0]
        logits = found[0] if found else torch.empty(shape, **place)
        dist.broadcast(logits, group=model.groups.pp_group, group_src=model.groups.pp_size - 1)
        return logits
