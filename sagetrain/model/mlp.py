"""The SwiGLU MLP of a block."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from sagekernels.matmul import Matmul, Measured, Pending
from sagetrain.config.layer_specs import LayerSpec
from sagetrain.parallel.collectives import Region
from sagetrain.parallel.layers import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """The MLP down(silu(gate(x)) * up(x)), with its inner width spread over the tensor-parallel group.

    A call of the module computes everything but `down`, which is a stage of its own in block.Block.
    """

    def __init__(self, layer: LayerSpec, region: Region, *, matmuls: Mapping[str, Matmul]) -> None:
        super().__init__()
        self.activation = layer.mlp.activation
        gate_up, down = layer.mlp.linear_layers(layer.hidden, 1).values()
        self.gate_up = ColumnParallelLinear(*gate_up, region, matmul=matmuls.get("gate_up"))
        self.down = RowParallelLinear(down.inputs, layer.hidden, region, matmul=matmuls.get("down"))

    @property
    def linear_layers(self) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
        """The linear layers, keyed by name."""
        return {"gate_up": self.gate_up, "down": self.down}

    def forward(self, x_TD: Tensor | Measured | Pending) -> Tensor | Measured:
        """Return silu(gate(x)) * up(x), [tokens, inner / tp], for `down`. x comes from start_enter and is
        [tokens, hidden]."""
        if self.activation == "geglu":
            gate, up = self.gate_up(x_TD)
            activated: Tensor = F.gelu(gate, approximate="tanh") * up
            return activated
        return self.gate_up.gated(x_TD)
