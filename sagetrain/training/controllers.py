"""The observers and controllers that keep a run stable: they watch its steps and decide what follows.

Observers look at a step between its batches and its update. Controllers decide between two steps how the run continues.
Every checkpoint contains what a controller remembers. The policy for a step that goes wrong ends the run, leaves
the step out, or sends the run back to a checkpoint. Every rank does the same.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sagetrain.checkpoint.ledger import TrainState
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.earlier_run import critical_in_words, critical_tokens, margin_of, ratios_of
from sagetrain.config.errors import ConfigError, TrainingError
from sagetrain.config.layer_specs import exact_backend
from sagetrain.config.run_parts import end_of
from sagetrain.config.schema import NoiseAwareTokens, RunConfig
from sagetrain.config.tokens_per_step import tokens_per_step
from sagetrain.data.batch import Batch
from sagetrain.engines.protocol import Observers, StepResult, untimed
from sagetrain.engines.step import Engine
from sagetrain.model.backends import attention_function
from sagetrain.parallel.objects import of_every_rank
from sagetrain.stability.balance import Starving
from sagetrain.stability.choices import Flips
from sagetrain.stability.controller import Controller, Event, Taken
from sagetrain.stability.linear_errors import MICRO_BATCHES, LinearErrors, Vanishing
from sagetrain.stability.linear_schedule import LinearSchedule
from sagetrain.stability.measured import Measured
from sagetrain.stability.monitor import Monitor
from sagetrain.stability.noise_aware import NoiseAware
from sagetrain.stability.noise_scale import GradientNoise, NoiseScale
from sagetrain.stability.quant_noise import QuantizationProbe, QuantNoise
from sagetrain.stability.replica_check import METRIC as REPLAY
from sagetrain.stability.replica_check import ReplicaCheck, ReplicaTry
from sagetrain.stability.spikes import METRIC, Spikes, Verdict
from sagetrain.stability.stragglers import Stragglers
from sagetrain.training.reporter import Reporter

Take = Callable[[Observers], StepResult]
"""A function that lets the engine take a step under observers."""
GoBack = Callable[[Callable[[int], bool]], TrainState | None]
"""A function that loads the newest undamaged checkpoint whose step is wanted, and returns its state. It returns None if
there is no such checkpoint."""


class Controllers:
    """The observers and controllers of one run.

    Args:
        cfg: the configuration, with `auto` settled for attention and linear layers.
        state: the position of the run. Its `controllers` are the result of `state` when the checkpoint was written, and
            {} in a new run.
    """

    def __init__(
        self,
        cfg: RunConfig,
        engine: Engine,
        folder: RunFolder,
        reporter: Reporter,
        state: TrainState,
        begins_part: bool = False,
    ) -> None:
        self._cfg, self._engine, self._folder, self._reporter = cfg, engine, folder, reporter
        model = engine.model
        groups, device, stability, schedule = engine.groups, engine.device, cfg.stability, cfg.tokens_per_step
        gains = lambda: ((kept.name, kept.weight) for kept in engine.owned())  # noqa: E731
        self._monitor = Monitor(stability.monitor, model, gains)
        leaves = engine.leaves()
        self._linear = LinearErrors(model, self._monitor.chosen, leaves)
        self._noise = GradientNoise(leaves, model.every_spec.values(), groups, device)
        exact = attention_function(exact_backend(cfg.model), cfg.attention, device)
        self._probe = QuantizationProbe(model, exact, leaves)
        self.spikes = Spikes(stability.spikes)
        micro_batch = cfg.data.micro_batch_size * cfg.data.seq_length
        decay = stability.noise_scale.decay
        noise = NoiseScale(micro_batch, decay)
        # The controllers are in the order in which they read a step's numbers and add to them.
        self.controllers: list[Controller] = [self.spikes, noise, QuantNoise(micro_batch, noise, decay), Vanishing()]
        self._flips = None
        if cfg.model.experts:
            self._flips = Flips(model, exact, leaves)
            self.controllers.append(Starving(groups.metrics, cfg.model.experts.number))
        self._aware, self._measured = None, Measured()
        self._movers: dict[str, LinearSchedule | NoiseAware] = {}
        tokens = cfg.training.total_tokens, state.tokens
        if len(cfg.linear.phases) > 1:
            self._movers["linear.precision"] = LinearSchedule(cfg.linear, model, engine.weights_changed, *tokens)
        if isinstance(schedule, NoiseAwareTokens):
            self._aware = self._movers["tokens_per_step.schedule noise_aware"] = NoiseAware(schedule)
        self.controllers += [*self._movers.values(), self._measured]
        watched = stability.stragglers or stability.replay.every_steps
        # The hosts and the devices of all ranks, in words.
        places = _places(engine) if watched else []
        self._stragglers = None
        if stability.stragglers:
            self._stragglers = Stragglers(groups.rank, places, groups.topology.stage_size, device)
        self._replay = (
            _replay(engine, places, cfg.attention.backend, every) if (every := stability.replay.every_steps) else None
        )
        self.controllers += [self._stragglers] if self._stragglers else []
        other = {each.name for each in self.controllers if begins_part and each.of_sequences}
        self._restore({name: each for name, each in state.controllers.items() if name not in other})
        for name, mover in self._movers.items():
            reporter.say(f"{name}: {mover.summary()}")
        # This comes last, because the movers have set the precision of the layers now.
        self._say_unmeasured()

    def _say_unmeasured(self) -> None:
        settings, linear = self._cfg.stability.monitor, self._linear.layers
        # The user asked for a measurement, but `auto` or a mover has chosen layers in which there is nothing to
        # measure.
        if not isinstance(settings.every_steps, int):
            return
        if not self._engine.groups.on_any_stage(bool(self._monitor.layers or linear)):
            said = f"no layer looked at quantizes attention ({self._cfg.attention.backend}) or multiplies in 8 bits"
            self._reporter.say(f"stability.monitor: {said}: nothing is measured")

    # -- what a checkpoint has of it -----------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Any]]:
        """Return what each controller remembers, by the controller's name."""
        return {controller.name: controller.state() for controller in self.controllers}

    def _restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for controller in self.controllers:
            controller.restore(states.get(controller.name, {}))

    def tell(self, state: TrainState) -> None:
        """Write the measurements of the run's stability so far to stability.json."""
        if self._engine.groups.rank == 0:
            metrics = self._measured.state()["metrics"]
            self._folder.tell_stability(state.step, state.tokens, metrics, self._critical())

    def say_critical(self) -> None:
        """Print the number of tokens per step at which quantization would add too much noise, if it was measured."""
        if critical := self._critical():
            said = f"quantization's error beside the gradient's noise: {critical_in_words(critical)}"
            self._reporter.say(f"{said} (stability.json, docs/stability.md)")

    def _critical(self) -> dict[str, Any] | None:
        return critical_tokens(ratios_of(self._measured.state()["metrics"]), margin_of(self._cfg.tokens_per_step))

    # -- around a step -------------------------------------------------------------------------------------------

    def tokens_of_step(self, tokens: int) -> int:
        """Return the tokens of the next step, which begins after `tokens` tokens."""
        return self._aware.now if self._aware else tokens_per_step(self._cfg.tokens_per_step, tokens)

    def tokens_ahead(self, tokens: int) -> int | None:
        """Return the tokens of the step that follows the next one, so that its data can be prepared. The next step ends
        at `tokens`. Return None if the run, or a part of it, ends there."""
        if tokens >= end_of(self._cfg):
            return None
        return self._aware.following if self._aware else tokens_per_step(self._cfg.tokens_per_step, tokens)

    def take(self, state: TrainState, size: int, take: Take, last: Callable[[int], Batch]) -> StepResult:
        """Let the engine take the step after `state`, and take it again if rows of experts lacked room or the
        computations of two replicas differ. `last` returns the last micro-batch of any replica in it. Raises
        TrainingError if computations differ a second time, and stability.replay.policy is stop."""
        step, replay = state.step + 1, self._replay
        observers, take = self._observers(step, size), partial(self._with_room, state, take)
        if replay is None or not _due(self._cfg.stability.replay.every_steps, step):
            return take(observers)
        tries: list[ReplicaTry] = []
        goes_on = self._cfg.stability.replay.policy == "go_on"

        def judge(metrics: Mapping[str, float]) -> Verdict:
            tries.append(replay.compare(self._engine.groups.metrics.vectors[REPLAY]))
            if tries[-1].pairs and not (len(tries) > 1 and goes_on):
                return Verdict(False)
            return observers.judge(metrics)

        watched = replace(observers, replay=replay.begin(last, None), judge=judge)
        result = take(watched)
        if not tries[0].pairs:
            return result
        found = replay.refusal(tries[0])
        how = f"{found.text}. Step {step} is refused, and taken again with weights renewed from the masters"
        self._reporter.event(state, replace(found, text=how))
        self._engine.weights_changed()
        replay.begin(last, tries[0])
        result = take(watched)
        event = replay.verdict(*tries)
        if tries[1].pairs and not goes_on:
            raise TrainingError(
                f"step {step}: {event.text}. In the second try {replay.refusal(tries[1]).text}. "
                "stability.replay.policy is stop, and nothing of this step was saved: test the GPU (dcgmi diag -r 3), "
                "leave its host out, or set stability.replay.policy: go_on"
            )
        self._reporter.event(state, replace(event, text=f"step {step}: {event.text}. The run goes on"))
        return result

    def _with_room(self, state: TrainState, take: Take, observers: Observers) -> StepResult:
        """Take a step, and take it again until rows of experts have room (engines/room.py)."""
        while (room := (result := take(observers)).room) is not None:
            text = f"rows of experts did not fit on some rank. Step {state.step + 1} is taken again with room for "
            text += f"{room:g} times their mean (parallel.expert_room)"
            self._reporter.event(state, Event("room", text, {"room": room}))
        return result

    def compare_weights(self, state: TrainState) -> None:
        """Compare the weights of all replicas, and renew them from the masters if they differ; collective. Raises
        TrainingError if the masters differ as well, and stability.replay.policy is stop."""
        if self._replay is None or (event := self._replay.different_weights()) is None:
            return
        self._engine.weights_changed()
        still = self._replay.different_weights()
        if still and self._cfg.stability.replay.policy == "stop":
            raise TrainingError(
                f"step {state.step}: {event.text}, and so do the master weights. stability.replay.policy is stop, and "
                "this step is not saved: test the GPUs (dcgmi diag -r 3), or set stability.replay.policy: go_on"
            )
        done = "the master weights differ as well" if still else "renewed from the master weights"
        self._reporter.event(state, replace(event, text=f"{event.text}; {done}"))

    def _observers(self, step: int, size: int) -> Observers:
        """Return the observers of a step of `size` tokens, without those of stability.replay."""
        data, stability = self._cfg.data, self._cfg.stability
        linear = self._monitor.every
        if linear and stability.monitor.every_steps == "auto":
            micro_batches = size // (data.micro_batch_size * data.seq_length * self._engine.groups.dp_size)
            linear = max(linear, MICRO_BATCHES // micro_batches)
        probed = (self._probe, stability.quant_noise.every_steps), (self._linear, linear), (self._flips, linear)
        # A single gradient says nothing about its noise.
        several = size > data.micro_batch_size * data.seq_length
        return Observers(
            noise=self._noise if several and _due(stability.noise_scale.every_steps, step) else None,
            probes=[probe for probe, every in probed if probe and _due(every, step)],
            watch=self._monitor.watch(step),
            layer_norms=_due(self._cfg.logging.layer_norms_every_steps, step),
            timed=self._stragglers.timed if self._stragglers else untimed,
            judge=partial(self.spikes.judge, tokens=size),
        )

    def taken(self, state: TrainState, size: int, result: StepResult) -> list[Event]:
        """Record a step that has brought the run to `state`. Return the event of the step, if it has one, and the
        events of the controllers' decisions."""
        if result.event:
            result.metrics[METRIC] = 1.0
        return [*([result.event] if result.event else []), *self.ask(state, size, result.metrics)]

    def ask(self, state: TrainState, size: int, metrics: dict[str, float]) -> list[Event]:
        """Tell the controllers of the step that has brought the run to `state`. Return the events of their
        decisions."""
        taken = Taken(state.step, state.tokens, size, metrics)
        return [event for controller in self.controllers for event in controller.after_step(taken)]

    # -- steps that go wrong -------------------------------------------------------------------------------------

    def leave_out(self, state: TrainState, size: int, result: StepResult, go_back: GoBack) -> TrainState:
        """Apply the policy to the step after `state`, whose update was not made. Return the position of the run after
        that. Raises TrainingError if the policy ends the run."""
        cfg, step, settings, event = self._cfg, state.step + 1, self.spikes.settings, result.event
        assert event, "a step is left out because something is wrong with it"
        if settings.policy == "stop" or not self.spikes.may_act(step):
            self._tell_end(state, event)
            raise _refused(cfg, state, size, event.text)
        moved: list[Event] = []
        if settings.policy == "rewind":
            state, weights_of, moved = self._rewind(state, size, event, go_back)
            done = f"back to the weights of step {weights_of}; steps {weights_of + 1} to {step} are dropped"
        else:
            weights_of, done = state.step, "left out"
            self.drop(state, size, "stability.spikes.policy skip")
        self.spikes.act(step, weights_of)
        fields = {**event.fields, "action": settings.policy, "weights_of": weights_of}
        spike = Event("spike", f"{event.text}: {done}", fields)
        for event in [spike, *moved, *self.ask(state, size, {METRIC: 1.0})]:
            self._reporter.event(state, event)
        return state

    def _tell_end(self, state: TrainState, event: Event) -> None:
        fields = {**event.fields, "step": state.step + 1, "action": "stop"}
        self._reporter.event(state, Event("spike", f"{event.text}: the run ends", fields), say=False)

    def _rewind(
        self, state: TrainState, size: int, event: Event, go_back: GoBack
    ) -> tuple[TrainState, int, list[Event]]:
        """Load weights and optimizer of an earlier checkpoint, but continue after the present step. Return the new
        position, the step of that checkpoint, and the events of the movers that went back. Raises TrainingError if
        there is no checkpoint to go back to."""
        step, seq_length = state.step + 1, self._cfg.data.seq_length
        back = go_back(partial(self.spikes.may_go_back, step))
        if back is None:
            self._tell_end(state, event)
            raise TrainingError(
                f"step {step}: {event.text}, and stability.spikes.policy rewind finds no checkpoint to go back to but "
                "those that it went back to lately; keep more of them (checkpoint.keep_last), save them more often "
                "(checkpoint.every_tokens), or use policy skip. Nothing of this step was saved"
            )
        self.drop(state, size, "stability.spikes.policy rewind")
        weights_of = back.step
        for samples in state.ledger.samples_of_steps()[weights_of:]:
            back.advance(samples * seq_length, seq_length, dropped=True)
        before = [mover.summary() for mover in self._movers.values()]
        self._restore(back.controllers)
        moved = [
            Event(mover.name, f"{name}, back at step {weights_of}: {now}", {"cause": "rewind"})
            for (name, mover), was in zip(self._movers.items(), before, strict=True)
            if (now := mover.summary()) != was
        ]
        return back, weights_of, moved

    def drop(self, state: TrainState, size: int, why: str) -> None:
        """Pass over the samples of a step. Every later step keeps the samples that it would have had."""
        # This writes the row of the step before, which may be the last step that is taken.
        self._reporter.row()
        first = state.sequences
        state.advance(size, self._cfg.data.seq_length, dropped=True)
        self._reporter.write(state, {"train/dropped_tokens": size})
        self._reporter.say(
            f"step {state.step}: dropped ({why}): sequences {first:,} to {state.sequences - 1:,} are passed over "
            "without an update"
        )


def _replay(engine: Engine, places: Sequence[str], backend: str, every: int) -> ReplicaCheck:
    """Return the comparison of replicas; collective. Raises ConfigError if their GPUs are of different models, whose
    kernels give different bits, or their attention was not tried on GPUs."""
    device = engine.device
    if device.type == "cuda" and backend != "sage":
        raise ConfigError(
            f"stability.replay.every_steps: {every} compares bits, which was not tried on a GPU with attention.backend "
            f"{backend}; set it to null, or use attention.backend sage"
        )
    models = of_every_rank(torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    if len(different := sorted(set(models))) > 1:
        raise ConfigError(
            f"stability.replay.every_steps: {every} compares bits of replicas, which run on GPUs of "
            f"different models ({', '.join(different)}); set it to null, or use GPUs of one model"
        )
    return ReplicaCheck(engine.model, engine.leaves(), places, engine.groups.rank)


def _places(engine: Engine) -> list[str]:
    """Return the host and the device of each rank, in words; collective."""
    device = engine.device
    place = f"host {socket.gethostname()}, {device.type}"
    if device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(device)
        place += f" {device.index} ({found.name}, GPU-{found.uuid})"
    return of_every_rank(place)


def _refused(cfg: RunConfig, state: TrainState, size: int, text: str) -> TrainingError:
    """Build the error for a step of `size` tokens behind `state` that may be neither applied nor left out. `text` says
    what is wrong with the step. The message lists the ways to continue."""
    ways = ["lower optimizer.lr or the tokens per step"]
    if cfg.attention.backend == "sage":
        ways.append("use 16-bit attention (attention.backend=sdpa)")
        if cfg.attention.qk_norm == "none":
            ways.append("begin another training.run_dir with attention.qk_norm=before_rope")
    if cfg.linear.low_bit:
        ways.append("multiply linear layers in 16 bits (linear.precision=bf16)")
    numbers = ",".join(map(str, sorted({*cfg.training.drop_steps, state.step + 1})))
    ways.append(f"pass over its samples with training.drop_steps=[{numbers}], which every later checkpoint records")
    used_up, spikes = "", cfg.stability.spikes
    if spikes.policy != "stop":
        used_up = f", after {spikes.max_events} in {spikes.window} steps (stability.spikes.max_events)"
    last = state.sequences + size // cfg.data.seq_length - 1
    return TrainingError(
        f"step {state.step + 1} (sequences {state.sequences:,} to {last:,}): {text}{used_up}. "
        f"Nothing of this step was saved, and run again as it was it would be the same: {'; or '.join(ways)}"
    )


def _due(every: int | None, step: int) -> bool:
    """Whether something that is measured every `every` steps is measured at this step."""
    return every is not None and step % every == 0
