"""Parameters and FLOPs of a model as plain integers, counted from the lists in model/tensors.py and
costs/operations.py. Nothing here needs torch, so that planning runs anywhere."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

from sagetrain.config.arithmetic import recomputed_blocks
from sagetrain.config.layer_specs import layers
from sagetrain.config.layout import Layout
from sagetrain.config.schema import (
    AttentionConfig,
    ModelConfig,
    MuonConfig,
    Recomputation,
    RunConfig,
)
from sagetrain.costs.operation_kinds import AttentionCost, MatmulCost, Operation, of_kind
from sagetrain.costs.operations import Rank, block_operations, end_operations
from sagetrain.model.placement import slices_of
from sagetrain.model.tensors import tensors

# Two halves gain from this many FLOPs of a block's matmuls on. Below, a host launches slower than a GPU computes
# (results/tensor-parallel).
_OVERLAP_FLOPS = 3e12


class MemoryItem(NamedTuple):
    """One line of the memory estimate."""

    name: str
    bytes: int
    why: str


def total_bytes(items: Iterable[MemoryItem]) -> int:
    """Return the sum of an estimate's items, in bytes."""
    return sum(item.bytes for item in items)


def rank_of(cfg: RunConfig, copies: bool = False, span: float | None = None) -> Rank:
    """Return the share of a micro-step that a rank of this run computes. `auto` of what is recomputed is decided
    before. `copies` and `span` are as in Rank."""
    how = cfg.training.activation_checkpointing
    full = recomputed_blocks(how, cfg.model.num_layers) > 0
    return Rank(
        tokens=cfg.data.micro_batch_size * cfg.data.seq_length // cfg.parallel.context_parallel_size,
        seq_length=cfg.data.seq_length,
        documents=cfg.data.document_attention,
        document_span=span,
        dtype=cfg.training.dtype,
        linear=cfg.linear,
        fused=cfg.training.compile != "off",
        recompute=how if how in ("selective", "attention") else "full" if full else "none",
        tensor=cfg.parallel.tensor_parallel_size,
        context=cfg.parallel.context_parallel_size,
        gather=layers(cfg.model)[0].attention.gather_of(
            cfg.parallel.tensor_parallel_size, cfg.parallel.context_parallel_size
        ),
        experts=cfg.parallel.expert_parallel_size if cfg.model.experts else 1,
        room=min(cfg.parallel.expert_room, cfg.parallel.expert_parallel_size),
        sequence_parallel=cfg.parallel.sequence_parallel,
        copies=copies,
    )


def with_recomputation(cfg: RunConfig, how: Recomputation) -> RunConfig:
    """Return the configuration with this setting of training.activation_checkpointing."""
    return cfg.changed({"training": {"activation_checkpointing": how}})


def last_block(cfg: RunConfig, rank: Rank) -> tuple[Operation, ...]:
    """List the operations of the last block. All blocks have its linear layers, but for dense ones before those with
    experts."""
    return block_operations(layers(cfg.model, cfg.attention.qk_norm)[-1], cfg.attention, rank)


def num_parameters(model: ModelConfig, attention: AttentionConfig, vocab_size: int) -> int:
    """Return the exact number of parameters of Transformer with `vocab_size` (padded) rows in the embedding."""
    return parameters_per_rank(model, attention, vocab_size, 1)


def active_parameters(model: ModelConfig, attention: AttentionConfig, vocab_size: int) -> int:
    """Return the number of parameters that one token meets: of a layer's experts only those that it goes to."""
    everything = num_parameters(model, attention, vocab_size)
    if (experts := model.experts) is None:
        return everything
    of_experts = sum(spec.size for spec in tensors(model, attention, vocab_size) if spec.cut == "experts")
    return everything - of_experts * (experts.number - experts.per_token) // experts.number


