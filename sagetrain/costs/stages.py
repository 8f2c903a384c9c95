"""The blocks of a model by their kinds, those that each chunk of a pipeline has, by what they cost, and what a stage
keeps. No torch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from sagetrain.config.arithmetic import recomputed_blocks
from sagetrain.config.layer_specs import LayerSpec
from sagetrain.config.layer_specs import layers as specs
from sagetrain.config.layout import Layout
from sagetrain.config.schema import SIXTEEN_BITS, AttentionConfig, ModelConfig, RunConfig
from sagetrain.config.sections.model import QKNorm
from sagetrain.costs.operation_kinds import AttentionCost, MatmulCost, Operation
from sagetrain.costs.operations import Rank, block_operations, end_operations
from sagetrain.model.chunks import ModelChunk
from sagetrain.model.placement import slices_of
from sagetrain.model.tensors import tensors
from sagetrain.parallel.orders import in_flight, orders


def chunks(cfg: RunConfig, vocab_size: int) -> list[ModelChunk]:
    """Return all chunks of a model, from its input to its output."""
    bounds = [0, *accumulate(blocks_of_chunks(cfg, vocab_size))]
    last = len(bounds) - 2
    return [
        ModelChunk(number, range(bounds[number], bounds[number + 1]), number == 0, number == last)
        for number in range(last + 1)
    ]


def chunks_of_stage(cfg: RunConfig, vocab_size: int, stage: int) -> list[ModelChunk]:
    """Return the chunks of one pipeline stage, in the order of the model."""
    return chunks(cfg, vocab_size)[stage :: cfg.parallel.pipeline_parallel_size]


def blocks_of_chunks(cfg: RunConfig, vocab_size: int) -> Sequence[int]:
    """Return the number of blocks in each chunk. `auto` makes the largest number of FLOPs of a chunk as small as it can
    be, with those of the output projection counted; a lookup in the embedding has none."""
    parallel, layers = cfg.parallel, cfg.model.num_layers
    if parallel.pipeline_parallel_size == 1:
        return [layers]
    if parallel.pipeline_blocks != "auto":
        return parallel.pipeline_blocks
    count = parallel.pipeline_parallel_size * parallel.pipeline_chunks
    rank = Rank(tokens=cfg.data.micro_batch_size * cfg.data.seq_length, seq_length=cfg.data.seq_length)
    every = Counter(specs(cfg.model, cfg.attention.qk_norm))
    total = sum(count * _flops(block_operations(layer, cfg.attention, rank)) for layer, count in every.items())
    block = total // layers
    return _even_blocks(layers, count, block, end_operations(cfg.model, vocab_size, rank).head.flops)


def _flops(operations: Iterable[Operation]) -> int:
    return sum(int(part.flops) for part in operations if isinstance(part, MatmulCost | AttentionCost))


@functools.lru_cache(maxsize=256)
def _even_blocks(layers: int, count: int, block: int, head: int) -> Sequence[int]:
    """Return the blocks of each chunk whose largest cost is smallest. The last chunk has the cost of the head too."""
    found, costs = [1] * count, [block] * count
    costs[-1] += head
    for _ in range(layers - count):
        # Of equal chunks a late one is taken, because early stages keep more micro-batches.
        least = min(range(count), key=lambda chunk: (costs[chunk], -chunk))
        found[least] += 1
        costs[least] += block
    return tuple(found)


class BlockKind(NamedTuple):
    """The blocks of a model that are alike."""

    blocks: int
    layer: LayerSpec
    rank: Rank
    """The share of a micro-step that a rank runs in such a block."""


def kinds_of_blocks(cfg: RunConfig, rank: Rank) -> list[BlockKind]:
    """Return the kinds of blocks. Blocks differ in what they compute, in the precision of their linear layers, and in
    whether they are recomputed."""
    blocks = cfg.model.num_layers
    low, again = cfg.linear.low_bit_blocks(blocks), blocks
    if rank.recompute == "full":
        again = recomputed_blocks(cfg.training.activation_checkpointing, again)
    return _kinds(cfg.model, cfg.attention.qk_norm, low, again, rank)


# Proposing layouts asks for the kinds of blocks of the same ranks again and again.
@functools.lru_cache(maxsize=1024)
def _kinds(model: ModelConfig, qk_norm: QKNorm, low: range, again: int, rank: Rank) -> list[BlockKind]:
    """Return the kinds of blocks, of which those in `low` are in 8 bits and the first `again` are recomputed."""
    counts: dict[tuple[LayerSpec, Rank], int] = {}
    kinds = Counter((layer, number in low, number < again) for number, layer in enumerate(specs(model, qk_norm)))
    for (layer, is_low, recomputes), count in kinds.items():
        own = replace(
            rank,
            linear=rank.linear if is_low else SIXTEEN_BITS,
            recompute=rank.recompute if recomputes else "none",
        )
        counts[layer, own] = counts.get((layer, own), 0) + count
    return [BlockKind(count, *kind) for kind, count in counts.items()]


@dataclass(frozen=True)
class Held:
    """The part of a model on one pipeline stage. Without a pipeline it is the whole model."""

    cfg: RunConfig
    """The configuration with the number of blocks of the stage."""
    parameters: int
    """The parameters of a tensor-parallel rank."""
    first: bool
    """Whether the stage has the embedding."""
    last: bool
    """Whether the stage has the output projection and the loss."""
    kept: float
    """The number of micro-batches whose activations the stage keeps at once."""


def different_stages(cfg: RunConfig, vocab_size: int) -> list[int]:
    """Return the pipeline stages that differ in what they have. Of equal stages it is the first one, which keeps the
    most micro-batches."""
    again, found = cfg.training.activation_checkpointing, dict[tuple[object, ...], int]()
    stages = cfg.parallel.pipeline_parallel_size
    every, layers = chunks(cfg, vocab_size), specs(cfg.model)
    for stage in range(stages):
        own = every[stage::stages]
        recomputed = _recomputed(again, own) if isinstance(again, int) else 0
        blocks, dense = sum(len(chunk.blocks) for chunk in own), _dense(cfg.model, own)
        valued = sum(layers[number].value_embeddings for chunk in own for number in chunk.blocks)
        found.setdefault((blocks, dense, valued, recomputed, own[0].first, own[-1].last), stage)
    return [*found.values()]


def _dense(model: ModelConfig, own: Sequence[ModelChunk]) -> int:
    """Return how many blocks of these chunks have no experts, in a model that has experts."""
    return _recomputed(model.experts.dense_layers, own) if model.experts else 0


def _recomputed(again: int, own: Sequence[ModelChunk]) -> int:
    """Return how many blocks of these chunks are among the first `again` blocks of the model, which are recomputed."""
    return sum(len(range(chunk.blocks.start, min(chunk.blocks.stop, again))) for chunk in own)


@functools.lru_cache(maxsize=1024)
def _in_flight(stages: int, per_stage: int, micros: int) -> list[int]:
    """Return the largest number of forward passes that each stage keeps at once."""
    return [in_flight(order) for order in orders(stages, per_stage, micros)]


def held(cfg: RunConfig, layout: Layout, vocab_size: int, stage: int) -> Held:
    """Return the part of a model on a pipeline stage, and what the stage keeps at the largest number of tokens per
    step."""
    own = tuple(chunks_of_stage(cfg, vocab_size, stage))
    first, last = own[0].first, own[-1].last
    size = _parameters(cfg.model, cfg.attention, vocab_size, layout.tensor, own) - _elsewhere(cfg, own)
    if layout.stages == 1:
        return Held(cfg, size, first, last, 1.0)
    blocks = sum(len(chunk.blocks) for chunk in own)
    micros = max(cfg.tokens_per_step.named_tokens.values()) // layout.micro_step
    # Of many micro-batches no more are kept than of a few rounds.
    micros = min(max(1, micros), 4 * layout.stages)
    passes = _in_flight(layout.stages, layout.chunks, micros)[stage]
    again = cfg.training.activation_checkpointing
    if isinstance(again, int):
        again = _recomputed(again, own)
    windows, numbers = cfg.model.windows, [number for chunk in own for number in chunk.blocks]
    if windows is not None:
        letters = "".join(windows.pattern[number % len(windows.pattern)] for number in numbers)
        windows = windows.model_copy(update={"pattern": letters})
    experts = cfg.model.experts
    if experts is not None:
        dense = _dense(cfg.model, own)
        experts = None if dense == blocks else experts.model_copy(update={"dense_layers": dense})
    every = specs(cfg.model)
    tables = any(every[number].value_embeddings for number in numbers)
    model = {"num_layers": blocks, "windows": windows, "experts": experts, "value_embeddings": tables}
    part = cfg.changed({"model": model, "training": {"activation_checkpointing": again}})
    return Held(part, size, first, last, passes / len(own))


def _elsewhere(cfg: RunConfig, own: Sequence[ModelChunk]) -> int:
    """Return the parameters of the experts of these chunks that other ranks have."""
    ranks, blocks = cfg.parallel.expert_parallel_size, sum(len(chunk.blocks) for chunk in own) - _dense(cfg.model, own)
    if ranks == 1 or (experts := cfg.model.experts) is None:
        return 0
    return 3 * blocks * experts.ffn_size * cfg.model.hidden_size * (experts.number - experts.number // ranks)


# Many layouts are proposed for one model, and each of them asks for these counts.
@functools.lru_cache(maxsize=256)
def _parameters(
    model: ModelConfig, attention: AttentionConfig, vocab_size: int, tensor_parallel: int, own: tuple[ModelChunk, ...]
) -> int:
    """Count the parameters of a stage on one tensor-parallel rank. Matrices are cut, and gains are on every rank."""
    first, last = own[0].first, own[-1].last
    ends = {"embedding": first or (last and model.tie_embeddings), "head": last}
    layers = {number for chunk in own for number in chunk.blocks}
    here = (
        spec
        for spec in tensors(model, attention, vocab_size)
        if (spec.layer in layers if isinstance(spec.layer, int) else ends[spec.layer])
    )
    return sum(spec.size // slices_of(spec, tensor_parallel) for spec in here if spec.kind != "state")
