"""The training loop: resume, step, evaluate, report, save, stop on a signal.

Progress is counted in tokens and sequences. Everything that a resume needs is in TrainState plus the engine's tensors;
every decision that one rank could take differently (stop, damaged checkpoint, non-finite loss) is made by all at once.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sagetrain import __version__
from sagetrain.config.arithmetic import padded_vocab_size, resolved_zero_stage, token_multiple
from sagetrain.config.errors import ConfigError, Finding
from sagetrain.config.load import dump_config
from sagetrain.config.schema import RunConfig
from sagetrain.data import verify
from sagetrain.data.loader import Loader, SampleStream
from sagetrain.data.token_file import write_atomic
from sagetrain.data.tokenizer import Tokenizer, find_tokenizer
from sagetrain.model.accounting import flops_per_token, num_parameters, overlaps
from sagetrain.model.selection import choose_backend, resolve_backend
from sagetrain.model.transformer import Transformer
from sagetrain.parallel import copies
from sagetrain.parallel.rng import rng_state, seed_everything, set_rng_state
from sagetrain.parallel.topology import ParallelGroups, Topology
from sagetrain.train import checkpoint, roster
from sagetrain.train.checkpoint import CheckpointError, Reader
from sagetrain.train.engine import Engine, StepResult, init_distributed
from sagetrain.train.guard import Ledger, TrainingError, Watchdog, check_consumed
from sagetrain.train.lr_schedule import learning_rate
from sagetrain.train.metrics import MetricsWriter, Throughput, memory_gib, peak_flops
from sagetrain.train.rendezvous import ended_by_signals
from sagetrain.train.run_folder import RunFolder, changed_settings, flat
from sagetrain.train.saver import Saver
from sagetrain.train.tokens_per_step import change_at_resume, tokens_per_step

log = logging.getLogger("sagetrain")


_ORDER = "order of samples (hash of token files, weights, seq_length and seed)"


@dataclass
class TrainState:
    """Where a run is. Everything else follows from the configuration."""

    step: int = 0
    tokens: int = 0
    sequences: int = 0
    ledger: Ledger = field(default_factory=Ledger)

    def advance(self, tokens: int, seq_length: int) -> None:
        """Count one optimizer step."""
        self.ledger.add(self.sequences, tokens // seq_length)
        self.step += 1
        self.tokens += tokens
        self.sequences += tokens // seq_length


class StopSignal:
    """SIGTERM, SIGUSR1 and Ctrl-C ask for a checkpoint and a clean exit; a second Ctrl-C ends the run at once."""

    def __init__(self) -> None:
        self.name: str | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT and self.name == "SIGINT":
            raise KeyboardInterrupt
        self.name = self.name or signal.Signals(number).name


class Trainer:
    """One run of a RunConfig on this rank. `findings` are recorded in the run folder."""

    def __init__(self, cfg: RunConfig, findings: list[Finding]):
        self.cfg, self.findings = cfg, findings
        self.metrics: MetricsWriter | None = None
        self.folder = RunFolder(Path(cfg.training.run_dir))
        # Everything that can be wrong with files and settings comes before ranks begin to wait for each other.
        tokenizer = Tokenizer.load(find_tokenizer(cfg.data))
        self.vocab_size = cfg.model.vocab_size or tokenizer.vocab_size
        self.tokenizer_hash = tokenizer.sha256
        self.stream = self._stream(cfg.data.train)
        valid = self._stream(cfg.data.valid) if cfg.data.valid else None
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[cfg.training.dtype]
        kind = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self.backend, self.backend_reason = resolve_backend(cfg.attention, cfg.model, device=kind, dtype=self.dtype)
        except ValueError as error:
            raise ConfigError(str(error)) from error

        roster.use_interface(cfg.training.network_interface)
        self.stop = StopSignal()
        patience, rank = cfg.training.timeout_minutes, int(os.environ.get("RANK", "0"))
        self.watchdog = Watchdog(self.folder.stacks, rank, 60 * patience)
        with ended_by_signals():
            self.device = init_distributed(2 * patience)  # the watchdog comes first: it can say more than a collective
            parallel = cfg.parallel
            topology = Topology(dist.get_world_size(), parallel.tensor_parallel_size, parallel.context_parallel_size)
            # Reading files may take a while: the ranks have met by now, and each host tells how far it is.
            self.files = roster.check_in(cfg, topology, self.device, lambda say: self._check_files(valid, say))
        self.groups = ParallelGroups.create(topology, timedelta(minutes=2 * patience))
        self.main = dist.get_rank() == 0
        if self.main:
            self.folder.claim()
            self.watchdog.forget()
        seed_everything(cfg.training.seed, f"rank {dist.get_rank()}")
        if self.backend == "auto":
            self.backend, self.backend_reason = self._choose_backend(), "auto: the fastest that was admitted"
        self.micro_step = token_multiple(cfg, self.groups.dp_size)
        self.state = TrainState(ledger=Ledger(self.stream.fingerprint))
        self.engine = self._build_engine()
        self._resume()
        if self.main:  # `sagetrain generate` needs nothing but the run folder
            write_atomic(self.folder.tokenizer, tokenizer.model)
        self.saver = Saver(
            self.folder.checkpoints,
            self.groups,
            cfg.checkpoint.keep_last,
            cfg.checkpoint.keep_every_tokens,
            timedelta(minutes=2 * patience),
            alive=lambda: self.watchdog.begin("saving"),
        )
        self.saver.reserve(self._shards())
        self.loader = self._loader(self.stream)
        self.valid = self._loader(valid) if valid else None

    # -- construction --------------------------------------------------------------------------------------------

    def _choose_backend(self) -> str:
        """Rank 0 times and all ranks take its choice: layers of one model must not differ."""
        chosen = [None]
        if self.main:
            chosen[0] = choose_backend(
                self.cfg.attention,
                self.cfg.model,
                tensor_parallel_size=self.groups.tp_size,
                context_parallel_size=self.groups.cp_size,
                overlap=overlaps(self.cfg),
                num_sequences=self.cfg.data.micro_batch_size,
                seq_length=self.cfg.data.seq_length,
                documents=self.stream.document_lengths(64) if self.cfg.data.document_attention else (),
                device=self.device,
                dtype=self.dtype,
                cache=self.folder.attention,
                say=self._say,
            )
        dist.broadcast_object_list(chosen, src=0, device=self.device)
        return chosen[0]

    def _stream(self, sources: list) -> SampleStream:
        seed = self.cfg.training.seed
        return SampleStream.configured(self.cfg.data, sources, seed, self.vocab_size, self.tokenizer_hash)

    def _check_files(self, valid: SampleStream | None, say: Callable[[str], None]) -> dict[str, str]:
        """Check this host's data; hashes of it by name. One rank of a run reads all tokens, before its first save."""
        streams = {"data.train": self.stream} | ({"data.valid": valid} if valid else {})
        hashes = verify.verify(streams, deep=dist.get_rank() == 0 and not self.folder.checkpoints.exists(), say=say)
        orders = {name: stream.fingerprint for name, stream in streams.items()}
        return {"tokenizer": self.tokenizer_hash, **orders, **hashes}

    def _loader(self, stream: SampleStream) -> Loader:
        return Loader(
            stream,
            dp_rank=self.groups.dp_rank,
            dp_size=self.groups.dp_size,
            micro_batch_size=self.cfg.data.micro_batch_size,
            num_workers=self.cfg.data.num_workers,
        )

    def _build_engine(self) -> Engine:
        cfg = self.cfg
        model = Transformer(
            cfg.model,
            cfg.attention.model_copy(update={"backend": self.backend}),
            vocab_size=padded_vocab_size(self.vocab_size),
            groups=self.groups,
            sequence_parallel=cfg.parallel.sequence_parallel,
            overlap=overlaps(cfg),
            activation_checkpointing=cfg.training.activation_checkpointing,
            seed=cfg.training.seed,
            dtype=self.dtype,
            device=self.device,
        )
        compiled = cfg.training.compile == "on" or (cfg.training.compile == "auto" and self.device.type == "cuda")
        if compiled:
            model.compile_blocks(whole=resolved_zero_stage(cfg) == 3)
        first = tokens_per_step(cfg.tokens_per_step, 0)
        engine = Engine(cfg, model, self.groups, first // self.micro_step)
        if self.main:
            size = num_parameters(cfg.model, cfg.attention, padded_vocab_size(self.vocab_size))
            copied = self.groups.tp_size > 1 and self.groups.tp_group.group_name in copies.connected
            how = (" by copies" if copied else "") + (" in halves" if self.groups.tp_size > 1 and model.overlap else "")
            context = f" x context parallel {self.groups.cp_size}" if self.groups.cp_size > 1 else ""
            self._say(
                f"sagetrain {__version__}: {size:,} parameters, "
                f"{dist.get_world_size()} ranks (tensor parallel {self.groups.tp_size}{how}{context} x data parallel"
                f" {self.groups.dp_size}), ZeRO {engine.stage}, {cfg.training.dtype}, torch.compile"
                f" {'on' if compiled else 'off'}, attention {self.backend} ({self.backend_reason})"
            )
            if engine.stage != cfg.parallel.zero_stage:
                self._say(
                    "parallel.zero_stage 0 runs as 1: DeepSpeed's bf16 at stage 0 changes the weights at start-up"
                )
        return engine

    # -- resume and save -----------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that continues it."""
        return {
            "model": self.cfg.model.model_dump(),
            "attention.qk_norm": self.cfg.attention.qk_norm,
            "vocab_size": self.vocab_size,
            "training.seed": self.cfg.training.seed,
            "data.seq_length": self.cfg.data.seq_length,
            "tokenizer (SHA-256)": self.tokenizer_hash,
            _ORDER: self.stream.fingerprint,
        }

    def _resume(self) -> None:
        folder, damaged = checkpoint.newest_whole(self.folder.checkpoints, self._warn)
        if folder is None:
            return
        if self.cfg.checkpoint.resume == "never":
            raise CheckpointError(
                f"{self.folder.path} holds checkpoint {folder.name} and checkpoint.resume is never; "
                "set it to auto to continue, or choose another training.run_dir"
            )
        reader = Reader(folder)
        state = reader.manifest["state"]
        if self.stream.keep_order(state["identity"].get(_ORDER, "")) and self.main:
            self._say("the shares of data.train are those that the run began with, coarser than a new run's")
        theirs, ours = flat(state["identity"]), flat(self._identity())
        changed = [f"{k}: checkpoint {theirs.get(k)!r}, this run {ours[k]!r}" for k in ours if theirs.get(k) != ours[k]]
        changed += verify.changed(state.get("files", {}), self.files)
        if changed:
            raise CheckpointError(
                f"{folder} was written by another run: {'; '.join(changed)}. "
                "Restore these settings, or choose another training.run_dir"
            )
        counts = state["step"], state["sequences"]
        ledger = Ledger.verified(state.get("ledger"), self.stream.fingerprint, *counts, folder)
        checkpoint.load_engine(reader, self.engine, state["optimizer_steps"])
        rng = reader.rng(dist.get_rank())
        if rng is not None:
            set_rng_state(rng)
        self.state = TrainState(state["step"], state["tokens"], state["sequences"], ledger)
        if self.main:
            for bad in damaged:
                checkpoint.set_aside(bad)
            self._say(f"resumed from {folder.name} ({self.state.tokens:,} tokens seen)")
            if reader.world_size != dist.get_world_size():
                self._say(f"ranks: {reader.world_size} wrote that checkpoint, {dist.get_world_size()} go on with it"
                          " (parallel.world_size makes a number that you do not mean an error)")  # fmt: skip
            for line in changed_settings((folder / "config.yaml").read_text(), dump_config(self.cfg)):
                self._say(f"changed since that checkpoint: {line}")
            if ledger.segments:
                last = ledger.segments[-1][1] * self.cfg.data.seq_length
                if said := change_at_resume(self.cfg.tokens_per_step, self.state.tokens, last):
                    self._say(said)

    def _shards(self):
        """What this rank writes of the model and the optimizer."""
        return self.engine.shards() if self.engine.writes_shards else ()

    def save(self) -> None:
        """Take a checkpoint of the present state, which the saver writes in the background; collective.

        Waits for the one before, and raises its CheckpointError on every rank.
        """
        self.watchdog.begin("saving")
        running = self.state.tokens < self.cfg.training.total_tokens and not self.stop.name
        if self.main and self.saver.busy and running and not self._waited:
            self._waited = True
            self._say(f"step {self.state.step}: training waits for the checkpoint before this one (said once): the disk"
                      " takes longer than checkpoint.every_tokens")  # fmt: skip
        state = {
            **asdict(self.state),
            "optimizer_steps": self.state.step,
            "identity": self._identity(),
            "files": self.files,
            "guidance_overrides": list(self.cfg.guidance.override),
            "versions": {"sagetrain": __version__, "torch": torch.__version__},
        }
        self.saver.start(state, dump_config(self.cfg), self._shards(), rng_state())
        self._saved_step = self.state.step

    def _report_saved(self) -> None:
        """Say which checkpoints have been published since the last call."""
        while saved := self.saver.take_saved():
            if self.main:
                name, stall, later = checkpoint.folder_name(saved.step), saved.stall_seconds, saved.publish_seconds
                figures = {"perf/save_stall_seconds": stall, "perf/save_publish_seconds": later}
                self.metrics.write(saved.step, saved.tokens, figures)
                self._say(f"saved {name}: training stood still for {stall:.2f} s, published {later:.1f} s later")

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Train to the end, or to a signal. Returns whether the run is finished; on a signal a checkpoint is saved."""
        with self.watchdog:
            try:
                return self._train()
            except TrainingError:  # raised on every rank; a checkpoint of better days may still be on its way
                with contextlib.suppress(CheckpointError):
                    self.saver.wait()
                raise
            finally:
                if self.metrics:
                    self.metrics.close()

    def _train(self) -> bool:
        cfg, state, total = self.cfg, self.state, self.cfg.training.total_tokens
        if self.main:
            self.folder.describe(cfg, self.engine.config, self.findings)
        every_eval = cfg.evaluation.every_tokens or max(1, total // 10)
        every_save = cfg.checkpoint.every_tokens or max(1, total // 10)
        self._saved_step, self._waited = state.step, False
        if self.main:
            self.metrics = MetricsWriter(self.folder.path, state.step, state.tokens, total, cfg.logging.tensorboard)
        self.clock = Throughput()
        first, stopped, trained = state.step, False, state.tokens < total
        while state.tokens < total and not stopped:
            self.watchdog.begin(f"step {state.step + 1}")
            size = tokens_per_step(cfg.tokens_per_step, state.tokens)
            lr = learning_rate(cfg.optimizer, cfg.lr_schedule, state.tokens, size, total)
            before, after = state.tokens, state.tokens + size
            following = tokens_per_step(cfg.tokens_per_step, after) if after < total else None
            batches = self.watchdog.over(self.loader.step_batches(state.sequences, size, following))
            # After a failed save nothing that follows could be saved either: stop, and learn why in self.save.
            stop = self.stop.name is not None or self.saver.failed
            result = self.engine.step(batches, size // self.micro_step, lr, stop)
            if state.step == first:  # what compiling left is no garbage: the collector takes .3 s to look through it
                gc.collect()
                gc.freeze()
            samples, layout = size // cfg.data.seq_length, (self.groups.dp_size, dist.get_world_size())
            check_consumed(result.folds, state.sequences, samples, cfg.data.micro_batch_size, *layout)
            state.advance(size, cfg.data.seq_length)
            self._check_finite(result)
            self._report(result, size, lr)
            self._report_saved()
            stopped = result.stop
            running = state.tokens < total and not stopped
            if self.valid and running and _crossed(before, after, every_eval):
                self._aside(self._evaluate)
            if stopped or (running and _crossed(before, after, every_save)):
                self._aside(self.save)
        finished = state.tokens >= total
        if finished and self.valid and trained:
            self._evaluate()
        if finished and self._saved_step != state.step:
            self.save()
        self.saver.wait()
        self._report_saved()
        if self.main:
            why = f"stopped by {self.stop.name or 'a signal to another rank'}" if stopped else "finished"
            self._say(f"{why} at step {state.step}, {state.tokens:,} of {total:,} tokens"
                      + ("" if finished else "; run the same command to continue"))  # fmt: skip
        self.loader.close()
        if self.valid:
            self.valid.close()
        return finished

    def _aside(self, action: Callable[[], Any]) -> None:
        """Do something that is not training, off the clock."""
        self.clock.pause()
        action()
        self.clock.resume()

    def _check_finite(self, result: StepResult) -> None:
        """Both numbers are reduced over all ranks, so every rank decides alike."""
        if not (torch.isfinite(torch.tensor([result.loss, result.grad_norm])).all() and result.applied):
            raise TrainingError(
                f"step {self.state.step} ({self.state.tokens:,} tokens): loss {result.loss}, gradient norm "
                f"{result.grad_norm}. Nothing of this step was saved. Lower optimizer.lr or the tokens per step, "
                "turn attention.qk_norm on, or set attention.backend to sdpa, and run again to continue from the "
                "newest checkpoint"
            )

    def _report(self, result: StepResult, size: int, lr: float) -> None:
        self.clock.add(size)
        if self.metrics is None or (self.state.step % self.cfg.logging.every_steps and not result.stop):
            return
        self.clock.pause()
        rate, peak = self.clock.take(), peak_flops(self.device)
        flops = flops_per_token(self.cfg.model, padded_vocab_size(self.vocab_size), self.cfg.data.seq_length)
        self.metrics.write(
            self.state.step,
            self.state.tokens,
            {
                **result.metrics,
                "train/lr": lr,
                "train/tokens_per_step": size,
                "perf/tokens_per_second": rate,
                "perf/mfu": rate * flops / (peak * dist.get_world_size()) if peak else None,
                "perf/memory_gib": memory_gib(self.device),
            },
        )
        self.metrics.progress(self.state.step, self.state.tokens, result.loss, lr, rate)
        self.clock.resume()

    def _evaluate(self) -> None:
        self.watchdog.begin("evaluation")
        batches = self.valid.eval_batches(self.cfg.evaluation.num_sequences)
        loss = self.engine.evaluate(self.watchdog.over(batches))
        if self.metrics:
            self.metrics.write(self.state.step, self.state.tokens, {"valid/loss": loss})
            self._say(f"step {self.state.step}: validation loss {loss:.4f}")

    # -- messages ----------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if self.metrics:
            self.metrics.say(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def _warn(self, text: str) -> None:
        if self.main:
            log.warning(text)


def _crossed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]."""
    return before // every != after // every
