"""The collectives around the layers of a model, listed once, as parallel/collectives.py and parallel/layers.py call
them. No torch. costs/operations.py has what a rank computes between them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from sagetrain.config.layout import by_rows
from sagetrain.config.linear_sizes import EIGHT_BITS
from sagetrain.costs.operations import Rank
from sagetrain.costs.stages import Held, kinds_of_blocks

INTO, OUT = "into the layers", "out of the layers"
"""The names of what tensor parallelism's collectives exchange: the inputs of column-parallel layers, and the outputs of
row-parallel layers."""

_Moment = Literal["forward", "recomputed", "backward"]
_Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
_Beside = Literal["nothing", "forward", "backward", "weight gradients"]


class CollectiveCost(NamedTuple):
    """The calls of one kind of collective around the layers, in one micro-step."""

    axis: Literal["tensor", "context", "gather", "experts"]
    moment: _Moment
    what: str
    kind: _Kind
    calls: int
    payload: int
    """The bytes of the whole tensor of one call, which is added up, gathered or scattered. For an all-to-all, the bytes
    that one rank exchanges. It is the mean where calls differ."""
    beside: _Beside = "nothing"
    """The work that may run at the same time. It is the forward or backward pass of the micro-batch's other half, or
    the gradients of the weights of the column-parallel layer whose input gradient is on its way."""


def collectives(part: Held, rank: Rank, parts: int) -> list[CollectiveCost]:
    """List the collectives that parallel/collectives.py and layers.py call in a micro-step whose tokens go through the
    blocks in `parts` parts.

    Halves run beside each other. Without halves, only the sum of a column-parallel layer's input gradients runs beside
    other work.
    """
    totals = dict[CollectiveCost, tuple[int, int]]()
    for of in (_tensor_parallel, _context_parallel, _expert_parallel):
        for call in sorted(of(part, rank, parts), key=lambda call: get_args(_Moment).index(call.moment)):
            calls, payload = totals.get(like := call._replace(calls=0, payload=0), (0, 0))
            totals[like] = calls + call.calls, payload + call.calls * call.payload
    return [like._replace(calls=calls, payload=all_ // calls) for like, (calls, all_) in totals.items() if calls]


def _moments(rank: Rank) -> tuple[_Moment, ...]:
    """Return the moments at which the forward pass of a block runs."""
    return ("forward", "recomputed") if rank.recomputes else ("forward",)


def _tensor_parallel(part: Held, rank: Rank, parts: int) -> Iterator[CollectiveCost]:
    """List the collectives around the two halves of each block, the embedding and the head."""
    if rank.tensor == 1:
        return
    hidden = part.cfg.model.hidden_size
    payload, gathers = rank.tokens * hidden * rank.element // parts, parts * rank.sequence_parallel
    leaves: _Kind = "reduce-scatter" if rank.sequence_parallel else "all-reduce"
    forward: _Beside = "forward" if parts > 1 else "nothing"
    backward: _Beside = "backward" if parts > 1 else "nothing"
    into: _Beside = "backward" if parts > 1 else "weight gradients"
    call = functools.partial(CollectiveCost, "tensor")
    low_bit = EIGHT_BITS.get(rank.linear.precision)
    eight = rank.tokens * (hidden + 16) // parts  # the tensor has the format of sagekernels/packing.py
    for blocks, layer, own in part.kinds(rank):
        moments = _moments(own)
        # Experts compute the tokens of their rank. Only an MLP beside them takes part in collectives.
        for name, sizes in layer.linear_layers(rank.tensor).items():
            # Two layers read what a block with embeddings of values gathers for q, k and v: in 16 bits, and the sum of
            # both gradients waits for those of the weights.
            twice = name == "qkv" and layer.value_embeddings
            packed = bool(low_bit and low_bit.travels) and own.linear.takes(sizes) and not twice
            gathered = eight if packed else payload
            if name in ("qkv", "gate_up"):
                yield from (call(at, INTO, "all-gather", blocks * gathers, gathered, forward) for at in moments)
                yield call("backward", INTO, leaves, blocks * parts, payload, backward if twice else into)
            else:
                yield from (call(at, OUT, leaves, blocks * parts, payload, forward) for at in moments)
                yield call("backward", OUT, "all-gather", blocks * gathers, gathered, backward)
        if layer.attention.qk_norm == "all_heads":
            squares = 4 * rank.tokens // parts
            for at in (*moments, "backward"):
                yield call(at, "squares of q and k", "all-reduce", 2 * blocks * parts, squares)
        # Gains are whole on every rank but see only their rank's heads (gains of q and k) or tokens (gains of the
        # residual stream). A block also has the next block's gain unless it is recomputed. Nothing runs beside the sum
        # of their gradients, at the end of a block.
        width = 2 * layer.attention.head_dim * (layer.attention.qk_norm in ("before_rope", "after_rope"))
        width += (2 * sum(layer.normed) + (not own.recomputes)) * hidden * rank.sequence_parallel
        yield call("backward", "gains", "all-reduce", blocks * (width > 0), parts * width * rank.element)
    if part.first:
        yield call("forward", OUT, leaves, parts, payload, forward)
        yield call("backward", OUT, "all-gather", gathers, payload, backward)
    if part.last:
        yield call("forward", INTO, "all-gather", gathers, payload, forward)
        yield call("backward", "into the head", leaves, parts, payload)
    for chunk in part.chunks:
        # The first of the blocks that are not recomputed has its norm outside for one part, and the final norm is
        # outside for the other ones (Transformer.through).
        first = any(not kind.rank.recomputes for kind in kinds_of_blocks(part.cfg, rank, [chunk]))
        calls = rank.sequence_parallel * (first + (parts - first) * chunk.last)
        yield call("backward", "gains outside of blocks", "all-reduce", calls, hidden * rank.element)


def _context_parallel(part: Held, rank: Rank, parts: int) -> Iterator[CollectiveCost]:
    """List one all-to-all of q, k and v together before attention and one of its output after, forward and backward.
    Key/value heads are repeated where the ranks that exchange heads are more than they. Ranks that gather keys and
    values gather each of these, and exchange the gradients before they sum them."""
    if rank.context == 1:
        return
    ulysses = rank.context // rank.gather
    for blocks, layer, own in part.kinds(rank):
        attention = layer.attention
        head = rank.tokens * attention.head_dim * rank.element // rank.tensor
        queries, keys = attention.heads, attention.key_heads * attention.copies_of_keys(rank.tensor * ulysses)
        for moment in ("backward", *_moments(own)):
            if ulysses > 1:
                for what, heads in (("q, k, v", queries + 2 * keys), ("output", queries)):
                    yield CollectiveCost("context", moment, what, "all-to-all", blocks, heads * head)
            if rank.gather > 1:
                kind: _Kind = "all-to-all" if moment == "backward" else "all-gather"
                yield CollectiveCost("gather", moment, "keys and values", kind, 2 * blocks, rank.gather * keys * head)


def _expert_parallel(part: Held, rank: Rank, parts: int) -> Iterator[CollectiveCost]:
    """List the gathers of tokens, with the weights and numbers of their choices, before experts that ranks have between
    them, and the sums of their results behind (model/dispatch.py). Rows go by all-to-alls of those that there is room
    for. Backward each has its counterpart. Nothing runs beside them."""
    if rank.experts == 1:
        return
    tokens = rank.tokens // (rank.shards * parts)
    for blocks, layer, own in part.kinds(rank):
        if (experts := layer.experts) is None:
            continue
        by_row = by_rows(rank.experts, experts.per_token)
        rows_of_rank = int(rank.room * experts.per_token * tokens)
        count, top = (rows_of_rank, 1) if by_row else (rank.experts * tokens, experts.per_token)
        there: _Kind = "all-to-all" if by_row else "all-gather"
        back: _Kind = "all-to-all" if by_row else "reduce-scatter"
        stream, weights, numbers = layer.hidden * rank.element, 4 * top, 8 * top
        rows: list[tuple[_Moment, str, _Kind, int]] = [
            *((moment, what, there, size) for moment in _moments(own)
              for what, size in (("tokens", stream), ("weights of choices", weights), ("choices", numbers))),
            *((moment, "results of experts", back, stream) for moment in _moments(own)),
            ("backward", "results of experts", there, stream),
            ("backward", "tokens", back, stream),
            ("backward", "weights of choices", back, weights),
        ]  # fmt: skip
        for moment, what, kind, size in rows:
            yield CollectiveCost("experts", moment, what, kind, blocks * parts, size * count)


def expert_exchanges(
    part: Held, element: int, reduced: int, parts: int
) -> Iterator[tuple[str, str, str, int, int, tuple[int, int] | None]]:
    """Yield the collectives for weights and gradients of experts beside those of whole blocks: the axis, the purpose,
    the kind, the number of calls in a step, the payload of one, and the number of ranks with the replicas from one of
    them to the next, if only a part of the axis takes part. Nothing is taken to hide them.

    Experts that ranks have between them are units of ZeRO of their own. Others have seen the tokens of one
    tensor-parallel rank, whose gradients are added up.

    Args:
        element: the bytes of a weight that the model computes with.
        reduced: the times that gradients are reduced in a step.
        parts: the parts of a micro-batch. At ZeRO 3 each of them gathers the experts.
    """
    layout, experts = part.layout, part.sizes.experts
    if not experts:
        return
    ranks, shards, copies = layout.experts, layout.expert_shards, layout.expert_copies
    calls, size, apart = len(experts), max(experts), max(1, ranks // layout.tensor)
    if ranks == 1:
        if layout.tensor > 1:
            yield "tensor", "gradients of experts", "all-reduce", 2 * calls, 2 * size // layout.shards, None
        return
    if shards > 1:
        gathers = 2 * reduced * parts if layout.calls_experts else 1
        yield "data", "weights of experts", "all-gather", gathers * calls, element * size, (shards, apart)
        yield "data", "gradients of experts", "reduce-scatter", reduced * calls, 4 * size, (shards, apart)
    if copies > 1:
        yield "data", "gradients of experts", "all-reduce", calls, 4 * size // shards, (copies, apart * shards)
