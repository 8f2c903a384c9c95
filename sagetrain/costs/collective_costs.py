"""The collectives around the layers of a model, listed once, as parallel/collectives.py and parallel/layers.py call
them. No torch. costs/operations.py has what a rank computes between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from sagetrain.config.layer_specs import layers, linear_layers
from sagetrain.config.layout import Layout, by_rows
from sagetrain.config.linear_sizes import EIGHT_BITS
from sagetrain.config.schema import AttentionConfig, ModelConfig, RunConfig
from sagetrain.costs.accounting import expert_weights
from sagetrain.costs.operations import Rank

INTO, OUT = "into the layers", "out of the layers"
"""The names of what tensor parallelism's collectives exchange: the inputs of column-parallel layers, and the outputs of
row-parallel layers."""

_Moment = Literal["forward", "recomputed", "backward"]
_Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
_Beside = Literal["nothing", "forward", "backward", "weight gradients"]


@dataclass(frozen=True)
class CollectiveCost:
    """The calls of one kind of collective around the layers, in one micro-step."""

    axis: Literal["tensor", "context", "gather", "experts"]
    moment: _Moment
    what: str
    kind: _Kind
    per_block: int
    at_ends: int
    """The number of calls around the embedding, the final norm and the head."""
    payload: int
    """The bytes of the whole tensor of one call, which is added up, gathered or scattered. For an all-to-all, the bytes
    that one rank exchanges."""
    beside: _Beside = "nothing"
    """The work that may run at the same time. It is the forward or backward pass of the micro-batch's other half, or
    the gradients of the weights of the column-parallel layer whose input gradient is on its way."""
    dense: int = 0
    """The number of first blocks that do not call it."""


def collectives(model: ModelConfig, attention: AttentionConfig, rank: Rank, parts: int) -> list[CollectiveCost]:
    """List the collectives that parallel/collectives.py and layers.py call in a micro-step whose tokens go through the
    blocks in `parts` parts.

    Halves run beside each other. Without halves, only the sum of a column-parallel layer's input gradients runs beside
    other work.
    """
    return [
        *_tensor_parallel(model, attention, rank, parts),
        *_context_parallel(model, rank),
        *_expert_parallel(model, rank, parts),
    ]


def _tensor_parallel(
    model: ModelConfig, attention: AttentionConfig, rank: Rank, parts: int
) -> Iterable[CollectiveCost]:
    """List the collectives around the two halves of a block, the embedding and the head."""
    if rank.tensor == 1:
        return
    payload = rank.tokens * model.hidden_size * rank.element // parts
    enters: _Kind | None = "all-gather" if rank.sequence_parallel else None
    leaves: _Kind = "reduce-scatter" if rank.sequence_parallel else "all-reduce"
    forward: _Beside = "forward" if parts > 1 else "nothing"
    backward: _Beside = "backward" if parts > 1 else "nothing"
    into: _Beside = "backward" if parts > 1 else "weight gradients"
    rows: list[tuple[_Moment, str, _Kind | None, int, _Beside]] = [
        ("forward", INTO, enters, 1, forward),
        ("forward", OUT, leaves, 1, forward),
        ("recomputed", INTO, enters, 0, forward),
        ("recomputed", OUT, leaves, 0, forward),
        ("backward", OUT, enters, 1, backward),
        ("backward", INTO, leaves, 0, into),
    ]
    packed = {("forward", INTO): payload, ("recomputed", INTO): payload, ("backward", OUT): payload}
    # Experts compute the tokens of their rank. Only an MLP beside them takes part in collectives.
    halves = 1 + bool(layers(model)[-1].mlp.inner)
    gathers, linear = halves * model.num_layers, rank.linear
    if (low_bit := EIGHT_BITS.get(linear.precision)) and low_bit.travels:
        eight = rank.tokens * (model.hidden_size + 16) // parts  # the tensor has the format of sagekernels/packing.py
        sizes = list(linear_layers(model, rank.tensor).values())
        for key in packed:
            own = sizes[key[1] == OUT :: 2]  # column-parallel layers read, row-parallel layers write
            blocks = linear.low_bit_blocks(model.num_layers)
            low = len(blocks) * sum(map(linear.takes, own))
            if key[1] == INTO and linear.takes(own[0]):  # Two layers read what such blocks gather for q, k and v.
                low -= sum(layers(model)[number].value_embeddings for number in blocks)
            packed[key] = (low * eight + (gathers - low) * payload) // gathers
    for moment, what, kind, at_ends, beside in rows:
        if kind and (rank.recomputes or moment != "recomputed"):
            calls = [(halves * parts, at_ends * parts, payload)]
            if kind == "all-gather" and packed[moment, what] < payload:
                calls = [(halves * parts, 0, packed[moment, what]), (0, at_ends * parts, payload)]
            yield from (CollectiveCost("tensor", moment, what, kind, *call, beside) for call in calls)
    yield CollectiveCost("tensor", "backward", "into the head", leaves, 0, parts, payload)
    if attention.qk_norm == "all_heads":
        for at in ("forward", "recomputed", "backward") if rank.recomputes else ("forward", "backward"):
            squares = 4 * rank.tokens // parts
            yield CollectiveCost("tensor", at, "squares of q and k", "all-reduce", 2 * parts, 0, squares)
    # Gains are whole on every rank but see only their rank's heads (gains of q and k) or tokens (gains of the residual
    # stream). A block also has the next block's gain unless it is recomputed. Nothing runs beside the sum of their
    # gradients, at the end of a block.
    width = 2 * model.head_dim * (attention.qk_norm in ("before_rope", "after_rope"))
    before, after = layers(model)[0].normed
    width += (2 * (before + after) + (not rank.recomputes)) * model.hidden_size * rank.sequence_parallel
    if rank.sequence_parallel:
        outside = model.hidden_size * rank.element
        yield CollectiveCost("tensor", "backward", "gains outside of blocks", "all-reduce", 0, parts, outside)
    if width:
        yield CollectiveCost("tensor", "backward", "gains", "all-reduce", 1, 0, parts * width * rank.element)


def _context_parallel(model: ModelConfig, rank: Rank) -> Iterable[CollectiveCost]:
    """List one all-to-all of q, k and v together before attention and one of its output after, forward and backward.
    Key/value heads are repeated where the ranks that exchange heads are more than they. Ranks that gather keys and
    values gather each of these, and exchange the gradients before they sum them."""
    if rank.context == 1:
        return
    ulysses, attention = rank.context // rank.gather, layers(model)[0].attention
    head = rank.tokens * model.head_dim * rank.element // rank.tensor
    queries, keys = attention.heads, attention.key_heads * attention.copies_of_keys(rank.tensor * ulysses)
    moments: tuple[_Moment, ...] = ("forward", "backward", "recomputed")
    for moment in moments[: 2 + rank.recomputes]:
        if ulysses > 1:
            for what, heads in (("q, k, v", queries + 2 * keys), ("output", queries)):
                yield CollectiveCost("context", moment, what, "all-to-all", 1, 0, heads * head)
        if rank.gather > 1:
            kind: _Kind = "all-to-all" if moment == "backward" else "all-gather"
            yield CollectiveCost("gather", moment, "keys and values", kind, 2, 0, rank.gather * keys * head)


def _expert_parallel(model: ModelConfig, rank: Rank, parts: int) -> Iterable[CollectiveCost]:
    """List the gathers of tokens, with the weights and numbers of their choices, before experts that ranks have between
    them, and the sums of their results behind (model/dispatch.py). Rows go by all-to-alls of those that there is room
    for. Backward each has its counterpart. Nothing runs beside them."""
    if rank.experts == 1 or (experts := model.experts) is None:
        return
    tokens, by_row = rank.tokens // (rank.shards * parts), by_rows(rank.experts, experts.per_token)
    rows_of_rank = int(rank.room * experts.per_token * tokens)
    count, top = (rows_of_rank, 1) if by_row else (rank.experts * tokens, experts.per_token)
    there: _Kind = "all-to-all" if by_row else "all-gather"
    back: _Kind = "all-to-all" if by_row else "reduce-scatter"
    stream, weights, numbers = model.hidden_size * rank.element, 4 * top, 8 * top
    moments: tuple[_Moment, ...] = ("forward", "recomputed") if rank.recomputes else ("forward",)
    rows: list[tuple[_Moment, str, _Kind, int]] = [
        *((moment, what, there, size) for moment in moments
          for what, size in (("tokens", stream), ("weights of choices", weights), ("choices", numbers))),
        *((moment, "results of experts", back, stream) for moment in moments),
        ("backward", "results of experts", there, stream),
        ("backward", "tokens", back, stream),
        ("backward", "weights of choices", back, weights),
    ]  # fmt: skip
    for moment, what, kind, size in rows:
        yield CollectiveCost("experts", moment, what, kind, parts, 0, size * count, dense=experts.dense_layers)


def expert_exchanges(
    cfg: RunConfig, layout: Layout, element: int, reduced: int, parts: int
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
    ranks, shards, copies = cfg.parallel.expert_parallel_size, layout.expert_shards, layout.expert_copies
    if not (every := [size for layer in layers(cfg.model) if (size := expert_weights(layer, ranks))]):
        return
    calls, size, apart = len(every), max(every), max(1, layout.experts // layout.tensor)
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
