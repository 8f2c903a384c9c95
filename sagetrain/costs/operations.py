"""The operations of the model, listed once: matmuls, attention, and passes that only move data. Nothing here needs
torch. costs/collective_costs.py lists the collectives around them.

costs/accounting.py counts FLOPs of this list, memory.py its memory, and planning/performance.py its time; none of them
knows the model.
Sizes are those of one rank. A new pass over the activations is one entry of `block_operations`. A linear layer in other
arithmetic is another `Precision`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from sagetrain.config.layer_specs import LayerSpec
from sagetrain.config.layout import by_rows
from sagetrain.config.linear_sizes import EIGHT_BITS, LinearSizes
from sagetrain.config.schema import AttentionConfig, DeltaNetConfig, ExpertsConfig, LinearConfig, ModelConfig
from sagetrain.costs.documents import document_share
from sagetrain.costs.operation_kinds import AttentionCost, MatmulCost, Operation, PassCost, Precision

# Elements moved per token and column, forward and backward, first fused by torch.compile and then eager. Fused, every
# kernel reads its inputs and writes its outputs once. Eager, RMSNorm and rotary embedding also write their fp32
# intermediates out: 65 and 54 elements per column. The quantizers of sage are part of its attention rate.
# _NORM counts the norm of the residual stream and the addition before it.
_NORM = 9.5, 75.5
# _ROTARY counts the rotary embedding of q and k, and QK-norm.
_ROTARY = 5, 119
# With this value of qk_norm, one kernel each way computes QK-norm and then rotary embedding, compiled or not
# (sagekernels/qk_norm_rope.py). Forward, q and k are read and written. Backward, q, k and their gradients are read, and
# the gradients of the projection are written. The gradient of v is copied.
_IN_ONE_PASS = "before_rope"
_QK_NORM_ROTARY, _GRADIENT_OF_V = (5, 5), (2, 2)
_SWIGLU = 8, 14
# Elements moved per row of an expert and column of the residual stream: tokens are gathered into rows, again for the
# gradient of the weights, and so are the gradients of the output; the rows of a token are added up both ways.
_ROWS = 8
# Rows of one expert in a tile of transposed codes (sagekernels/grouped.py).
_TILE = 128
# Bytes moved per token and expert: logits and scores in fp32, their order, and the places of rows (a guess).
_SCORES = 96
# The matmul writes a logit. The log-sum-exp reads it, then it is read and replaced by its gradient.
_LOGIT = 3, 35
_EMBEDDING = 5
# Elements moved per column of the values that embeddings are added to: the rows are looked up and their gradient is
# added up in the table's, as in the embedding; forward v and rows are read and v is written, backward the gradient of
# v and the rows are read for the gradients of rows and gate.
_VALUES = 9, 15
# Elements moved per column of every operand of a block's linear layers in 8 bits, for both of its uses. The kernels
# (sagekernels/casts.py) read it once for the largest magnitudes and once to round it, and write one byte for each use.
_CASTS = 3, 3
# Elements of these that are not moved where the kernel that makes an operand leaves its largest magnitudes.
_FIRST_READ = 1, 1
# A head in INT8 has one use, by torch.compile or eager. It is not taken to be fused with the norm, though it may be.
_CAST_ONCE = 1.5, 16.5
# Elements moved per column by the convolutions of a gated delta net (two forward and eight backward, which convolves
# anew; fla's kernels take the time of 15, 4.9 ms in the same profile as its rule), and by its output norm (three and
# five).
_CONVOLUTION, _GATED_NORM = 15, 8
DELTA_RULE = "delta rule"
"""The name of the recurrence of a gated delta net in Hardware.attention."""
_ALL_TO_ALL = 8  # q, k, v and o are packed and unpacked around the all-to-alls


@dataclass(frozen=True)
class Rank:
    """The share of the model and of a micro-step that one rank runs. By default it is one token on a single rank."""

    tokens: int = 1
    """The number of tokens of a micro-step on this rank."""
    seq_length: int = 1
    documents: bool = False
    """Whether attention stays within documents."""
    document_span: float | None = None
    """The span of the documents at hand (see `span`). None: that of text as measured (document_share)."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    linear: LinearConfig = field(default_factory=LinearConfig)
    """The settings of the block's linear layers."""
    fused: bool = True
    """Whether torch.compile fuses the passes that only move data."""
    recompute: Literal["none", "selective", "attention", "full"] = "none"
    """The setting training.activation_checkpointing."""
    tensor: int = 1
    """The number of ranks that share the layers."""
    context: int = 1
    """The number of ranks that share every sequence."""
    gather: int = 1
    """The number of those ranks that gather keys and values from each other. The others exchange heads."""
    experts: int = 1
    """The number of ranks that have the experts of a layer between them."""
    room: float = 1.0
    """The rows of experts that there is memory for, in multiples of the mean over ranks."""
    sequence_parallel: bool = False
    copies: bool = False
    """Whether sequence parallelism's collectives go by copy engines."""

    @property
    def element(self) -> int:
        """The bytes of one value of an activation."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def span(self) -> float:
        """Twice the mean number of keys that a token sees.

        It is the sum of the squared lengths of the sequences, or of the documents where attention stays within them,
        divided by the tokens.
        """
        if not self.documents:
            return self.seq_length
        return self.seq_length * document_share(self.seq_length) if self.document_span is None else self.document_span

    def span_within(self, window: int | None) -> float:
        """Return the span where a query sees a window of tokens only. It is exact for documents of equal lengths."""
        span = self.span
        return span if window is None or window >= span else window * (2 * span - window) / span

    @property
    def shards(self) -> int:
        """The number of ranks among which the tokens of the residual stream are sharded."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def recomputes(self) -> bool:
        """Whether blocks run alone, and run again in the backward pass at least in part, with their collectives."""
        return self.recompute != "none"

    @property
    def precision(self) -> Precision:
        """The arithmetic of the block's linear layers in 8 bits, or in dtype where the run has none."""
        if not self.linear.low_bit:
            return Precision(self.dtype, self.dtype, self.dtype)
        return Precision(*3 * (self.linear.precision,))

    @property
    def head_precision(self) -> Precision:
        """The arithmetic of the output projection."""
        if (low := self.linear.head) not in EIGHT_BITS:
            return Precision(self.dtype, self.dtype, self.dtype)
        gradients = low if EIGHT_BITS[low].head_gradients else self.dtype
        return Precision(low, gradients, gradients)

    def matmul(
        self, name: str, outputs: int, inputs: int, *, column_parallel: bool, recomputed: bool,
        precision: Precision | None = None, saved: int = 0,
    ) -> MatmulCost:  # fmt: skip
        """Build a linear layer with its sizes on this rank. Its precision is dtype by default."""
        return MatmulCost(
            name=name, tokens=self.tokens, outputs=outputs, inputs=inputs, saved=saved, recomputed=recomputed,
            precision=precision or Precision(*3 * (self.dtype,)), column_parallel=column_parallel,
        )  # fmt: skip

    def kept_by_layer(self, layer: LinearSizes) -> int:
        """Return the bytes per token that a linear layer keeps for backward, of its input or of the input's codes."""
        return layer.inputs * (1 if self.linear.takes(layer) else self.element)

    def moved(self, elements: tuple[float, float], columns: float) -> float:
        """Return the bytes per token of a pass that moves `elements` per column, fused or eager."""
        return self.element * elements[not self.fused] * columns

    def saved_by_norm(self, width: int, rows: int = 1) -> int:
        """Return the bytes per token that RMSNorm of a width saves (in so many rows): its statistics, and the excess of
        its input over its output."""
        return 4 * rows + (width * self.element if self.fused else 8 * width)


