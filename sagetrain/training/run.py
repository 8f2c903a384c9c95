"""The parts of a run that is built: the results of the acts of training/build_run.py, and the record for a
checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sagetrain import __version__
from sagetrain.auto import overlap_choice
from sagetrain.auto.settled import Settled
from sagetrain.checkpoint.in_memory import CopiesInMemory
from sagetrain.checkpoint.ledger import TrainState
from sagetrain.checkpoint.saving import Saver
from sagetrain.checkpoint.state import Identity, InitFromRecord, RunState, SettledAttention, SettledLinear, Texts
from sagetrain.cluster.failures import Failures
from sagetrain.cluster.guard import StopSignal, Watchdog
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.data.loader import Loader, SampleStream
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.engines.step import Engine
from sagetrain.parallel.cross_entropy import OwnLoss, is_by_sequence
from sagetrain.parallel.metrics import total_over_ranks
from sagetrain.parallel.objects import of_rank_0
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.storage.url_path import Location
from sagetrain.training.controllers import Controllers
from sagetrain.training.reporter import Reporter
from sagetrain.training.start_times import StartTimes


@dataclass(frozen=True)
class CheckedFiles:
    """The content of this host's files for a run, after all of them were checked."""

    folder: RunFolder
    tokenizer: Tokenizer | None
    vocab_size: int
    train: SampleStream
    valid: SampleStream | None
    text_prefix: list[int]
    """The tokens that the texts of the training data begin with."""
    chat_template: Any
    """The template of the chats in the training data, or templates by name."""
    identity: Identity
    dtype: torch.dtype
    loss: OwnLoss | None = None
    """The user's loss, guarded. None: the cross-entropy."""
    failures: Failures = field(default_factory=Failures)
    """The errors of the user's functions."""
    later: tuple[CheckedFiles, ...] = ()
    """The files as the later parts of the run read them (config/run_parts.py)."""

    def part(self, number: int) -> CheckedFiles:
        """Return the files as a part of the run reads them."""
        return (self, *self.later)[number]


@dataclass(frozen=True)
class Meeting:
    """The agreement of a run's ranks, and the guards of this rank."""

    device: torch.device
    groups: ParallelGroups
    hashes: dict[str, str]
    """The first digits of the hashes of the data, by name. All hosts have the same."""
    checkpoint: Location | None
    """The checkpoint or copy to continue from; None: the run begins."""
    damaged: list[Location]
    """The damaged newer checkpoints that were passed over."""
    stop: StopSignal
    watchdog: Watchdog
    reporter: Reporter
    saved_step: int = 0
    """The step of the newest whole checkpoint; 0: there is none."""
    copies: CopiesInMemory | None = None
    """The copies of checkpoint.in_memory_every."""
    from_memory: bool = False
    """Whether `checkpoint` is such a copy."""
    part: int = 0
    """The number of the part of the run that begins or continues (config/run_parts.py)."""
    begins_part: bool = False
    """Whether the part before wrote `checkpoint`."""

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which prints and writes for all ranks."""
        return self.groups.rank == 0


@dataclass(frozen=True)
class Resumed:
    """The position at which a run continues."""

    state: TrainState
    init_from: InitFromRecord | None
    """The record of the weights that the run began with; None: the run drew its own weights."""
    changed: list[str]
    """The settings that differ from those of the checkpoint, on rank 0."""


@dataclass(frozen=True)
class Run:
    """A run that is ready for its next step."""

    files: CheckedFiles
    met: Meeting
    settled: Settled
    engine: Engine
    resumed: Resumed
    saver: Saver
    controllers: Controllers
    loader: Loader
    valid: Loader | None
    times: StartTimes

    @property
    def cfg(self) -> RunConfig:
        """The configuration of the run, with nothing left `auto`."""
        return self.settled.cfg

    @property
    def layout(self) -> Layout:
        """The run's ranks along the axes, and what its engine does when."""
        return Layout.of(self.cfg, self.engine.groups.topology.world_size)

    @property
    def texts(self) -> Texts:
        """The conventions of texts that the weights had learned when the run began, and those of its own data."""
        return self.record(self.resumed.state).texts

    def counted(self, sequences: int, size: int, ahead: int | None = None) -> int | None:
        """Return how many of the `size` tokens after the first `sequences` sequences count in the loss, on all ranks;
        None if no token is masked, or if the loss counts sequences. Collective.

        Args:
            ahead: the tokens of the step after it, if they are known.
        """
        if is_by_sequence(self.files.loss):
            return None
        own, groups = self.loader.counted(sequences, size, ahead), self.engine.groups
        sharing = groups.topology.world_size // groups.dp_size
        return None if own is None else total_over_ranks(own, sharing, self.engine.device)

    def cannot_save(self) -> bool:
        """Whether the checkpoint before could not be written and is tried again, from the memory that the next one
        needs; collective, and rank 0 decides. Without checkpoint.tolerate_minutes nothing is tried again."""
        if not self.cfg.checkpoint.tolerate_minutes:
            return False
        self.met.watchdog.begin("saving")
        self.saver.wait_for_an_attempt()
        return of_rank_0(self.saver.retries)

    def record(self, state: TrainState) -> RunState:
        """Return the record for a checkpoint of the run at `state`."""
        attention, linear, before = self.cfg.attention, self.cfg.linear, self.resumed.init_from
        return RunState(
            step=state.step,
            tokens=state.tokens,
            sequences=state.sequences,
            ledger=state.ledger,
            controllers=state.controllers,
            optimizer_steps=self.engine.optimizer_steps,
            init_from=before,
            text_prefix=self.files.text_prefix or (before.text_prefix if before else None) or [],
            chat_template=self.files.chat_template,
            identity=self.files.identity,
            engine=self.layout.engine,
            attention=SettledAttention(attention.backend, attention.recipe),
            linear=SettledLinear(linear.precision, linear.keep_layers_below),
            overlap=overlap_choice.record(self.cfg),
            files=self.met.hashes,
            guidance_overrides=list(self.cfg.guidance.override),
            versions={"sagetrain": __version__, "torch": torch.__version__},
        )
