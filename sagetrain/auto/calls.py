"""The calls of layers that `auto` times."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RankCalls:
    """The share of a micro-batch that the layers of one rank compute, and the device and dtype in which they compute
    it."""

    tensor_parallel_size: int
    context_parallel_size: int
    overlap: bool
    """Whether a micro-batch goes in two halves."""
    num_sequences: int
    seq_length: int
    device: torch.device
    dtype: torch.dtype
    expert_parallel_size: int = 1
    """The ranks that have the experts of a layer between them."""

    @property
    def own_tokens(self) -> int:
        """The number of tokens of a micro-batch on a context-parallel rank."""
        return self.num_sequences * self.seq_length // self.context_parallel_size
