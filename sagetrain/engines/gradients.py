"""A step's gradients, as the optimizer is about to read them: their noise, and where they are large."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.noise_scale import GradientNoise, LayerSquares

_LAYER = "layer/"


class StepGradients:
    """What this rank owns of a step's gradients, summed over the micro-batches and clipped.

    Args:
        optimizer: whose `grad` they are when DeepSpeed calls it.
        weights: what this rank owns of each parameter, by name: views of the optimizer's.
        clip: largest global norm; 0: none.
        copies: so many replicas own the same.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Iterable[tuple[str, Tensor]],
        model: Transformer,
        groups: ParallelGroups,
        device: torch.device,
        clip: float,
        copies: int,
    ) -> None:
        self._optimizer, self._weights, self._groups, self._device = optimizer, list(weights), groups, device
        self._clip, self._copies = clip, copies
        self._layers = LayerSquares(model.specs.values(), groups, device)
        self.begin(None)

    def begin(self, noise: GradientNoise | None) -> None:
        """Before a step, whose gradients `noise` is to see."""
        self._noise, self._squares = noise, torch.empty(0)

    @torch.no_grad()
    def show(self, by_layer: bool) -> None:
        """Before the optimizer reads them. DeepSpeed steps one group of parameters after the other; those of others
        are not there yet, or not there any more. by_layer: their norms are wanted, too."""
        if not self._noise and not by_layer:
            return
        masters = {
            m.data_ptr(): m for group in self._optimizer.param_groups for m in group["params"] if m.grad is not None
        }
        starts, parts = sorted(masters), []
        for name, weight in self._weights if masters else ():
            master = masters[starts[max(0, bisect.bisect_right(starts, weight.data_ptr()) - 1)]]
            first = (weight.data_ptr() - master.data_ptr()) // master.element_size()
            if 0 <= first < master.numel():
                parts.append((name, master.grad.view(-1).narrow(0, first, weight.numel())))
        if parts and self._noise:
            self._noise.of_step(parts)
        if by_layer and not len(self._squares):  # on ranks that own nothing too
            self._squares = torch.zeros(len(self._layers.place), dtype=torch.float64, device=self._device)
        for name, part in parts if by_layer else ():
            self._squares[self._layers.place[name]] += torch.linalg.vector_norm(part).double().square()

    def finish(self, accumulation: int, norm: float) -> tuple[dict[str, float], dict[str, float]]:
        """Once all of them were there: what `noise` has measured, and the norm of each layer, if they were wanted;
        collective, if there is anything.

        Args:
            accumulation: micro-batches of the step on this rank.
            norm: global, before clipping.
        """
        if not self._noise and not len(self._squares):
            return {}, {}
        clipped = self._clip / (norm + 1e-6) if self._clip and self._clip < norm < math.inf else 1.0
        if self._noise:
            self._noise.finish(accumulation, clipped, self._copies)
        if len(self._squares):
            self._layers.add(f"{_LAYER}*", self._squares, clipped**-2, self._copies)
        found = self._groups.metrics.reduce(self._device)
        layers = [name for name in found if name.startswith(_LAYER)]
        return found, {name.removeprefix(_LAYER): math.sqrt(found.pop(name)) for name in layers}
