"""Settle what `auto` of the engine, attention, linear layers and overlap stands for in a run.

Each choice is made when the run begins, most of them by times, and kept when it continues. Layers of one model must not
differ between ranks: where one rank times, all ranks take its choice.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sagekernels.matmul import Matmul
from sagetrain.auto.attention_choice import choose_attention, settle_attention
from sagetrain.auto.calls import RankCalls
from sagetrain.auto.kept import Kept, kept_engine
from sagetrain.auto.linear_choice import choose_linear, settle_linear
from sagetrain.auto.overlap_choice import settle_overlap, time_overlap
from sagetrain.auto.recomputation_choice import least_recomputation
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.layout import Layout
from sagetrain.config.schema import AttentionConfig, LinearConfig, Recomputation, RunConfig
from sagetrain.costs.accounting import memory_per_rank, overlaps, total_bytes, with_recomputation
from sagetrain.costs.hardware import usable_bytes
from sagetrain.data.loader import SampleStream, batch_of
from sagetrain.model.selection import matmuls_of
from sagetrain.parallel.topology import ParallelGroups

T = TypeVar("T")


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
    layers_of_tp: int | None,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    folder: RunFolder,
    say: Callable[[str], None],
) -> Settled:
    """Return the configuration with the choices in the place of `auto`. All ranks call it.

    Args:
        before: the choices that the run had, if it continues.
        stream: the data, on whose documents attention is timed.
        compiled: whether the run compiles its blocks.
        layers_of_tp: the tensor-parallel size whose layer sizes decide which linear layers are in 8 bits. None: the
            run's own.
        vocab_size: the rows of the embedding, padded.
        folder: the run folder, which keeps the tables of times.
        say: receives the tables, and the reason where a choice that the run had cannot be kept, for example on other
            hardware.

    Raises:
        ValueError: a backend or a precision cannot run here, see resolve_backend and matmuls_of.
    """
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
    )
    attention, why_attention = settle_attention(
        cfg.attention,
        cfg.model,
        before.attention if before else None,
        device=device,
        dtype=dtype,
        choose=partial(_fastest_attention, cfg, stream, calls, folder.attention, say),
        say=say,
    )
    size = layers_of_tp or groups.tp_size
    linear, why = settle_linear(
        cfg.linear,
        cfg.model,
        before,
        tensor_parallel_size=size,
        device=device,
        dtype=dtype,
        choose=partial(_fastest_linear, cfg, compiled, calls, folder.linear, say),
        say=say,
    )
    matmuls, why_linear = matmuls_of(
        linear, cfg.model, tensor_parallel_size=size, here=groups.tp_size, device=device, dtype=dtype
    )
    settled = cfg.model_copy(update={"attention": attention, "linear": linear})
    again = _recomputation(settled, groups, vocab_size, device, say)
    settled = with_recomputation(settled, again)
    overlap, why_overlap = settle_overlap(
        settled,
        before.overlap if before else None,
        device=device,
        choose=partial(_halves_are_faster, settled, again, matmuls, stream, groups, compiled, device, dtype, say),
    )
    parallel = cfg.parallel.model_copy(update={"tensor_parallel_overlap": overlap})
    reasons = Reasons(why_attention, f"{why_linear}; {why}" if why else why_linear, why_overlap)
    return Settled(settled.model_copy(update={"parallel": parallel}), matmuls, again, reasons)


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

    chosen = _by_main(lambda: least_recomputation(cfg.model.num_layers, fits), device)
    say(f"training.activation_checkpointing: {chosen}, by estimate the least that fits into {usable / 2**30:.1f} GiB")
    return chosen


def _fastest_attention(
    cfg: RunConfig,
    stream: SampleStream,
    calls: RankCalls,
    cache: Path,
    say: Callable[[str], None],
    asked: AttentionConfig,
) -> AttentionConfig:
    def choose() -> AttentionConfig:
        documents = stream.document_lengths(64) if cfg.data.document_attention else ()
        return choose_attention(asked, cfg.model, calls, documents=documents, cache=cache, say=say)

    return _by_main(choose, calls.device)


def _fastest_linear(
    cfg: RunConfig, compiled: bool, calls: RankCalls, cache: Path, say: Callable[[str], None], asked: LinearConfig
) -> LinearConfig:
    kept = Layout.of(cfg).zero_stage < 3  # weights stay in 8 bits from one step to the next

    def choose() -> LinearConfig:
        return choose_linear(asked, cfg.model, calls, kept=kept, compiled=compiled, cache=cache, say=say)

    return _by_main(choose, calls.device)


def _halves_are_faster(
    settled: RunConfig,
    again: Recomputation,
    matmuls: Sequence[Mapping[str, Matmul]],
    stream: SampleStream,
    groups: ParallelGroups,
    compiled: bool,
    device: torch.device,
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> bool:
    """Time micro-batches whole and in halves, with attention and linear layers settled. All ranks call it."""
    say(
        "parallel.tensor_parallel_overlap auto: blocks are made whole and in halves, and timed"
        f"{'; each way is compiled first' * compiled}. `on` or `off` skips this"
    )
    data = settled.data
    samples = [stream.sample(index) for index in range(data.micro_batch_size)]
    batch = batch_of(samples, data.document_attention, data.document_positions)
    seconds = time_overlap(
        settled.model,
        settled.attention,
        batch.inputs(device, groups.cp_rank, groups.cp_size),
        matmuls,
        groups,
        sequence_parallel=settled.parallel.sequence_parallel,
        activation_checkpointing=again,
        compiled=compiled,
        keeps_weights=Layout.of(settled).zero_stage < 3,
        device=device,
        dtype=dtype,
    )
    # Compiled blocks refer to themselves: their weights would stay in memory while the run's model is built.
    gc.collect()
    halves = seconds["on"] < seconds["off"]
    whole, parts = (f"{1e3 * seconds[name]:.2f} ms" for name in ("off", "on"))
    say(
        f"parallel.tensor_parallel_overlap: forward and backward of a block take {whole} whole, {parts} in halves\n"
        f"  chosen: {'on' if halves else 'off'}"
    )
    return halves


def _by_main(choose: Callable[[], T], device: torch.device) -> T:
    """Let the first rank choose for all ranks."""
    chosen: list[Any] = [choose() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(chosen, src=0, device=device)
    choice: T = chosen[0]
    return choice
