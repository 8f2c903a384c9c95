"""AdamW with decoupled weight decay, on the pieces that a rank keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from sagekernels.adamw import Factors
from sagekernels.adamw import adamw as in_one_pass
from sagetrain.config.schema import OptimizerConfig
from sagetrain.optim.pieces import State, TensorPiece, clip_gradients
from sagetrain.optim.states import state_of
from sagetrain.optim.weights import weights_of

KINDS = "exp_avg", "exp_avg_sq"
"""The kinds of AdamW's state: the running averages of gradients and of their squares."""
# This many values of state are in fp32 at once, if memory holds them in fewer bits.
_AT_ONCE = 2**23


class AdamW:
    """An optimizer (pieces.Optimizer) that works value by value, so that ranks need not exchange anything.

    Args:
        seed: the seed of the run.
        lr_factor: the learning rate as a multiple of the schedule's.
        offloaded: the CPU updates what a GPU computes with, by one fused kernel on all of its cores.
    """

    def __init__(
        self,
        pieces: Sequence[TensorPiece],
        cfg: OptimizerConfig,
        seed: int,
        weight_decay: float,
        lr_factor: float = 1.0,
        offloaded: bool = False,
    ) -> None:
        self._cfg, self._weight_decay, self._lr_factor, self._offloaded = cfg, weight_decay, lr_factor, offloaded
        self._sizes = [len(piece.weight) for piece in pieces]
        self.weights = [weights_of(cfg.master, piece, seed) for piece in pieces]
        self.state: list[dict[str, State]] = [
            {
                "exp_avg": state_of(cfg.moments, piece.weight),
                "exp_avg_sq": state_of(cfg.moments, piece.weight, signed=False),
            }
            for piece in pieces
        ]
        # torch has a kernel for fp32, and on a GPU ours reads and writes all others once.
        fp32 = cfg.moments == cfg.master == "fp32"
        self._in_one_pass = not fp32 and any(piece.weight.is_cuda for piece in pieces)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float, update: int, clip: float = 1.0) -> None:
        """Update weights and averages: see pieces.Optimizer."""
        if self._in_one_pass:
            cfg, rate = self._cfg, lr * self._lr_factor
            factors = Factors.of(rate, cfg.betas, cfg.eps, self._weight_decay, update, clip)
            for masters, state, gradient in zip(self.weights, self.state, gradients, strict=True):
                first, second = (state[kind].moment() for kind in KINDS)
                in_one_pass(masters.master(update), gradient, first, second, factors)
            return
        clip_gradients(gradients, clip)
        for parts in self._parts():
            weights = [self.weights[number].read(start, stop) for number, start, stop in parts]
            average, squares = ([self.state[n][kind].read(start, stop) for n, start, stop in parts] for kind in KINDS)
            found = [gradients[number][start:stop].float() for number, start, stop in parts]
            self._update(weights, found, average, squares, lr * self._lr_factor, update)
            for (number, start, _), weight in zip(parts, weights, strict=True):
                self.weights[number].write(weight, start, update)
            for kind, values in zip(KINDS, (average, squares), strict=True):
                for (number, start, _), value in zip(parts, values, strict=True):
                    self.state[number][kind].write(value, start)

    def _parts(self) -> Iterator[list[tuple[int, int, int]]]:
        """Yield what is updated at once: a list of piece, begin and end. Weights and state in fp32 are updated in place
        and all at once. Others are read into fp32 for that, so there is a bound."""
        sizes = [(number, size) for number, size in enumerate(self._sizes) if size]
        if self._cfg.moments == self._cfg.master == "fp32":
            yield [(number, 0, size) for number, size in sizes]
            return
        parts, total = list[tuple[int, int, int]](), 0
        for number, size in sizes:
            for start in range(0, size, _AT_ONCE):
                part = number, start, min(start + _AT_ONCE, size)
                if total + part[2] - start > _AT_ONCE:
                    yield parts
                    parts, total = [], 0
                parts.append(part)
                total += part[2] - start
        yield parts

    def _update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        average: list[Tensor],
        squares: list[Tensor],
        lr: float,
        update: int,
    ) -> None:
        """Call torch's AdamW: one fused kernel for all of them on a GPU."""
        if not weights:
            return
        fused = weights[0].is_cuda or self._offloaded
        # torch counts the updates itself, in one tensor for each weight.
        before = torch.full((len(weights),), update - 1.0, device=weights[0].device if fused else "cpu")
        adamw(
            weights,
            gradients,
            average,
            squares,
            [],
            list(before.unbind()),
            foreach=False,
            fused=fused,
            amsgrad=False,
            beta1=self._cfg.betas[0],
            beta2=self._cfg.betas[1],
            lr=lr,
            weight_decay=self._weight_decay,
            eps=self._cfg.eps,
            maximize=False,
        )
