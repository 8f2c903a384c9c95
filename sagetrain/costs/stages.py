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
from sagetrain.costs.accounting import muon_shapes, rank_of
from sagetrain.costs.operation_kinds import AttentionCost, MatmulCost, Operation
from sagetrain.costs.operations import Rank, block_operations, end_operations
from sagetrain.model.chunks import ModelChunk, whole
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


def kinds_of_blocks(cfg: RunConfig, rank: Rank, own: Sequence[ModelChunk] = ()) -> list[BlockKind]:
    """Return the kinds of blocks of some chunks, or of the whole model. Blocks differ in what they compute, in the
    precision of their linear layers, and in whether they are recomputed."""
    count = cfg.model.num_layers
    low, again = cfg.linear.low_bit_blocks(count), count
    if rank.recompute == "full":
        again = recomputed_blocks(cfg.training.activation_checkpointing, count)
    return _kinds(cfg.model, cfg.attention.qk_norm, low, again, rank, tuple(own or [whole(count)]))


# Proposing layouts asks for the kinds of blocks of the same ranks again and again.
@functools.lru_cache(maxsize=1024)
def _kinds(
    model: ModelConfig, qk_norm: QKNorm, low: range, again: int, rank: Rank, own: tuple[ModelChunk, ...]
) -> list[BlockKind]:
    """Return the kinds of blocks, of which those in `low` are in 8 bits and the first `again` are recomputed."""
    every, counts = specs(model, qk_norm), dict[tuple[LayerSpec, Rank], int]()
    kinds = Counter((every[number], number in low, number < again) for chunk in own for number in chunk.blocks)
    for (layer, is_low, recomputes), count in kinds.items():
        of_kind = replace(
            rank,
            linear=rank.linear if is_low else SIXTEEN_BITS,
            recompute=rank.recompute if recomputes else "none",
        )
        counts[layer, of_kind] = counts.get((layer, of_kind), 0) + count
    return [BlockKind(count, *kind) for kind, count in counts.items()]


@dataclass(frozen=True)
class Held:
    """The part of a model on one pipeline stage. Without a pipeline it is the whole model."""

    cfg: RunConfig
    """The configuration of the whole model."""
    layout: Layout
    vocab_size: int
    chunks: tuple[ModelChunk, ...]
    kept: float
    """The number of micro-batches whose activations the stage keeps at once."""

    @property
    def first(self) -> bool:
        """True for the stage that has the embedding, which is the first one."""
        return self.chunks[0].first

    @property
    def last(self) -> bool:
        """True for the stage that has the output projection and the loss, which is the last one."""
        return self.chunks[-1].last

    @functools.cached_property
    def num_blocks(self) -> int:
        """The number of the stage's blocks."""
        return sum(len(chunk.blocks) for chunk in self.chunks)

    def kinds(self, rank: Rank) -> list[BlockKind]:
        """Return the kinds of the stage's blocks (kinds_of_blocks)."""
        return kinds_of_blocks(self.cfg, rank, self.chunks)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The parameters of a tensor-parallel rank."""
        cfg, layout = self.cfg, self.layout
        return _sizes(cfg.model, cfg.attention, self.vocab_size, layout.tensor, layout.experts, self.chunks)

    @functools.cached_property
    def muon_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The whole shapes of the matrices that Muon updates."""
        return muon_shapes(self.cfg, tuple(number for chunk in self.chunks for number in chunk.blocks))


def different_stages(cfg: RunConfig, vocab_size: int) -> dict[int, int]:
    """Return the pipeline stages that differ in what they have, each with the number of stages that are like it. Of
    equal stages it is the first one, which keeps the most micro-batches."""
    found = dict[tuple[object, ...], list[int]]()
    stages, every, rank = cfg.parallel.pipeline_parallel_size, chunks(cfg, vocab_size), rank_of(cfg)
    for stage in range(stages):
        own = every[stage::stages]
        found.setdefault((frozenset(kinds_of_blocks(cfg, rank, own)), own[0].first, own[-1].last), []).append(stage)
    return {alike[0]: len(alike) for alike in found.values()}


@functools.lru_cache(maxsize=1024)
def _in_flight(stages: int, per_stage: int, micros: int) -> list[int]:
    """Return the largest number of forward passes that each stage keeps at once."""
    return [in_flight(order) for order in orders(stages, per_stage, micros)]


def held(cfg: RunConfig, layout: Layout, vocab_size: int, stage: int) -> Held:
    """Return the part of a model on a pipeline stage, and what the stage keeps at the largest number of tokens per
    step."""
    own, kept = tuple(chunks_of_stage(cfg, vocab_size, stage)), 1.0
    if layout.stages > 1:
        micros = max(cfg.tokens_per_step.named_tokens.values()) // layout.micro_step
        # With more than four micro-batches for each stage, a stage keeps no more of them, and they are sooner counted.
        micros = min(max(1, micros), 4 * layout.stages)
        kept = _in_flight(layout.stages, layout.chunks, micros)[stage] / len(own)
    return Held(cfg, layout, vocab_size, own, kept)


class Sizes(NamedTuple):
    """Numbers of parameters of a pipeline stage on one tensor-parallel rank. Matrices are cut, and gains are on every
    rank."""

    parameters: int
    """All parameters."""
    blocks: tuple[int, ...]
    """The parameters of each block that FSDP2 gathers and reduces together (engines/sharding.py), experts included."""
    experts: tuple[int, ...]
    """The rank's experts in each block that has some."""
    apart: int
    """All experts, where ranks have those of a layer between them. They are then not gathered with their blocks."""

    @property
    def outside(self) -> int:
        """Everything outside of blocks, the gains of norms and routers included."""
        return self.parameters - sum(self.blocks)


# Many layouts are proposed for one model, and each of them asks for these counts.
@functools.lru_cache(maxsize=256)
def _sizes(
    model: ModelConfig, attention: AttentionConfig, vocab_size: int, tensor: int, ranks: int,
    own: tuple[ModelChunk, ...],
) -> Sizes:  # fmt: skip
    """Count the parameters of some chunks, where so many ranks have the experts of a layer between them."""
    first, last = own[0].first, own[-1].last
    parameters = 0
    blocks, experts = ({number: 0 for chunk in own for number in chunk.blocks} for _ in range(2))
    ends = {"embedding": first or (last and model.tie_embeddings), "head": last}
    for spec in tensors(model, attention, vocab_size):
        if spec.kind == "state" or not (ends[spec.layer] if isinstance(spec.layer, str) else spec.layer in blocks):
            continue
        size = spec.size // (ranks if spec.cut == "experts" else slices_of(spec, tensor))
        parameters += size
        if isinstance(spec.layer, int) and not spec.wide and spec.kind != "gain":
            blocks[spec.layer] += size
            experts[spec.layer] += size * (spec.cut == "experts")
    of_experts = tuple(filter(None, experts.values()))
    return Sizes(parameters, tuple(blocks.values()), of_experts, sum(of_experts) * (ranks > 1))
