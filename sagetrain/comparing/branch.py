"""Pairs of runs that are one run up to a point, where the other runs continue from a checkpoint of the baseline.

Two runs that differ in one rounding drift apart most where the loss falls fastest. If they branch off after that,
chance leaves a smaller difference between them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path

from sagetrain.checkpoint import on_disk
from sagetrain.comparing.question import Job, Question
from sagetrain.comparing.results import LOSSES
from sagetrain.config.errors import CheckpointError, ConfigError


class Branches:
    """The run that each run continues from, and the folders of all runs."""

    def __init__(self, question: Question, run_dirs: Path):
        self._question, self._run_dirs = question, run_dirs
        self._parting = {row.name: question.parting(row.name) for row in question.rows}

    def check(self, missing: Iterable[Job], finished: Container[Job]) -> None:
        """Check that each missing run can get its checkpoint. Raises ConfigError if the baseline of a run is finished,
        and has kept no checkpoint for it."""
        for job in missing:
            source = self._source(job)
            if source and source in finished and not self.ready(job):
                where, tokens = self._run_dirs / source.folder, self._question.branch
                raise ConfigError(
                    f"{job} goes on from {source} at {tokens:,} tokens, and {where} is finished and has no checkpoint "
                    f"of there. Remove it and its line in {LOSSES}: it is trained again, and keeps that checkpoint"
                )

    def ready(self, job: Job) -> bool:
        """Whether a run can start. If its baseline has come far enough, the run gets the checkpoint here."""
        source, own = self._source(job), self._run_dirs / job.folder / "checkpoints"
        if source is None or own.exists():
            return True
        if found := _checkpoint(self._run_dirs / source.folder / "checkpoints", self._parting[job.row]):
            _link_checkpoint(found, own)
        return found is not None

    def why_not(self, job: Job) -> str:
        """Return the reason why a run that never became ready was not started."""
        return f"{job}: not started: {self._source(job)} has no checkpoint at {self._question.branch:,} tokens"

    def _source(self, job: Job) -> Job | None:
        """Return the baseline's run that a job continues from, or None if the job begins by itself."""
        whole = Job(job.row, self._question.baseline, job.seed)
        return whole if self._question.branch and job != whole else None


def _checkpoint(root: Path, tokens: range) -> Path | None:
    for folder in on_disk.published(root):
        with suppress(CheckpointError):  # This is another checkpoint, which is being deleted.
            if on_disk.read_state(folder).tokens in tokens:
                return folder
    return None


def _link_checkpoint(folder: Path, root: Path) -> None:
    """Make `root`, the folder of another run's checkpoints, with this checkpoint in it. Files are hard links, or copies
    where links are impossible."""
    part = root.with_name(".branching")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(folder, part / folder.name, copy_function=_link)
    part.rename(root)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
