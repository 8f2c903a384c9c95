"""Micro-steps as CUDA graphs: forward and backward of a micro-batch are recorded once, and replayed for others."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from sagekernels import observe
from sagekernels.graphs import Pool, Record, Recording, hooks_of, leave_default_stream
from sagetrain.config.layout import Refusal
from sagetrain.data.batch import Batch
from sagetrain.engines.gradient_sums import LeafSums
from sagetrain.engines.model_weights import ResidentWeights
from sagetrain.engines.protocol import Observers
from sagetrain.engines.replay_times import ReplayTimes, replays_stay, slowest_of_ranks
from sagetrain.engines.static_inputs import StaticInputs, shapes_of
from sagetrain.engines.traversal import Passes, Plain
from sagetrain.model.moe import MoE
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.copies import Copies, connected
from sagetrain.parallel.layers import linear_layers
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.noise_scale import GradientNoise

# A micro-step runs twice by the host before it is recorded: kernels are compiled, tuned and loaded then.
PASSES = 2
_KEPT = 8  # This is the number of recordings that are kept.


def recorder(device: torch.device) -> Record | None:
    """Return the function that records on a device, and leave the default stream for good. None: the device has no
    graphs."""
    if device.type != "cuda":
        return None
    leave_default_stream()
    return Pool().record


def copies_of(groups: ParallelGroups) -> Copies | None:
    """Return the collectives by copy engines that a micro-step uses, if it does."""
    return connected.get(groups.tp_group.group_name) if groups.tp_group and groups.tp_size > 1 else None


def recorder_of(
    how: str, refusal: Refusal | None, model: Transformer, device: torch.device
) -> tuple[Record | None, str]:
    """Return the function that records micro-steps, or None and the reason why the host launches each of them.

    Args:
        how: training.cuda_graphs.
        refusal: the setting that keeps micro-steps from being recorded.
    """
    if how == "off":
        return None, "training.cuda_graphs off"
    if refusal:
        return None, f"{refusal.key} {refusal.value}, where {refusal.why}"
    if how == "auto" and model.head.loss is not None:
        return None, "a loss of your own may change from one micro-step to the next"
    record = recorder(device)
    return record, "" if record else "no GPU"


class _Program:
    """The launches of micro-steps that differ in their micro-batch alone."""

    def __init__(
        self, key: Any, last: bool, noise: GradientNoise | None, inputs: StaticInputs, times: ReplayTimes
    ) -> None:
        self.key, self.last, self.noise, self.inputs, self.times = key, last, noise, inputs, times
        self.passes = self.replays = 0
        self.recording: Recording | None = None
        self.given: frozenset[str] = frozenset()
        """The names of the leaves that get a gradient."""


class Replayed(Plain):
    """Take one micro-batch after the other by a replay, as soon as one like it has run by the host.

    Args:
        record: the function that records (`recorder`).
        weights: the weights, which stay in the same memory.
        sums: the sums of the gradients, which stay in the same memory as soon as there are recordings.
        timed: whether micro-steps are timed both ways in the first steps, and replayed later if that is as fast.
    """

    def __init__(self, engine: Passes, record: Record, weights: ResidentWeights, sums: LeafSums, timed: bool) -> None:
        super().__init__(engine)
        self._record, self._weights, self._sums, self._model = record, weights, sums, engine.model
        self._leaves, self._device = weights.leaves, engine.device
        # The metrics must not change in a recording.
        self._metrics = engine.groups.metrics
        self._programs: list[_Program] = []
        self._copies = copies_of(engine.groups)
        self._steps = 0
        self._rooms: list[int | None] = []
        self._state: Any = None
        # Both ways are timed until one of them is chosen.
        self._timing = timed
        self.refusal = ""
        """The reason why nothing is recorded any more."""

    def run(self, batches: Iterable[Batch], micro_batches: int, observers: Observers, masked: bool) -> Tensor:
        """Run forward and backward over all micro-batches of a step: see Plain."""
        # The weights, and what is derived from them, are where the micro-steps will find them.
        self._weights.gather()
        self._steps += 1
        if self._timing:
            self._choose()
        if (rooms := [module.room for module in self._model.modules() if isinstance(module, MoE)]) != self._rooms:
            # A room only grows, so what was recorded with the smaller one is never replayed again.
            self._programs.clear()
            self._rooms = rooms
        self._state = None if self.refusal else state_of(self._model, self._leaves, self._copies)
        return super().run(batches, micro_batches, observers, masked)

    def _micro_step(self, number: int, batch: Batch, last: bool, observers: Observers) -> None:
        seen = observers.layer_norms or (number == 0 and observers.watch) or (last and observers.replay)
        if self._copies:
            self._copies.align()
        if self._state is None or seen:
            with self._repeatable():
                super()._micro_step(number, batch, last, observers)
        else:
            inputs = batch.inputs(torch.device("cpu"), self._engine.groups)
            self._replay(inputs, last and self._sums.reduces, observers.noise)

    @contextlib.contextmanager
    def _repeatable(self) -> Iterator[None]:
        """Let the collectives of a micro-step be the same whether it is launched by the host or replayed, so that ranks
        need not agree on that."""
        with self._copies.repeatable() if self._copies else contextlib.nullcontext():
            yield

    def _replay(self, inputs: Mapping[str, Any], last: bool, noise: GradientNoise | None) -> None:
        """Run a micro-step.

        Args:
            inputs: the arguments of the model, with tensors in CPU memory.
            last: whether gradients are reduced in it.
            noise: the measurement that looks at the gradients.
        """
        # A micro-step that was watched may have left other blocks than a recording begins with.
        self._weights.gather()
        program = self._program_of(inputs, last, noise)
        program.inputs.write(inputs)
        # The first step allocates what later steps keep.
        ran = program.passes >= PASSES and (program.times.host_known or not self._timing)
        if program.recording is None and ran and self._steps > 1 and not self.refusal:
            self._record_program(program)
        if program.recording is not None:
            # The first replay puts the graph on the GPU.
            with self._timed(program, program.replays > 0):
                program.recording.replay()
            self._sums.given |= program.given
            program.replays += 1
        else:
            with self._timed(program, program.passes >= PASSES):
                self._launch(program)
            program.passes += 1

    def _timed(self, program: _Program, counts: bool) -> AbstractContextManager[None]:
        timing = self._timing and counts
        return program.times.timed(program.recording is not None) if timing else contextlib.nullcontext()

    def _choose(self) -> None:
        """Choose the faster way, as soon as all ranks have timed both; collective."""
        times = next((program.times for program in self._programs if program.times.known), None)
        found = slowest_of_ranks(times, not self.refusal, self._device)
        if found is None:
            return
        self._timing = False
        by_host, replayed = found
        if not by_host:
            return
        self._metrics.max("perf/micro_step_by_host_seconds", by_host)
        self._metrics.max("perf/micro_step_replayed_seconds", replayed)
        if not self.refusal and not replays_stay(by_host, replayed):
            self._give_up(f"a replay takes {1e3 * replayed:.2f} ms, and the host's launches {1e3 * by_host:.2f} ms")

    def _launch(self, program: _Program) -> None:
        with self._repeatable(), program.noise.micro_batch() if program.noise else contextlib.nullcontext():
            self.add(self._engine.run(program.inputs.arguments), program.last)

    def _program_of(self, inputs: Mapping[str, Any], last: bool, noise: GradientNoise | None) -> _Program:
        """Return the program of a micro-step, and make it if it is new."""
        inputs = dict(inputs)
        if inputs["cu_seqlens"] is not None:
            # The number of bounds is a power of two, and the longest document may be as long as a sequence.
            inputs["max_seqlen"] = inputs["tokens"].shape[1] * self._engine.groups.cp_size
        key = self._state, last, self._sums.needed, noise, shapes_of(inputs)
        for place, program in enumerate(self._programs):
            if program.key == key:
                self._programs.append(self._programs.pop(place))
                return program
        del self._programs[: max(0, len(self._programs) - _KEPT + 1)]
        static, times = StaticInputs(inputs, self._device), ReplayTimes(self._device)
        self._programs.append(_Program(key, last, noise, static, times))
        return self._programs[-1]

    def _record_program(self, program: _Program) -> None:
        """Record a program, or refuse to record anything from now on."""
        given, added = set(self._sums.given), self._metrics.added()
        self._sums.given.clear()
        try:
            self.refusal = lacks_memory(self._device, 0 if self._sums.stays else self._sums.reduced_bytes)
            if not self.refusal:
                self._sums.stay()
                program.recording = self._record(lambda: self._launch(program))
                program.given = frozenset(self._sums.given)
                if self._metrics.added() != added:
                    self.refusal = "a micro-step adds to the metrics"
        except Exception as error:  # noqa: BLE001 - Whatever it is, micro-steps run without recordings as well.
            self.refusal = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._sums.given = given
        if self.refusal:
            # What a micro-step left when it was interrupted was never computed.
            for leaf in self._leaves.values():
                leaf.grad = None
            self._weights.interrupt()
            if self._copies:
                self._copies.interrupt()
            program.recording = None
            self._give_up(self.refusal)

    def _give_up(self, why: str) -> None:
        """Let the host launch every micro-step from now on."""
        self.refusal, self._state, self._sums.stays = why, None, False
        self._programs.clear()
        warnings.warn(f"the host launches each micro-step from now on: {why}", stacklevel=2)


def state_of(model: Transformer, leaves: Mapping[str, Tensor], copies: Copies | None) -> Any:
    """Return all that decides what micro-steps launch, and where, beside their micro-batches. None: something looks at
    them that would see nothing of a replay."""
    modules = (each for each in model.named_modules() if not isinstance(each[1], FSDPModule))
    if (
        observe.listening()
        or torch._C._autograd._profiler_enabled()
        or torch.is_anomaly_enabled()
        or hooks_of(modules)
        or any(leaf._backward_hooks for leaf in leaves.values())
    ):
        return None
    layers = list(linear_layers(model))
    held = [*leaves.values(), *(tensor for layer in layers for tensor in layer.kept)]
    return (
        [layer.matmul for layer in layers],
        model.functions,
        model.activation_checkpointing,
        [leaf.requires_grad for leaf in leaves.values()],
        [tensor.data_ptr() for tensor in held],
        copies and copies.addresses,
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled(held[0].device.type),
    )


def lacks_memory(device: torch.device, beside: int) -> str:
    """Return "", or that recordings do not fit into a GPU's memory. Recordings keep the memory of a micro-step for
    themselves, and others need as much for passes that are not recorded, or for the update."""
    if device.type != "cuda":
        return ""
    kept = torch.cuda.memory_allocated(device)
    needed = 2 * (torch.cuda.max_memory_allocated(device) - kept) + beside
    # A capture cannot free what the caching allocator keeps.
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - kept
    if free >= needed:
        return ""
    return f"recordings need {needed / 2**30:.1f} GiB for micro-steps, and {free / 2**30:.1f} GiB are free"
