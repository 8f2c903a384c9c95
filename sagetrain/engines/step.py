"""Take a step from top to bottom: run micro-batches, reduce gradients, observe and judge once, update or leave. All
engines share this order, and the evaluation.

An engine derives from BaseEngine and implements how it runs the model, adds up gradients, and updates weights. Its
traversal puts the passes of micro-batches in order (traversal.py).
"""

from __future__ import annotations

import collections
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.checkpoint.ledger import fold
from sagetrain.data.batch import Batch
from sagetrain.engines.gradients import Parts, StepGradients
from sagetrain.engines.protocol import NOBODY, Observers, Probe, StepResult, never
from sagetrain.engines.room import METRIC as METRIC_OF_ROOM
from sagetrain.engines.room import Room
from sagetrain.engines.traversal import Passes, Plain, counted_of
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.digest import word_sum
from sagetrain.parallel.metrics import Metrics, ratio, root_mean_square
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.replica_check import METRIC, ReplicaCheck
from sagetrain.stability.spikes import Verdict


class Decision:
    """The decision on one step: whether its update is made. It is made once and is the same on all ranks, as soon as an
    engine knows the gradient norm."""

    def __init__(
        self, observers: Observers, groups: ParallelGroups, gradients: StepGradients, device: torch.device
    ) -> None:
        self._observers, self._groups, self._gradients, self._device = observers, groups, gradients, device
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
            if norm is not None:
                self._groups.metrics.mean("train/grad_norm", norm)
            # Pipeline stages measure their own layers.
            differ = self._observers.probes or self._observers.watch
            self.metrics = self._groups.metrics.reduce(self._device, self._groups.pp_group if differ else None)
            self.lacked_room = self.metrics.pop(METRIC_OF_ROOM, 0.0) > 0
            self.verdict = Verdict(apply=False) if self.lacked_room else self._observers.judge(self.metrics)
        return self.verdict.apply

    def show(self, parts: Parts) -> None:
        """Show the step's gradients to their observers. An engine that has the gradients part by part shows each part
        once, when the decision is made."""
        assert self.verdict is not None, "gradients are shown when the step is judged"
        self._gradients.show(parts, by_layer=self.verdict.event is not None or self._observers.layer_norms)


class BaseEngine(Passes):
    """The part of an engine that takes a step, in the order that all engines share. engines/protocol.Engine describes
    the methods.

    Args:
        model: the model that the engine trains.
        gradients: what observers are shown of a step's gradients.
    """

    def __init__(
        self, model: Transformer, groups: ParallelGroups, device: torch.device, gradients: StepGradients
    ) -> None:
        super().__init__(model, groups, device)
        self.optimizer_steps = 0
        self.room: Room | None = None
        """The room for rows of experts. None: there is room for all rows."""
        self._traversal = Plain(self)
        self._gradients = gradients

    # -- what each engine does its own way -----------------------------------------------------------------------

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
        """Take one optimizer step: see engines/protocol.Engine."""
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
        decision = Decision(observers, self.groups, self._gradients, self.device)
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
        """Return the logits of a micro-batch: see engines/protocol.Engine."""
        self._prepare_evaluation()
        return self.as_whole(self.model)(**{**self.inputs(batch), "labels": None})

    def as_whole(self, model: Transformer) -> Callable[..., Tensor]:
        """Return a function that calls the model: see engines/protocol.Engine."""
        return self._traversal.as_whole(model)

    def waits(self) -> str:
        """Return what this rank waits for: see engines/protocol.Engine."""
        return self._traversal.waits()

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[Batch], sources: Sequence[str] = (), stop: Callable[[], bool] = never
    ) -> dict[str, float]:
        """Return the losses of held-out batches: see engines/protocol.Engine."""
        self._prepare_evaluation()
        # The evaluation has metrics of its own, because numbers that the model adds meanwhile belong to no step.
        metrics = Metrics()
        # Each row is the sum of losses and the number of tokens.
        totals = torch.zeros(1 + len(sources), 2, dtype=torch.float64, device=self.device)
        for batch, labels, losses in self._traversal.token_losses(self._until(stop, batches)):
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

    def _until(self, stop: Callable[[], bool], batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches until any rank is asked to stop: see engines/protocol.Engine.evaluate."""
        several, asked = dist.get_world_size() > 1, collections.deque[Tensor]()
        for batch in batches:
            asked.append(torch.tensor(stop(), dtype=torch.int32, device=self.device if several else "cpu"))
            if several:
                dist.all_reduce(asked[-1], op=dist.ReduceOp.MAX)
            if len(asked) > several and asked.popleft():
                raise InterruptedError
            yield batch
