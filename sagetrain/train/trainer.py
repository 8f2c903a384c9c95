"""The training loop: resume, step, evaluate, report, save, stop on a signal.

Progress is counted in tokens and sequences. Everything that a resume needs is in TrainState plus the engine's tensors;
every decision that one rank could take differently (stop, damaged checkpoint, non-finite loss) is made by all at once.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from sagetrain import __version__
from sagetrain.auto import attention_choice, linear_choice, overlap_choice
from sagetrain.auto.kept import Kept
from sagetrain.auto.timing import Timing
from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.ledger import Ledger, TrainState, check_consumed
from sagetrain.checkpoint.reading import Reader
from sagetrain.checkpoint.saving import Saver
from sagetrain.checkpoint.state import Identity, RunState, SettledAttention, SettledLinear, Texts
from sagetrain.cluster import preflight
from sagetrain.cluster.guard import StopSignal, Watchdog
from sagetrain.cluster.join import init_distributed
from sagetrain.cluster.rendezvous import ended_by_signals
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.arithmetic import checkpoint_tokens, padded_vocab_size, resolved_zero_stage, token_multiple
from sagetrain.config.errors import CheckpointError, ConfigError, Finding, TrainingError
from sagetrain.config.load import dump_config
from sagetrain.config.rules.data import TEXT_PREFIX, chat_templates, prepared, text_prefixes
from sagetrain.config.schema import NoiseAwareTokens, RunConfig
from sagetrain.config.tokens_per_step import change_at_resume, stages, tokens_per_step
from sagetrain.data import verify
from sagetrain.data.loader import Batch, Loader, SampleStream
from sagetrain.data.token_file import write_atomic
from sagetrain.data.tokenizer import tokenizer_of
from sagetrain.engines.build_engine import build_engine, partitioner
from sagetrain.engines.protocol import Engine
from sagetrain.model.accounting import flops_per_token, memory_per_rank, overlaps, total_bytes
from sagetrain.model.backends import AttentionFunction
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import attention_functions, matmuls_of, resolve_backend
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.metrics import total_over_ranks
from sagetrain.parallel.rng import rng_state, seed_everything
from sagetrain.parallel.topology import ParallelGroups, Topology
from sagetrain.stability.controller import Event
from sagetrain.stability.precision import rungs_of
from sagetrain.train import failed_step, init_from, inputs, resume
from sagetrain.train.controllers import Controllers
from sagetrain.train.lr_schedule import learning_rate
from sagetrain.train.out_of_memory import explained, record_allocations
from sagetrain.train.perturb import perturb
from sagetrain.train.profile import ProfileWindow
from sagetrain.train.reporter import Reporter
from sagetrain.train.start_line import start_line
from sagetrain.train.writers import names_at

_VALID, _TASKS, _SAMPLES = "valid/", "eval/", "samples/"


Tasks = Callable[[Engine, Texts, Callable[[], None]], dict[str, float]]
"""Given the engine, what its weights had learned of texts, and what to call as a sign of life, numbers by name;
collective, and they matter on the first rank."""
Samples = Callable[[Engine, Texts, Callable[[], None]], list[tuple[str, str]]]
"""Given the same: the prompts of evaluation.samples_prompts, each with what the model has written after it."""


class Trainer:
    """One run of a RunConfig on this rank. `findings` are recorded in the run folder; `tasks` gives the numbers of
    evaluation.tasks, `samples` the texts of evaluation.samples_prompts. Linear layers are in 8 bits as on the ranks of
    a run of tensor-parallel size `layers_of_tp`, where that is another's."""

    def __init__(
        self,
        cfg: RunConfig,
        findings: list[Finding],
        tasks: Tasks | None = None,
        samples: Samples | None = None,
        *,
        layers_of_tp: int | None = None,
    ):
        self.cfg, self.findings, self.tasks, self.samples = cfg, findings, tasks, samples
        self._changed: list[str] = []  # since the checkpoint that the run continues from
        self.folder = RunFolder(Path(cfg.training.run_dir))
        # Everything that can be wrong with files and settings comes before ranks begin to wait for each other.
        tokenizer = tokenizer_of(cfg.data, cfg.model.vocab_size)
        self.vocab_size = cfg.model.vocab_size or tokenizer.vocab_size
        self.tokenizer_hash = tokenizer.sha256 if tokenizer else None
        records = prepared(cfg.data)
        self.text_prefix = next(filter(None, text_prefixes(records).values()), [])
        self.chat_template = next(filter(None, chat_templates(records).values()), None)
        self.stream = self._stream(cfg.data.train)
        valid = self._stream(cfg.data.valid) if cfg.data.valid else None
        init_from.check(self.folder.checkpoints, cfg.training, self._identity())
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[cfg.training.dtype]
        kind = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            resolve_backend(cfg.attention, cfg.model, device=kind, dtype=self.dtype)
            self._rungs(kind)
            size = cfg.parallel.tensor_parallel_size
            matmuls_of(cfg.linear, cfg.model, tensor_parallel_size=size, device=kind, dtype=self.dtype)
        except ValueError as error:
            raise ConfigError(str(error)) from error

        preflight.use_interface(cfg.training.network_interface)
        self.stop = StopSignal()
        patience, rank = cfg.training.timeout_minutes, int(os.environ.get("RANK", "0"))
        self.watchdog = Watchdog(self.folder.stacks, rank, 60 * patience)
        with ended_by_signals():
            self.device = init_distributed(2 * patience)  # the watchdog comes first: it can say more than a collective
            parallel = cfg.parallel
            topology = Topology(dist.get_world_size(), parallel.tensor_parallel_size, parallel.context_parallel_size)
            # Reading files may take a while: the ranks have met by now, and each host tells how far it is.
            self.files = preflight.check_in(cfg, topology, self.device, lambda say: self._check_files(valid, say))
            preflight.share(self.folder)
        self.groups = ParallelGroups.create(topology, timedelta(minutes=2 * patience))
        self.main = dist.get_rank() == 0
        self.reporter = Reporter(self.main)
        self._say = self.reporter.say
        self.profile = ProfileWindow(cfg.profile, self.folder.path / "profile", dist.get_rank(), self._say)
        if self.main:
            self.watchdog.forget()
        seed_everything(cfg.training.seed, f"rank {dist.get_rank()}")
        found, damaged = on_disk.newest_whole(self.folder.checkpoints, self._say)
        if found is not None:  # before auto is timed and the model is built
            resume.check(found, cfg, self._identity(), self.files)
        self.compiled = {"auto": self.device.type == "cuda", "on": True, "off": False}[cfg.training.compile]
        place = {"device": self.device, "dtype": self.dtype}
        how = {**place, "say": self._say}
        if cfg.profile is not None:
            record_allocations(self.device)
        self.attention, self.linear, self.halves = cfg.attention, cfg.linear, cfg.parallel.tensor_parallel_overlap
        with self._memory_explained():
            timing = Timing(cfg, self.groups, self.stream, self.folder, compiled=self.compiled, **how)
            kept = Kept.by(found) if found else None
            before = kept and kept.attention
            chosen = attention_choice.settle(cfg.attention, cfg.model, before, choose=timing.attention, **how)
            self.attention, self.attention_reason = chosen
            place["tensor_parallel_size"] = layers_of_tp or self.groups.tp_size
            say = self._say
            self.linear, why = linear_choice.settle(cfg.linear, cfg.model, kept, choose=timing.linear, say=say, **place)
            self.matmuls, self.linear_reason = matmuls_of(self.linear, cfg.model, here=self.groups.tp_size, **place)
            self.linear_reason += f"; {why}" if why else ""
            both_ways = partial(timing.overlap, self._settled(), self.matmuls)
            self.halves, self.halves_reason = overlap_choice.settle(
                self._settled(), kept and kept.overlap, device=self.device, choose=both_ways
            )
            self.micro_step = token_multiple(cfg, self.groups.dp_size)
            self.state = TrainState(ledger=Ledger(self.stream.fingerprint))
            self.engine = self._build_engine()
            self._resume(found, damaged)
        self.text_prefix = self.text_prefix or (self.origin and self.origin.text_prefix) or []
        if self.main and tokenizer:  # `sagetrain generate` needs nothing but the run folder
            write_atomic(self.folder.path / tokenizer.file_name, tokenizer.model)
        self.saver = Saver(
            self.folder.checkpoints,
            self.groups,
            cfg.checkpoint.keep_last,
            cfg.checkpoint.keep_every_tokens,
            timedelta(minutes=2 * patience),
            alive=lambda: self.watchdog.begin("saving"),
            needed=partial(failed_step.needed, self.folder.spikes),
        )
        self.saver.reserve(self.engine.owned())
        parts = self._rungs(self.device), self.stream, self.folder, self.saver, self.reporter
        self.controllers = Controllers(self._settled(), self.engine, *parts, self.state)
        self.loader = self._loader(self.stream)
        self.valid = self._loader(valid) if valid else None

    # -- construction --------------------------------------------------------------------------------------------

    def _settled(self) -> RunConfig:
        """Return the configuration with what `auto` of attention, linear layers and halves has become so far."""
        how = {"tensor_parallel_overlap": self.halves}
        parallel = self.cfg.parallel.model_copy(update=how)
        return self.cfg.model_copy(update={"attention": self.attention, "linear": self.linear, "parallel": parallel})

    def _rungs(self, device: torch.device) -> dict[str, AttentionFunction]:
        """The attention functions of the precision ladder, if there is one."""
        cfg = self.cfg
        return rungs_of(cfg.stability.precision, cfg.attention, cfg.model, device=device, dtype=self.dtype)

    def _stream(self, sources: list) -> SampleStream:
        seed = self.cfg.training.seed
        return SampleStream.configured(self.cfg.data, sources, seed, self.vocab_size, self.tokenizer_hash)

    def _check_files(self, valid: SampleStream | None, say: Callable[[str], None]) -> dict[str, str]:
        """Check this host's data; hashes of it by name. One rank of a run reads all tokens, before its first save."""
        streams = {"data.train": self.stream} | ({"data.valid": valid} if valid else {})
        hashes = verify.verify(streams, deep=dist.get_rank() == 0 and not self.folder.checkpoints.exists(), say=say)
        orders = {name: stream.fingerprint for name, stream in streams.items()}
        prefix = {TEXT_PREFIX: f"{self.text_prefix}"} if self.text_prefix else {}
        return {"tokenizer": self.tokenizer_hash or "none", **prefix, **orders, **hashes}

    def _loader(self, stream: SampleStream) -> Loader:
        return Loader(
            stream,
            dp_rank=self.groups.dp_rank,
            dp_size=self.groups.dp_size,
            micro_batch_size=self.cfg.data.micro_batch_size,
            num_workers=self.cfg.data.num_workers,
        )

    def _build_engine(self) -> Engine:
        cfg = self._settled()
        model = Transformer(
            cfg.model,
            cfg.attention,
            vocab_size=padded_vocab_size(self.vocab_size),
            known=self.vocab_size,
            groups=self.groups,
            functions=attention_functions(cfg.attention, cfg.model, device=self.device, dtype=self.dtype),
            sequence_parallel=cfg.parallel.sequence_parallel,
            overlap=overlaps(cfg),
            activation_checkpointing=cfg.training.activation_checkpointing,
            seed=cfg.training.seed,
            dtype=self.dtype,
            device=self.device,
            partition=partitioner(cfg, self.groups),
            matmuls=self.matmuls,
        )
        if self.compiled:
            later = self._rungs(self.device).values()
            compile_blocks(model, whole=resolved_zero_stage(cfg) == 3, later=later)
        engine = build_engine(cfg, model, self.groups, tokens_per_step(cfg.tokens_per_step, 0) // self.micro_step)
        words = f"{self.attention.backend} ({self.attention_reason})", self.linear_reason, self.halves_reason
        self._say(start_line(cfg, engine, padded_vocab_size(self.vocab_size), self.compiled, words))
        if resolved_zero_stage(cfg) != cfg.parallel.zero_stage:
            self._say("parallel.zero_stage 0 runs as 1: DeepSpeed's bf16 at stage 0 changes the weights at start-up")
        return engine

    # -- resume and save -----------------------------------------------------------------------------------------

    def _identity(self) -> Identity:
        """What a checkpoint must share with the run that continues it."""
        return inputs.identity(self.cfg, self.vocab_size, self.tokenizer_hash, self.stream.fingerprint)

    def _resume(self, folder: Path | None, damaged: list[Path]) -> None:
        if folder is None:
            self.origin = init_from.start_from(self.cfg.training, self.engine, self.folder.path, self._say)
            perturb(self.engine, self.cfg.training.perturb)
            return
        reader = Reader(folder)
        self.state = self._restore(reader)
        self.origin = reader.state.init_from
        if self.main:
            for bad in damaged:
                on_disk.set_aside(bad)
            self._say(f"resumed from {folder.name} ({self.state.tokens:,} tokens seen)")
            if reader.world_size != dist.get_world_size():
                self._say(f"ranks: {reader.world_size} wrote that checkpoint, {dist.get_world_size()} go on with it"
                          " (parallel.world_size makes a number that you do not mean an error)")  # fmt: skip
            now, asked = self.linear, self.cfg.linear
            kept = [name for name in ("recipe", "keep_layers_below") if getattr(now, name) != getattr(asked, name)]
            for line in resume.changed(self.cfg, folder):
                if not line.startswith(tuple(f"linear.{name}:" for name in kept)):  # those are as `auto` had them
                    self._say(f"changed since that checkpoint: {line}")
                    self._changed.append(line)
            if last := resume.last_step(reader.state, self.cfg):
                if said := change_at_resume(self.cfg.tokens_per_step, self.state.tokens, last):
                    self._say(said)
                if jump := resume.learning_rate_jump(self.cfg, folder, self.state.tokens, last):
                    self._say("; ".join(jump))

    def _restore(self, reader: Reader) -> TrainState:
        """Load a whole checkpoint, in another rounding if training.perturb has changed since."""
        state = resume.restore(reader, self.engine, self.stream.fingerprint)
        if channel := self.cfg.training.perturb:
            before = yaml.safe_load((reader.folder / "config.yaml").read_text())["training"]
            perturb(self.engine, channel if channel != before.get("perturb") else 0)
        return state

    def _go_back(self, wanted: Callable[[int], bool]) -> TrainState | None:
        """Load the newest whole checkpoint of a wanted step, if there is one."""
        self.watchdog.begin("going back to a checkpoint")
        self.saver.wait()
        self.reporter.saved(self.saver)
        folder, _ = on_disk.newest_whole(self.folder.checkpoints, self._say, wanted)
        return self._restore(Reader(folder)) if folder else None

    def save(self) -> None:
        """Take a checkpoint of the present state, which the saver writes in the background; collective.

        Waits for the one before, and raises its CheckpointError on every rank.
        """
        self.watchdog.begin("saving")
        self.reporter.row()  # what it has measured would be lost if the run continued from here
        running = self.state.tokens < self.cfg.training.total_tokens and not self.stop.name
        if self.main and self.saver.busy and running and not self._waited:
            self._waited = True
            self._say(f"step {self.state.step}: training waits for the checkpoint before this one (said once): the disk"
                      " takes longer than checkpoint.every_tokens")  # fmt: skip
        self.state.controllers = self.controllers.state()
        state = RunState(
            step=self.state.step,
            tokens=self.state.tokens,
            sequences=self.state.sequences,
            ledger=self.state.ledger,
            controllers=self.state.controllers,
            optimizer_steps=self.state.optimizer_steps + (self.origin.optimizer_steps if self.origin else 0),
            init_from=self.origin,
            text_prefix=self.text_prefix,
            chat_template=self.chat_template,
            identity=self._identity(),
            attention=SettledAttention(self.attention.backend, self.attention.recipe),
            linear=SettledLinear(self.linear.precision, self.linear.recipe, self.linear.keep_layers_below),
            overlap=overlap_choice.record(self._settled()),
            files=self.files,
            guidance_overrides=list(self.cfg.guidance.override),
            versions={"sagetrain": __version__, "torch": torch.__version__},
        )
        self.controllers.forget(self._saved_step)  # which is published by then
        self.saver.start(state, dump_config(self.cfg), self.engine.owned(), rng_state())
        self._saved_step = self.state.step
        self.controllers.tell(self.state)

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Train to the end, or to a signal. Returns whether the run is finished; on a signal a checkpoint is saved."""
        with self.watchdog, self._memory_explained():
            try:
                return self._train()
            except TrainingError as error:  # raised on every rank; a checkpoint of better days may still be on its way
                with contextlib.suppress(CheckpointError):
                    self.saver.wait()
                with contextlib.suppress(OSError):
                    self.controllers.tell(self.state)
                newest = on_disk.newest(self.folder.checkpoints)
                where = f"continues from {newest.name}" if newest else "starts anew: no checkpoint was written yet"
                raise TrainingError(f"{error}. The same command {where}") from None
            finally:
                try:
                    self.profile.close()
                finally:
                    self.reporter.close()

    def _memory_explained(self) -> contextlib.AbstractContextManager[None]:
        cfg = self.cfg

        def predicted() -> float:
            items = memory_per_rank(self._settled(), dist.get_world_size(), padded_vocab_size(self.vocab_size))
            return total_bytes(items)

        ways = {
            "data.micro_batch_size": cfg.data.micro_batch_size,
            "training.activation_checkpointing": cfg.training.activation_checkpointing,
            "parallel.zero_stage": resolved_zero_stage(cfg),
            "parallel.tensor_parallel_size": cfg.parallel.tensor_parallel_size,
        }
        return explained(self.folder.path, dist.get_rank(), predicted, ways)

    def _train(self) -> bool:
        cfg, total = self.cfg, self.cfg.training.total_tokens
        every_save = checkpoint_tokens(cfg)
        self._saved_step, self._waited = self.state.step, False
        if self.main:
            self.folder.describe(cfg, self.engine.settings, self.findings)
        flops = partial(flops_per_token, cfg.model, padded_vocab_size(self.vocab_size))
        how = (cfg.logging, cfg.model_dump(mode="json"), flops, cfg.data.seq_length, self.device)
        self.reporter.open(self.folder.path, self.state, total, *how)
        if self.state.step:
            ranks = dist.get_world_size()
            text = f"resumed at {self.state.tokens:,} tokens with {ranks} rank{'s' * (ranks > 1)}"
            text += f"; changed: {'; '.join(self._changed)}" if self._changed else ""
            fields = {"ranks": ranks, "changed": self._changed}
            self.reporter.event(self.state, Event("resume", text, fields), say=False)
        self._announce()
        first, left = self.state.step, self._look(self._left_to_look())
        stopped = bool(left)
        while self.state.tokens < total and not stopped:
            before = self.state.tokens
            size = self.controllers.tokens_of_step(before)
            if self.state.step + 1 in cfg.training.drop_steps:
                self.controllers.drop(self.state, size, "training.drop_steps")
                for event in self.controllers.ask(self.state, size, {}):  # what goes by tokens goes on
                    self.reporter.event(self.state, event)
            else:
                stopped = self._step(size)
            state = self.state  # another one if the step went back to a checkpoint
            self.reporter.saved(self.saver)
            if state.step == first + 1:  # what compiling left is no garbage: to look through it takes .3 s each time
                gc.collect()
                gc.freeze()
            due = self._due(before, state.tokens)
            left = due if stopped else self._look(due)
            stopped = stopped or bool(left)
            running = state.tokens < total and not stopped
            if (stopped or (running and _crossed(before, state.tokens, every_save))) and self._saved_step != state.step:
                with self.reporter.off_the_clock():
                    self.save()
        state, finished = self.state, self.state.tokens >= total and not left
        if finished and self._saved_step != state.step:
            self.save()
        self.saver.wait()
        self.reporter.saved(self.saver)
        if self.main:
            self.controllers.say_critical()
            why = f"stopped by {self.stop.name or 'a signal to another rank'}" if stopped else "finished"
            self._say(f"{why} at step {state.step}, {state.tokens:,} of {total:,} tokens"
                      + ("" if finished else "; run the same command to continue"))  # fmt: skip
        self.loader.close()
        if self.valid:
            self.valid.close()
        return finished

    def _step(self, size: int) -> bool:
        """One optimizer step over the next `size` tokens. Returns whether some rank was asked to stop."""
        cfg, state = self.cfg, self.state
        self.watchdog.begin(f"step {state.step + 1}")
        lr = learning_rate(cfg.optimizer, cfg.lr_schedule, state.tokens, size, cfg.training.total_tokens)
        ahead = self.controllers.tokens_ahead(state.tokens + size)
        batches = self._micro_batches(self.loader.step_batches(state.sequences, size, ahead))
        observers = self.controllers.observers(state.step + 1, size)
        samples, layout = size // cfg.data.seq_length, (self.groups.dp_size, dist.get_world_size())
        counted = self.counted(size, ahead)
        try:
            with self.profile.step(state.step + 1):
                result = self.engine.step(batches, size // self.micro_step, lr, observers, counted, self._stopping)
        except InterruptedError:  # of _micro_batches
            self.reporter.row()
            return True
        if counted is not None:
            result.metrics["train/counted_share"] = counted / size
            if not counted:
                self._say(f"step {state.step + 1}: no token of it counts in the loss, which is 0, as its gradient is")
        check_consumed(result.folds, state.sequences, samples, cfg.data.micro_batch_size, *layout)
        if result.event:
            self.controllers.keep_bundle(state, size, lr, result)
        if not result.applied:
            self.state = self.controllers.leave_out(state, size, result, self._go_back)
            if self.state is not state:
                self.save()  # or a run that is killed now would begin once more with the steps that were given up
            return result.stop
        state.advance(size, cfg.data.seq_length)
        events = self.controllers.taken(state, size, result)
        self.reporter.step(state, result, size, lr)
        for event in events:
            self.reporter.event(state, event)
        return result.stop

    def counted(self, size: int, ahead: int | None = None) -> int | None:
        """Return how many of the next `size` tokens count in the loss, on all ranks; None without masks. Collective.

        ahead: tokens of the step after it, if they are known.
        """
        own = self.loader.counted(self.state.sequences, size, ahead)
        return (
            None
            if own is None
            else total_over_ranks(own, self.groups.topology.world_size // self.groups.dp_size, self.device)
        )

    def _stopping(self) -> bool:
        # After a failed save nothing that follows could be saved either: stop, and learn why in self.save.
        return self.stop.name is not None or self.saver.failed

    def _micro_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Those of a step, each a sign of life. A rank alone leaves a step that a signal comes into, which may be long,
        as if it had not begun; several learn of a signal together, at its end."""
        for batch in self.watchdog.over(batches):
            if self.stop.name and dist.get_world_size() == 1:
                raise InterruptedError(self.stop.name)
            yield batch

    # -- looking at the model between steps ----------------------------------------------------------------------

    def _due(self, before: int, after: int) -> list[str]:
        """What is to be measured after a step from `before` to `after` tokens: the beginnings of its metrics' names."""
        total, evaluation = self.cfg.training.total_tokens, self.cfg.evaluation
        tenth = max(1, total // 10)
        every = {_VALID: evaluation.every_tokens or tenth} if self.valid else {}
        every |= {_TASKS: evaluation.tasks_every_tokens or tenth} if self.tasks else {}
        every |= {_SAMPLES: evaluation.samples_every_tokens} if self.samples else {}
        return [name for name, tokens in every.items() if after >= total or _crossed(before, after, tokens)]

    def _left_to_look(self) -> list[str]:
        """What of it a run that continues has not measured, because a signal came first."""
        if not self.state.step:
            return []
        last = self.state.ledger.segments[-1][1] * self.cfg.data.seq_length
        due = self._due(self.state.tokens - last, self.state.tokens)
        there = names_at(self.folder.path, self.state.step) if self.main and due else ()
        missing = torch.tensor([not any(name.startswith(x) for name in there) for x in due], device=self.device)
        if due:
            dist.broadcast(missing, 0)  # files of other hosts may be late
        return [name for name, so in zip(due, missing.tolist(), strict=True) if so]

    def _look(self, due: list[str]) -> list[str]:
        """Measure that; what of it is left, because some rank was asked to stop."""
        look = {_VALID: self._evaluate, _TASKS: self._ask_tasks, _SAMPLES: self._write_samples}
        with self.reporter.off_the_clock():
            for number, name in enumerate(due):
                try:
                    look[name]()
                except InterruptedError:
                    return due[number:]
        return []

    def _evaluate(self) -> None:
        """Raises InterruptedError on every rank if some rank was asked to stop meanwhile."""
        self.watchdog.begin("evaluation")
        batches = self.valid.eval_batches(self.cfg.evaluation.num_sequences)
        names = self.valid.stream.names if len(self.cfg.data.valid) > 1 else []
        found = self.engine.evaluate(self.watchdog.over(batches), names, self._stopping)
        each = {name: found[f"valid/{name}/loss"] for name in dict.fromkeys(names)}
        each = {name: loss for name, loss in each.items() if not math.isnan(loss)}  # few sequences, many sources
        loss, parts = found["valid/loss"], ", ".join(f"{name} {loss:.4f}" for name, loss in each.items())
        self.reporter.write(self.state, {"valid/loss": loss, **{f"valid/{name}/loss": each[name] for name in each}})
        self._say(f"step {self.state.step}: validation loss {loss:.4f}" + (f" ({parts})" if parts else ""))

    def _ask_tasks(self) -> None:
        found = self.tasks(self.engine, self._texts(), lambda: self.watchdog.begin("downstream tasks"))
        self.reporter.write(self.state, {f"{_TASKS}{name}": value for name, value in found.items()})
        said = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        self._say(f"step {self.state.step}: {said}")

    def _write_samples(self) -> None:
        begin = time.perf_counter()
        texts = self.samples(self.engine, self._texts(), lambda: self.watchdog.begin("samples"))
        seconds = time.perf_counter() - begin
        self.reporter.samples(self.state, texts)
        self.reporter.write(self.state, {f"{_SAMPLES}seconds": seconds})

    def _texts(self) -> Texts:
        """What the weights had learned of texts when the run began, and its own text prefix."""
        generation = self.origin.generation if self.origin else {}
        return Texts.learned(self.text_prefix, self.chat_template, generation, self.origin)

    def _announce(self) -> None:
        """Say where whole steps and the data at hand give something else than the settings ask for."""
        cfg, asked = self.cfg, self.cfg.training.total_tokens
        last = stages(cfg.tokens_per_step, asked, self.micro_step)[-1]
        end = last.from_tokens + last.steps * last.tokens_per_step
        if self.state.step == 0 and end != asked and not isinstance(cfg.tokens_per_step, NoiseAwareTokens):
            self._say(f"training.total_tokens {asked:,}: whole steps end at {end:,} tokens")
        wanted = cfg.evaluation.num_sequences
        if self.valid and (held := self.valid.eval_size(wanted)) < wanted:
            self._say(f"evaluation.num_sequences {wanted:,}: data.valid holds {held:,}; each evaluation takes so many")
        late = {step for step in cfg.training.drop_steps if step <= self.state.step} - set(self.state.ledger.dropped)
        if late:
            steps = ", ".join(map(str, sorted(late)))
            self._say(f"training.drop_steps: {steps} came before this checkpoint: trained, and in its weights")


def _crossed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]."""
    return before // every != after // every
