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
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from sagekernels.graphs import no_collection
from sagekernels.matmul import Matmul
from sagetrain.auto.kept import Kept
from sagetrain.auto.timed_choice import FASTEST, StartOfRun, TimeTable, as_before, decide
from sagetrain.checkpoint.state import SettledOverlap
from sagetrain.config.arithmetic import parts_of
from sagetrain.config.layout import Layout
from sagetrain.config.schema import ParallelConfig, Recomputation, RunConfig
from sagetrain.costs.accounting import overlaps, rank_of
from sagetrain.model.chunks import whole
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import attention_functions
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.host import ranks_of_host
from sagetrain.parallel.layers import materialize

Choice = Literal["auto", "on", "off"]


def record(settled: RunConfig) -> SettledOverlap:
    """Return the entry of a checkpoint about the choice: the choice, and the layout that it was made for."""
    return SettledOverlap(
        settled.parallel.tensor_parallel_overlap, _layout(settled.parallel, settled.data.micro_batch_size)
    )


def settle_overlap(
    start: StartOfRun,
    before: Kept | None,
    matmuls: Sequence[Mapping[str, Matmul]],
    batch: Callable[[], Mapping[str, Any]],
) -> tuple[Choice, str]:
    """Return `on` or `off`, and a few words that say why where `auto` had a choice; collective.

    Halves add up gradients in another order. A run that continues in the layout of its checkpoint therefore keeps its
    choice.

    Args:
        start: the start, with attention, linear layers and recomputation settled.
        before: the choices that the run had, if it continues.
        batch: returns the arguments of Transformer.forward for a micro-batch of the run's data on this rank.
    """
    cfg, kept, why = start.cfg, before.overlap if before else None, ""
    key, choice = "parallel.tensor_parallel_overlap", cfg.parallel.tensor_parallel_overlap
    if choice == "auto" and kept and kept.layout == _layout(cfg.parallel, cfg.data.micro_batch_size):
        choice, why = as_before(key, choice, kept.choice, start.say)
    if choice != "auto":
        return choice, why
    if parts_of(rank_of(cfg).tokens, cfg.parallel.tensor_parallel_size, True) == 1:
        return "off", ""
    by_rule: Choice = "on" if overlaps(cfg) else "off"
    if start.device.type != "cuda":
        return by_rule, "by the work of a block: nothing is timed without a GPU"
    # Below this work halves lost wherever they were timed, because launching twice as many kernels takes longer than a
    # block (results/halves). Compiling both ways takes longer than the rest of a start.
    if by_rule == "off":
        return by_rule, "by the work of a block, which is less than two launches take"

    def measure() -> TimeTable:
        seconds = time_overlap(start, matmuls, batch())
        # Compiled blocks refer to themselves: their weights would stay in memory while the run's model is built.
        gc.collect()
        return TimeTable("forward and backward of a block, whole (off) and in halves (on)", {"block": seconds})

    how = f"blocks are made whole and in halves, and timed{'; each way is compiled first' * start.compiled}"
    known = [cfg.model, cfg.attention, cfg.linear, cfg.parallel, cfg.data.micro_batch_size, cfg.data.seq_length]
    known += [cfg.data.document_attention, cfg.training.activation_checkpointing, start.compiled, start.dtype]
    # Collectives inside of a host are other ones, and the speed of the host decides.
    known += [start.groups.topology.world_size, ranks_of_host(), os.cpu_count()]
    waits = f"{how}. `on` or `off` skips this"
    chosen = decide(key, start, measure, file=start.folder.overlap, key=known, waits=waits, together=True)
    return "on" if chosen == "on" else "off", FASTEST


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
    start: StartOfRun, matmuls: Sequence[Mapping[str, Matmul]], batch: Mapping[str, Any]
) -> dict[str, float]:
    """Return the seconds of a block from the middle of the model, forward and backward, keyed by "off" (whole) and
    "on" (halves).

    All ranks call it: each tensor-parallel group runs its own collectives, and the slowest rank counts. The time that a
    block waits for its weights under ZeRO 3 is not part of the result.
    """
    cfg, groups, device, dtype, compiled = start.cfg, start.groups, start.device, start.dtype, start.compiled
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