# Many layouts are proposed for one model, and each of them asks for this count.
@functools.lru_cache(maxsize=256)
def parameters_per_rank(model: ModelConfig, attention: AttentionConfig, vocab_size: int, tensor_parallel: int) -> int:
    """Return the number of parameters that one tensor-parallel rank holds. Matrices are cut, and gains are on every
    rank."""
    every = tensors(model, attention, vocab_size)
    return sum(spec.size // slices_of(spec, tensor_parallel) for spec in every if spec.kind != "state")


# A prediction asks twice, and most predictions are for one model.
@functools.lru_cache(maxsize=64)
def flops_per_token(model: ModelConfig, vocab_size: int, span: float) -> int:
    """Return the floating point operations of forward and backward for one token.

    A weight of a matmul takes 6. The output projection counts, tied or not; the embedding lookup and gains do not.
    Causal attention takes 6 x layers x attention width x span: half of the square, 1 part forward and 2 parts backward.
    Recomputation is not counted.

    Args:
        span: see Rank.span. With data.seq_length as the span, the result follows the usual convention, which ignores
            that documents hide keys.
    """
    one = Rank(documents=True, document_span=span)
    matmuls, attention = end_operations(model, vocab_size, one).head.flops, 0.0
    for layer, count in Counter(layers(model)).items():
        block = block_operations(layer, AttentionConfig(), one)
        matmuls += count * _matmul_flops(block)
        attention += count * sum(2 * part.flops for part in of_kind(AttentionCost, block))
    return 3 * (matmuls + int(attention))


def _matmul_flops(operations: Iterable[Operation]) -> int:
    """Return the FLOPs of the matmuls in the forward pass."""
    return sum(matmul.flops for matmul in of_kind(MatmulCost, operations))


@functools.lru_cache(maxsize=64)
def elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return the number of values of matrices with these shapes."""
    return sum(map(prod, shapes))


def muon_shapes(cfg: RunConfig, blocks: tuple[int, ...] | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the whole shapes of the matrices that Muon updates, of all tensor-parallel ranks together: those of the
    blocks with these numbers, or of all."""
    if cfg.optimizer.name != "muon":
        return ()
    return _muon_shapes(cfg.model, cfg.attention, tuple(cfg.optimizer.muon.adamw_matrices), blocks)


# Layouts of a model share them, and a search for layouts asks ten thousand times.
@functools.lru_cache(maxsize=64)
def _muon_shapes(
    model: ModelConfig, attention: AttentionConfig, adamw_matrices: tuple[Any, ...], blocks: tuple[int, ...] | None
) -> tuple[tuple[int, ...], ...]:
    muon = MuonConfig(adamw_matrices=[*adamw_matrices])
    return tuple(
        spec.matrix
        for spec in tensors(model, attention, 1)
        if muon.takes(spec.kind, spec.name) and (blocks is None or spec.layer in blocks)
        for _ in range(spec.matrices)
    )


def checkpoint_bytes(cfg: RunConfig, vocab_size: int) -> int:
    """Return the bytes of a checkpoint's tensors: fp32 weights, and the optimizer's state in fp32. AdamW has two values
    for each parameter, Muon has one."""
    return 12 * num_parameters(cfg.model, cfg.attention, vocab_size) - 4 * elements(muon_shapes(cfg))


def save_host_bytes(cfg: RunConfig, world_size: int, vocab_size: int) -> int:
    """Return the host memory, in bytes, from which a rank writes its share of a checkpoint."""
    tensor = cfg.parallel.tensor_parallel_size
    size = parameters_per_rank(cfg.model, cfg.attention, vocab_size, tensor)
    slice_bytes = (12 * size - 4 * elements(muon_shapes(cfg)) // tensor) // cfg.parallel.pipeline_parallel_size
    # Ranks that hold the same write it once: at stage 0 the first replica writes everything.
    return -(-slice_bytes // Layout.of(cfg, world_size).shards)


def overlaps(cfg: RunConfig) -> bool:
    """Whether micro-batches are taken in halves, by parallel.tensor_parallel_overlap. For `auto` the FLOPs of a block
    decide."""
    if cfg.parallel.tensor_parallel_overlap != "auto":
        return cfg.parallel.tensor_parallel_overlap == "on"
    whole = Rank(tokens=rank_of(cfg).tokens)
    flops = 3 * _matmul_flops(last_block(cfg, whole))
    return flops >= _OVERLAP_FLOPS * cfg.parallel.tensor_parallel_size
