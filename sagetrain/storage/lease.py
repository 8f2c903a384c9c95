"""The right of one run to write into a folder of a store.

The file `owner.json` names the run, and the run renews it every minute. A lock of the operating system would end with
the process. A file stays after a kill, so another run watches it: a file that nobody renews belongs to nobody. Clocks
of two hosts are not compared.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from sagetrain.config.errors import CheckpointError
from sagetrain.storage.url_path import UrlPath, store_at

OWNER = "owner.json"
BEAT = 60.0
"""The seconds between two renewals."""
_PATIENCE = 10.0
"""The seconds in which a store must answer before a run starts."""


class Lease:
    """The lease of a folder for one run.

    Args:
        folder: the folder of the store.
        run: the identity of the run. A run that was killed and starts again has the same one, and waits for nothing.
        beat: the seconds between two renewals.
    """

    def __init__(self, folder: UrlPath, run: str, beat: float = BEAT) -> None:
        self._folder, self._store, self._run, self._beat = folder, store_at(folder), run, beat
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def claim(self, say: Callable[[str], None]) -> None:
        """Take the lease, and renew it until `release`. This waits, and says so, if another run had it, to see whether
        that run is alive. Raises CheckpointError if another run has the lease."""
        try:
            self._store.put(OWNER, self._owner(), absent=True)
        except FileExistsError:
            found, tag = self._store.tagged(OWNER)
            owner = _parsed(found)
            taken = f"{self._folder} is in use by another run, on host {owner.get('host', '?')}"
            try:
                if owner.get("run") != self._run:
                    wait = 2.5 * self._beat
                    say(f"{taken}, or one that was killed: waiting {wait:.0f} s to see whether it is alive")
                    until = time.monotonic() + wait
                    while time.monotonic() < until:
                        time.sleep(self._beat / 4)
                        if self._store.tagged(OWNER)[1] != tag:
                            raise FileExistsError(OWNER)
                self._store.swap(OWNER, self._owner(), tag)
            except (FileExistsError, FileNotFoundError) as error:
                raise CheckpointError(f"{taken}: give each run a training.run_url of its own") from error
        self._thread.start()

    def release(self) -> None:
        """Give the lease back."""
        self._ended.set()
        self._thread.join()
        with suppress(OSError, CheckpointError):
            self.check()
            self._store.delete([OWNER])

    def check(self) -> None:
        """Check that the run still has the lease. Raises CheckpointError if another run has taken it, for instance
        because this process was stopped for minutes, and OSError if the store does not answer."""
        try:
            owner = _parsed(self._store.read(OWNER))
        except FileNotFoundError:
            owner = {}
        if owner.get("run") != self._run:
            raise CheckpointError(
                f"{self._folder} has another owner by now, on host {owner.get('host', '?')}: this run may no longer "
                "write there; give each run a training.run_url of its own"
            )

    def _renew(self) -> None:
        while not self._ended.wait(self._beat):
            # A store that is away for a while is the saver's concern. The next beat tries again.
            with suppress(OSError):
                found, tag = self._store.tagged(OWNER)
                if _parsed(found).get("run") != self._run:
                    return
                self._store.swap(OWNER, self._owner(), tag)

    def _owner(self) -> bytes:
        """Return what the file says. It differs each time, so that a change can be seen."""
        tree = {"run": self._run, "host": socket.gethostname(), "token": secrets.token_hex(8)}
        return json.dumps(tree).encode()


def _parsed(text: bytes) -> dict[str, str]:
    with suppress(ValueError):
        if isinstance(tree := json.loads(text), dict):
            return tree
    return {}


def check_rights(folder: UrlPath) -> str:
    """Check that files can be written, replaced and deleted in a folder of a store. Return a warning if the store
    replaces a file that another writer has put, or an empty text. Raises CheckpointError if a right is missing, or the
    place does not exist."""
    store, name = store_at(folder, _PATIENCE), f".probe-{secrets.token_hex(8)}"
    try:
        store.put(name, b"1", absent=True)
        try:
            store.put(name, b"2", absent=True)
            warning = (
                f"warning: {folder} is in a store that replaces files it was asked to keep (by If-None-Match, or "
                "ifGenerationMatch): nothing keeps a second run out of it, start no other one there while this one runs"
            )
        except FileExistsError:
            warning = ""
        store.names(name)
        store.delete([name])
    except PermissionError as error:
        raise CheckpointError(f"training.run_url {folder}: {error}, or choose another place") from error
    except OSError as error:
        raise CheckpointError(
            f"training.run_url {folder} cannot be written to: {error}; make the bucket, or choose another place"
        ) from error
    return warning
