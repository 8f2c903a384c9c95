"""Pairs that are one run up to a point: the others go on from a checkpoint of the baseline. Two runs that differ in one
rounding part most where the loss falls fastest; branched off behind that, chance leaves less between them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path

from sagetrain.checkpoint import on_disk
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.compare.question import Job, Question
from sagetrain.compare.results import LOSSES
from sagetrain.config.errors import CheckpointError, ConfigError


class Branches:
    """Which run goes on from which, and the folders of all."""

    def __init__(self, question: Question, run_dirs: Path):
        self._question, self._run_dirs = question, run_dirs
        self._parting = {row.name: question.parting(row.name) for row in question.rows}

    def check(self, missing: Iterable[Job], finished: Container[Job]) -> None:
        """ConfigError if the baseline of a run is over and has kept no checkpoint for it."""
        for job in missing:
            source = self._source(job)
            if source and source in finished and not self.ready(job):
                where, tokens = self._folder(source).path, self._question.branch
                raise ConfigError(
                    f"{job} goes on from {source} at {tokens:,} tokens, and {where} is finished and has no checkpoint "
                    f"of there. Remove it and its line in {LOSSES}: it is trained again, and keeps that checkpoint"
                )

    def ready(self, job: Job) -> bool:
        """Whether a run can start. One that can because its baseline has come so far gets the checkpoint here."""
        source, own = self._source(job), self._folder(job).checkpoints
        if source is None or own.exists():
            return True
        if found := _checkpoint(self._folder(source).checkpoints, self._parting[job.row]):
            _link_checkpoint(found, own)
        return found is not None

    def why_not(self, job: Job) -> str:
        """Why a run was not started, of one that was not ready to the end."""
        return f"{job}: not started: {self._source(job)} has no checkpoint at {self._question.branch:,} tokens"

    def _source(self, job: Job) -> Job | None:
        """The baseline's run that a job goes on from; None: it begins by itself."""
        whole = Job(job.row, self._question.baseline, job.seed)
        return whole if self._question.branch and job != whole else None

    def _folder(self, job: Job) -> RunFolder:
        return RunFolder(self._run_dirs / job.folder)


def _checkpoint(root: Path, tokens: range) -> Path | None:
    """The first checkpoint that saw a number of tokens of that range."""
    for folder in on_disk.published(root):
        with suppress(CheckpointError):  # another one, which is being deleted
            if on_disk.read_state(folder).tokens in tokens:
                return folder
    return None


def _link_checkpoint(folder: Path, root: Path) -> None:
    """Make `root`, the checkpoints of another run, with this one in it: hard links, copies where there are none."""
    part = root.with_name(".branching")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(folder, part / folder.name, copy_function=_link)
    part.rename(root)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
