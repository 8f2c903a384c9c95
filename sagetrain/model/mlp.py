"""The SwiGLU MLP of a block."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagekernels.matmul import Matmul
from sagekernels.swiglu import swiglu
from sagetrain.config.schema import ModelConfig
from sagetrain.parallel.layers import ColumnParallelLinear, RowParallelLinear
from sagetrain.parallel.topology import ParallelGroups


class MLP(nn.Module):
    """The MLP down(silu(gate(x)) * up(x)), with its inner width spread over the tensor-parallel group.

    A call of the module computes everything but `down`. The block calls `down`, see block.Block.
    """

    def __init__(
        self,
        model: ModelConfig,
        groups: ParallelGroups,
        *,
        matmuls: Mapping[str, Matmul],
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        hidden, inner = model.hidden_size, model.ffn_hidden_size
        self.gate_up = ColumnParallelLinear(
            hidden,
            {"gate": inner, "up": inner},
            groups,
            matmul=matmuls.get("gate_up"),
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.down = RowParallelLinear(
            inner,
            hidden,
            groups,
            matmul=matmuls.get("down"),
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return silu(gate(x)) * up(x), [tokens, inner / tp]. x comes from start_enter and is [tokens, hidden]."""
        gate, up = self.gate_up(x_TD)
        # torch.compile computes separate gradients in one pass by itself, and as fast. Joined ones need the kernel.
        return swiglu(gate, up) if self.gate_up.matmul.joined else F.silu(gate) * up
