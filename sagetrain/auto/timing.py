"""What `auto` stands for on this machine: rank 0 times it, and all ranks take its choice."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sagetrain.auto.attention_choice import choose_attention
from sagetrain.auto.linear_choice import choose_linear
from sagetrain.auto.overlap_choice import time_overlap
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.arithmetic import resolved_zero_stage
from sagetrain.config.schema import AttentionConfig, LinearConfig, RunConfig
from sagetrain.data.loader import SampleStream, batch_of
from sagetrain.model.accounting import overlaps
from sagetrain.parallel.matmul import Matmul
from sagetrain.parallel.topology import ParallelGroups

T = TypeVar("T")


class Timing:
    """Of one run: layers of one model must not differ between ranks.

    Args:
        stream: whose documents attention is timed on.
        folder: where the tables of times are kept.
        compiled: whether blocks are.
    """

    def __init__(
        self,
        cfg: RunConfig,
        groups: ParallelGroups,
        stream: SampleStream,
        folder: RunFolder,
        *,
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool,
        say: Callable[[str], None],
    ) -> None:
        self._cfg, self._stream, self._folder, self._compiled, self._device = cfg, stream, folder, compiled, device
        self._groups, self._dtype, self._say = groups, dtype, say
        self._calls: dict[str, Any] = {  # what layers see of a micro-batch on a rank, where, and who hears of it
            "tensor_parallel_size": groups.tp_size,
            "context_parallel_size": groups.cp_size,
            "overlap": overlaps(cfg),
            "num_sequences": cfg.data.micro_batch_size,
            "seq_length": cfg.data.seq_length,
            "device": device,
            "dtype": dtype,
            "say": say,
        }

    def attention(self, asked: AttentionConfig) -> AttentionConfig:
        """The fastest, in the place of `auto`; collective."""

        def choose() -> AttentionConfig:
            documents = self._stream.document_lengths(64) if self._cfg.data.document_attention else ()
            how = {**self._calls, "documents": documents, "cache": self._folder.attention}
            return choose_attention(asked, self._cfg.model, **how)

        return self._by_main(choose)

    def linear(self, asked: LinearConfig) -> LinearConfig:
        """The same for the linear layers; collective."""
        kept = resolved_zero_stage(self._cfg) < 3
        how = {**self._calls, "kept": kept, "compiled": self._compiled, "cache": self._folder.linear}
        return self._by_main(lambda: choose_linear(asked, self._cfg.model, **how))

    def overlap(self, settled: RunConfig, matmuls: Sequence[Mapping[str, Matmul]]) -> bool:
        """Return whether micro-batches go in halves, the faster way of the two; collective.

        Args:
            settled: the configuration with attention and linear layers settled.
            matmuls: how its blocks multiply.
        """
        data, groups = settled.data, self._groups
        samples = [self._stream.sample(index) for index in range(data.micro_batch_size)]
        batch = batch_of(samples, data.document_attention, data.document_positions)
        seconds = time_overlap(
            settled.model,
            settled.attention,
            batch.inputs(self._device, groups.cp_rank, groups.cp_size),
            matmuls,
            groups,
            sequence_parallel=settled.parallel.sequence_parallel,
            activation_checkpointing=settled.training.activation_checkpointing,
            compiled=self._compiled,
            keeps_weights=resolved_zero_stage(settled) < 3,
            device=self._device,
            dtype=self._dtype,
        )
        gc.collect()  # compiled blocks refer to themselves: their weights would stay while the run's model is built
        halves = seconds["on"] < seconds["off"]
        whole, parts = (f"{1e3 * seconds[name]:.2f} ms" for name in ("off", "on"))
        self._say(
            f"parallel.tensor_parallel_overlap: forward and backward of a block take {whole} whole, {parts} in halves\n"
            f"  chosen: {'on' if halves else 'off'}"
        )
        return halves

    def _by_main(self, choose: Callable[[], T]) -> T:
        chosen: list[Any] = [choose() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(chosen, src=0, device=self._device)
        choice: T = chosen[0]
        return choice
