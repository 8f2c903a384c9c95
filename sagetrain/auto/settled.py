"""Settle what `auto` of the engine, attention, linear layers and overlap stands for in a run.

Each choice is made when the run begins, most of them by times, and kept when it continues. Layers of one model must not
differ between ranks: where one rank times, all ranks take its choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sagekernels.matmul import Matmul
from sagetrain.auto.ahead import begin
from sagetrain.auto.attention_choice import settle_attention
from sagetrain.auto.kept import Kept, kept_engine
from sagetrain.auto.linear_choice import settle_linear
from sagetrain.auto.overlap_choice import settle_overlap
from sagetrain.auto.recomputation_choice import least_recomputation
from sagetrain.auto.timed_choice import RankCalls, by_first_rank
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.layout import Layout
from sagetrain.config.schema import Recomputation, RunConfig
from sagetrain.costs.accounting import overlaps, total_bytes, with_recomputation
from sagetrain.costs.hardware import usable_bytes
from sagetrain.costs.memory import memory_per_rank
from sagetrain.data.batch import Batch, batch_of
from sagetrain.data.loader import SampleStream
from sagetrain.model.selection import matmuls_of
from sagetrain.parallel.topology import ParallelGroups


@dataclass(frozen=True)
class Reasons:
    """The reasons of the choices in words: what runs, and why where `auto` had a choice."""

    attention: str
    linear: str
    overlap: str


@dataclass(frozen=True)
class Settled:
    """A configuration with nothing left `auto` in attention, linear layers, recomputation and overlap. The engine is
    `auto` where Layout.engine is the one that it stands for."""

    cfg: RunConfig
    """The configuration that runs. Everything reads it from here on."""
    asked: RunConfig
    """The configuration as the user wrote it, for the records of the run: its config.yaml, and what has changed."""
    matmuls: Sequence[Mapping[str, Matmul]]
    """The Matmul of each linear layer that does not multiply in training.dtype, keyed by the layer's name, for each
    block."""
    recomputation: Recomputation
    """The value of training.activation_checkpointing, which is in `cfg` as well."""
    reasons: Reasons


def settle(
    cfg: RunConfig,
    before: Kept | None,
    stream: SampleStream,
    groups: ParallelGroups,
    *,
    compiled: bool,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    folder: RunFolder,
    say: Callable[[str], None],
) -> Settled:
    """Return the configuration with the choices in the place of `auto`. All ranks call it. Raises ValueError if a
    backend or a precision cannot run here, see resolve_backend and matmuls_of.

    Args:
        before: the choices that the run had, if it continues.
        stream: the data, on whose documents attention is timed.
        folder: the run folder, which keeps the tables of times.
        say: receives the tables, and the reason where a choice that the run had cannot be kept, for example on other
            hardware.
    """
    asked = cfg
    begin(cfg, groups, compiled=compiled, vocab_size=vocab_size, device=device, dtype=dtype)
    if before:
        cfg, found = kept_engine(cfg, before)
        if found:
            say(str(found))
    calls = RankCalls(
        tensor_parallel_size=groups.tp_size,
        context_parallel_size=groups.cp_size,
        overlap=overlaps(cfg),
        num_sequences=cfg.data.micro_batch_size,
        seq_length=cfg.data.seq_length,
        device=device,
        dtype=dtype,
        expert_parallel_size=groups.ep_size,
    )
    place: dict[str, Any] = {"device": device, "dtype": dtype}

    attention, why_attention = settle_attention(
        cfg.attention,
        cfg.model,
        before.attention if before else None,
        calls,
        documents=lambda: stream.document_lengths(64) if cfg.data.document_attention else (),
        cache=folder.attention,
        say=say,
    )
    linear, why = settle_linear(
        cfg.linear,
        cfg.model,
        before,
        calls,
        kept=Layout.of(cfg).zero_stage < 3,  # weights stay in 8 bits from one step to the next
        compiled=compiled,
        cache=folder.linear,
        say=say,
    )
    matmuls, why_linear = matmuls_of(linear, cfg.model, tensor_parallel_size=groups.tp_size, **place)
    settled = cfg.model_copy(update={"attention": attention, "linear": linear})
    again = _recomputation(settled, groups, vocab_size, device, say)
    settled = with_recomputation(settled, again)

    def first_batch() -> Batch:
        samples = [stream.sample(index) for index in range(cfg.data.micro_batch_size)]
        return batch_of(samples, cfg.data.document_attention, cfg.data.document_positions)

    overlap, why_overlap = settle_overlap(
        settled,
        before.overlap if before else None,
        lambda: by_first_rank("the first micro-batch", first_batch, device).inputs(device, groups),
        matmuls,
        groups,
        compiled=compiled,
        **place,
        cache=folder.overlap,
        say=say,
    )
    parallel = cfg.parallel.model_copy(update={"tensor_parallel_overlap": overlap})
    reasons = Reasons(why_attention, f"{why_linear}; {why}" if why else why_linear, why_overlap)
    return Settled(settled.model_copy(update={"parallel": parallel}), asked, matmuls, again, reasons)


def _recomputation(
    cfg: RunConfig, groups: ParallelGroups, vocab_size: int, device: torch.device, say: Callable[[str], None]
) -> Recomputation:
    """Return training.activation_checkpointing. For `auto` it is the least that fits into the first rank's GPU."""
    how = cfg.training.activation_checkpointing
    if how != "auto":
        return how
    if device.type != "cuda":
        return "none"
    usable = usable_bytes(torch.cuda.get_device_properties(device).total_memory)

    def fits(way: Recomputation) -> bool:
        memory = memory_per_rank(with_recomputation(cfg, way), groups.topology.world_size, vocab_size)
        return total_bytes(memory) <= usable

    chosen = by_first_rank(
        "training.activation_checkpointing auto", lambda: least_recomputation(cfg.model.num_layers, fits), device
    )
    say(f"training.activation_checkpointing: {chosen}, by estimate the least that fits into {usable / 2**30:.1f} GiB")
    return chosen
