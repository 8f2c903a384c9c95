"""What an optimizer step is given beside its batches, and what all ranks know of it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from sagetrain.stability.controller import Event
from sagetrain.stability.noise_scale import GradientNoise
from sagetrain.stability.spikes import Verdict

Watch = Callable[[int, int], AbstractContextManager[None]]
"""Given the sequences of a micro-batch and their length, what its forward and backward pass run in."""


class Probe(Protocol):
    """Looks at micro-batches before the step begins."""

    @property
    def micro_batches(self) -> int:
        """How many of this rank's, the first ones, if there are as many."""
        ...

    def measure(self, runs: Sequence[Callable[[], Tensor]], counted: Sequence[int] | None = None) -> None:
        """Given their forward passes to the loss, which is the mean over the `counted` tokens of each (None: over all
        of them): it may run each as often as it likes, but accumulate no gradient."""
        ...


class UpdateObserver(Protocol):
    """Looks at the weights of a step, before and after they are updated."""

    def before_update(self) -> None:
        """Look at the weights when the last backward pass is over. What is added to the metrics is the step's."""
        ...

    def after_update(self) -> None:
        """Look at the weights that an update has made. The observer may change them, in all copies of this rank."""
        ...


def _accept(metrics: Mapping[str, float]) -> Verdict:
    return Verdict()


@dataclass(frozen=True)
class Observers:
    """What looks at a step while it is taken; by default nothing does, and the update is made."""

    noise: GradientNoise | None = None
    """Takes note of the gradients."""
    probes: Sequence[Probe] = ()
    """Called first, one after the other. Not at ZeRO 3, whose hooks cannot take that."""
    watch: Watch | None = None
    """Sees the first micro-batch, forward and backward."""
    layer_norms: bool = False
    """Whether norms/<layer>/gradient and norms/<layer>/activation are measured."""
    updates: Sequence[UpdateObserver] = ()
    """See the weights before the step is judged, and after an update that was made."""
    judge: Callable[[Mapping[str, float]], Verdict] = _accept
    """Whether the update is made: asked on every rank, with the step's numbers but those of `noise`."""


@dataclass(frozen=True)
class StepResult:
    """What all ranks know of a step. metrics: every number that was added while it ran, by name; applied: the update
    was made; stop: some rank was asked to stop; folds: sum over all ranks of ledger.fold of the samples they trained
    on; span: sum of the squared lengths of the documents that attention stayed within, over all tokens; event: what is
    wrong with the step; layer_norms: then, or if observers wanted them, gradient norm of each layer, if DeepSpeed found
    it finite."""

    metrics: dict[str, float]
    applied: bool
    stop: bool
    folds: int
    span: float
    event: Event | None = None
    layer_norms: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean over the global batch."""
        return self.metrics["train/loss"]

    @property
    def grad_norm(self) -> float:
        """Global, before clipping."""
        return self.metrics["train/grad_norm"]
