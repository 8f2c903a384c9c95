"""The training loop: step, evaluate, report, save, stop on a signal.

The position is counted in tokens and sequences. TrainState and the engine's tensors contain everything that a resume
needs. Decisions that ranks could take differently (a stop, a damaged checkpoint, a loss that is not finite) are taken
by all ranks at once.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch.distributed as dist

from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.ledger import TrainState, check_consumed
from sagetrain.checkpoint.reading import Reader
from sagetrain.checkpoint.state import Texts
from sagetrain.cluster.lifeline import lifeline
from sagetrain.config.arithmetic import checkpoint_tokens, padded_vocab_size
from sagetrain.config.errors import CheckpointError, ConfigError, Finding, TrainingError, many, shown
from sagetrain.config.load import dump_config
from sagetrain.config.run_parts import end_of, lengths_of
from sagetrain.costs.accounting import flops_per_token
from sagetrain.data.batch import Batch, Sample, batch_of
from sagetrain.engines.protocol import Observers, StepResult
from sagetrain.engines.step import Engine
from sagetrain.parallel.objects import of_every_rank
from sagetrain.parallel.rng import rng_state
from sagetrain.stability.controller import Event
from sagetrain.training import resume
from sagetrain.training.callbacks import Callback, Callbacks, Position, RunStart
from sagetrain.training.copying import Copying
from sagetrain.training.lr_schedule import learning_rate
from sagetrain.training.out_of_memory import memory_explained
from sagetrain.training.profile import ProfileWindow
from sagetrain.training.resume import SAMPLES, TASKS, VALID, crossed
from sagetrain.training.run import Run
from sagetrain.training.start_line import say_differences
from sagetrain.training.start_times import SignsOfSteps
from sagetrain.training.tensorboard import TensorBoard
from sagetrain.training.weights_and_biases import WeightsAndBiases

Tasks = Callable[[Engine, Texts, Callable[[], None]], dict[str, float]]
"""A function that returns the numbers of tasks by name. Its arguments are the engine, the conventions of texts that its
weights had learned, and a function to call as a sign of life. It is collective, and the result of rank 0 is used."""
Samples = Callable[[Engine, Texts, Callable[[], None]], list[tuple[str, str]]]
"""A function with the same arguments that returns pairs: a prompt of evaluation.samples_prompts, and the model's
continuation."""


class Trainer:
    """The training loop of one run, or of a part of it, on this rank.

    Args:
        findings: the findings that are written to the run folder.
        tasks: the function that gives the numbers of evaluation.tasks.
        samples: the function that gives the texts of evaluation.samples_prompts.
    """

    def __init__(
        self,
        run: Run,
        findings: Sequence[Finding] = (),
        tasks: Tasks | None = None,
        samples: Samples | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.run, self.cfg, self.engine, self.state = run, run.cfg, run.engine, run.resumed.state
        evaluation = self.cfg.evaluation
        for key, asked, function in (
            ("tasks", evaluation.tasks, tasks),
            ("samples_every_tokens", evaluation.samples_every_tokens, samples),
        ):
            if asked and function is None:
                raise ConfigError(
                    f"evaluation.{key} = {shown(asked)}: this Trainer was given no function for it; give it those of "
                    "sagetrain.interop.looks.looks_of(cfg) as tasks and samples, or leave the key out"
                )
        self._findings, self._tasks, self._samples = findings, tasks, samples
        self._reporter, self._say, self._watchdog = run.met.reporter, run.met.reporter.say, run.met.watchdog
        self._watchdog.waits = self.engine.waits
        self._failures = run.files.failures
        self._callbacks = Callbacks(self._listeners(), callbacks, self._failures)
        # A run that continues from copies in memory saves after its first step.
        self._saved_step, self._waited, self._owes = run.met.saved_step, False, run.met.from_memory
        self.goes_on: bool = False
        """Whether `train` has ended because another part of the run follows (config/run_parts.py)."""
        self._copying = Copying(run)
        # Writing the YAML takes as long as a small training step, and training stands still at each save.
        self._config_text = dump_config(run.settled.asked)

    def _listeners(self) -> list[Callback]:
        """Return the callbacks that the configuration asks for."""
        cfg, rank = self.cfg, self.engine.groups.rank
        own: list[Callback] = [TensorBoard()] if cfg.logging.tensorboard else []
        own += [WeightsAndBiases(cfg.logging.wandb)] if cfg.logging.wandb else []
        folder = self.run.files.folder.path / "profile"
        own += [SignsOfSteps()] if lifeline() else []
        return own + ([ProfileWindow(cfg.profile, folder, rank, self._say)] if cfg.profile else [])

    @property
    def position(self) -> Position:
        """The position of the run."""
        return Position(self.state.step, self.state.tokens)

    def train(self) -> bool:
        """Train to the end, or until a signal. A signal saves a checkpoint. Return whether the run is finished. Raises
        TrainingError if training cannot continue, or a user's function has failed on some rank, and CheckpointError if
        a checkpoint cannot be written."""
        run, finished = self.run, False
        explained = memory_explained(run.cfg, run.files.vocab_size)
        with self._watchdog, explained, contextlib.ExitStack() as last, contextlib.ExitStack() as broken:
            last.callback(run.files.folder.release)
            broken.callback(self._end, finished)
            try:
                stopped, finished = self._loop()
                broken.pop_all()
                # From here on a rank may fail alone, on a full disk for instance, and the others learn of it.
                with self._failures.kept("the end of the run failed"), contextlib.ExitStack() as end:
                    end.callback(self._end, finished)
                    self._finish(stopped, finished)
                self._failures.check()
            # The error is raised on every rank, and an earlier checkpoint may still be on its way to disk.
            except TrainingError as error:
                with contextlib.suppress(CheckpointError):
                    run.saver.wait()
                with contextlib.suppress(OSError):
                    run.controllers.tell(self.state)
                newest = on_disk.newest(run.files.folder.checkpoints)
                where = f"continues from {newest.name}" if newest else "begins anew: no checkpoint was written yet"
                raise TrainingError(f"{error}. Started again, the run {where}") from error.__cause__
        return finished

    def _end(self, finished: bool) -> None:
        """Write the last row, call on_end of every callback and close the files."""
        try:
            with contextlib.suppress(OSError):
                self._reporter.row()
            self._callbacks.end(self.position, finished)
        finally:
            self._reporter.close()

    def _loop(self) -> tuple[bool, bool]:
        """Make all steps and measurements. Return whether the run was stopped, and whether it is finished."""
        run, cfg, total, until = self.run, self.cfg, self.cfg.training.total_tokens, end_of(self.cfg)
        every_save = checkpoint_tokens(cfg)
        self._open()
        say_differences(run)
        state, owed = self.state, list[str]()
        if not run.met.begins_part:  # The part before has measured what is due at the border.
            last = state.ledger.last_tokens(cfg.data.seq_length)
            owed = resume.owed(cfg, run.files.folder.path, state.step, state.tokens, last)
        first, left = state.step, self._look(owed)
        stopped = bool(left)
        while self.state.tokens < until and not stopped:
            before = self.state.tokens
            size = run.controllers.tokens_of_step(before)
            if self.state.step + 1 in cfg.training.drop_steps:
                run.controllers.drop(self.state, size, "training.drop_steps")
                # Schedules that depend on tokens continue in a dropped step.
                for event in run.controllers.ask(self.state, size, {}):
                    self._reporter.event(self.state, event)
            else:
                stopped = self._step(size)
            # This is another object if the step went back to a checkpoint.
            state = self.state
            self._reporter.saved(run.saver)
            # The objects that compiling left are no garbage, and looking through them takes 0.3 s in each collection.
            if state.step == first + 1:
                self._reporter.started(state, first, run.times)
                gc.collect()
                # In a program that continues, the run would be frozen as well, and never give its memory back.
                if self._watchdog.watches and until == total:
                    gc.freeze()
                with self._reporter.clock.stopped():
                    run.saver.pin()
            due = resume.due(cfg, before, state.tokens)
            left = due if stopped else self._look(due)
            stopped = stopped or bool(left)
            running = state.tokens < until and not stopped
            saves = running and (self._owes or crossed(before, state.tokens, every_save))
            if (stopped or saves) and self._saved_step != state.step:
                with self._reporter.clock.stopped():
                    self._owes = saves and run.cannot_save()
                    if not self._owes:
                        self.save()
        finished = self.state.tokens >= total and not left
        self.goes_on = self.state.tokens >= until and not (finished or stopped)
        if (finished or stopped or self.goes_on) and self._saved_step != self.state.step:
            self.save()
        run.saver.wait()
        self._copying.end()
        return stopped, finished

    def _open(self) -> None:
        """Begin to report, and describe the run in the run folder."""
        run, cfg = self.run, self.cfg
        if run.met.main:
            for finding in self._findings:
                self._reporter.keep(f"{finding.level}: {finding}")
            asked, engine = run.settled.asked, run.layout.engine
            run.files.folder.describe(asked, engine, self.engine.settings, self._findings)
        self._reporter.open(
            run.files.folder.path,
            self.state,
            cfg.training.total_tokens,
            cfg.logging,
            partial(flops_per_token, cfg.model, padded_vocab_size(run.files.vocab_size)),
            cfg.data.seq_length,
            self.engine.device,
            self._callbacks,
            60 * cfg.checkpoint.tolerate_minutes,
        )
        path, main = run.files.folder.path, run.met.main
        stop = partial(run.met.stop.ask, "a callback")
        start = RunStart(run.settled.asked, path, self.position, self.engine, main, self._say, stop)
        self._callbacks.tell(Callback.on_start, start)
        if self.state.step:
            ranks, changed = dist.get_world_size(), run.resumed.changed
            text = f"resumed at {self.state.tokens:,} tokens with {many(ranks, 'rank')}"
            text += f"; changed: {'; '.join(changed)}" * bool(changed)
            event = Event("resume", text, {"ranks": ranks, "changed": changed})
            self._reporter.event(self.state, event, say=False)
        if lengths_of(cfg):
            length, end = cfg.data.seq_length, end_of(cfg)
            text = f"sequences of {length:,} tokens up to {end:,} tokens, in training and in data.valid"
            self._reporter.event(self.state, Event("sequences", text, {"seq_length": length}))

    def _finish(self, stopped: bool, finished: bool) -> None:
        run, state, total = self.run, self.state, self.cfg.training.total_tokens
        self._reporter.saved(run.saver)
        if run.met.main:
            run.controllers.say_critical()
            asked = run.met.stop.name or ("an error" if self._failures.text else "another rank")
            why = f"stopped by {asked}" if stopped else "finished"
            where = f"{why} at step {state.step}, {state.tokens:,}"
            if self.goes_on:
                self._say(f"step {state.step}: a part of the run ends, at {state.tokens:,} tokens")
            elif finished:
                over = "" if state.tokens == total else f": whole steps for training.total_tokens {total:,}"
                self._say(f"{where} tokens{over}")
                self._say(f"next: sagetrain eval {self.cfg.training.run_dir}, or generate, report and export")
            else:
                self._say(f"{where} of {total:,} tokens; started again, the run continues")
        run.loader.close()
        if run.valid:
            run.valid.close()

    # -- step ----------------------------------------------------------------------------------------------------

    def _step(self, size: int) -> bool:
        """Take one optimizer step over the next `size` tokens. Return whether any rank was asked to stop."""
        run, cfg, state = self.run, self.cfg, self.state
        self._watchdog.begin(f"step {state.step + 1}")
        lr = learning_rate(cfg.optimizer, cfg.lr_schedule, state.tokens, size, cfg.training.total_tokens)
        ahead, number = run.controllers.tokens_ahead(state.tokens + size), size // run.layout.micro_step
        counted = run.counted(state.sequences, size, ahead)

        def take(observers: Observers) -> StepResult:
            observers = self._copying.watched(observers)
            batches = self._micro_batches(run.loader.step_batches(state.sequences, size, ahead), number)
            return self.engine.step(batches, number, lr, observers, counted, self._stopping)

        try:
            self._callbacks.tell(Callback.on_step_begin, state.step + 1)
            last = partial(run.loader.last_batch, state.sequences, number)
            result = run.controllers.take(state, size, take, last)
        # This comes from _micro_batches.
        except InterruptedError:
            self._reporter.row()
            return True
        if self._loss_failed(result):
            return True
        samples, layout = size // cfg.data.seq_length, (self.engine.groups.dp_size, dist.get_world_size())
        try:
            check_consumed(result.folds, state.sequences, samples, cfg.data.micro_batch_size, *layout)
        # The error is raised on every rank. The user's tokens may have failed on some of them.
        except TrainingError:
            self._failures.check()
            raise
        if counted is not None:
            result.metrics["train/counted_share"] = counted / size
            if not counted:
                self._say(f"step {state.step + 1}: no token of it counts in the loss, which is 0, as its gradient is")
        self._callbacks.tell(Callback.on_step, Position(state.step + 1, state.tokens + size), result)
        if not result.applied:
            self.state = run.controllers.leave_out(state, size, result, self._go_back)
            if self.state is not state:
                # Without this checkpoint, a run that is killed now would begin again with the steps that were given up.
                self.save()
            return result.stop
        state.advance(size, cfg.data.seq_length)
        if lengths_of(cfg):
            result.metrics["train/seq_length"] = float(cfg.data.seq_length)
        events = run.controllers.taken(state, size, result)
        self._reporter.step(state, result, size, lr)
        for event in events:
            self._reporter.event(state, event)
        self._copying.after_step(state, result)
        return result.stop

    def _loss_failed(self, result: StepResult) -> bool:
        """Return whether the user's loss has failed in this step on some rank. Its update was not made, and the run
        ends as if it had not begun; collective where a loss may have failed."""
        if self.run.files.loss is None or result.applied or not result.stop:
            return False
        return any(of_every_rank(self._failures.text))

    def _micro_batches(self, batches: Iterable[Batch], number: int) -> Iterator[Batch]:
        """Yield the micro-batches of a step, each with a sign of life. On a single rank a signal leaves the step at
        once, as if it had not begun. Several ranks learn of a signal together, at the end of the step. There they also
        learn that the user's tokens have failed on one of them, which goes on to that place with empty micro-batches:
        these have no sample ids, so check_consumed refuses the step."""
        stop, data, left = self.run.met.stop, self.cfg.data, number
        try:
            for batch in self._watchdog.over(batches):
                if stop.name and dist.get_world_size() == 1:
                    raise InterruptedError(stop.name)
                left -= 1
                yield batch
        except TrainingError as error:
            self._failures.keep("", error)
            empty = Sample(np.zeros(data.seq_length + 1, np.int64), [])
            for _ in range(left):
                yield batch_of([empty] * data.micro_batch_size, data.document_attention, data.document_positions)

    def _stopping(self) -> bool:
        self._copying.tell()
        # After a failed save no later one could succeed. The run stops, and self.save raises the reason.
        return bool(self.run.met.stop.name or self.run.saver.failed or self._failures.text)

    def _go_back(self, wanted: Callable[[int], bool]) -> TrainState | None:
        """Load the newest undamaged checkpoint of a wanted step and return its state; None if there is none."""
        run = self.run
        self._watchdog.begin("going back to a checkpoint")
        run.saver.wait()
        self._copying.settle()
        self._reporter.saved(run.saver)
        folder, _ = on_disk.newest_whole(run.files.folder.checkpoints, self._say, wanted)
        if folder is None:
            return None
        return resume.restore(Reader(folder), self.engine, run.files.train.fingerprint, self.cfg)

    # -- save ----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Take a checkpoint of the present state, which the saver writes in the background; collective. Raises
        CheckpointError on every rank if the checkpoint before could not be written.

        This waits for the checkpoint before.
        """
        run, state = self.run, self.state
        self._watchdog.begin("saving")
        # The measurements of this row would be lost if the run continued from here.
        self._reporter.row()
        running = state.tokens < self.cfg.training.total_tokens and not run.met.stop.name
        if run.met.main and run.saver.busy and running and not self._waited:
            self._waited = True
            self._say(f"step {state.step}: training waits for the checkpoint before this one (said once): the disk"
                      " takes longer than checkpoint.every_tokens")  # fmt: skip
        state.controllers = run.controllers.state()
        record = run.record(state)
        run.controllers.compare_weights(state)
        # The checkpoint before is published by then.
        run.saver.start(record, self._config_text, self.engine.owned(), rng_state())
        self._saved_step = state.step
        # The same disk may be full for this file.
        with contextlib.suppress(*[OSError] * bool(self.cfg.checkpoint.tolerate_minutes)):
            run.controllers.tell(state)
        self._callbacks.tell(Callback.on_save, self.position)

    # -- looking at the model between steps ----------------------------------------------------------------------

    def _look(self, due: list[str]) -> list[str]:
        """Make the measurements that are due. Return those that are left because some rank was asked to stop."""
        look = {VALID: self._evaluate, TASKS: self._ask_tasks, SAMPLES: self._write_samples}
        with self._reporter.clock.stopped():
            for number, name in enumerate(due):
                try:
                    look[name]()
                except InterruptedError:
                    return due[number:]
        return []

    def _evaluate(self) -> None:
        """Measure and report the validation losses. Raises InterruptedError on every rank if any rank was asked to stop
        meanwhile."""
        valid = self.run.valid
        assert valid is not None
        self._watchdog.begin("evaluation")
        batches = valid.eval_batches(self.cfg.evaluation.num_sequences)
        names = valid.stream.names if len(self.cfg.data.valid) > 1 else []
        found = self.engine.evaluate(self._watchdog.over(batches), names, self._stopping)
        each = {name: found[f"valid/{name}/loss"] for name in dict.fromkeys(names)}
        # With few sequences and many sources, some sources have no loss.
        each = {name: loss for name, loss in each.items() if not math.isnan(loss)}
        loss, parts = found["valid/loss"], ", ".join(f"{name} {loss:.4f}" for name, loss in each.items())
        losses = {"valid/loss": loss, **{f"valid/{name}/loss": each[name] for name in each}}
        self._reporter.write(self.state, losses)
        self._say(f"step {self.state.step}: validation loss {loss:.4f}" + (f" ({parts})" if parts else ""))
        self._callbacks.tell(Callback.on_evaluate, self.position, losses)

    def _ask_tasks(self) -> None:
        assert self._tasks is not None
        found = self._tasks(self.engine, self.run.texts, lambda: self._watchdog.begin("downstream tasks"))
        self._reporter.write(self.state, {f"{TASKS}{name}": value for name, value in found.items()})
        said = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        self._say(f"step {self.state.step}: {said}")

    def _write_samples(self) -> None:
        assert self._samples is not None
        begin = time.perf_counter()
        texts = self._samples(self.engine, self.run.texts, lambda: self._watchdog.begin("samples"))
        self._reporter.write(self.state, {f"{SAMPLES}seconds": time.perf_counter() - begin})
        self._reporter.samples(self.state, texts)
