"""Observe a step's gradients just before the optimizer reads them: their noise, and their norm in each layer. Decide
whether it reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sagetrain.engines.protocol import Observers
from sagetrain.engines.room import METRIC as METRIC_OF_ROOM
from sagetrain.model.transformer import Transformer
from sagetrain.stability.noise_scale import GradientNoise, LayerSquares
from sagetrain.stability.spikes import Verdict

Parts = Callable[[], Sequence[tuple[str, Tensor]]]
"""A function that returns the parts of the present gradients that this rank owns, 1-D, each with the name of its
tensor."""

_LAYER = "layer/"


class StepGradients:
    """The part of a step's gradients that this rank owns, summed over the micro-batches and, as the engine has it,
    clipped.

    Args:
        clip: the largest global norm of the gradients that are shown; 0: they are shown before they are clipped.
        copies: the number of replicas that own the same gradients.
        expert_copies: the number of ranks that own the same gradients of experts, if ranks have experts between them.
    """

    def __init__(
        self, model: Transformer, device: torch.device, clip: float, copies: int, expert_copies: int = 1
    ) -> None:
        self.groups, self.device, self._clip, self._copies = model.groups, device, clip, copies
        self._layers = LayerSquares(model.every_spec.values(), model.groups, device, copies / expert_copies)
        self.begin(None)

    def begin(self, noise: GradientNoise | None) -> None:
        """Prepare for a step. Its gradients are shown to `noise`."""
        self._noise, self._squares = noise, torch.empty(0)

    @torch.no_grad()
    def show(self, parts: Parts, by_layer: bool) -> None:
        """Look at gradients before the optimizer reads them, and at the norm of each layer if `by_layer`. An engine may
        show them part by part, each part once."""
        if not self._noise and not by_layer:
            return
        found = parts()
        if found and self._noise:
            self._noise.of_step(found)
        # Ranks that own no gradients also need the zeros.
        if by_layer and not len(self._squares):
            self._squares = torch.zeros(len(self._layers.place), dtype=torch.float64, device=self.device)
        for name, part in found if by_layer else ():
            self._squares[self._layers.place[name]] += torch.linalg.vector_norm(part).double().square()

    def finish(self, micro_batches: int, norm: float) -> tuple[dict[str, float], dict[str, float]]:
        """Reduce the measurements after all gradients were shown; collective, if anything was measured. `norm` is the
        global norm before clipping. Return the numbers of `noise`, and the gradient norm of each layer by name; each is
        empty if it was not asked for."""
        if not self._noise and not len(self._squares):
            return {}, {}
        clipped = self._clip / (norm + 1e-6) if self._clip and self._clip < norm < math.inf else 1.0
        if self._noise:
            self._noise.finish(micro_batches, clipped, self._copies)
        if len(self._squares):
            self._layers.add(f"{_LAYER}*", self._squares, clipped**-2, self._copies)
        found = self.groups.metrics.reduce(self.device)
        layers = [name for name in found if name.startswith(_LAYER)]
        return found, {name.removeprefix(_LAYER): math.sqrt(found.pop(name)) for name in layers}


class Decision:
    """The decision on one step: whether its update is made. It is made once and is the same on all ranks, as soon as an
    engine knows the gradient norm."""

    def __init__(self, observers: Observers, gradients: StepGradients) -> None:
        self._observers, self._gradients = observers, gradients
        self.metrics: dict[str, float] = {}
        """The step's numbers over all ranks. The dict is filled when the decision is made."""
        self.verdict: Verdict | None = None
        self.lacked_room: bool = False
        """Whether rows of experts had no room on some rank (room.py). Such a step is not judged."""

    def allows(self, norm: Tensor | float | None = None) -> bool:
        """Return whether the update is to be made. The first call reduces the step's metrics, which is collective, and
        asks the judge. Later calls return the same answer.

        Args:
            norm: the global gradient norm before clipping, the same on every rank. None: the engine has added
                train/grad_norm to the metrics itself.
        """
        if self.verdict is None:
            groups, device = self._gradients.groups, self._gradients.device
            if norm is not None:
                groups.metrics.mean("train/grad_norm", norm)
            # Pipeline stages measure their own layers.
            differ = self._observers.probes or self._observers.watch
            self.metrics = groups.metrics.reduce(device, groups.pp_group if differ else None)
            self.lacked_room = self.metrics.pop(METRIC_OF_ROOM, 0.0) > 0
            self.verdict = Verdict(apply=False) if self.lacked_room else self._observers.judge(self.metrics)
        return self.verdict.apply

    def show(self, parts: Parts) -> None:
        """Show the step's gradients to their observers. An engine that has the gradients part by part shows each part
        once, when the decision is made."""
        assert self.verdict is not None, "gradients are shown when the step is judged"
        self._gradients.show(parts, by_layer=self.verdict.event is not None or self._observers.layer_norms)
