"""What an engine is, what it is given for an optimizer step, and what all ranks know of the step afterwards.

An engine keeps the weights of a model and the state of its optimizer, and takes steps. Training, checkpoints and
inference know this protocol; what is behind it (engines/deepspeed.py) is nobody else's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sagetrain.data.loader import Batch
from sagetrain.model.tensors import TensorSpec
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups
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
    """Called first, one after the other, where Engine.takes_probes."""
    watch: Watch | None = None
    """Sees the first micro-batch, forward and backward."""
    layer_norms: bool = False
    """Whether norms/<layer>/gradient and norms/<layer>/activation are measured."""
    updates: Sequence[UpdateObserver] = ()
    """See the weights before the step is judged, and after an update that was made."""
    judge: Callable[[Mapping[str, float]], Verdict] = _accept
    """Whether the update is made: asked once, on every rank, with the step's numbers but those of `noise`."""


@dataclass(frozen=True)
class StepResult:
    """What all ranks know of a step. metrics: every number that was added while it ran, by name; applied: the update
    was made; stop: some rank was asked to stop; folds: sum over all ranks of ledger.fold of the samples they trained
    on; span: sum of the squared lengths of the documents that attention stayed within, over all tokens; event: what is
    wrong with the step; layer_norms: then, or if observers wanted them, gradient norm of each layer, if the engine
    found it finite."""

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


@dataclass(frozen=True)
class Owned:
    """What this rank keeps of one tensor of the model: a range of its flattened tensor-parallel slice.

    `weight`, `state` and `copies` are 1-D views of the engine's own memory. Who writes to them tells the engine:
    `weights_changed` if all of them were written, `state_changed` if `weight` and `state` were.
    """

    spec: TensorSpec
    start: int
    stop: int
    """Where the range begins and ends. They are equal on a rank that keeps nothing of this tensor."""
    weight: Tensor
    """The fp32 master weights of the range."""
    state: Mapping[str, Tensor]
    """The optimizer's moments of the range, by the names that checkpoints have for them."""
    copies: tuple[Tensor, ...] = ()
    """What else this rank keeps of the values, in the model's dtype: what the model computes with, of any range."""
    twin: bool = False
    """Whether another replica keeps the same range, and saves and loads it for this one."""

    @property
    def name(self) -> str:
        """The tensor's name in the model."""
        return self.spec.name

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weight and the moments, by the names that checkpoints have for them; {} of an empty range."""
        return {"weight": self.weight, **self.state} if self.stop > self.start else {}


def never() -> bool:
    """Return False: nobody is asked to stop."""
    return False


def every(spec: TensorSpec) -> bool:
    """Choose all tensors."""
    return True


NOBODY = Observers()
"""Nothing looks at the step, and its update is made."""


class Engine(Protocol):
    """Keeps a model's weights and its optimizer's state on the ranks of a run, and takes steps. Methods are collective
    where nothing else is said."""

    @property
    def groups(self) -> ParallelGroups: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def model(self) -> Transformer: ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the library behind the engine was told: for the run folder."""
        ...

    @property
    def takes_probes(self) -> bool:
        """Whether micro-batches may be run apart from a step, for Observers.probes."""
        ...

    def step(
        self,
        batches: Iterable[Batch],
        micro_batches: int,
        lr: float,
        observers: Observers = NOBODY,
        counted: int | None = None,
        stop: Callable[[], bool] = never,
    ) -> StepResult:
        """Run forward and backward over the micro-batches, then make one update, if observers.judge allows it.

        A step that is refused, or whose gradient is not finite, leaves the weights and the optimizer's state as they
        were, to the last bit.

        Args:
            batches: `micro_batches` of them, this rank's.
            lr: learning rate of the update.
            counted: tokens of all ranks' batches that count in the loss, which is their mean; None: all do. Where none
                does, loss and gradient are 0.
            stop: whether this rank was asked to stop, asked at the end of the step; all ranks learn of it.
        """
        ...

    def evaluate(
        self, batches: Iterable[Batch], sources: Sequence[str] = (), stop: Callable[[], bool] = never
    ) -> dict[str, float]:
        """Return valid/loss, the mean over what counts of all ranks' micro-batches (equally many on every rank); with
        names of the sources also valid/<name>/loss of each, nan of one that is in none.

        Args:
            stop: whether this rank was asked to stop, asked before every batch.

        Raises:
            InterruptedError: on every rank, some rank was asked to stop. Several learn of it one batch later: none
                waits for what was just begun.
        """
        ...

    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of a micro-batch, [B, S (/ cp), vocab] in the model's dtype, whatever its labels."""
        ...

    def owned(self, chosen: Callable[[TensorSpec], bool] = every) -> Iterator[Owned]:
        """Iterate over what this rank keeps of each tensor, in the order of the model, or of those that are
        chosen. Every rank gets all of them, also of those of which it keeps nothing. Not collective."""
        ...

    def leaves(self) -> Mapping[str, Tensor]:
        """Return the tensors that autograd gives gradients to, by name: they stay the same for the whole run. Not
        collective."""
        ...

    def weights_changed(self) -> None:
        """Call after weights were set, in all copies that ranks keep of them."""
        ...

    def state_changed(self, optimizer_steps: int | None = None) -> None:
        """Call after master weights or moments were set: every other copy of the weights becomes what they are.

        Args:
            optimizer_steps: how many steps the optimizer counts from now on; None: as many as before.

        Raises:
            ConfigError: on every rank, the engine does not keep what `owned` says it does.
        """
        ...
