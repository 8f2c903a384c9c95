"""The folder of a run: the names of the files in it, who may write there, and the texts in it for people.

checkpoint/on_disk.py describes the checkpoints, and training/writers.py the metrics.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from sagetrain.cluster.run_copy import bring, send
from sagetrain.config.earlier_run import CRITICAL, STABILITY_NAME
from sagetrain.config.errors import CheckpointError, Finding
from sagetrain.config.load import dump_config
from sagetrain.config.schema import RunConfig
from sagetrain.data.token_file import write_atomic
from sagetrain.storage.lease import Lease, check_rights
from sagetrain.storage.local import read_rows
from sagetrain.storage.url_path import UrlPath, checkpoints_of

_LOOKS = 10
"""The number of times to look for a new file, because a network file system may show it late."""


def lock(folder: Path) -> tuple[IO[str], OSError | None]:
    """Make a folder and lock it. Return a file that holds the lock as long as it is open, and the error that prevented
    the lock. The error is None if the lock was taken. Otherwise the file system has no locks, or another process holds
    the lock (`is_taken`)."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return file, error
    return file, None


def is_taken(error: OSError | None) -> bool:
    """Whether the error of `lock` says that another process uses the folder."""
    return error is not None and error.errno in (errno.EWOULDBLOCK, errno.EACCES)


class RunFolder:
    """The folder training.run_dir."""

    def __init__(self, path: Path, url: str | None = None):
        self.path = path
        self.url = UrlPath(url) if url else None
        """The folder of the run in a store, or None."""
        self.checkpoints = checkpoints_of(path, url)
        self.log = path / "log.txt"
        self.stacks = path / "stacks"
        """The folder of the stacks that each rank had when the run hung."""
        self.attention = path / "attention.json"
        """The table of what `auto` chose for attention.backend and attention.recipe, and why."""
        self.linear = path / "linear.json"
        """The table of what `auto` chose for linear.precision, and why."""
        self.overlap = path / "overlap.json"
        """The table of what `auto` chose for parallel.tensor_parallel_overlap, and why."""
        self._lock: IO[str] | None = None
        self._lease: Lease | None = None

    def claim(self, token: str, say: Callable[[str], None] = lambda text: None) -> str:
        """Make the folder, lock it until `release`, and leave `token` there for other hosts to find. Two runs in one
        folder would destroy each other's files. A folder in a store (training.run_url) is taken as well; `say` gets a
        line if this waits. Return a warning, or an empty text. Raises CheckpointError if another run uses the folder,
        or the store cannot be written to."""
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
        return "\n".join(filter(None, [warning, self._claim_store(say) if self.url else ""]))

    def _claim_store(self, say: Callable[[str], None]) -> str:
        """Check the rights in the store, and take its lease. Return a warning, or an empty text."""
        assert self.url
        warning, lease = check_rights(self.url), Lease(self.url, self.identity())
        lease.claim(say)
        self._lease = lease
        bring(self.url, self.path)
        return warning

    def identity(self) -> str:
        """Return a random text that the folder keeps for as long as it exists. Rank 0 calls this."""
        path = self.path / ".run"
        if not path.exists():
            write_atomic(path, secrets.token_hex(16).encode())
        return path.read_text()

    def send(self) -> None:
        """Copy the small files to the store, if there is one. A store that is away for a while gets them with the next
        checkpoint."""
        if self.url and self._lease:
            with suppress(OSError):
                send(self.path, self.url)

    def check_owner(self) -> None:
        """Check that the run may still write to its store, if it has one. Raises CheckpointError if not."""
        if self._lease:
            self._lease.check()

    @property
    def _token(self) -> Path:
        return self.path / ".start"

    def finds(self, token: str) -> str:
        """Say why this host does not find the token that rank 0 left in the folder. The text is empty if it does."""
        missing = [folder for folder in (self.path, *self.path.parents) if not os.path.exists(folder)]
        # A lookup may be answered from this host's cache, but the file server itself answers this call.
        try:
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
        """Release the lock of the folder, and the lease of the store. The end of the process releases the lock, too."""
        if self._lease is not None:
            with suppress(CheckpointError, OSError):
                self.check_owner()
                self.send()
            self._lease.release()
            self._lease = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def unclaim(self) -> None:
        """Undo `claim`, because the run will not start."""
        self.found()
        (self.path / ".lock").unlink(missing_ok=True)
        # The folder is not empty if it holds an earlier run.
        with suppress(OSError):
            self.path.rmdir()

    def found(self) -> None:
        """Remove the token after every host has found it."""
        self._token.unlink(missing_ok=True)

    def describe(self, cfg: RunConfig, engine: str, settings: Mapping[str, Any], findings: Sequence[Finding]) -> None:
        """Write the resolved configuration, the settings of its engine and the findings as read-only files. Another
        engine that the run had before leaves no file."""
        (self.path / f"{'fsdp' if engine == 'deepspeed' else 'deepspeed'}.json").unlink(missing_ok=True)
        for name, text in {
            "config.yaml": dump_config(cfg),
            f"{engine}.json": json.dumps(settings, indent=2) + "\n",
            "findings.json": json.dumps([asdict(finding) for finding in findings], indent=2) + "\n",
        }.items():
            write_atomic(self.path / name, text.encode())
            (self.path / name).chmod((self.path / name).stat().st_mode & 0o444)

    def tell_stability(
        self, step: int, tokens: int, metrics: dict[str, dict[str, float]], critical: dict[str, Any] | None
    ) -> None:
        """Write the measurements of the run's stability so far (stability.measured.Measured), and its events by kind,
        to stability.json. `critical` is the result of config.earlier_run.critical_tokens."""
        events: dict[str, dict[str, Any]] = {}
        for event in read_rows(self.path / "events.jsonl"):
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
