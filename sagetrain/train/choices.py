"""What `auto` stands for on this machine: rank 0 times it, and all ranks take its choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sagetrain.config.arithmetic import resolved_zero_stage
from sagetrain.config.schema import AttentionConfig, LinearConfig, RunConfig
from sagetrain.data.loader import SampleStream
from sagetrain.model.accounting import overlaps
from sagetrain.model.selection import choose_attention, choose_linear
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.train.run_folder import RunFolder

T = TypeVar("T")


class Choices:
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

    def _by_main(self, choose: Callable[[], T]) -> T:
        chosen: list[Any] = [choose() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(chosen, src=0, device=self._device)
        choice: T = chosen[0]
        return choice
