"""What linear layers lose in 8 bits: each beside fp32, from the same x, W and dY, as it computes its gradients.

With x as the layer computes it and y exact, for x of Y, dX and dW (the weights that read one x are one matrix):

    <tag>/<x>/rel_l2, cosine         as the monitor's (monitor.py)
    <tag>/dY/zero_share_dX, dW       of the entries of dY that are not zero, the share that is rounded to zero on the
                                     way to dX and to dW (not where dW is made of 16 bits)

No share saturates: scales come from the values at hand, so that none leaves the range (sagekernels/casts.py), and what
is not finite makes results NaN, which the step's own check finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sagekernels.observe import pooled_cosine, pooled_rel_l2
from sagetrain.parallel.lowbit import LowBit
from sagetrain.parallel.matmul import Matmul
from sagetrain.parallel.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Observed(Matmul):
    """Computes what a low-bit Matmul does, and adds its errors to the metrics in every backward pass.

    Keeps x and dY as they are: for examinations, not for training.
    """

    joined: bool = True
    low: LowBit
    metrics: Metrics
    tag: str

    def read(self, x: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Codes and scales of x, and x."""
        return self.low.operand(x), (x,)

    def forward(
        self, operand: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """x W^T of each weight: [tokens, out] each."""
        return self.low.forward(operand, weights, kept)

    def input_gradient(
        self,
        prepared: Sequence[Tensor],
        weights: Sequence[Tensor],
        out: Tensor | None = None,
        kept: Sequence[Tensor] = (),
    ) -> Tensor:
        """[tokens, in]."""
        return self.low.input_gradient(self.low.prepare(prepared), weights, out, kept)

    def weight_gradients(
        self, prepared: Sequence[Tensor], saved: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Of each weight, in its shape."""
        (grad,), (x,), low = prepared, saved, self.low
        operand, to_weights = low.read(x)
        rounded = low.prepare(prepared)
        gradients = low.weight_gradients(rounded, to_weights, weights)
        dy, w, x = grad.float(), torch.cat(tuple(weights)).float(), x.float()
        self._compare("Y", torch.cat(low.forward(operand, weights), 1), x @ w.t())
        self._compare("dX", low.input_gradient(rounded, weights), dy @ w)
        self._compare("dW", torch.cat(tuple(gradients)), dy.t() @ x)
        self._count("dX", grad, rounded[0])
        if not low.wide_weight_gradient:
            self._count("dW", grad, rounded[2].t()[: len(grad)])  # rows of zeros fill it up
        return gradients

    def _compare(self, name: str, found: Tensor, exact: Tensor) -> None:
        sums = [x.double().square().sum() for x in (found - exact, found, exact)]
        self.metrics.derive(f"{self.tag}/{name}/rel_l2", pooled_rel_l2, *sums)
        self.metrics.derive(f"{self.tag}/{name}/cosine", pooled_cosine, *sums)

    def _count(self, name: str, grad: Tensor, codes: Tensor) -> None:
        there = grad != 0
        lost = there & (codes.float() == 0)
        self.metrics.derive(f"{self.tag}/dY/zero_share_{name}", _share, lost.sum(), there.sum())


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
