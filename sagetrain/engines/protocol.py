"""The values that an engine (step.Engine) is given for a step and gives back: observers, and the result of the step on
all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from sagetrain.model.tensors import TensorSpec
from sagetrain.model.transformer import Gradients
from sagetrain.parallel.metrics import Metrics
from sagetrain.stability.controller import Event
from sagetrain.stability.noise_scale import GradientNoise
from sagetrain.stability.replica_check import ReplicaCheck
from sagetrain.stability.spikes import Verdict


class Watched(Protocol):
    """An observer of the passes of one micro-batch."""

    def passing(self, blocks: range, backward: bool) -> AbstractContextManager[None]:
        """Return the context in which a forward or backward pass through these blocks runs. In a pipeline, passes of
        other micro-batches come between those of this one."""
        ...

    def end(self) -> None:
        """Conclude after the last pass."""
        ...


Watch = Callable[[int, int], Watched]
"""A function that takes the number of sequences of a micro-batch and their length in tokens, and returns the observer
of the micro-batch."""


class Probe(Protocol):
    """A probe measures micro-batches before the step begins."""

    @property
    def micro_batches(self) -> int:
        """Return how many of this rank's micro-batches the probe needs. It gets the first ones, and fewer if the step
        has fewer."""
        ...

    def measure(self, runs: Sequence[Gradients], counted: Sequence[int] | None = None) -> None:
        """Measure micro-batches. The probe may run each of them as often as it likes; collective.

        Args:
            runs: one function for each micro-batch, which returns the gradients of its loss, the mean over its counted
                tokens.
            counted: the number of counted tokens in each micro-batch; None: all tokens count.
        """
        ...


def _accept(metrics: Mapping[str, float]) -> Verdict:
    return Verdict()


def untimed(metrics: Metrics) -> AbstractContextManager[None]:
    """Measure no time."""
    return nullcontext()


@dataclass(frozen=True)
class Observers:
    """The observers of a step. By default there are none, and the update is made."""

    noise: GradientNoise | None = None
    """The measurement of the gradients' noise."""
    probes: Sequence[Probe] = ()
    """The probes, which are called first and one after the other."""
    watch: Watch | None = None
    """The observer of the first micro-batch's passes."""
    layer_norms: bool = False
    """Whether norms/<layer>/gradient and norms/<layer>/activation are measured."""
    timed: Callable[[Metrics], AbstractContextManager[None]] = untimed
    """The clock of forward and backward, a context that adds this rank's time to the step's metrics."""
    replay: ReplicaCheck | None = None
    """The comparison of the last micro-batch with what another replica computes of it."""
    judge: Callable[[Mapping[str, float]], Verdict] = _accept
    """The judge of the update. It is called once on every rank, with the step's numbers except those of `noise`."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step, which is the same on all ranks."""

    metrics: dict[str, float]
    """Every number that was added while the step ran, by name."""
    applied: bool
    """Whether the update was made."""
    stop: bool
    """Whether any rank was asked to stop."""
    folds: int
    """The sum over all ranks of ledger.fold of the samples that they trained on."""
    span: float
    """The sum of the squared lengths of the documents that attention stayed within, divided by the number of tokens."""
    event: Event | None = None
    """The event that says what is wrong with the step; None: nothing is."""
    layer_norms: dict[str, float] = field(default_factory=dict)
    """The gradient norm of each layer, by name. It is there if the engine found it finite, and if the step has an event
    or observers asked for it."""
    room: float | None = None
    """The room for rows of experts (parallel.expert_room) with which the step is to be taken again, because rows did
    not fit. None: they did."""

    @property
    def loss(self) -> float:
        """The mean loss over the global batch, in nats per token."""
        return self.metrics["train/loss"]

    @property
    def grad_norm(self) -> float:
        """The global gradient norm before clipping."""
        return self.metrics["train/grad_norm"]


def never() -> bool:
    """Return False. This is the default of `stop`: nobody asks the run to stop."""
    return False


def every(spec: TensorSpec) -> bool:
    """Return True for each tensor."""
    return True


NOBODY = Observers()
"""No observers: nothing looks at the step, and its update is made."""
