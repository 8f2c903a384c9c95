"""The cache of keys and values of the tokens that a model has seen, and of the states of gated delta nets. With it, the
next token costs the work of one token, not that of the whole context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sagetrain.model.attention import Attention
from sagetrain.model.backends import AttentionFunction, Documents, TokenLayout
from sagetrain.model.block import Block
from sagetrain.model.delta_net import DeltaNet
from sagetrain.model.delta_rule import DeltaRule, recurrence
from sagetrain.model.transformer import Transformer

_STRETCH = 128
"""Rows are allocated, and read by their new tokens, in multiples of this many places, so that a step keeps one shape
for a while."""


@dataclass
class _Call:
    """The facts about a call of the model that the layers need."""

    row: int = 0
    """The row whose text is read, when a text is read."""
    lengths: list[int] = field(default_factory=list)
    """Tokens that each row holds, with the new one. Empty while a text is read."""
    slots: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """The rows, and in each row the place where its new token goes, by window."""
    seen: dict[int | None, Tensor] = field(default_factory=dict)
    """Masks [rows, 1, 1, places] to be added to scores, by window: 0 where a row holds a token that its new token sees,
    else -inf."""


class Cached(AttentionFunction):
    """A layer's attention over the tokens that each row holds. It is called with the new tokens alone.

    A text is read by the layer's own function. Later tokens, one per row, go through torch's attention in the precision
    of their inputs: an INT8 function quantizes blocks of tokens, and a single token is no block.

    A layer with a window keeps as many tokens as it sees, rounded up to whole stretches. Token t is at place t modulo
    the places of a row.
    """

    name = "cached"

    def __init__(self, layer: Attention, rows: int, capacity: int, call: _Call) -> None:
        self._whole, self.window = layer.function, layer.window
        self.places = capacity if self.window is None else min(capacity, _whole_stretches(self.window))
        """The tokens of a row that the layer keeps."""
        self._rows, self._call = rows, call
        self._k = self._v = torch.empty(0)

    def wants(self, window: bool) -> Documents:
        return self._whole.wants(window)

    def with_sinks(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, sinks: Tensor | None) -> Tensor:
        call = self._call
        if not self._k.numel():
            self._k, self._v = (x.new_zeros(self._rows, self.places, *x.shape[2:]) for x in (k, v))
        if not call.lengths:
            own = torch.arange(max(0, k.shape[1] - self.places), k.shape[1], device=k.device)
            self._k[call.row, own % self.places], self._v[call.row, own % self.places] = k[0, own], v[0, own]
            return self._whole(q, k, v, layout) if sinks is None else self._whole.with_sinks(q, k, v, layout, sinks)
        slots = call.slots[self.window]
        self._k[slots], self._v[slots] = k[:, 0], v[:, 0]
        seen = call.seen[self.window]
        count, *_, places = seen.shape
        keys, values = (x[:count, :places].transpose(1, 2) for x in (self._k, self._v))
        # The heads that share keys are treated as several queries, so nothing is repeated.
        queries = q.reshape(count, k.shape[2], -1, q.shape[3])
        if sinks is None:
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen).reshape(q.shape)
        scores = (queries @ keys.mT).float() * q.shape[3] ** -0.5 + seen
        column = sinks.float().view(k.shape[2], -1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
        return (weights.to(values.dtype) @ values).reshape(q.shape)

    def move(self, source: int, target: int) -> None:
        """Copy what one row holds into another row."""
        self._k[target], self._v[target] = self._k[source], self._v[source]


class CachedDelta(DeltaRule):
    """A layer's gated delta rule over the tokens that each row holds. It keeps the state of each row, and the last
    inputs of the convolutions, and is called with the new tokens alone. A text is read by the layer's own function."""

    window = None

    def __init__(self, function: DeltaRule, rows: int, capacity: int, call: _Call) -> None:
        self._whole, self._rows, self._call, self.places = function, rows, call, capacity
        self._inputs: list[Tensor] = []
        self._state = torch.empty(0)

    def convolved(self, x: Sequence[Tensor], weights: Sequence[Tensor], layout: TokenLayout) -> list[Tensor]:
        """Convolve the new tokens, see DeltaRule."""
        if not self._inputs:
            self._inputs = [
                each.new_zeros(self._rows, weight.shape[1] - 1, each.shape[2])
                for each, weight in zip(x, weights, strict=True)
            ]
        made = []
        for each, weight, kept in zip(x, weights, self._inputs, strict=True):
            before, rows = kept.shape[1], slice(0, len(each))
            if not self._call.lengths:
                rows = slice(self._call.row, self._call.row + 1)
                kept[rows] = F.pad(each, (0, 0, before, 0))[:, each.shape[1] :]
                continue
            window = torch.cat((kept[rows], each), 1)
            kept[rows] = window[:, 1:]
            made.append(F.silu((window.float() * weight.float().T).sum(1, keepdim=True)).to(each.dtype))
        return made or self._whole.convolved(x, weights, layout)

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: TokenLayout, *, final: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Run the recurrence over the new tokens, see DeltaRule."""
        if not self._state.numel():
            self._state = g.new_zeros(self._rows, v.shape[2], q.shape[3], v.shape[3])
        if self._call.lengths:
            o, self._state[: len(q)] = recurrence(q, k, v, g, beta, self._state[: len(q)])
            return o, None
        o, state = self._whole.rule(q, k, v, g, beta, layout, final=True)
        assert state is not None
        self._state[self._call.row] = state[0]
        return o, None

    def move(self, source: int, target: int) -> None:
        """Copy what one row holds into another row."""
        for kept in (*self._inputs, self._state):
            kept[target] = kept[source]


class Recorded:
    """A function of a tensor on a GPU, as a recording of the kernels that it launched once. In a step of a small model
    the launches take longer than the kernels, and a recording is one launch."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        """Record the function. Nothing is computed yet. `x` has the shape and dtype of later arguments, with any
        values."""
        self._x, self._graph = x.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._y = function(self._x)

    def __call__(self, x: Tensor) -> Tensor:
        self._x.copy_(x)
        self._graph.replay()
        return self._y.clone()


class CachedModel:
    """A model with a cache for up to `rows` texts of at most `capacity` tokens each.

    Rows have different lengths. The logits of a row are what they would be without the others, up to the order of float
    sums. The model itself is not changed. It is called by `call` where it is spread over the stages of a pipeline.
    """

    def __init__(self, model: Transformer, rows: int, capacity: int, call: Callable[..., Tensor] | None = None) -> None:
        self._model, self._capacity, self._called = model, capacity, call or model
        self._weight = next(model.parameters())
        self._call = _Call()
        places = _whole_stretches(capacity)
        self._functions = [
            CachedDelta(layer.function, rows, places, self._call)
            if isinstance(layer, DeltaNet)
            else Cached(layer, rows, places, self._call)
            for layer in self._layers()
        ]
        self.lengths: list[int] = []
        """Number of tokens that each row holds."""
        # Collectives with other ranks cannot be recorded, and a state must not be changed twice by one token.
        states = any(isinstance(function, CachedDelta) for function in self._functions)
        self.records = model.groups.topology.world_size == 1 and self._weight.is_cuda and not states
        """True if steps of one shape are recorded at the second one. It becomes False if a recording gives another
        result."""
        self._shape = 0, 0
        self._recorded: Recorded | None = None

    def read(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Read a text, whose tokens become all that a row holds. The row exists already, or is the next one. Return
        logits [vocab] of the token that follows. Raises ValueError if there are more tokens than the capacity."""
        self._check(len(tokens))
        self.lengths[row : row + 1] = [len(tokens)]
        self._call.row, self._call.lengths = row, []
        read = torch.tensor([list(tokens)], device=self._weight.device)
        return self._run(read, torch.arange(len(tokens), device=read.device)[None])[0, -1]

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Add one token to each row, and return logits [rows, vocab] of the token that follows. Raises ValueError if a
        row is full."""
        self._check(max(self.lengths) + 1)
        new = torch.tensor([list(tokens), self.lengths], device=self._weight.device)
        self._call.lengths = self.lengths = [length + 1 for length in self.lengths]
        shape = len(tokens), _whole_stretches(max(self.lengths))
        if shape != self._shape or not self.records:
            self._shape, self._recorded = shape, None
            return self._step(new, shape[1])
        if self._recorded is None:
            # The step may be taken twice, because both write the same. A recording with another result is not used.
            logits, self._recorded = self._step(new, shape[1]), Recorded(lambda new: self._step(new, shape[1]), new)
            self.records = torch.equal(self._recorded(new), logits)
            return logits
        return self._recorded(new)

    def _step(self, new: Tensor, places: int) -> Tensor:
        """Take a step. `new` is int64 [2, rows]: the next token of each row, and how many tokens the row holds. The
        host decides nothing by these values."""
        tokens, held = new
        rows, now = torch.arange(len(held), device=new.device), held[:, None]
        self._call.seen, self._call.slots = {}, {}
        for window, most in {function.window: function.places for function in self._functions}.items():
            # The token at a place is so many tokens older than the new one. One that is older than the text is none.
            age = (now - torch.arange(min(places, most), device=new.device)) % most
            hidden = (age > now) | (age >= (window or most))
            zeros = torch.zeros(hidden.shape, dtype=self._weight.dtype, device=new.device)
            self._call.seen[window] = zeros.masked_fill(hidden, -torch.inf)[:, None, None]
            self._call.slots[window] = rows, held % most
        return self._run(tokens[:, None], held[:, None])[:, 0]

    def drop(self, row: int) -> None:
        """Forget a row. The last row takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            for function in self._functions:
                function.move(last, row)
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def _check(self, length: int) -> None:
        if length > self._capacity:
            raise ValueError(f"{length} tokens are more than the context of {self._capacity}")

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        layers = self._layers()
        own: list[AttentionFunction] = [layer.function for layer in layers]
        try:
            for layer, function in zip(layers, self._functions, strict=True):
                layer.function = function
            logits: Tensor = self._called(tokens, positions=positions, last=True)
        finally:
            for layer, before in zip(layers, own, strict=True):
                layer.function = before
        return logits

    def _layers(self) -> list[Attention | DeltaNet]:
        return [cast(Block, block).attention for block in self._model.blocks]


def _whole_stretches(tokens: int) -> int:
    return -(-tokens // _STRETCH) * _STRETCH
