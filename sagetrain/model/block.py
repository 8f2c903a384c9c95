"""One block of the decoder, as stages. The order in which tokens go through the stages is in walks.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sagekernels.matmul import Measured, Pending
from sagetrain.config.layer_specs import LayerSpec
from sagetrain.model import walks
from sagetrain.model.attention import Attention
from sagetrain.model.backends import AttentionFunction, TokenLayout
from sagetrain.model.delta_net import DeltaNet
from sagetrain.model.mlp import MLP
from sagetrain.model.moe import MoE
from sagetrain.model.norm import NoNorm, RMSNorm, complete, enter_gains, normalize
from sagetrain.model.walks import BlockStage, Half, Part, Stretch
from sagetrain.parallel.collectives import Region
from sagetrain.parallel.layers import LinearLayer, RowParallelLinear

NextNorm = RMSNorm | NoNorm | Literal["stream"] | None
"""The norm that ends a stretch of stages. "stream": a stretch ends without a norm. None: a block is walked alone."""


class Block(nn.Module):
    """A block computes x + attention(norm(x)), then x + mlp(norm(x)), in stages that walks.py walks. The norms may
    stand behind attention and MLP instead, or on both sides (`settled`).

    A stage takes the residual stream x and the output y of the stage before, and returns both for the next stage.

        normalize   x + y, normalized       finishes the sum of y over the ranks, starts to gather
        project     q, k, v
        attend      softmax(q k^T) v
        out         added to x next         starts the sum
        normalize   x + y, normalized
        gate_up     silu(gate) * up
        down        added to x next         starts the sum

    A gated delta net (delta_net.DeltaNet) has more outputs of `project`, and a recurrence in the place of attention.
    A mixture of experts (moe.MoE) has one stage in the place of gate_up and down. It takes and makes this rank's
    tokens, so nothing is gathered for it, and there is no sum.
    """

    def __init__(
        self,
        layer: LayerSpec,
        function: AttentionFunction,
        region: Region,
        *,
        matmuls: Mapping[str, Any],
        dear: tuple[str, ...],
        share: Tensor,
        vocab_size: int,
    ) -> None:
        super().__init__()
        self.region = region
        self.joins_norms = layer.joins_norms
        self.dear = dear
        """If there are any, the block, walked alone, keeps the results of these operators for its backward pass, and
        recomputes the rest."""

        def norm() -> RMSNorm:
            how = {"split_input": region.sharded, "of_one": layer.gains_of_one}
            return RMSNorm(layer.hidden, layer.norm_eps, region, **how)

        before, after = layer.normed
        self.attention_norm = norm() if before else NoNorm()
        self.attention: Attention | DeltaNet
        if layer.delta_net:
            self.attention = DeltaNet(layer, function, region, matmuls=matmuls)
        else:
            self.attention = Attention(layer, function, region, matmuls=matmuls, vocab_size=vocab_size)
        self.attention_post_norm = norm() if after else None
        self.mlp_norm = norm() if before else NoNorm()
        self.mlp: MLP | MoE
        if layer.experts is None:
            self.mlp = MLP(layer, region, matmuls=matmuls)
        else:
            self.mlp = MoE(layer, region, matmuls=matmuls, share=share)
        self.mlp_post_norm = norm() if after else None
        self._read_by(matmuls)

    def _read_by(self, matmuls: Mapping[str, Any]) -> None:
        if self.region.sharded and self.region.groups.tp_size > 1:
            # Only layers in fewer bits become readers. Another reader makes another graph, for the last block's next
            # norm as well.
            self.attention_norm.reader = None if self.attention.gates else matmuls.get("qkv")
            self.mlp_norm.reader = matmuls.get("gate_up") if isinstance(self.mlp, MLP) else None

    @property
    def linear_layers(self) -> dict[str, LinearLayer[Any]]:
        """The block's linear layers, keyed by name: qkv, out, gate_up, down, experts."""
        return {**self.attention.linear_layers, **self.mlp.linear_layers}

    @property
    def norms(self) -> list[RMSNorm]:
        """The block's norms: those on the residual stream, and those inside of attention."""
        around = self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm
        return [norm for norm in (*around, *self.attention.norms) if isinstance(norm, RMSNorm)]

    @property
    def matmuls(self) -> dict[str, Any]:
        """The Matmul of each linear layer that does not multiply in the dtype of its operands, keyed by the layer's
        name. It may be set."""
        layers = self.linear_layers.items()
        return {name: layer.matmul for name, layer in layers if type(layer.matmul) is not type(layer.in_dtype)}

    @matmuls.setter
    def matmuls(self, matmuls: Mapping[str, Any]) -> None:
        for name, layer in self.linear_layers.items():
            layer.matmul, layer.kept = matmuls.get(name) or layer.in_dtype, ()
        self._read_by(matmuls)

    @property
    def measures(self) -> bool:
        """Whether the norm that the block reads comes with its largest magnitudes (Measured)."""
        return self._read_once(self.attention.qkv)

    def _read_once(self, layer: LinearLayer[Any]) -> bool:
        """Whether a layer's casts, for which a backward pass comes, read a matrix once if its largest magnitudes are
        known."""
        return self.region.groups.tp_size == 1 and layer.matmul.measured and torch.is_grad_enabled()

    def stages(self, next_norm: NextNorm) -> Stretch:
        """Return all stages, in their order. For next_norm see `forward`."""
        before, out = (self.normalize(self.attention_norm), self.project), self.attention.out
        if isinstance(self.mlp, MLP):
            attended = *self.added(out, self.attention_post_norm, self.mlp_norm), self.made_by(self.mlp)
            return before, self.attend, (*attended, *self.added(self.mlp.down, self.mlp_post_norm, next_norm))
        attended = self.made_by(out), *self.settled(self.attention_post_norm)
        mlp = self.normalize_own, self.mix, *self.settled(self.mlp_post_norm)
        return before, self.attend, (*attended, *mlp, self.ended(next_norm))

    def added(self, layer: RowParallelLinear, post_norm: RMSNorm | None, norm: NextNorm) -> list[BlockStage]:
        """Return the stages that multiply y by a layer, add it to x and normalize the sum. It is one stage where the
        kernels of the addition and the norm leave largest magnitudes for casts."""
        if not (self.joins_norms and self._read_once(layer) and isinstance(norm, RMSNorm)):
            return [self.made_by(layer), *self.settled(post_norm), self.ended(norm)]

        def stage(x: Tensor, y: Tensor | Measured, part: Part) -> Half:
            return Half(*layer.normed(y, x, norm.entered(_gain(part, norm)), norm.eps))

        return [stage]

    def ended(self, norm: NextNorm) -> BlockStage:
        """Return the stage behind a y that is to be added to x."""
        if norm is None:
            return walks.idle
        return self.end if norm == "stream" else self.normalize(norm)

    def settled(self, norm: RMSNorm | None) -> list[BlockStage]:
        """Return the stage that finishes y and normalizes it, with a norm of this block. None: there is none."""

        def stage(x: Tensor, y: Tensor | Pending, part: Part) -> Half:
            assert norm is not None
            return Half(x, norm(complete(y, self.region), part.gains.get(norm)))

        return [] if norm is None else [stage]

    def normalize(self, norm: RMSNorm | NoNorm) -> BlockStage:
        """Return the stage that adds y to x and normalizes the sum, with a norm of this block or of the next one."""

        def stage(x: Tensor, y: Tensor | Pending | None, part: Part) -> Half:
            return Half(*normalize(x, y, norm, _gain(part, norm), self.region))

        return stage

    def normalize_own(self, x: Tensor, y: Tensor | Pending, part: Part) -> Half:
        """Add y to x and normalize the sum for the MLP. Nothing is gathered."""
        x = x + complete(y, self.region)
        return Half(x, self.mlp_norm(x, _gain(part, self.mlp_norm)))

    def mix(self, x: Tensor, y: Tensor, part: Part) -> Half:
        """Send normalized tokens through their experts."""
        return Half(x, self.mlp(y, part.parts))

    def end(self, x: Tensor, y: Tensor | Pending, part: Part) -> Half:
        """Add y to x. This is the last stage of a pipeline stage, which sends the residual stream to the next one."""
        return Half(x + complete(y, self.region), None)

    def project(self, x: Tensor, y: Tensor | Pending, part: Part) -> Half:
        return Half(x, self.attention.project(y, part.cos, part.sin, part.gains, part.tokens))

    def attend(self, x: Tensor, qkv: tuple[Tensor, ...], part: Part) -> Half:
        return Half(x, self.attention(*qkv, part.layout, part.gains))

    def made_by(self, function: Callable[[Any], Any]) -> BlockStage:
        """Return the stage that makes y anew by a function of it, and leaves x as it is."""

        def stage(x: Tensor, y: Any, part: Part) -> Half:
            return Half(x, function(y))

        return stage

    def forward(self, layouts: Sequence[TokenLayout], next_norm: NextNorm, *halves: Any) -> tuple[Any, ...]:
        """Take two halves, or the whole as one, through the stretch of stages that ends with next_norm. With "stream"
        the stretch ends with the complete residual stream, for another stage of the pipeline.

        Without next_norm they go through this block alone, and only complete residual streams come in and go out.
        Activation checkpointing then keeps little, and nothing that is still under way. FSDP2's hooks notice the
        backward pass by arguments and results that are tensors.

        Args:
            layouts: the layout of each half, or of all tokens.
            next_norm: the norm of the next block, or the final norm.
            halves: each a `Half`, or a residual stream without next_norm.

        Returns:
            As many halves or residual streams as were given.
        """
        if self.dear and next_norm is None and torch.is_grad_enabled():
            return walks.selective(self.dear, self._walk, layouts, None, *halves)
        return self._walk(layouts, next_norm, *halves)

    def _walk(self, layouts: Sequence[TokenLayout], next_norm: NextNorm, *halves: Any) -> tuple[Any, ...]:
        norms = [*self.norms, next_norm] if isinstance(next_norm, RMSNorm) else self.norms
        parts = walks.split(layouts, enter_gains(*norms, parts=len(halves)))
        before, attend, after = self.stages(next_norm)
        if next_norm is None:
            before = walks.idle, *before
            halves = tuple(Half(x, None) for x in halves)
        if len(halves) == 1:
            halves = (walks.whole((before, attend, after), *halves, *parts),)
        else:
            halves = walks.staggered((before, attend, after), halves, parts, attend_together=len(layouts) == 1)
        if next_norm is not None:
            return halves
        return tuple(x + complete(y, self.region) for x, y in halves)


def _gain(part: Part, norm: RMSNorm | NoNorm) -> Tensor | None:
    return part.gains.get(norm) if isinstance(norm, RMSNorm) else None
