"""SwiGLU MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagetrain.config.schema import ModelConfig
from sagetrain.parallel.collectives import Pending
from sagetrain.parallel.gated import Gated
from sagetrain.parallel.layers import ColumnParallelLinear, RowParallelLinear
from sagetrain.parallel.matmul import Matmul
from sagetrain.parallel.topology import ParallelGroups


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), its inner width spread over the tensor-parallel group.

    Called, it does all but `down`, which the block calls: see transformer.Block.
    """

    def __init__(
        self,
        model: ModelConfig,
        groups: ParallelGroups,
        *,
        matmul: Matmul | None,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        hidden, inner = model.hidden_size, model.ffn_hidden_size
        layer = {"matmul": matmul, "sequence_parallel": sequence_parallel, "dtype": dtype, "device": device}
        self.gate_up = ColumnParallelLinear(hidden, {"gate": inner, "up": inner}, groups, **layer)
        self.down = RowParallelLinear(inner, hidden, groups, **layer)
        self.fused = self.gate_up.matmul.gates and self.down.matmul == self.gate_up.matmul
        """Whether SwiGLU and its casts to 8 bits are one where there will be a backward pass."""

    def forward(self, x_TD: Tensor | Pending) -> Tensor | Gated:
        """[tokens, hidden], of start_enter -> what `down` reads: [tokens, inner / tp], or what it computes that of."""
        if self.fused and torch.is_grad_enabled():
            return self.gate_up(x_TD, gated=True)
        gate, up = self.gate_up(x_TD)
        return F.silu(gate) * up
