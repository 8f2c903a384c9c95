"""The memory of a host that a rank takes with parallel.offload and training.activation_offload, and for copies of the
state (checkpoint.in_memory_every). No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sagetrain.config.errors import Finding, many
from sagetrain.config.layout import Layout
from sagetrain.config.rules.findings import About
from sagetrain.config.schema import RunConfig
from sagetrain.costs.accounting import MemoryItem, rank_of, save_host_bytes, total_bytes
from sagetrain.costs.operation_kinds import AttentionCost, of_kind
from sagetrain.costs.operations import block_operations
from sagetrain.costs.stages import kinds_of_blocks
from sagetrain.model.placement import slices_of
from sagetrain.model.tensors import tensors

_PROCESS = 4 * 2**30
HOST_SHARE = 0.95
"""The share of a host's memory that its ranks may take. The system has the rest."""


def host_memory_per_rank(cfg: RunConfig, world_size: int, vocab_size: int, one_host: bool = False) -> list[MemoryItem]:
    """Estimate the bytes of host memory that one rank takes, item by item. The list is empty if nothing is offloaded.

    torch's pinned memory comes in powers of two. Masters and reduced gradients are pinned, tensor by tensor.

    Args:
        one_host: whether the run has a single host, which holds no copies of another one's state.
    """
    every = [*_state(cfg, world_size, vocab_size)]
    if cfg.checkpoint.in_memory_every:
        saved = save_host_bytes(cfg, world_size, vocab_size)
        number, of_another = (2, "") if one_host else (4, " and two of another host's")
        every.append(MemoryItem("copies", number * saved, f"two of its own state{of_another}"))
    if kept := activations_on_host(cfg):
        what = "inputs and results of attention" if len(kept) > cfg.model.num_layers else "inputs"
        # Only inputs are large tensors of one size: results of attention are several of about such sizes.
        inputs, results = kept[: cfg.model.num_layers], kept[cfg.model.num_layers :]
        size = sum(map(_pinned, inputs)) + sum(results)
        every.append(MemoryItem("activations", size, f"{what} of all blocks, pinned"))
    if not every:
        return []
    return [
        *every,
        MemoryItem(
            "checkpoint", save_host_bytes(cfg, world_size, vocab_size), "the copy that is written in background"
        ),
        MemoryItem("process", _PROCESS, "torch, CUDA and NCCL (a guess)"),
    ]


def activations_on_host(cfg: RunConfig) -> list[int]:
    """Return the bytes of the tensors that leave the GPU in the forward pass of a micro-batch, with
    training.activation_offload: the inputs of all blocks, and the results of each attention if they are kept."""
    if not cfg.training.activation_offload:
        return []
    rank = rank_of(cfg)
    inputs = [rank.tokens * rank.element * cfg.model.hidden_size // rank.shards] * cfg.model.num_layers
    if rank.recompute == "full":
        return inputs
    made = [
        kind.blocks * [rank.tokens * part.saved]
        for kind in kinds_of_blocks(cfg, rank)
        for part in of_kind(AttentionCost, block_operations(kind.layer, cfg.attention, kind.rank))
    ]
    return [*inputs, *itertools.chain(*made)]


def _pinned(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _state(cfg: RunConfig, world_size: int, vocab_size: int) -> list[MemoryItem]:
    """Estimate masters, gradients and moments with parallel.offload."""
    if cfg.parallel.offload == "none":
        return []
    shards = Layout.of(cfg, world_size).shards
    sizes = list(_sizes(cfg, vocab_size, shards))
    pinned = sum(_pinned(4 * size) for size in sizes)
    # Where gradients come in every micro-step, those of one are added while those of the next arrive.
    sets = 2 if cfg.parallel.zero_stage > 1 else 1
    one = f"1/{shards} of them" if shards > 1 else "all of them"
    return [
        MemoryItem("masters", pinned, f"fp32, {one}, pinned: each tensor takes a power of two"),
        MemoryItem("gradients", sets * pinned, f"fp32, {one}, pinned in the same way" + ", twice" * (sets > 1)),
        MemoryItem("moments", 8 * sum(sizes), f"two Adam moments in fp32, {one}"),
    ]


def _sizes(cfg: RunConfig, vocab_size: int, shards: int) -> Iterator[int]:
    """Yield the number of values that a rank has of each tensor: whole rows of a tensor-parallel slice."""
    for spec in tensors(cfg.model, cfg.attention, vocab_size):
        slices = slices_of(spec, cfg.parallel.tensor_parallel_size)
        rows = spec.shape[0] // slices if spec.dim == 0 else spec.shape[0]
        yield -(-rows // shards) * (spec.size // slices // rows)


def host_memory_finding(
    cfg: RunConfig, world_size: int, vocab_size: int, ranks: int, memory: float, whose: str
) -> Finding | None:
    """Return a finding if the ranks of a host, `whose` in words, are estimated to need more than its `memory` in bytes,
    or None."""
    of_rank = total_bytes(host_memory_per_rank(cfg, world_size, vocab_size, ranks >= world_size))
    need, usable = ranks * of_rank, HOST_SHARE * memory
    if need <= usable:
        return None
    if cfg.training.activation_offload:
        about = About("host_memory", "training.activation_offload", True)
        fix = "use more context-parallel ranks, or more memory in each host (--host-memory of `sagetrain plan`)"
        fix += ", or activation_checkpointing full" * (cfg.training.activation_checkpointing == "attention")
    elif cfg.parallel.offload == "none":
        about = About("host_memory", "checkpoint.in_memory_every", cfg.checkpoint.in_memory_every)
        fix = (
            "use more hosts or a higher zero_stage, which divide the state, or more memory in each host (--host-memory "
        )
        fix += "of `sagetrain plan`), or set it to null"
    else:
        about = About("host_memory", "parallel.offload", cfg.parallel.offload)
        fix = "use more hosts, which divide the state, or more memory in each (--host-memory of `sagetrain plan`), or "
        fix += "offload: none with optimizer.moments int8"
    return about.error(
        f"takes {need / 2**30:.1f} GiB of host memory for {many(ranks, 'rank')}, more than the "
        f"{usable / 2**30:.1f} GiB that {whose} leaves to them",
        fix,
    )
