"""The passes through the chunks of a pipeline stage as CUDA graphs.

Several micro-batches are under way at once, and each of them has a slot. A slot has a recording of the forward pass and
one of the backward pass through each chunk. Messages between stages, their order and reductions stay on the host.

What a forward pass keeps must outlive the passes of other micro-batches, so the forward passes of each slot have a pool
of their own. Backward passes leave nothing behind but sums and the gradients to send, and have one pool together. A
slot takes more than 1F1B does by what the forward pass of a block needs and does not keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagekernels.graphs import Record, Recording
from sagetrain.data.batch import Batch
from sagetrain.engines.piped import Piped, StagePasses, StageStep
from sagetrain.engines.protocol import Observers
from sagetrain.engines.recorder import PASSES, Recorder
from sagetrain.engines.replay_times import ReplayTimes
from sagetrain.engines.static_inputs import StaticInputs, shapes_of
from sagetrain.model.moe import MoE
from sagetrain.parallel.orders import Action
from sagetrain.parallel.pipeline import Pass, Pipe


class _Passes:
    """The recorded passes through a chunk, in the memory of a slot.

    Args:
        inputs: the arguments of the model.
        received: the residual streams that come to the chunk.
        gradients: the gradients of the streams behind the chunk, which come back.
    """

    forward: Recording
    backward: Recording
    given: frozenset[str]
    """The names of the leaves that get a gradient."""

    def __init__(self, key: Any, inputs: StaticInputs, received: list[Tensor], gradients: list[Tensor]) -> None:
        self.key, self.inputs = key, inputs
        self.messages = {"forward": received, "backward": gradients}
        # Messages that come do not count as changes of what autograd has saved.
        self.streams = [x.data.requires_grad_() for x in received]
        self.made: Sequence[Tensor] = []
        """The outputs, with which the backward pass begins."""


class _Slot(NamedTuple):
    """The memory of one micro-batch under way, in one chunk at a time."""

    record: Record
    passes: dict[int, _Passes]
    """The recorded passes through each chunk that has used the slot."""


class _Slots:
    """The slots of all chunks of this stage, from one step to the next."""

    def __init__(self, passes: StagePasses, recorder: Recorder) -> None:
        self._passes, self.recorder = passes, recorder
        self.times = ReplayTimes(passes.device)
        self._ways: set[str] = set()
        # The last chunk keeps gradients of the output projection too, so its slots are not those of others.
        self._free: dict[bool, list[_Slot]] = {False: [], True: []}
        self._ran: dict[int, tuple[Any, int]] = {}
        self._steps = self._bounds = 0
        self._state: Any = None
        self._recorded_before: bool = False
        """Whether there are recordings of this step or an earlier one."""

    def begin(self) -> None:
        """Begin a step."""
        self._steps += 1
        self._ways.clear()
        if self.recorder.timing:
            self.recorder.choose(self.times.medians())
        self._recorded_before = any(self._free.values())
        if self.recorder.refusal:
            self._free = {False: [], True: []}
        state = self.recorder.begin()
        rooms = [module.room for module in self._passes.model.modules() if isinstance(module, MoE)]
        # An only micro-step's gradients are reduced as they are, and not in any recording.
        self._state = (*state, rooms) if state and self.recorder.sums.needed else None

    def ended(self, begin: Any, micro_batches: int) -> None:
        """Note the time of a step since `begin`, if all of its passes went the same way. Stages wait for each other, so
        that a pass alone says little."""
        if self.recorder.timing and self._ways in ({"host"}, {"replay"}):
            self.times.note("replay" in self._ways, begin, micro_batches)

    def padded(self, batch: Batch) -> Batch:
        """Return a micro-batch whose bounds of documents are as many as the most so far, so that few shapes are
        recorded. Documents without tokens pad them."""
        bounds = batch.cu_seqlens
        if bounds is None:
            return batch
        self._bounds = max(self._bounds, len(bounds))
        more = bounds[-1:].expand(self._bounds - len(bounds))
        return replace(batch, cu_seqlens=torch.cat([bounds, more]), max_seqlen=batch.tokens.shape[1])

    def take(self, step: _ReplayedStep, number: int, micro: int) -> _Slot | None:
        """Return a free slot, with the recorded passes of a micro-batch through a chunk and its arguments in place.
        None: the host launches them."""
        if self._state is None or self.recorder.refusal:
            return None
        inputs = step.batches[micro].inputs(torch.device("cpu"), self._passes.groups)
        key = self._state, shapes_of(inputs)
        known, ran = self._ran.get(number, (None, 0))
        ran = ran if known == key else 0
        if ran < PASSES or self._steps == 1:  # The first step allocates what later steps keep.
            self._ran[number] = key, ran + 1
            self._ways.add("first passes")
            return None
        if self.recorder.timing and not self.times.host_known:
            self._ways.add("host")
            return None
        free = self._free[step.flow.chunks[number].last]
        fits = [slot for slot in free if number in slot.passes and slot.passes[number].key == key]
        if fits:
            free.remove(fits[-1])
            fits[-1].passes[number].inputs.write(inputs)
            self._ways.add("replay")
            return fits[-1]
        self._ways.add("recording")
        slot = free.pop() if free else _Slot(self.recorder.pool(), {})
        slot.passes.pop(number, None)
        return slot if self._fill(slot, step, number, micro, key, inputs) else None

    def give(self, last: bool, slot: _Slot) -> None:
        """Take back a slot behind a backward pass through a chunk, which is the last one of the model or is not."""
        self._free[last].append(slot)

    def _fill(self, slot: _Slot, step: _ReplayedStep, number: int, micro: int, key: Any, inputs: Any) -> bool:
        """Record passes in a slot. Return whether they were recorded."""

        def make() -> None:
            self._passes.expect(False)
            slot.passes[number] = self._recorded(slot.record, step, number, micro, key, inputs)

        given = self.recorder.record(make, another=self._recorded_before)
        self._recorded_before = True
        if given is not None:
            slot.passes[number].given = given
        return given is not None

    def _recorded(self, record: Record, step: _ReplayedStep, number: int, micro: int, key: Any, inputs: Any) -> _Passes:
        chunk, device = step.flow.chunks[number], self._passes.device
        received = [] if chunk.first else step.flow.like(Action("forward", number, micro))
        gradients = [] if chunk.last else step.flow.like(Action("backward", number, micro))
        passes = _Passes(key, StaticInputs(inputs, device), received, gradients)
        passes.inputs.write(inputs)

        def forward() -> None:
            with self.recorder.repeatable():
                passes.made = step.through(number, passes.inputs.arguments, passes.streams)

        def backward() -> None:
            with self.recorder.repeatable():
                torch.autograd.backward(passes.made, gradients or None)

        self.recorder.align()
        passes.forward = record(forward)
        passes.backward = self.recorder.shared(backward)
        passes.made = [x.detach() for x in passes.made]
        return passes


class _ReplayedStep(StageStep):
    """The passes of a step, of which those of unwatched micro-batches are replays."""

    slots: _Slots

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._taken: dict[tuple[int, int], _Slot | None] = {}
        self._seen = bool(self.observers.layer_norms or self.observers.noise)

    def _slot(self, number: int, micro: int) -> _Slot | None:
        if (number, micro) not in self._taken:
            seen = self._seen or (micro == 0 and self.observers.watch)
            self._taken[number, micro] = None if seen else self.slots.take(self, number, micro)
        return self._taken[number, micro]

    def like(self, action: Action) -> list[Tensor]:
        """Return the tensors that receive what an action needs: see StageStep."""
        slot = self._slot(action.chunk, action.micro)
        return super().like(action) if slot is None else slot.passes[action.chunk].messages[action.kind]

    def forward(self, number: int, micro: int, streams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the forward pass of a micro-batch through a chunk: see StageStep."""
        slot = self._slot(number, micro)
        self.slots.recorder.align()
        if slot is None:
            with self.slots.recorder.repeatable():
                return super().forward(number, micro, streams)
        passes = slot.passes[number]
        passes.forward.replay()
        return passes.made

    def backward(self, number: int, micro: int, later: int, run: Pass) -> Sequence[Tensor]:
        """Run the backward pass of a micro-batch through a chunk: see StageStep."""
        slot = self._taken.pop((number, micro))
        self.slots.recorder.align()
        if slot is None:
            with self.slots.recorder.repeatable():
                return super().backward(number, micro, later, run)
        passes = slot.passes[number]
        self.expect(number, later)
        passes.backward.replay()
        self.slots.recorder.sums.given |= passes.given
        self._passes.add()
        self.slots.give(self.flow.chunks[number].last, slot)
        # The next replay overwrites the gradients, which may still be on their way then.
        return [x.grad.clone() for x in passes.streams if x.grad is not None]


class ReplayedPipe(Piped):
    """Take micro-batches through the chunks of a pipeline stage by replays, as soon as others like them have run by
    the host: see Piped and _Slots."""

    def __init__(self, engine: StagePasses, pipe: Pipe, dtype: torch.dtype, recorder: Recorder) -> None:
        super().__init__(engine, pipe, dtype)
        self.slots = _Slots(engine, recorder)

    def run(self, batches: Iterable[Batch], micro_batches: int, observers: Observers, masked: bool) -> Tensor:
        """Run forward and backward over all micro-batches of a step: see Plain."""
        self.slots.begin()
        begin = self.slots.times.mark()
        total = super().run(map(self.slots.padded, batches), micro_batches, observers, masked)
        self.slots.ended(begin, micro_batches)
        return total

    def _step(self, *parts: Any) -> StageStep:
        step = _ReplayedStep(*parts)
        step.slots = self.slots
        return step
