"""The folder of a run: what it is called inside, who may write there, and what it says for people to read.

Checkpoints are checkpoint/on_disk.py's, metrics training/writers.py's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import yaml

from sagetrain.config.earlier_run import CRITICAL, STABILITY_NAME
from sagetrain.config.errors import CheckpointError, Finding
from sagetrain.config.load import dump_config, flat
from sagetrain.config.schema import RunConfig
from sagetrain.data.token_file import write_atomic

_LOOKS = 10
"""A network file system may show a new file late."""


def lock(folder: Path) -> tuple[IO[str], OSError | None]:
    """Make a folder and lock it for as long as the file that comes back is open; why it is not locked: a file system
    without locks, or somebody else who has it (`is_taken`)."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return file, error
    return file, None


def is_taken(error: OSError | None) -> bool:
    """Whether `lock` has found another process in the folder."""
    return error is not None and error.errno in (errno.EWOULDBLOCK, errno.EACCES)


class RunFolder:
    """training.run_dir."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.spikes = path / "spikes"
        """Bundles of steps that went wrong."""
        self.stacks = path / "stacks"
        """Where each rank stood when the run hung."""
        self.attention = path / "attention.json"
        """What attention.backend and recipe auto chose, and why: a table."""
        self.linear = path / "linear.json"
        """The same of linear.precision."""
        self._lock: IO[str] | None = None

    def claim(self, token: str) -> str:
        """Make the folder, lock it until `release` (two runs in one would destroy each other), and leave `token`
        there for other hosts to find. Returns a warning, or nothing.

        Raises:
            CheckpointError: another run has it.
        """
        warning = ""
        self._lock, error = lock(self.path)
        if is_taken(error):
            raise CheckpointError(
                f"training.run_dir {self.path} is in use by another run; wait for it or choose another folder"
            )
        if error:
            warning = (
                f"warning: training.run_dir {self.path} is on a file system without locks ({error.strerror}): nothing "
                "keeps a second run out of it, so start no other one there while this one runs"
            )
        self._token.write_text(token)
        return warning

    @property
    def _token(self) -> Path:
        return self.path / ".start"

    def finds(self, token: str) -> str:
        """Why this host does not find what rank 0 left in the folder, or nothing."""
        missing = [folder for folder in (self.path, *self.path.parents) if not os.path.exists(folder)]
        try:  # a look may be answered from what this host remembers, the file server itself answers this
            self.path.mkdir(parents=True)
        except FileExistsError:
            for _ in range(_LOOKS):
                with suppress(OSError):
                    if self._token.read_text() == token:
                        return ""
                time.sleep(0.5)
            return "has another folder there"
        except OSError as error:
            return f"cannot use it ({error.strerror})"
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        return "has no such folder"

    def release(self) -> None:
        """Let others have the folder. A process that ends does so, too."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def unclaim(self) -> None:
        """Undo `claim`: the run will not start."""
        self.found()
        (self.path / ".lock").unlink(missing_ok=True)
        with suppress(OSError):  # it holds an earlier run
            self.path.rmdir()

    def found(self) -> None:
        """Remove the token: every host has found it."""
        self._token.unlink(missing_ok=True)

    def describe(self, cfg: RunConfig, deepspeed: Mapping[str, Any], findings: Sequence[Finding]) -> None:
        """Write the resolved configuration, the generated DeepSpeed dict and the findings, read-only."""
        for name, text in {
            "config.yaml": dump_config(cfg),
            "deepspeed.json": json.dumps(deepspeed, indent=2) + "\n",
            "findings.json": json.dumps([asdict(finding) for finding in findings], indent=2) + "\n",
        }.items():
            write_atomic(self.path / name, text.encode())
            (self.path / name).chmod((self.path / name).stat().st_mode & 0o444)

    def tell_stability(
        self, step: int, tokens: int, metrics: dict[str, dict[str, float]], critical: dict[str, Any] | None
    ) -> None:
        """Write what was measured so far about the run's stability, and its events by kind, to stability.json.

        metrics: of stability.measured.Measured. critical: of config.earlier_run.critical_tokens.
        """
        events: dict[str, dict[str, Any]] = {}
        path = self.path / "events.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            event = json.loads(line)
            count = events.get(event["kind"], {"count": 0})["count"] + 1
            events[event["kind"]] = {"count": count, "last_step": event["step"], "last": event["text"]}
        tree = {
            "step": step,
            "tokens": tokens,
            CRITICAL: critical,
            "metrics": metrics,
            "events": events,
        }
        write_atomic(self.path / STABILITY_NAME, (json.dumps(tree, indent=1) + "\n").encode())


def changed_settings(old_text: str, new_text: str) -> list[str]:
    """Lines `key: old -> new` for every setting that differs between two dumped configurations."""
    old, new = flat(yaml.safe_load(old_text)), flat(yaml.safe_load(new_text))
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)
    ]
