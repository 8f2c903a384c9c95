"""Settle what `auto` of the engine, attention, linear layers and overlap stands for in a run.

Each choice is made when the run begins, most of them by times, and kept when it continues. Layers of one model must not
differ between ranks: where one rank times, all ranks take its choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sagekernels.matmul import Matmul
from sagetrain.auto.ahead import begin
from sagetrain.auto.attention_choice import settle_attention
from sagetrain.auto.kept import Kept, kept_engine
from sagetrain.auto.linear_choice import settle_linear
from sagetrain.auto.overlap_choice import settle_overlap
from sagetrain.auto.recomputation_choice import least_recomputation
from sagetrain.auto.timed_choice import StartOfRun, by_first_rank
from sagetrain.config.schema import Recomputation, RunConfig
from sagetrain.costs.accounting import total_bytes, with_recomputation
from sagetrain.costs.hardware import usable_bytes
from sagetrain.costs.memory import memory_per_rank
from sagetrain.data.batch import Batch, batch_of
from sagetrain.data.loader import SampleStream
from sagetrain.model.selection import matmuls_of


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

    start: StartOfRun
    """The start, with the configuration that runs."""
    asked: RunConfig
    """The configuration as the user wrote it, for the records of the run: its config.yaml, and what has changed."""
    matmuls: Sequence[Mapping[str, Matmul]]
    """The Matmul of each linear layer that does not multiply in training.dtype, keyed by the layer's name, for each
    block."""
    reasons: Reasons

    @property
    def cfg(self) -> RunConfig:
        """The configuration that runs. Everything reads it from here on."""
        return self.start.cfg


def settle(start: StartOfRun, before: Kept | None, stream: SampleStream) -> Settled:
    """Return the configuration with the choices in the place of `auto`. All ranks call it. Raises ValueError if a
    backend or a precision cannot run here, see resolve_backend and matmuls_of.

    Args:
        before: the choices that the run had, if it continues.
        stream: the data, on whose documents attention is timed.
    """
    asked = start.cfg
    begin(start)
    if before:
        cfg, found = kept_engine(asked, before)
        start = replace(start, cfg=cfg)
        if found:
            start.say(str(found))
    data = start.cfg.data
    attention, why_attention = settle_attention(
        start, before, lambda: stream.document_lengths(64) if data.document_attention else ()
    )
    linear, why = settle_linear(start, before)
    ranks = start.groups.tp_size
    matmuls, why_linear = matmuls_of(
        linear, start.cfg.model, tensor_parallel_size=ranks, device=start.device, dtype=start.dtype
    )
    start = replace(start, cfg=start.cfg.model_copy(update={"attention": attention, "linear": linear}))
    start = replace(start, cfg=with_recomputation(start.cfg, _recomputation(start)))

    def first_batch() -> Batch:
        samples = [stream.sample(index) for index in range(data.micro_batch_size)]
        return batch_of(samples, data.document_attention, data.document_positions)

    def batch() -> Mapping[str, Any]:
        first = by_first_rank("the first micro-batch", first_batch, start.device)
        return first.inputs(start.device, start.groups)

    overlap, why_overlap = settle_overlap(start, before, matmuls, batch)
    start = replace(start, cfg=start.cfg.changed({"parallel": {"tensor_parallel_overlap": overlap}}))
    reasons = Reasons(why_attention, f"{why_linear}; {why}" if why else why_linear, why_overlap)
    return Settled(start, asked, matmuls, reasons)


def _recomputation(start: StartOfRun) -> Recomputation:
    """Return training.activation_checkpointing. For `auto` it is the least that fits into the first rank's GPU."""
    cfg, how = start.cfg, start.cfg.training.activation_checkpointing
    if how != "auto":
        return how
    if start.device.type != "cuda":
        return "none"
    usable = usable_bytes(torch.cuda.get_device_properties(start.device).total_memory)

    def fits(way: Recomputation) -> bool:
        memory = memory_per_rank(with_recomputation(cfg, way), start.groups.topology.world_size, start.vocab_size)
        return total_bytes(memory) <= usable

    key = "training.activation_checkpointing"
    least = partial(least_recomputation, cfg.model.num_layers, fits)
    chosen = by_first_rank(f"{key} auto", least, start.device)
    start.say(f"{key}: {chosen}, by estimate the least that fits into {usable / 2**30:.1f} GiB")
    return chosen
