"""Keys and values of the tokens that a model has seen: the next one costs one token's work, not the whole context's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sagetrain.model.attention import Attention
from sagetrain.model.backends import AttentionFunction, TokenLayout
from sagetrain.model.transformer import Block, Transformer


@dataclass
class _Call:
    """What the layers are to know of a call of the model."""

    row: int = 0
    """Whose text is read, when one is."""
    lengths: list[int] = field(default_factory=list)
    """Tokens that each row holds, with the new one. Empty: a text is read."""
    slots: tuple[Tensor, Tensor] | int = 0
    """Where the new token of each row goes: rows and places in them, or one place for all."""
    seen: Tensor | None = None
    """bool [rows, 1, 1, longest row]; None: all of them are as long."""


class Cached(AttentionFunction):
    """A layer's attention over the tokens that each row holds, of which it is given those that are new.

    A text is read by the layer's own function. Later tokens, one a row, go through torch's in the precision of their
    inputs, unless it takes them: an INT8 function quantizes blocks of tokens, and there is no block in one.
    """

    name = "cached"

    def __init__(self, whole: AttentionFunction, rows: int, capacity: int, call: _Call) -> None:
        self.whole, self._rows, self._capacity, self._call = whole, rows, capacity, call
        self._k = self._v = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        call = self._call
        if not self._k.numel():
            self._k, self._v = (x.new_zeros(self._rows, self._capacity, *x.shape[2:]) for x in (k, v))
        if not call.lengths:
            self._k[call.row, : k.shape[1]], self._v[call.row, : v.shape[1]] = k[0], v[0]
            return self.whole(q, k, v, layout)
        rows, longest = len(call.lengths), max(call.lengths)
        for cache, new in ((self._k, k), (self._v, v)):
            if isinstance(call.slots, int):
                cache[:rows, call.slots] = new[:, 0]
            else:
                cache[call.slots] = new[:, 0]
        if self.whole.takes_few_queries:
            held = [
                (self._k[row, None, :length], self._v[row, None, :length]) for row, length in enumerate(call.lengths)
            ]
            return torch.cat([self.whole(q[row, None], *kv, layout) for row, kv in enumerate(held)])
        keys, values = (x[:rows, :longest].transpose(1, 2) for x in (self._k, self._v))
        # The heads that share keys are as several queries: nothing is repeated.
        queries = q.reshape(rows, k.shape[2], -1, q.shape[3])
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=call.seen).view(q.shape)

    def move(self, source: int, target: int) -> None:
        """Let one row hold what another one does."""
        self._k[target], self._v[target] = self._k[source], self._v[source]


class CachedModel:
    """A model that keeps what it has seen of up to so many `rows`, each of `capacity` tokens at most.

    Rows are of different lengths, and of each the logits are what they would be alone, up to the order of float sums.
    The model stays as it is.
    """

    def __init__(self, model: Transformer, rows: int, capacity: int) -> None:
        self._model, self._capacity = model, capacity
        self._call = _Call()
        self._functions = [Cached(layer.function, rows, capacity, self._call) for layer in self._layers()]
        self.lengths: list[int] = []
        """Tokens that each row holds."""

    def read(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Logits [vocab] of what follows the tokens, which become all that a row holds: one that there is, or the
        next one. ValueError if they are more than its capacity."""
        self._check(len(tokens))
        self.lengths[row : row + 1] = [len(tokens)]
        self._call.row, self._call.lengths = row, []
        return self._run([tokens], [range(len(tokens))])[0, -1]

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Logits [rows, vocab] of what follows one more token of each row. ValueError if a row is full."""
        self._check(max(self.lengths) + 1)
        before, call = self.lengths, self._call
        call.lengths = self.lengths = [length + 1 for length in before]
        call.slots, call.seen = before[0], None
        if len(set(before)) > 1:
            device = self._model.head.weight.device
            lengths = torch.tensor(before, device=device)
            call.slots = torch.arange(len(before), device=device), lengths
            call.seen = (torch.arange(max(before) + 1, device=device) <= lengths[:, None])[:, None, None]
        return self._run([[token] for token in tokens], [[length] for length in before])[:, 0]

    def drop(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            for function in self._functions:
                function.move(last, row)
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def _check(self, length: int) -> None:
        if length > self._capacity:
            raise ValueError(f"{length} tokens are more than the context of {self._capacity}")

    def _run(self, tokens: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Tensor:
        device = self._model.head.weight.device
        layers = self._layers()
        own: list[AttentionFunction] = [layer.function for layer in layers]
        try:
            for layer, function in zip(layers, self._functions, strict=True):
                layer.function = function
            places = torch.tensor([list(each) for each in positions], device=device)
            read = torch.tensor([list(each) for each in tokens], device=device)
            logits: Tensor = self._model(read, positions=places, last=True)
        finally:
            for layer, before in zip(layers, own, strict=True):
                layer.function = before
        return logits

    def _layers(self) -> list[Attention]:
        return [cast(Block, block).attention for block in self._model.blocks]
