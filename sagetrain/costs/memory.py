"""The memory that a rank takes, item by item, as plain integers. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

from sagetrain.config.arithmetic import parts_of
from sagetrain.config.errors import many
from sagetrain.config.layer_specs import LayerSpec
from sagetrain.config.layout import Layout
from sagetrain.config.linear_sizes import LOW_BIT
from sagetrain.config.schema import SIXTEEN_BITS, RunConfig
from sagetrain.costs import deepspeed_prices
from sagetrain.costs.accounting import MemoryItem, elements, overlaps, rank_of, total_bytes, with_recomputation
from sagetrain.costs.operation_kinds import MatmulCost, Operation, of_kind
from sagetrain.costs.operations import Rank, block_operations, end_operations
from sagetrain.costs.stages import Held, different_stages, held
from sagetrain.optim.owners import MUON_ROUND

# This many logits exist at once, see parallel/cross_entropy.py.
_CHUNK_LOGITS = 2**28
KEPT_BLOCKS = 2
"""The blocks whose activations are on the GPU at once with training.activation_offload (model/activation_offload.py).
"""
_MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / 256}
"""Bytes of a moment of one parameter, by optimizer.moments. In 8 bits 256 values share a scale (optim/states.py)."""


def memory_per_rank(cfg: RunConfig, world_size: int, vocab_size: int) -> list[MemoryItem]:
    """Estimate one rank's peak memory in bytes, item by item, in the part of the run where it is largest.

    The items are everything that the rank always holds, and the largest of some moments. The moments are the loss over
    the last logits, the last block's backward, the reduction of gradients, a probe (stability.quant_noise), and the
    measurement of linear layers (stability.monitor). All items but the workspace follow the allocations of DeepSpeed
    0.19 for our settings, or of FSDP2, and the tensors that autograd saves for our blocks; the workspace is a guess.

    Not counted are CUDA's context, NCCL and the slots of parallel/copies.py (1 to 3 GB), and fragmentation of the
    allocator. Building the model takes less than a step: the weights, or at ZeRO 3 this rank's part of them and one
    whole parameter.

    Args:
        vocab_size: the number of rows of the embedding, padded.
    """
    parts = [cfg.model_copy(update={"linear": linear}) for linear in cfg.linear.phases]
    layout = Layout.of(cfg, world_size)
    every = ((part, stage) for part in parts for stage in different_stages(part, vocab_size))
    return max((_memory(part, layout, vocab_size, stage) for part, stage in every), key=total_bytes)


def _memory(cfg: RunConfig, layout: Layout, vocab_size: int, stage: int) -> list[MemoryItem]:
    part, rank = held(cfg, layout, vocab_size, stage), rank_of(cfg)
    kept, running = _activations(part, rank)
    if layout.stages > 1:
        why = f"{kept.why}; of {part.kept:g} micro-batches at once, on pipeline stage {stage + 1}"
        kept = MemoryItem(kept.name, int(part.kept * kept.bytes), why)
    bucket, copies, left = _reduction(part)
    moments = [
        [kept, *_loss(part, rank)],
        [kept, *running, bucket],
        [*(item._replace(bytes=int(left * item.bytes)) for item in (kept, *running)), bucket, copies],
        *_probe(part),
        *_linear_errors(part),
        _orthogonalizing(part),
    ]
    slots = round(part.kept * layout.chunks) if layout.stages > 1 else 0
    largest = [*max(moments, key=total_bytes), *_recordings(part, moments[:2], slots)]
    return [item for item in (*_model_state(part, _codes(part, rank)), *largest) if item.bytes]


def _recordings(part: Held, passes: Sequence[list[MemoryItem]], slots: int) -> list[MemoryItem]:
    """Estimate what recorded micro-steps keep for themselves. With `auto` they are made only if that is there.

    Args:
        passes: the memory of the loss, and that of a block's backward pass.
        slots: the micro-batches that a stage of a pipeline has under way at once; 0: there is no pipeline.
    """
    layout, sizes, rank = part.layout, part.sizes, rank_of(part.cfg)
    if part.cfg.training.cuda_graphs != "on" or not layout.recorded:
        return []
    beside, more = "reduced gradients", 4 * sizes.parameters // layout.shards * (layout.reduced == "once a step")
    if layout.zero_stage == 3:
        beside, more = "a block on its way to its place", rank.element * max(sizes.blocks)
    held, what = max(map(total_bytes, passes)), "micro-steps"
    if slots:
        # Forward and backward passes have pools of their own, and each slot has what a block does not keep.
        (_, *loss), (kept, again, workspace, _) = passes
        forward, backward = _passing(part, rank)
        held, what = total_bytes([kept, *loss, again]), f"{slots} micro-batches"
        held += max(workspace.bytes, backward) + slots * max(again.bytes, forward)
    why = f"activations of {what} as CUDA graphs, beside those of passes by the host, and {beside}"
    return [MemoryItem("recordings", held + more, why)]


def _passing(part: Held, rank: Rank) -> tuple[int, int]:
    """Return the bytes that the forward pass of a block needs at once beside what it keeps, and those that its backward
    pass needs at once if nothing of the forward pass is freed for it.

    Most is needed around the widest layer, `down`: SwiGLU's result and its codes by rows, or the gradients of gate, up
    and that result, the codes of the former by rows and columns, and the gradients of the weights of gate and up. Two
    residual streams are there as well.
    """
    widest = max((layer for _, layer in _matmuls(part, rank)), key=lambda layer: layer.tokens * layer.inputs)
    low, streams = widest.precision.forward in LOW_BIT, 2 * rank.element * widest.tokens * widest.outputs
    made = widest.tokens * widest.inputs
    forward = made * (rank.element + 1) * low + streams
    return forward, made * (3 * rank.element + 4 * low) + streams + 2 * rank.element * widest.weights


def kept_bytes(operations: Iterable[Operation]) -> int:
    """Return the bytes per token that autograd saves of a block's operations on one rank."""
    return sum(part.saved // part.shards for part in operations)


def _model_state(part: Held, codes: MemoryItem) -> list[MemoryItem]:
    """Estimate weights, gradients and optimizer state of a rank while it holds all activations."""
    if part.layout.engine == "fsdp":
        return _fsdp_state(part, codes)
    return [*deepspeed_prices.state(part.cfg, part.layout, part.sizes.parameters, *_moments(part)), codes]


def _codes(part: Held, rank: Rank) -> MemoryItem:
    """Estimate the 8-bit weights that linear layers keep, and the output projection if it is here."""
    linear = part.cfg.linear
    every = _matmuls(part, rank) if linear.low_bit else ()
    bytes_ = 2 * sum(blocks * layer.weights for blocks, layer in every if layer.precision.forward == linear.precision)
    bytes_ += _head_codes(end_operations(part.cfg.model, part.vocab_size, rank).head) if part.last else 0
    return MemoryItem("8-bit weights", bytes_, "codes of linear layers, as they are and transposed")


def _head_codes(head: MatmulCost) -> int:
    """Return the bytes of the codes of the output projection's weights, for the products that are in 8 bits."""
    return head.weights * sum(precision in LOW_BIT for precision in head.precision[:2])


def _matmuls(part: Held, rank: Rank) -> Iterator[tuple[int, MatmulCost]]:
    """Yield the matmuls of each kind of blocks, with the number of such blocks."""
    for kind in part.kinds(rank):
        for layer in of_kind(MatmulCost, block_operations(kind.layer, part.cfg.attention, kind.rank)):
            yield kind.blocks, layer


def _fsdp_state(part: Held, codes: MemoryItem) -> list[MemoryItem]:
    """Estimate what _model_state does, for FSDP2 (engines/fsdp.py)."""
    cfg, layout, sizes = part.cfg, part.layout, part.sizes
    stage, shards, element = layout.zero_stage, layout.shards, rank_of(cfg).element
    size, block, outside, experts = sizes.parameters, max(sizes.blocks), sizes.outside, sizes.apart
    # Other ranks shard the experts that ranks have between them.
    share = -(-(size - experts) // shards) + -(-experts // layout.expert_shards)
    moments, state = _moments(part)
    # With what rounding has left, masters in bf16 take as much as in fp32. Gradients have the dtype of the masters.
    master = cfg.optimizer.master
    taken, wide = 2 if master == "bf16_chance" else 4, 4 if master == "fp32" else 2
    what = f"masters in {master} and {moments}, 1/{shards} of them"
    of_state = -(-state * share // size) if experts else -(-state // shards)
    optimizer = MemoryItem("optimizer", taken * share + of_state, what)
    if cfg.parallel.offload != "none":
        what = "fp32 shards of two blocks and outside of them, on their way from the host's memory"
        optimizer, wide = MemoryItem("offload", 4 * (outside + 2 * block) // shards, what), 0
    # Inside a host copy engines gather a block out of two slots (parallel/copies.py).
    slots = [MemoryItem("gather slots", 2 * element * block // shards, "of two blocks' shards")] if shards > 1 else []
    if stage == 3 and layout.hooks == "never":
        blocks = element * (size - outside) // shards
        slots = [
            MemoryItem("rows of weights", blocks, f"1/{shards} of all blocks, in {cfg.training.dtype} for all ranks")
        ]
    if stage == 3:
        # A block computes while the next one is on its way to a buffer, and from there to its place.
        gathered = MemoryItem("gathered weights", element * (outside + 3 * block), "of two blocks, and outside of them")
        return [gathered, MemoryItem("gradients", wide * share, f"1/{shards} of them"), optimizer, *slots]
    several = max(cfg.tokens_per_step.named_tokens.values()) > layout.micro_step
    if layout.reduced == "never":
        held = MemoryItem("gradients", 4 * size, "fp32, kept for good")
    elif stage < 2 and several:
        held = MemoryItem("gradients", 4 * size, "fp32, until they are reduced")
    else:
        held = MemoryItem("gradients", wide * share, f"1/{shards} of them")
    weights = MemoryItem("weights", element * size, f"{cfg.training.dtype}, gathered")
    return [weights, held, optimizer, codes, *slots]


def _moments(part: Held) -> tuple[str, int]:
    """Return the optimizer's state of a rank before ZeRO: in words, and in bytes."""
    muon, moments = elements(part.muon_shapes) // part.layout.tensor, part.cfg.optimizer.moments
    many = "moments (one for matrices, two for the rest)" if muon else "two Adam moments"
    return f"{many} in {moments}", int(_MOMENT_BYTES[moments] * (2 * part.sizes.parameters - muon))


def _orthogonalizing(part: Held) -> list[MemoryItem]:
    """Estimate the update by Muon: the directions of a round of matrices, and what Newton-Schulz steps hold."""
    shapes = part.muon_shapes
    if not shapes:
        return []
    of_a_round = max(min(MUON_ROUND, elements(shapes)), *map(prod, shapes))
    # Received directions, matrices before and after a step, two squares of their shorter side, and on several ranks
    # matrices whose slices were joined.
    return [MemoryItem("orthogonalizing", 6 * 2 * of_a_round, "Muon's updates of a round of matrices in bf16")]


def _reduction(part: Held) -> tuple[MemoryItem, MemoryItem, float]:
    """Estimate the gradients on their way to other ranks.

    The result is the bucket held during backward, the copies made of a full bucket, and the share of the activations
    that is left when the first bucket is full.

    FSDP2 reduces block by block, and what is outside of the
    blocks after backward. A single replica reduces nothing, and each gradient is added to its sum and freed.
    """
    sizes, layout = part.sizes, part.layout
    if layout.reduced == "never":
        none = MemoryItem("reduction", 0, "a single replica")
        return none, none, 0.0
    if layout.engine == "fsdp":
        why = "fp32 gradients of two blocks on their way, and those that backward makes of one"
        return (
            MemoryItem("bucket", (8 + rank_of(part.cfg).element) * max(sizes.blocks), why),
            MemoryItem("reduction", 4 * sizes.outside, "fp32 gradients outside of the blocks on their way"),
            0.0,
        )
    return deepspeed_prices.reduction(part.cfg, layout, sizes.parameters)


def _probe(part: Held) -> list[list[MemoryItem]]:
    """Estimate the moments of a probe (stability/quant_noise.py), which runs micro-batches twice and is not compiled.

    While the second pass of the last micro-batch runs in 16 bits, the gradients of the first pass are held. After it,
    both gradients and their difference in fp32 are held.
    """
    if not part.cfg.stability.quant_noise.every_steps:
        return []
    cfg = part.cfg.model_copy(update={"linear": SIXTEEN_BITS})
    # Experts that ranks have between them are not probed.
    size = part.sizes.parameters - part.sizes.apart
    rank = replace(rank_of(cfg), fused=False)
    part = replace(part, cfg=cfg)
    kept, running = _activations(part, rank)
    # A single replica takes two micro-batches, and has the sum of the differences from the first micro-batch on.
    alone = part.layout.data == 1
    why = "gradients of a probe: stability.quant_noise.every_steps"
    held = MemoryItem("probe", (rank.element + 4 * alone) * size, why)
    largest = (
        max(part.vocab_size * (part.first or part.last), cfg.model.ffn_hidden_size)
        * cfg.model.hidden_size
        // rank.tensor
    )
    return [
        [kept, *_loss(part, rank), held],
        [kept, *running, held],
        [MemoryItem("probe", (2 * rank.element + 4) * size + (16 if alone else 8) * largest, why)],
    ]


def _linear_errors(part: Held) -> list[list[MemoryItem]]:
    """Estimate the moments of measuring linear layers (stability/linear_errors.py). Nothing is compiled, and every
    block is recomputed.

    The moments are the loss, and the backward pass of a block that keeps inputs in 16 bits. Beside the backward pass
    there are a layer's weights in fp32, or later its input.
    """
    low = part.cfg.linear
    if not low.low_bit or part.cfg.stability.monitor.every_steps is None:
        return []
    cfg = with_recomputation(part.cfg, "full")
    part, rank = replace(part, cfg=cfg), replace(rank_of(cfg), fused=False, linear=SIXTEEN_BITS)
    kept, running = _activations(part, rank)
    largest = max(4 * max(layer.weights, layer.tokens * layer.inputs) for _, layer in _matmuls(part, rank))
    head, why = end_operations(cfg.model, part.vocab_size, rank).head, "a linear layer in fp32: stability.monitor"
    of_head = [MemoryItem("monitor", 4 * head.weights, why)] * (part.last and low.head != "bf16")
    return [
        [kept, *_loss(part, rank), *of_head],
        [kept, *running, MemoryItem("monitor", largest, why)],
    ]


def _activations(part: Held, rank: Rank) -> tuple[MemoryItem, list[MemoryItem]]:
    """Estimate the activations that all blocks keep of a micro-batch until backward, and the further memory of the
    block whose backward pass runs."""
    cfg = part.cfg

    def saved_by(layer: LayerSpec, own: Rank) -> int:
        return kept_bytes(block_operations(layer, cfg.attention, own))

    kinds, by_kind = part.kinds(rank), list[tuple[int, int]]()
    for _, layer, own in kinds:
        kept = 0 if own.recompute == "full" else saved_by(layer, own)
        by_kind.append((kept, saved_by(layer, replace(own, recompute="none"))))
    saved = sum(kind.blocks * kept for kind, (kept, _) in zip(kinds, by_kind, strict=True))
    again, whole = max(((whole - kept, whole) for kept, whole in by_kind), key=sum)
    blocks = sum(kind.blocks for kind in kinds if kind.rank.recompute != "full")
    inputs = (part.num_blocks - blocks) * rank.element * cfg.model.hidden_size // rank.shards
    what = []
    if inputs:
        what.append(f"input of {many(part.num_blocks - blocks, 'block') if blocks else 'every block'}")
    if blocks:
        how = "fused by torch.compile" if rank.fused else "not compiled: fp32 intermediates are kept"
        results = {"selective": "results of matmuls and attention", "attention": "results of attention"}
        how = results.get(rank.recompute, how)
        what.append(f"{saved / blocks:,.0f} bytes per token and block, {how}")
    held = saved + inputs
    if cfg.training.activation_offload and (away := part.num_blocks - KEPT_BLOCKS) > 0:
        held -= held * away // part.num_blocks
        what.append(f"of {KEPT_BLOCKS} blocks at a time, the others in the host's memory")
    return MemoryItem("activations", rank.tokens * held, "; ".join(what)), [
        MemoryItem("recomputed", rank.tokens * again, "activations of one block"),
        MemoryItem("workspace", rank.tokens * whole, "gradients inside one block: about what it saved (a guess)"),
    ]


def _loss(part: Held, rank: Rank) -> list[MemoryItem]:
    """Estimate the final norm, the head's chunk of logits, and the gradients that the head computes ahead of backward,
    on the last pipeline stage."""
    if not part.last:
        return []
    cfg, ends = part.cfg, end_operations(part.cfg.model, part.vocab_size, rank)
    stream = rank.tokens * rank.element * ends.head.inputs
    parts = parts_of(rank.tokens, rank.tensor, overlaps(cfg))
    tokens = rank.tokens // parts
    chunks = -(-tokens * ends.head.outputs // _CHUNK_LOGITS)
    chunk = -(-tokens // chunks)
    norm = rank.tokens * ends.norm.saved // ends.norm.shards
    gathered = stream if rank.shards > 1 else 0
    # Products in 8 bits are made in 16 bits before they are added to the sum. At ZeRO 3 nothing is kept of the weights.
    product = rank.element * ends.head.weights * (ends.head.precision.weight_gradient in LOW_BIT)
    codes = _head_codes(ends.head) if cfg.parallel.zero_stage == 3 else 0
    return [
        MemoryItem("logits", chunk * ends.loss.live, f"of {chunk:,} tokens at a time, and their gradients"),
        MemoryItem(
            "loss",
            norm + gathered + stream + product + codes + (4 + (parts - 1) * rank.element) * ends.head.weights,
            "final norm, gradient of its output and (fp32) of the output projection",
        ),
    ]
