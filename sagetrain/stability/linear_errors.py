"""The error of linear layers in 8 bits. Each is compared with fp32 from the same x, W and dY, as it computes its
gradients.

For Y, dX and dW (weights that read one x are one matrix), the tensor of the layer is compared with the tensor in fp32:

    quant/<layer>/<name>.<tensor>/rel_l2, cosine      as attention's (monitor.py); <name>: qkv, out, gate_up or down
    quant/<layer>/<name>.dY/zero_share_dX, _dW        of the entries of dY that are not zero, the share that is rounded
                                                      to zero on the way to dX and to dW (not to one made of 16 bits)

The output projection in 8 bits is layer `head` with the name head. Its numbers are those of all chunks of its tokens.
Experts have the names experts_gate_up and experts_down, and numbers of the rows of all experts of a layer.
Of results with more than 2^20 entries every n-th row is looked at. Sums run over all ranks before the root is taken.
Under tensor parallelism, Y of out and down and dX of qkv and gate_up are the terms that a rank adds to the sum over the
group.

No share of saturated entries is measured. Scales come from the current values, so no value leaves the range
(sagekernels/casts.py). A value that is not finite makes results NaN, which the step's own check finds.

A step itself is not touched. Before it begins, its first micro-batch goes forward and backward once more, not compiled
and with every block recomputed, through layers that keep x and dY in 16 bits, also while they travel.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sagekernels.grouped import Rows, plan_rows
from sagekernels.grouped_matmul import GroupedLowBit, GroupedMatmul
from sagekernels.grouped_products import GROUPED_PRODUCT, GROUPED_WEIGHT_PRODUCT
from sagekernels.lowbit import LowBit
from sagekernels.matmul import Matmul
from sagekernels.observe import pooled_cosine, pooled_rel_l2
from sagetrain.config.errors import many
from sagetrain.model.moe import Experts
from sagetrain.model.transformer import Gradients, Transformer, changed
from sagetrain.parallel.layers import ColumnParallelLinear, LinearLayer, RowParallelLinear
from sagetrain.parallel.metrics import share
from sagetrain.stability.controller import Controller, Event, Taken

MICRO_BATCHES = 300
"""Least number of micro-batches from one measurement to the next, where `auto` chooses the steps between them. A
measurement takes as long as two or three micro-batches."""
SAMPLE = 1 << 20
"""Number of entries of a result that are looked at."""
MUCH = 0.1
"""Share of dY's entries that has to be lost before it is reported. The number is ours, from no paper. With normal
numbers INT8 loses 1.2 % (rows of 4,096), and e4m3 one in 100,000. If a tenth is lost, a few entries are much larger
than the rest."""

Numbers = Callable[..., None]
"""The signature of Metrics.derive."""


@dataclass(frozen=True, kw_only=True)
class Observed(Matmul):
    """A Matmul that computes what a low-bit one does, and reports its errors in every backward pass.

    It keeps x and dY as they are, so it is for measurements and not for training.
    """

    joined: bool = True
    low: LowBit
    tell: Numbers
    tag: str
    layer: LinearLayer[Any] | None = None
    """The layer. Only one that adds the gradient of its weight up itself is asked for it."""

    def read(self, x: Tensor, largest: Tensor | None = None) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the codes and scales of x, and x."""
        return self.low.operand(x), (x,)

    def forward(
        self, operand: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Return x W^T of each weight: [tokens, out] each."""
        return self.low.forward(operand, weights, kept)

    def input_gradient(
        self,
        prepared: Sequence[Tensor],
        weights: Sequence[Tensor],
        out: Tensor | None = None,
        kept: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the gradient of x: [tokens, in]."""
        return self.low.input_gradient(self.low.prepare(prepared), weights, out, kept)

    def weight_gradients(
        self, prepared: Sequence[Tensor], saved: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the gradient of each weight, in its shape."""
        (grad,), (x,), low = prepared, saved, self.low
        operand, to_weights = low.read(x)
        rounded = low.prepare(prepared)
        gradients, w = low.weight_gradients(rounded, to_weights, weights), torch.cat(tuple(weights))
        self._compare("Y", torch.cat(low.forward(operand, weights), 1), x, w.t())
        self._compare("dX", low.input_gradient(rounded, weights), grad, w)
        self._compare("dW", torch.cat(tuple(gradients)), grad.t(), x)
        self._count("dX", grad, rounded[0])
        if low.gradient is not None:
            # Rows of zeros fill the codes up.
            self._count("dW", grad, rounded[2].t()[: len(grad)])
        return gradients

    def add_weight_gradient(self, total: Tensor, prepared: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
        """Add the gradient of one weight to an fp32 total."""
        assert self.layer is not None
        # At ZeRO 3 its weights are whole during a pass alone.
        total += self.weight_gradients(prepared, saved, self.layer.weights)[0]

    def _compare(self, name: str, found: Tensor, a: Tensor, b: Tensor) -> None:
        """Compare a result with a b in fp32, for every n-th row."""
        every = _every(found)
        _tell_errors(self.tell, f"{self.tag}.{name}", found[::every], a[::every].float() @ b.float())

    def _count(self, name: str, grad: Tensor, codes: Tensor) -> None:
        every = _every(grad)
        there = grad[::every] != 0
        lost = there & (codes[::every].float() == 0)
        self.tell(f"{self.tag}.dY/zero_share_{name}", share, lost.sum(), there.sum())


@dataclass(frozen=True, kw_only=True)
class ObservedExperts(GroupedMatmul):
    """A GroupedMatmul that computes what a low-bit one does, and reports its errors in every backward pass.

    It keeps x and dY as they are, so it is for measurements and not for training. Products that gather tokens are those
    of gate and up, others those of down.
    """

    low: GroupedLowBit
    tell: Numbers
    tag: str
    layer: Experts

    def check(self, weight: Tensor, tokens: int) -> None:
        """Raise ValueError where sizes are none that the low-bit one multiplies."""
        self.low.check(weight, tokens)

    def read(
        self, x: Tensor, rows: Rows, gathers: bool, largest: Tensor | None = None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the codes and scales of the rows of x, and x."""
        return self.low.operand(x, rows, gathers), (x,)

    def forward(self, operand: Sequence[Tensor], weight: Tensor, rows: Rows, kept: Sequence[Tensor]) -> Tensor:
        """Return the outputs of the rows, [R, N]."""
        return self.low.forward(operand, weight, rows, kept)

    def input_gradient(self, prepared: Sequence[Tensor], weight: Tensor, rows: Rows, kept: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the rows, [R, K]."""
        return self.low.input_gradient(self.low.prepare(prepared[0], rows, False), weight, rows, kept)

    def weight_gradient(
        self, prepared: Sequence[Tensor], saved: Sequence[Tensor], rows: Rows, gathers: bool, dtype: torch.dtype
    ) -> Tensor:
        """Return the gradient of the weight, [E, N, K]."""
        (grad,), ((x,), _), low = prepared, super().read(saved[0], rows, gathers), self.low
        weight = self.layer.weights[not gathers].detach().view(len(rows.ends), -1, x.shape[1])
        operand, to_weight = low.read(x, rows, False)
        rounded, tag = low.prepare(grad, rows, False), f"{self.tag}_{'gate_up' if gathers else 'down'}"
        made = low.weight_gradient(rounded, to_weight, rows, False, dtype)
        self._compare(f"{tag}.Y", low.forward(operand, weight, rows, ()), x, weight.mT, rows)
        self._compare(f"{tag}.dX", low.input_gradient(rounded, weight, rows, ()), grad, weight, rows)
        every = -(-made.numel() // SAMPLE)
        some = grad[:, ::every].contiguous()
        exact = GROUPED_WEIGHT_PRODUCT(some.float(), x.float(), rows.ends)
        _tell_errors(self.tell, f"{tag}.dW", made[:, ::every], exact)
        there = some.count_nonzero()
        # A code is not zero only where the entry is not, and what fills tiles up is zero.
        for to, codes in (("dX", rounded[0][:, ::every]), ("dW", rounded[2][::every])):
            self.tell(f"{tag}.dY/zero_share_{to}", share, there - codes.float().count_nonzero(), there)
        return made

    def _compare(self, name: str, found: Tensor, a: Tensor, b: Tensor, rows: Rows) -> None:
        """Compare each row of a times the matrix of its expert with fp32, for every n-th row."""
        every = _every(found)
        places = torch.arange(0, len(a), every, dtype=torch.int32, device=a.device)
        experts = torch.searchsorted(rows.ends, places, right=True)
        some = plan_rows(experts.masked_fill(experts == len(b), -1)[:, None], len(b))
        exact = GROUPED_PRODUCT(a[::every].float(), b.float(), some.ends, some.tiles)
        _tell_errors(self.tell, name, found[::every], exact)


def _tell_errors(tell: Numbers, name: str, found: Tensor, exact: Tensor) -> None:
    sums = [torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in (found - exact, found, exact)]
    tell(f"{name}/rel_l2", pooled_rel_l2, *sums)
    tell(f"{name}/cosine", pooled_cosine, *sums)


def _every(x: Tensor) -> int:
    return -(-x.numel() // SAMPLE)


class LinearErrors:
    """Measure the errors of a Transformer's linear layers in 8 bits, in passes of their own, and add them to the
    metrics of its groups. This is a probe (engines/protocol.py).

    Args:
        blocks: the numbers of the blocks that are looked at.
        leaves: the tensors that autograd gives gradients to, by name (Engine.leaves). None: the model's parameters.
    """

    micro_batches = 1

    def __init__(self, model: Transformer, blocks: Container[int], leaves: Mapping[str, Tensor] | None = None) -> None:
        self._model, self._blocks = model, blocks
        self._first = next(iter((leaves or dict(model.named_parameters())).values()))

    @property
    def layers(self) -> dict[tuple[int | str, str], tuple[LinearLayer[Any], LowBit | GroupedLowBit]]:
        """The layers in 8 bits at present, by the number of the block and the path inside of it, or both `head`. The
        experts of a block are two."""
        low: dict[tuple[int | str, str], tuple[LinearLayer[Any], LowBit | GroupedLowBit]] = {}
        head = getattr(self._model, "head", None)
        if head is not None and head.matmuls:
            low["head", "head"] = head, head.matmul
        for number, block in zip(self._model.numbers, self._model.blocks, strict=True):
            for path, layer in block.named_modules() if number in self._blocks else ():
                if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and isinstance(layer.matmul, LowBit):
                    low[number, path] = layer, layer.matmul
                elif isinstance(layer, Experts) and isinstance(layer.matmul, GroupedLowBit):
                    low |= {(number, f"{path}_{name}"): (layer, layer.matmul) for name in ("gate_up", "down")}
        return low

    @staticmethod
    def tag(number: int | str, path: str) -> str:
        """Return the beginning of the names of a layer's metrics, up to the tensor."""
        return f"quant/{number}/{path.rpartition('.')[2]}"

    def measure(self, runs: Sequence[Gradients], counted: Sequence[int] | None = None) -> None:
        """Measure the errors in micro-batches. Collective. It leaves no gradient behind, and does nothing if no layer
        is in 8 bits.

        Args:
            runs: the micro-batches, as functions that return gradients.
            counted: tokens of each that count in the loss, as for any probe. Relative errors do not need them.
        """
        if not self._model.groups.on_any_stage(bool(self.layers)):
            return
        metrics, found = self._model.groups.metrics, []
        eager = torch.compiler.set_stance("force_eager")
        with self._observed(lambda *entry: found.append(entry)), metrics.aside(), eager, torch.enable_grad():
            for run in runs:
                # The gradient of the first layer is asked for, so the backward pass goes through all layers and leaves
                # no gradient in any parameter.
                run([self._first])
        for entry in found:
            metrics.derive(*entry)

    def _observed(self, tell: Numbers) -> AbstractContextManager[None]:
        """Return a context in which the model is as these passes need it."""
        changes: dict[tuple[Any, str], object] = {(self._model, "activation_checkpointing"): "full"}
        for block in self._model.blocks:
            changes[block, "dear"] = ()
            changes |= {(norm, "reader"): None for norm in (block.attention_norm, block.mlp_norm)}
        for (number, path), (layer, low) in self.layers.items():
            tag = self.tag(number, path)
            if isinstance(low, GroupedLowBit) and isinstance(layer, Experts):
                of_both = tag[: tag.index("_")]
                changes[layer, "matmul"] = ObservedExperts(low=low, tell=tell, tag=of_both, layer=layer)
            elif isinstance(low, LowBit):
                changes[layer, "matmul"] = Observed(low=low, tell=tell, tag=tag, layer=layer)
        return changed(changes)


class Vanishing(Controller):
    """A controller that decides nothing. It reports each linear layer that loses much of dY in 8 bits, once."""

    name = "vanishing"

    def __init__(self) -> None:
        self._said: set[str] = set()

    def after_step(self, taken: Taken) -> list[Event]:
        """Report the layers that are measured to lose more than MUCH for the first time."""
        found: dict[str, float] = {}
        for metric, lost in taken.metrics.items():
            layer, mark, _ = metric.removeprefix("quant/").partition(".dY/zero_share_")
            if mark and lost > MUCH and layer not in self._said:
                found[layer] = max(lost, found.get(layer, 0.0))
        if not found:
            return []
        self._said.update(found)
        worst = max(found, key=lambda layer: found[layer])
        others = f", and more than {MUCH:.0%} of {many(len(found) - 1, 'other')}" if len(found) > 1 else ""
        text = (
            f"gradients vanish in 8 bits: of the output's gradient {found[worst]:.1%} of the entries of linear layer "
            f"{worst}{others}; linear.keep_first_blocks and keep_last_blocks keep blocks in 16 bits. In int8 up to "
            "38 % is usual, and no loss of ours minded (docs/low-bit-linear.md)"
        )
        return [Event(self.name, text, {"zero_shares": found})]

    def state(self) -> dict[str, Any]:
        return {"said": sorted(self._said)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._said = set(state.get("said", []))
