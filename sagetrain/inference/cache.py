"""Keys and values of the tokens that a model has seen: the next one costs one token's work, not the whole context's."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sagetrain.model.attention import Attention
from sagetrain.model.backends import AttentionFunction, TokenLayout
from sagetrain.model.transformer import Block, Transformer


class Cached(AttentionFunction):
    """A layer's attention over all tokens since the first call, of which it is given those that are new.

    The first call is the layer's own function; later ones are torch's, in the precision of their inputs: an INT8
    function quantizes blocks of tokens, and there is no block in one.
    """

    name = "cached"

    def __init__(self, whole: AttentionFunction, capacity: int) -> None:
        self.whole = whole
        self.capacity = capacity
        self.length = 0
        """Tokens that it holds."""
        self._k = self._v = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        first, new = self.length, q.shape[1]
        if not first:
            self._k, self._v = (x.new_empty(x.shape[0], self.capacity, *x.shape[2:]) for x in (k, v))
        self.length += new
        self._k[:, first : self.length], self._v[:, first : self.length] = k, v
        if not first:
            return self.whole(q, k, v, layout)
        seen = torch.ones(new, self.length, dtype=torch.bool, device=q.device).tril(first) if new > 1 else None
        keys, values = (x[:, : self.length].transpose(1, 2) for x in (self._k, self._v))
        grouped = q.shape[2] != k.shape[2]
        o = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=grouped)
        return o.transpose(1, 2)


class CachedModel:
    """A model of one process that keeps what it has seen, of `capacity` tokens at most. The model stays as it is."""

    def __init__(self, model: Transformer, capacity: int) -> None:
        self._model = model
        self._capacity = capacity
        self.forget()

    def forget(self) -> None:
        """Begin with another text."""
        layers = self._layers()
        self._functions = [Cached(layer.function, self._capacity) for layer in layers]
        self._length = 0

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self._capacity - self._length

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, vocab] of the next S <= room tokens, int64 [B, S], of B sequences."""
        first, last = self._length, self._length + tokens.shape[1]
        if last > self._capacity:
            raise ValueError(f"{last} tokens are more than the context of {self._capacity}")
        positions = torch.arange(first, last, device=tokens.device).expand(tokens.shape[0], -1)
        layers = self._layers()
        own: list[AttentionFunction] = [layer.function for layer in layers]
        try:
            for layer, function in zip(layers, self._functions, strict=True):
                layer.function = function
            logits: Tensor = self._model(tokens, positions=positions)
        finally:
            for layer, before in zip(layers, own, strict=True):
                layer.function = before
        self._length = last
        return logits

    def _layers(self) -> list[Attention]:
        return [cast(Block, block).attention for block in self._model.blocks]
