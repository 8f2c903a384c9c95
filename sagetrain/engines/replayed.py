"""Micro-steps as CUDA graphs: forward and backward of a micro-batch are recorded once, and replayed for others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from sagekernels.graphs import Recording
from sagetrain.data.batch import Batch
from sagetrain.engines.protocol import Observers
from sagetrain.engines.recorder import PASSES, Recorder
from sagetrain.engines.replay_times import ReplayTimes
from sagetrain.engines.static_inputs import StaticInputs, shapes_of
from sagetrain.engines.traversal import Passes, Plain
from sagetrain.model.moe import MoE
from sagetrain.stability.noise_scale import GradientNoise

_KEPT = 8  # This is the number of recordings that are kept.


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
    """Take one micro-batch after the other by a replay, as soon as one like it has run by the host."""

    def __init__(self, engine: Passes, recorder: Recorder) -> None:
        super().__init__(engine)
        self.recorder, self._sums, self._model = recorder, recorder.sums, engine.model
        self._programs: list[_Program] = []
        self._steps = 0
        self._rooms: list[int | None] = []
        self._state: Any = None

    def run(self, batches: Iterable[Batch], micro_batches: int, observers: Observers, masked: bool) -> Tensor:
        """Run forward and backward over all micro-batches of a step: see Plain."""
        self._steps += 1
        if self.recorder.timing:
            every = (program.times.medians() for program in self._programs)
            self.recorder.choose(next(filter(None, every), None))
        if self.recorder.refusal:
            self._programs.clear()
        if (rooms := [module.room for module in self._model.modules() if isinstance(module, MoE)]) != self._rooms:
            # A room only grows, so what was recorded with the smaller one is never replayed again.
            self._programs.clear()
            self._rooms = rooms
        self._state = self.recorder.begin()
        return super().run(batches, micro_batches, observers, masked)

    def _micro_step(self, number: int, batch: Batch, last: bool, observers: Observers) -> None:
        seen = observers.layer_norms or (number == 0 and observers.watch) or (last and observers.replay)
        self.recorder.align()
        if self._state is None or seen:
            with self.recorder.repeatable():
                super()._micro_step(number, batch, last, observers)
        else:
            inputs = batch.inputs(torch.device("cpu"), self._engine.groups)
            self._replay(inputs, last and self._sums.reduces, observers.noise)

    def _replay(self, inputs: Mapping[str, Any], last: bool, noise: GradientNoise | None) -> None:
        """Run a micro-step. The tensors of the model's arguments are in CPU memory. `last` says whether gradients are
        reduced in it, and `noise` looks at them."""
        # A micro-step that was watched may have left other blocks than a recording begins with.
        self.recorder.weights.gather()
        program = self._program_of(inputs, last, noise)
        program.inputs.write(inputs)
        # The first step allocates what later steps keep.
        ran = program.passes >= PASSES and (program.times.host_known or not self.recorder.timing)
        if program.recording is None and ran and self._steps > 1 and not self.recorder.refusal:
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
        timing = self.recorder.timing and counts
        return program.times.timed(program.recording is not None) if timing else contextlib.nullcontext()

    def _launch(self, program: _Program) -> None:
        with self.recorder.repeatable(), program.noise.micro_batch() if program.noise else contextlib.nullcontext():
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
        device = self._engine.device
        static, times = StaticInputs(inputs, device), ReplayTimes(device)
        self._programs.append(_Program(key, last, noise, static, times))
        return self._programs[-1]

    def _record_program(self, program: _Program) -> None:
        """Record a program, or refuse to record anything from now on."""

        def make() -> None:
            program.recording = self.recorder.shared(lambda: self._launch(program))

        given = self.recorder.record(make)
        if given is None:
            program.recording = self._state = None
            self._programs.clear()
        else:
            program.given = given
