"""SwiGLU MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagetrain.config.schema import ModelConfig
from sagetrain.parallel.collectives import enter_region
from sagetrain.parallel.layers import ColumnParallelLinear, RowParallelLinear
from sagetrain.parallel.topology import ParallelGroups


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), its inner width spread over the tensor-parallel group."""

    def __init__(
        self,
        model: ModelConfig,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.sequence_parallel = sequence_parallel
        hidden, inner = model.hidden_size, model.ffn_hidden_size
        self.gate = ColumnParallelLinear(hidden, inner, groups, dtype=dtype, device=device)
        self.up = ColumnParallelLinear(hidden, inner, groups, dtype=dtype, device=device)
        self.down = RowParallelLinear(
            inner, hidden, groups, sequence_parallel=sequence_parallel, dtype=dtype, device=device
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        """[tokens (/ tp with sequence parallelism), hidden] -> same."""
        x_TD = enter_region(x_TD, self.groups, self.sequence_parallel)
        return self.down(F.silu(self.gate(x_TD)) * self.up(x_TD))