# Proposing layouts prices many of them, and they share most blocks.
@functools.lru_cache(maxsize=4096)
def block_operations(layer: LayerSpec, attention: AttentionConfig, rank: Rank) -> tuple[Operation, ...]:
    """List the operations of one block in the order of its forward pass: x + attention(norm(x)), then x +
    mlp(norm(x))."""
    hidden, inner, element, own = layer.hidden, layer.mlp.inner // rank.tensor, rank.element, layer.attention
    heads, kv_heads = own.heads // rank.tensor, own.key_heads // rank.tensor
    query, key = heads * own.head_dim, kv_heads * own.head_dim
    # The key heads and their columns as attention sees them: repeated where context ranks are more than they.
    copies = own.copies_of_keys(rank.tensor * rank.context // rank.gather)
    seen_heads, seen = copies * kv_heads, copies * key
    # Ranks that gather keys keep those of all tokens. Each of their two chunks has codes of the keys up to its end.
    gathered, twice = rank.gather, (2 * rank.gather + 1) / 2 if rank.gather > 1 else 1
    again, stream = rank.recompute == "full", hidden / rank.shards

    layers = layer.linear_layers(rank.tensor)
    precisions = {name: rank.precision if rank.linear.takes(sizes) else None for name, sizes in layers.items()}
    inputs = {name: rank.kept_by_layer(sizes) for name, sizes in layers.items()}

    product = functools.partial(rank.matmul, recomputed=again)

    def column(name: str, outputs: int, linear: str, saved: int = 0) -> MatmulCost:
        return product(name, outputs, hidden, column_parallel=True, precision=precisions[linear], saved=saved)

    def row(name: str, width: int, saved: int) -> MatmulCost:
        return product(name, hidden, width, column_parallel=False, precision=precisions[name], saved=saved)

    def norm(name: str, before: str = "") -> PassCost:
        """Return the cost of a norm. Behind a layer in 8 bits (`before`) it keeps the sum alone (add_norm.py)."""
        saved, moved = rank.saved_by_norm(hidden), rank.moved(_NORM, stream)
        if precisions.get(before) and rank.tensor == 1 and layer.joins_norms:
            saved, moved = element * hidden, element * _NORM[0] * stream
        return PassCost(name=name, moved=moved, saved=saved, shards=rank.shards, recomputed=again)

    def moving(name: str, moved: float, saved: int = 0) -> PassCost:
        return PassCost(name=name, moved=moved, saved=saved, recomputed=again)

    normed, one_pass = own.qk_norm != "none", own.qk_norm == _IN_ONE_PASS
    qk_saved = normed * (rank.saved_by_norm(query, heads) + rank.saved_by_norm(key, kv_heads))
    qk_moved = rank.moved(_ROTARY, query + key)
    if one_pass:
        qk_saved = element * (query + key)  # the kernel saves q and k as the projection made them
        qk_moved = rank.moved(_QK_NORM_ROTARY, query + key) + rank.moved(_GRADIENT_OF_V, key)
    # sage keeps q and k in INT8 with a scale per token, and v and o in 16 bits. The other backends keep all four in 16
    # bits.
    sage = attention.backend == "sage"
    scales = heads + int(twice * seen_heads) + own.sinks * heads  # The last are the scores of the sinks.
    quantized = query + int(twice * seen) + 4 * scales
    # The last term is the log-sum-exp.
    kept = (
        (quantized if sage else element * (query + gathered * seen)) + element * (gathered * seen + query) + 4 * heads
    )
    # q, k and v of a layer in 8 bits are views of one tensor, so whoever keeps one of them keeps all. v is kept unless
    # it comes from an all-to-all, or embeddings were added to it. q and k are kept where they are normalized by
    # torch.compile or in one pass.
    if precisions["qkv"] is not None:
        kept_by = rank.context == 1 and not layer.value_embeddings, bool(normed) and (rank.fused or one_pass)
        kept += element * {(True, False): query + key, (False, True): key}.get(kept_by, 0)
    # The input of `out` is attention's output, which is kept anyway unless it is rounded or comes from an all-to-all.
    output = inputs["out"] if rank.context > 1 or inputs["out"] < element * query else 0
    # SwiGLU keeps gate and up. It also keeps silu(gate), unless torch.compile or the kernel for joint gradients
    # recomputes it.
    joined = rank.tensor > 1 or precisions.get("gate_up") is not None
    swiglu = 2 if rank.fused or joined else 3
    # A norm behind a layer, alone, costs what a norm before it does.
    both = layer.norms == "sandwich"
    after = [norm("norm of attention's output"), norm("norm of the MLP's output")] if both else []
    mlp = (
        column("gate", inner, "gate_up", saved=inputs["gate_up"]),
        column("up", inner, "gate_up"),
        moving("SwiGLU", rank.moved(_SWIGLU, inner), saved=swiglu * element * inner),
        row("down", inner, inputs["down"]),
    ) if inner else ()  # fmt: skip
    # The gates read in 16 bits what q, k and v may keep as codes.
    low = precisions["qkv"] is not None
    values = (
        product("gates", kv_heads, hidden, column_parallel=True, saved=low * element * hidden),
        moving("embeddings of values", rank.moved(_VALUES, key), element * (key + (2 - rank.fused) * kv_heads)),
    ) if layer.value_embeddings else ()  # fmt: skip
    mixer: tuple[Operation, ...] = (
        column("q", query, "qkv", saved=inputs["qkv"]),  # the layer keeps its input as it reads it: gathered
        column("k", key, "qkv"),
        column("v", key, "qkv"),
        *values,
        moving("QK-norm and rotary embedding", qk_moved, qk_saved),
        moving("around all-to-alls", element * _ALL_TO_ALL * (query + gathered * seen) * (rank.context > 1)),
        AttentionCost(
            name="attention",
            tokens=rank.tokens,
            heads=heads,
            head_dim=own.head_dim,
            span=rank.span_within(own.reach.window),
            documents=rank.documents,
            backends=_backends(attention),
            precision=rank.dtype,
            saved=kept,
            recomputed=again,
        ),
        row("out", query, output),
    )
    if layer.delta_net:
        mixer = _delta_net(layer.delta_net, hidden, rank, precisions["qkv"], inputs)
    listed = (
        norm("attention norm", "down"),
        *mixer,
        *after[:1],
        norm("MLP norm", "out"),
        *(_mixture(layer.experts, hidden, rank) if layer.experts else ()),
        *mlp,
        *after[1:],
        moving("casts to 8 bits", _casts(rank, layers, layer.joins_norms)),
    )
    if rank.recompute not in ("selective", "attention"):
        return listed
    # The block's input is kept, and the outputs of matmuls and attention: v is one of them, and so are q and k before
    # they are normalized and rotated. sage's codes of q and k are kept as well, and `auto` may choose sage. No gradient
    # needs the output of `down`, and torch.compile notices that; partial sums are an exception.
    columns, matmuls = {"attention norm": hidden}, rank.recompute == "selective"
    if matmuls:
        columns |= {"q": query, "k": key, "v": key, "gates": kv_heads, "out": hidden, "gate": inner, "up": inner}
        columns["down"] = hidden * (rank.tensor > 1 or not rank.fused)
        if layer.experts:
            room = int(rank.room * layer.experts.per_token)
            columns["gate and up of experts"] = 2 * room * layer.experts.ffn_size
            columns["down of experts"] = room * hidden * (not rank.fused)
    dear = {part.name: element * columns.get(part.name, 0) for part in listed}
    # torch does not see the operators of flash-attn and of fla, so nothing of them is kept.
    seen = attention.backend != "flash" and layer.delta_net is None
    if seen:
        dear["attention"] = element * query + 4 * heads + quantized * attention.may_be_int8
    anew = {AttentionCost: not seen, MatmulCost: not matmuls, PassCost: True}
    return tuple(replace(part, saved=dear[part.name], recomputed=anew[type(part)]) for part in listed)


def _delta_net(
    delta: DeltaNetConfig, hidden: int, rank: Rank, low: Precision | None, inputs: dict[str, int]
) -> tuple[Operation, ...]:
    """List the operations of a gated delta net (model/delta_net.py).

    Args:
        low: the arithmetic of its large projections. None: dtype.
        inputs: the bytes per token that these keep of their inputs, keyed by name.
    """
    again, element, heads = rank.recompute == "full", rank.element, delta.value_heads // rank.tensor
    keys, values = delta.key_heads * delta.key_dim // rank.tensor, heads * delta.value_dim
    columns = 2 * keys + values
    product = functools.partial(rank.matmul, recomputed=again)
    how: dict[str, Any] = {"column_parallel": True, "precision": low}

    def moving(name: str, elements: int, saved: int) -> PassCost:
        return PassCost(name=name, moved=element * elements, saved=saved, recomputed=again)

    return (
        product("q", keys, hidden, saved=inputs["qkv"], **how),
        product("k", keys, hidden, **how),
        product("v", values, hidden, **how),
        product("z", values, hidden, **how),
        # The gates read in 16 bits what the others may keep as codes.
        product("a and b", 2 * heads, hidden, column_parallel=True, saved=element * hidden * (low is not None)),
        moving("convolutions", _CONVOLUTION * columns, element * columns),
        # The FLOPs of a token are those of attention over three widths of a key, in the state's three products. The
        # normalized q and k are kept, v, what undoes a chunk of 64 tokens, and in fp32 gates and norms of q and k.
        AttentionCost(
            name="delta rule",
            tokens=rank.tokens,
            heads=heads,
            head_dim=delta.value_dim,
            span=3 * delta.key_dim,
            documents=False,
            backends=(DELTA_RULE,),
            precision=rank.dtype,
            saved=element * (columns + 66 * heads) + 8 * (heads + keys // delta.key_dim),
            recomputed=again,
        ),
        moving("gated norm", _GATED_NORM * values, 2 * element * values + 4 * heads),
        product("out", hidden, values, column_parallel=False, precision=low, saved=inputs["out"]),
    )


def _mixture(experts: ExpertsConfig, hidden: int, rank: Rank) -> Iterator[Operation]:
    """List the operations of a router and its experts. Ranks that have experts between them gather tokens, have room
    for more rows than the mean, and are taken to compute equal parts."""
    again, inner, element = rank.recompute == "full", experts.ffn_size, rank.element
    tokens = rank.tokens // rank.shards
    rows, own, room = experts.per_token * tokens, experts.number // rank.experts, rank.room * experts.per_token
    low = rank.linear.takes(LinearSizes(hidden, {"gate": inner, "up": inner}))
    matmul = functools.partial(rank.matmul, column_parallel=False, recomputed=again)

    def product(name: str, outputs: int, inputs: int, saved: int) -> MatmulCost:
        one = matmul(name, outputs, inputs, precision=rank.precision if low else None, saved=saved)
        return replace(one, tokens=rows, experts=own, shards=rank.shards)

    def moving(name: str, moved: float, saved: int = 0) -> PassCost:
        moved /= rank.shards
        return PassCost(name=name, moved=moved, saved=saved, shards=rank.shards, recomputed=again)

    # Codes of rows are kept in place of SwiGLU's results. They fill up the tiles of each expert.
    padded = (int(room * tokens) // _TILE + own) * _TILE // max(1, tokens)
    # The router keeps the rank's tokens, unless shared experts have kept them already.
    kept = 0 if experts.shared and not low else element * hidden
    router = matmul("router", experts.number, hidden, precision=Precision("fp32", "fp32", "fp32"), saved=kept)
    yield replace(router, tokens=tokens, shards=rank.shards)
    kept = (12 if rank.fused else 16) * experts.number + 12 * experts.per_token
    yield moving("scores", _SCORES * experts.number, saved=kept)
    # Tokens of all ranks, which were gathered, or the rows that came from them.
    by_row = by_rows(rank.experts, experts.per_token)
    kept = int(element * hidden * (room if by_row else rank.experts)) * (rank.experts > 1)
    if by_row:
        yield moving("rows for other ranks", 4 * element * room * hidden)
    if low:
        kept = padded * hidden
    elif rank.fused:  # One graph gathers the rows once for both passes.
        kept = int(element * room * hidden)
    yield moving("rows of experts", element * room * _ROWS * hidden, saved=kept)
    yield product("gate and up of experts", 2 * inner, hidden, saved=int(element * room * 2 * inner))
    yield moving("SwiGLU of experts", element * room * _SWIGLU[0] * inner)
    yield product("down of experts", hidden, inner, saved=int((padded if low else element * room) * inner))
    if low:
        columns = room * (3 * inner + 2 * hidden)
        yield moving("casts of experts to 8 bits", rank.moved(_CASTS, columns))


def _backends(attention: AttentionConfig) -> tuple[str, ...]:
    """Return the backends that may run, as Hardware.attention names them. `auto` does not count on an installed
    flash-attn."""
    sage = {"auto": ("sage scores", "sage"), "scores": ("sage scores",)}.get(attention.recipe, ("sage",))
    return {"auto": (*sage, "sdpa"), "sage": sage}.get(attention.backend, (attention.backend,))


def _casts(rank: Rank, layers: dict[str, LinearSizes], joins_norms: bool) -> float:
    """Return the bytes per token that casts to 8 bits move, over the columns that layers in 8 bits read and write.

    On one rank of tensor parallelism SwiGLU leaves the largest magnitudes of its result and its gradients, and with
    `joins_norms` a norm behind a layer in 8 bits those of its result and of the gradient of that layer's output.
    """
    low = {name: each for name, each in layers.items() if rank.linear.takes(each)}
    read = {name: each.inputs for name, each in low.items()}
    written = {name: sum(each.outputs.values()) for name, each in low.items()}
    known = 0
    if rank.tensor == 1:
        known = read.get("down", 0) + written.get("gate_up", 0)
        for before, name in (("down", "qkv"), ("out", "gate_up")) if joins_norms else ():
            known += written.get(before, 0) + (before in low and read.get(name, 0))
    return rank.moved(_CASTS, sum(read.values()) + sum(written.values())) - rank.moved(_FIRST_READ, known)


class Ends(NamedTuple):
    """The operations before and after the blocks."""

    embedding: PassCost
    norm: PassCost
    head: MatmulCost
    loss: PassCost


def end_operations(model: ModelConfig, vocab_size: int, rank: Rank) -> Ends:
    """Return embedding, final norm, output projection and loss. None of them is recomputed. `vocab_size` is padded."""
    hidden, columns, element = model.hidden_size, vocab_size // rank.tensor, rank.element
    # A chunk has logits and their gradient. Eager, the gradient is made of three fp32 tensors and a mask.
    per_logit = 2 * element if rank.fused else element + 13
    moved, precision = rank.moved(_LOGIT, columns), rank.head_precision
    if precision.input_gradient in EIGHT_BITS:  # The gradient of the logits is rounded twice while both are there.
        per_logit, moved = max(per_logit, 2 * element + 2), moved + rank.moved(_CASTS, hidden + columns)
    elif precision.forward in EIGHT_BITS:
        moved += rank.moved(_CAST_ONCE, hidden)
    return Ends(
        embedding=PassCost(name="embedding", moved=element * _EMBEDDING * hidden),
        # The time of the norm is computed as if each rank saw all tokens, because it is a small part of a step.
        norm=PassCost(
            name="final norm",
            moved=rank.moved(_NORM, hidden),
            saved=rank.saved_by_norm(hidden) + element * hidden,
            shards=rank.shards,
        ),
        head=rank.matmul("head", columns, hidden, column_parallel=True, precision=precision, recomputed=False),
        loss=PassCost(name="loss", moved=moved, live=per_logit * columns),
    )
