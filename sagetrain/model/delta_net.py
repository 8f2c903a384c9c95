"""The gated delta net of a layer: projections, gates and output norm around its function (delta_rule.py).

Shape letters as in delta_rule.py; T tokens of this rank, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from sagekernels.matmul import Matmul, Measured, Pending
from sagetrain.config.layer_specs import LayerSpec
from sagetrain.model.backends import AttentionFunction, TokenLayout
from sagetrain.model.delta_rule import DeltaRule
from sagetrain.model.norm import RMSNorm
from sagetrain.parallel.collectives import Region
from sagetrain.parallel.layers import ColumnParallelLinear, RowParallelLinear


class DeltaNet(nn.Module):
    """A gated delta net, which a block has in the place of attention.Attention and calls alike: `project`, then the
    module itself, then `out`. Raises ValueError if a rank has only a part of the heads or of the tokens, which was not
    proven.

        q, k, v    projected, and convolved along the tokens
        g          -exp(a_log) softplus(a + dt_bias), the logarithm of the decay; a is projected
        beta       sigmoid(b), the strength of the correction; b is projected
        result     RMSNorm(delta rule(q, k, v, g, beta)) * silu(z); z is projected
    """

    def __init__(
        self, layer: LayerSpec, function: AttentionFunction, region: Region, *, matmuls: Mapping[str, Matmul]
    ) -> None:
        super().__init__()
        groups = region.groups
        if groups.tp_size > 1 or groups.cp_size > 1:
            raise ValueError("a gated delta net needs tensor_parallel_size 1 and context_parallel_size 1")
        delta = layer.delta_net
        assert delta is not None and isinstance(function, DeltaRule)
        self.function = function
        self.window = None
        self.key_dim, self.value_dim = delta.key_dim, delta.value_dim
        linear, heads = layer.linear_layers(1), delta.value_heads
        qkv, out = linear["qkv"], linear["out"]
        self.qkv = ColumnParallelLinear(*qkv, region, matmul=matmuls.get("qkv"))
        self.gates = ColumnParallelLinear(layer.hidden, {"a": heads, "b": heads}, region)
        self.out = RowParallelLinear(out.inputs, layer.hidden, region, matmul=matmuls.get("out"))
        for name in ("q", "k", "v"):
            self.register_parameter(f"{name}_conv", region.parameter(qkv.outputs[name], delta.conv_size))
        self.a_log = region.parameter(heads)
        self.dt_bias = region.parameter(heads)
        self.o_norm = RMSNorm(delta.value_dim, layer.norm_eps, region, split_input=True, of_one=layer.gains_of_one)

    @property
    def linear_layers(self) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
        """The projections that may be in 8 bits, keyed by name. Those of the gates are not among them."""
        return {"qkv": self.qkv, "out": self.out}

    @property
    def norms(self) -> list[RMSNorm]:
        """The norm of each head's output."""
        return [self.o_norm]

    def project(self, x_TD: Tensor | Measured | Pending, *positions_gains_and_tokens: object) -> tuple[Tensor, ...]:
        """Return q, k, v, z, a and b, [T, columns] each. Nothing but x is needed."""
        return *self.qkv(x_TD), *self.gates(x_TD)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        a: Tensor,
        b: Tensor,
        layout: TokenLayout,
        gains: dict[RMSNorm, Tensor],
    ) -> Tensor:
        """Run the recurrence over the tokens, as `project` returns them, and return [T, N * V] for `out`."""
        weights = [self.get_parameter(f"{name}_conv") for name in ("q", "k", "v")]
        rows, widths = layout.num_sequences, (self.key_dim, self.key_dim, self.value_dim)
        convolved = self.function.convolved([x.unflatten(0, (rows, -1)) for x in (q, k, v)], weights, layout)
        q, k, v = (x.unflatten(-1, (-1, width)) for x, width in zip(convolved, widths, strict=True))
        g_TN = -self.a_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        g, beta = (x.unflatten(0, (rows, -1)) for x in (g_TN, b.float().sigmoid()))
        o_BSNV, _ = self.function.rule(q, k, v, g, beta, layout)
        normed = self.o_norm(o_BSNV.flatten(0, 1).float(), gains.get(self.o_norm))
        gated: Tensor = normed * F.silu(z.float()).view_as(normed)
        return gated.to(z.dtype).flatten(1)
