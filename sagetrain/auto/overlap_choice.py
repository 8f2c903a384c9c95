"""Choose whether a run takes its micro-batches in two halves where parallel.tensor_parallel_overlap says `auto`. A run
that continues keeps the choice in the same layout.

Halves hide tensor-parallel collectives behind the other half's work, but launch twice as many kernels, each over half
of the tokens. The faster of the two depends on the host, the links, the arithmetic of the layers and the size of the
micro-batch. It is therefore measured, with a real micro-batch and a few blocks of the run's own model, compiled like
the run's.

The time of a block is the difference between a model of several blocks and one of few. The host's work for embedding,
loss and the start of a backward pass is a large part of the time of such a small model, and the difference removes it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from sagekernels.graphs import no_collection
from sagekernels.matmul import Matmul
from sagetrain.auto.timed_choice import TimeTable, decide, settle
from sagetrain.checkpoint.state import SettledOverlap
from sagetrain.config.arithmetic import parts_of
from sagetrain.config.layout import Layout
from sagetrain.config.schema import ParallelConfig, Recomputation, RunConfig
from sagetrain.costs.accounting import overlaps
from sagetrain.model.chunks import whole
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import attention_functions
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.host import ranks_of_host
from sagetrain.parallel.layers import materialize
from sagetrain.parallel.topology import ParallelGroups

Choice = Literal["auto", "on", "off"]


def record(settled: RunConfig) -> SettledOverlap:
    """Return the entry of a checkpoint about the choice: the choice, and the layout that it was made for."""
    return SettledOverlap(
        settled.parallel.tensor_parallel_overlap, _layout(settled.parallel, settled.data.micro_batch_size)
    )


def settle_overlap(
    cfg: RunConfig,
    before: SettledOverlap | None,
    batch: Callable[[], Mapping[str, Any]],
    matmuls: Sequence[Mapping[str, Matmul]],
    groups: ParallelGroups,
    *,
    compiled: bool,
    device: torch.device,
    dtype: torch.dtype,
    cache: Path,
    say: Callable[[str], None],
) -> tuple[Choice, str]:
    """Return `on` or `off`, and a few words that say why where `auto` had a choice; collective.

    Halves add up gradients in another order. A run that continues in the layout of its checkpoint therefore keeps its
    choice.

    Args:
        cfg: the configuration, with attention, linear layers and recomputation settled.
        before: the choice that the run had, if it continues and has decided.
        batch: returns the arguments of Transformer.forward for a micro-batch of the run's data on this rank.
    """
    key, asked = "parallel.tensor_parallel_overlap", cfg.parallel.tensor_parallel_overlap
    tokens = cfg.data.micro_batch_size * cfg.data.seq_length // cfg.parallel.context_parallel_size

    def untimed(choice: Choice) -> tuple[Choice, str] | None:
        if choice != "auto":
            return choice, ""
        if parts_of(tokens, cfg.parallel.tensor_parallel_size, True) == 1:
            return "off", ""
        by_rule: Choice = "on" if overlaps(cfg) else "off"
        if device.type != "cuda":
            return by_rule, "by the work of a block: nothing is timed without a GPU"
        # Below this work halves lost wherever they were timed, because launching twice as many kernels takes longer
        # than a block (results/halves). Compiling both ways takes longer than the rest of a start.
        return None if by_rule == "on" else (by_rule, "by the work of a block, which is less than two launches take")

    def measure() -> TimeTable:
        seconds = time_overlap(cfg, batch(), matmuls, groups, compiled=compiled, device=device, dtype=dtype)
        # Compiled blocks refer to themselves: their weights would stay in memory while the run's model is built.
        gc.collect()
        return TimeTable("forward and backward of a block, whole (off) and in halves (on)", {"block": seconds})

    def timed(choice: Choice) -> Choice:
        how = f"blocks are made whole and in halves, and timed{'; each way is compiled first' * compiled}"
        known = [cfg.model, cfg.attention, cfg.linear, cfg.parallel, cfg.data.micro_batch_size, cfg.data.seq_length]
        known += [cfg.data.document_attention, cfg.training.activation_checkpointing, compiled, dtype]
        # Collectives inside of a host are other ones, and the speed of the host decides.
        known += [groups.topology.world_size, ranks_of_host(), os.cpu_count()]
        waits = f"{how}. `on` or `off` skips this"
        place: dict[str, Any] = {"device": device, "cache": cache, "say": say}
        return "on" if decide(key, measure, key=known, waits=waits, together=True, **place) == "on" else "off"

    layout = _layout(cfg.parallel, cfg.data.micro_batch_size)
    kept = before.choice if asked == "auto" and before and before.layout == layout else None
    return settle(key, asked, kept, lambda choice: "", untimed, timed, together=True, device=device, say=say)


def _layout(parallel: ParallelConfig, micro_batch_size: int) -> dict[str, Any]:
    """Return the settings that decide about the order of sums of a micro-batch."""
    names = "tensor_parallel_size", "context_parallel_size", "sequence_parallel"
    return {name: getattr(parallel, name) for name in names} | {"micro_batch_size": micro_batch_size}


FEW, MANY = 2, 8
"""The number of blocks of the two models. A run of fewer blocks than MANY is timed whole."""
_WARM_UP, _MICRO_STEPS, _WINDOWS = 3, 6, 3
# The embedding and the head get this many rows a rank. Their time is the same both ways, so they are kept small.
_ROWS_A_RANK = 512


def time_overlap(
    cfg: RunConfig,
    batch: Mapping[str, Any],
    matmuls: Sequence[Mapping[str, Matmul]],
    groups: ParallelGroups,
    *,
    compiled: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return the seconds of a block from the middle of the model, forward and backward, keyed by "off" (whole) and
    "on" (halves).

    All ranks call it: each tensor-parallel group runs its own collectives, and the slowest rank counts. The time that a
    block waits for its weights under ZeRO 3 is not part of the result.
    """
    model, attention = cfg.model, cfg.attention
    rows = _ROWS_A_RANK * groups.tp_size
    count = min(MANY, model.num_layers)
    first = (model.num_layers - count) // 2
    sizes = (FEW, count) if count == MANY else (count,)
    inputs = {**batch, "tokens": batch["tokens"] % rows, "labels": batch["labels"].clamp(min=0) % rows}
    few = model.model_copy(update={"num_layers": count})
    both = {
        name: Transformer(
            few,
            attention,
            vocab_size=rows,
            groups=groups,
            functions=attention_functions(attention, few, device=device, dtype=dtype),
            matmuls=[*matmuls[first : first + count], {}],
            sequence_parallel=cfg.parallel.sequence_parallel,
            overlap=name == "on",
            activation_checkpointing=cast(Recomputation, cfg.training.activation_checkpointing),
            seed=None,
            dtype=dtype,
            device=device,
        )
        for name in ("off", "on")
    }
    for one in both.values():
        for parameter in one.parameters():
            materialize(parameter, torch.empty_like(parameter, device=device).normal_(std=model.init_std))
        if Layout.of(cfg).zero_stage < 3:  # Low-bit weights are rounded once a step.
            one.keep_weights()
        if compiled:
            # What is outside of the blocks takes the same time both ways. Halves would be a second size of the blocks'
            # inputs.
            compile_blocks(one, blocks_alone=True, dynamic=False)
    # Training does not collect what was made before its first step either.
    with no_collection():
        for one in both.values():
            _seconds(one, count, inputs, _WARM_UP, device)
        windows = [
            [[_seconds(one, size, inputs, _MICRO_STEPS, device) for size in sizes] for one in both.values()]
            for _ in range(_WINDOWS)
        ]
    if compiled:
        # The run's first graphs are then of its own sizes, as these were, and inductor has compiled the faster way's.
        torch._dynamo.reset()
    least = torch.tensor(windows, dtype=torch.float64).amin(0).to(device, torch.float32)
    dist.all_reduce(least, dist.ReduceOp.MAX)
    blocks = sizes[-1] - sizes[0] or count
    whole = least[:, -1] if len(sizes) == 1 else least[:, 1] - least[:, 0]
    return dict(zip(both, (whole / blocks).tolist(), strict=True))


def _seconds(model: Transformer, blocks: int, inputs: Mapping[str, Any], count: int, device: torch.device) -> float:
    """Return the seconds of one forward and backward pass over the first `blocks` blocks. `count` passes are launched
    in a row, so that the host runs ahead."""
    every = model.chunks
    model.chunks = (whole(blocks),)
    model(**inputs).backward()  # the first pass of this many blocks may allocate
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        model(**inputs).backward()
        model.zero_grad(set_to_none=True)
    _synchronize(device)
    model.chunks = every
    return (time.perf_counter() - begin) / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
