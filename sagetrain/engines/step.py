"""Take a step from top to bottom: run micro-batches, reduce gradients, observe and judge once, update or leave. All
engines share this order, and the evaluation.

An engine derives from Engine and implements how it runs the model, adds up gradients, and updates weights
(fsdp.py, deepspeed/). Its traversal puts the passes of micro-batches in order (traversal.py).
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sagetrain.checkpoint.ledger import fold
from sagetrain.checkpoint.stateful import Owned
from sagetrain.data.batch import Batch
from sagetrain.engines.gradients import Decision, StepGradients
from sagetrain.engines.protocol import NOBODY, Observers, Probe, StepResult, every, never
from sagetrain.engines.room import Room
from sagetrain.engines.traversal import Passes, Plain, counted_of, until
from sagetrain.model.tensors import TensorSpec
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.digest import word_sum
from sagetrain.parallel.metrics import Metrics, ratio, root_mean_square
from sagetrain.stability.replica_check import METRIC, ReplicaCheck


class Engine(Passes):
    """The engine of a run: it keeps a model's weights and its optimizer's state on the ranks, and takes steps.

    Training, checkpoints and inference know this class, and not the engines that derive from it. Methods are collective
    unless their docstring says otherwise.

    Args:
        model: the model that the engine trains.
        gradients: what observers are shown of a step's gradients.
    """

    def __init__(self, model: Transformer, device: torch.device, gradients: StepGradients) -> None:
        super().__init__(model, device)
        self.optimizer_steps = 0
        """The number of updates that the optimizer's state has seen, those before a resume included."""
        self.room: Room | None = None
        """The room for rows of experts. None: there is room for all rows."""
        self._traversal = Plain(self)
        self._gradients = gradients

    # -- what each engine does its own way -----------------------------------------------------------------------

    settings: Mapping[str, Any]
    """The settings that were handed to the library behind the engine. They are written to the run folder."""

    @abstractmethod
    def owned(self, chosen: Callable[[TensorSpec], bool] = every) -> Iterator[Owned]:
        """Iterate over the part of each tensor that this rank keeps, in the order of the model. `chosen` selects
        tensors. Every rank gets an item for each chosen tensor, even if the rank keeps nothing of it. Not
        collective."""

    @abstractmethod
    def leaves(self) -> Mapping[str, Tensor]:
        """Return the tensors that receive gradients from autograd, by name. They stay the same for the whole run, and
        may have no memory outside of a pass. Not collective."""

    @abstractmethod
    def gathered(self) -> Mapping[str, Tensor]:
        """Return the whole weights of this tensor-parallel rank, in the model's dtype, by name. They are the engine's
        own memory and stay until the next step. Not for ZeRO 3, where a rank may have no memory for them."""

    @abstractmethod
    def weights_changed(self) -> None:
        """Renew what depends on the weights. Call this after weights were set in all copies that ranks keep of them."""

    @abstractmethod
    def state_changed(self, optimizer_steps: int | None = None) -> None:
        """Copy the master weights to every other copy of the weights. Call this after master weights or moments were
        set. Raises ConfigError on every rank if the engine's memory does not hold what `owned` says.

        Args:
            optimizer_steps: the number of steps that the optimizer has made so far; None: the number stays as it is.
        """

    @abstractmethod
    def _prepare(self, micro_batches: int, lr: float) -> None:
        """Prepare a step of this number of micro-batches, whose update has this learning rate."""

    @abstractmethod
    def _prepare_evaluation(self) -> None:
        """Prepare forward passes without backward passes."""

    @abstractmethod
    def _update(self, decision: Decision) -> bool:
        """Reduce the gradients, show them, ask the decision, and update the weights or leave everything as it was.
        Return whether the weights were updated."""

    @abstractmethod
    def _weights_written(self) -> None:
        """Renew what is derived from the model's weights, which were just written."""

    # -- a step --------------------------------------------------------------------------------------------------

    def step(
        self,
        batches: Iterable[Batch],
        micro_batches: int,
        lr: float,
        observers: Observers = NOBODY,
        counted: int | None = None,
        stop: Callable[[], bool] = never,
    ) -> StepResult:
        """Run forward and backward over the micro-batches, then make one update if observers.judge allows it.

        A step that is refused, or whose gradient is not finite, leaves the weights and the optimizer's state exactly as
        they were, bit by bit. So does a step in which rows of experts had no room: call it again (StepResult.room).

        Args:
            batches: this rank's micro-batches.
            counted: the number of tokens in all ranks' batches that count in the loss. The loss is their mean. None:
                all tokens count. If no token counts, loss and gradient are 0.
            stop: returns whether this rank was asked to stop. It is called at the end of the step, and all ranks learn
                the answer.
        """
        metrics = self.groups.metrics
        metrics.clear()
        if self.room:
            self.room.begin()
        self._prepare(micro_batches, lr)
        if observers.probes:
            batches = self._probe(batches, observers.probes, masked=counted is not None)
        # An engine averages over micro-batches and replicas. This factor turns the average into a mean over counted
        # tokens.
        divisor = None
        if counted is not None:
            divisor = max(counted, 1) / (micro_batches * self.groups.dp_size)
            batches = (replace(batch, divisor=divisor) for batch in batches)
        with observers.timed(metrics):
            samples = self._accumulate(batches, micro_batches, observers, masked=counted is not None)
        if observers.replay:
            self._compute_again(observers.replay, divisor)
        if self.room:
            self.room.end(metrics)
        metrics.sum("stop", stop())
        metrics.sum("folds", fold(samples, self.groups.dp_rank))

        self._gradients.begin(observers.noise)
        decision = Decision(observers, self._gradients)
        applied = self._update(decision)
        self.optimizer_steps += applied
        self._weights_written()
        return self._result(decision, applied, micro_batches, observers)

    def _compute_again(self, replay: ReplicaCheck, divisor: float | None) -> None:
        """Compute the last micro-batch of another replica, and let the step's reduction take the hashes along."""
        batch = replay.others_batch()
        batch = batch if divisor is None else replace(batch, divisor=divisor)
        with self.groups.metrics.aside(), replay.hashing(again=True) as hashes:
            loss = self.forward(batch)
            hashes["loss"] = word_sum(loss)
            torch.autograd.grad(loss * self.model.share, list(replay.leaves.values()))
        self.groups.metrics.vector(METRIC, replay.vector())

    def _probe(self, batches: Iterable[Batch], probes: Sequence[Probe], masked: bool) -> Iterable[Batch]:
        """Let probes run the first micro-batches. Return all micro-batches of the step."""
        batches = iter(batches)
        first = list(itertools.islice(batches, max(probe.micro_batches for probe in probes)))
        own = [counted_of(batch) for batch in first] if masked else None
        each = [replace(b, divisor=max(1, n)) for b, n in zip(first, own, strict=True)] if own else first
        runs = [partial(self._traversal.gradients, batch) for batch in each]
        for probe in probes:
            probe.measure(runs[: probe.micro_batches], own and own[: probe.micro_batches])
        return itertools.chain(first, batches)

    def _accumulate(
        self, batches: Iterable[Batch], micro_batches: int, observers: Observers, masked: bool
    ) -> list[int]:
        """Run forward and backward over all micro-batches. Return the ids of the samples that were in them."""
        metrics, seen, samples = self.groups.metrics, list[float](), list[int]()
        self.model.watch_blocks = self._note_activation if observers.layer_norms else None
        for layer in range(self.model.config.num_layers) if observers.layer_norms else ():
            # In a pipeline every rank adds the names of all blocks.
            self._add_activation(layer, 0.0, 0)

        def noted() -> Iterator[Batch]:
            for batch in batches:
                seen.append(batch.span)
                samples.extend(batch.sample_ids)
                yield batch

        total = self._traversal.run(noted(), micro_batches, observers, masked)
        self.model.watch_blocks = None
        if len(seen) != micro_batches:
            raise RuntimeError(f"the loader gave {len(seen)} micro-batches for a step of {micro_batches}")
        for span in seen:
            metrics.mean("span", span)
        # The mean is over the ranks that have losses: tensor-parallel ranks hold the same loss, and context-parallel
        # ranks hold losses of equally many tokens.
        last_stage = self.groups.pp_rank == self.groups.pp_size - 1
        metrics.mean("train/loss", total / micro_batches, weight=float(last_stage))
        return samples

    def _note_activation(self, block: int, stream: Tensor) -> None:
        """Add the root mean square of a block's output, over all tokens of the step on all ranks, to the metrics."""
        square = torch.linalg.vector_norm(stream, dtype=torch.float32).double().square()
        self._add_activation(block, square, stream.numel())

    def _add_activation(self, block: int, square: Tensor | float, count: int) -> None:
        self.groups.metrics.derive(f"norms/{block}/activation", root_mean_square, square, count)

    def _result(self, decision: Decision, applied: bool, micro_batches: int, observers: Observers) -> StepResult:
        found, verdict = decision.metrics, decision.verdict
        assert verdict is not None, "an update asks the decision"
        shown, layer_norms = self._gradients.finish(micro_batches, found["train/grad_norm"])
        found.update(shown)
        if observers.layer_norms:
            found.update((f"norms/{layer}/gradient", norm) for layer, norm in layer_norms.items())
        return StepResult(
            found,
            applied=applied,
            stop=found.pop("stop") > 0,
            folds=int(found.pop("folds")),
            span=found.pop("span"),
            event=verdict.event,
            layer_norms=layer_norms,
            room=self.room.grow() if self.room and decision.lacked_room else None,
        )

    # -- forward passes ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of a micro-batch, [B, S (/ cp), vocab] in the model's dtype. Labels are ignored."""
        self._prepare_evaluation()
        return self.as_whole(self.model)(**{**self.inputs(batch), "labels": None})

    def as_whole(self, model: Transformer) -> Callable[..., Tensor]:
        """Return a function that calls a model that is spread over the ranks like the engine's own, and returns its
        logits on all of them. Not collective; the function is."""
        return self._traversal.as_whole(model)

    def waits(self) -> str:
        """Return what this rank waits for, in words, or "". Another thread may call it. Not collective."""
        return self._traversal.waits()

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[Batch], sources: Sequence[str] = (), stop: Callable[[], bool] = never
    ) -> dict[str, float]:
        """Return the validation losses in nats per token. Every rank has the same number of micro-batches. Raises
        InterruptedError on every rank if any rank was asked to stop. With several ranks the error comes one batch
        later, because no rank waits for the batch that has just begun.

        Args:
            batches: this rank's micro-batches.
            sources: the names of the data sources, if a loss of each is wanted.
            stop: returns whether this rank was asked to stop. It is called before every batch.

        Returns:
            valid/loss, the mean over the counted tokens of all ranks, and valid/<name>/loss for each of `sources`. The
                loss of a source is nan if no batch has tokens of it.
        """
        self._prepare_evaluation()
        # The evaluation has metrics of its own, because numbers that the model adds meanwhile belong to no step.
        metrics = Metrics()
        # Each row is the sum of losses and the number of tokens.
        totals = torch.zeros(1 + len(sources), 2, dtype=torch.float64, device=self.device)
        for batch, labels, losses in self._traversal.token_losses(until(stop, batches, self.device)):
            counted = (labels[: batch.weight] >= 0).sum(1, dtype=torch.float64)
            sums = torch.stack([losses[: batch.weight].double().sum(1), counted], 1)
            totals[0] += sums.sum(0)
            if sources:
                totals[1:].index_add_(
                    0, torch.tensor(batch.sources[: len(sums)], dtype=torch.int64, device=self.device), sums
                )
        for name, parts in zip(["valid/loss", *(f"valid/{name}/loss" for name in sources)], totals, strict=True):
            metrics.derive(name, ratio, *parts)
        return metrics.reduce(self.device)
