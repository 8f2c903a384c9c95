"""The common part of stores in buckets: they are reached through fsspec, fail for a while, and answer late.

An answer "it exists already" or "it has changed" may be about this call's own first try, so the bytes are compared
before it counts. A bucket that has answered this process may be away for minutes. One that has not is most likely a
wrong name, endpoint or network, so the first call to it ends within some 20 s.
"""

from __future__ import annotations

import os
import random
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, ClassVar, TypeVar

from sagetrain.config.errors import ConfigError
from sagetrain.config.sections.base import PACKAGES
from sagetrain.storage.store import Store

T = TypeVar("T")

PATIENCE = 180.0
"""The seconds for which a call that fails is tried again."""
_FIRST_PATIENCE = 12.0
"""The seconds for which a call to a bucket is tried again if the bucket has not answered this process yet."""
_FIRST_ANSWER = 6.0
"""The seconds in which such a bucket must answer each try, and one more for each _A_SECOND bytes of data."""
_A_SECOND = 1 << 20
_ANSWERED = set[str]()
_SILENT: dict[str, tuple[float, str]] = {}
"""The buckets that have not answered: when the last call ended, and its error. All checks of a start ask the same one,
which must not take each of them as long."""
_REMEMBERED = 10.0
_PART = 32 << 20
"""The bytes of a part of a large file."""
AT_ONCE = 4
"""The number of requests that are on their way at once; each may have a part in memory."""
_TOO_BUSY = 429, 503
_LIBRARIES = {"aiobotocore", "aiohttp", "asyncio", "botocore", "fsspec", "gcsfs", "google", "requests", "urllib3"}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "SSOTokenLoadError",
                   "UnauthorizedSSOTokenError", "CredentialRetrievalError"}  # fmt: skip


class Bucket(Store):
    """A store in a bucket.

    Args:
        root: bucket and prefix, without the scheme.
        patience: the seconds for which a call that fails is tried again.
    """

    scheme: ClassVar[str]
    reach: ClassVar[str]
    """The advice about a bucket that never answers."""
    rights: ClassVar[str]
    """The advice about rights or credentials that are missing."""
    connect: ClassVar[Any]
    """Returns the connections of this process, whose number it is given. Those of a parent cannot be used."""

    def __init__(self, root: str, patience: float = PATIENCE) -> None:
        self._bucket, _, prefix = root.partition("/")
        self._prefix, self._patience = f"{prefix}/" if prefix else "", patience
        self._url = f"{self.scheme}://{self._bucket}"

    def put(self, name: str, data: bytes, *, absent: bool = False) -> None:
        self._again(name, lambda: self._put(name, data, "" if absent else None), lambda: self._holds(name, data))

    def swap(self, name: str, data: bytes, tag: str) -> None:
        self._again(name, lambda: self._put(name, data, tag), lambda: self.read(name) == data)

    def tagged(self, name: str) -> tuple[bytes, str]:
        while True:
            _, before = self._again(name, lambda: self._head(name))
            data = self.read(name)
            if self._again(name, lambda: self._head(name))[1] == before:
                return data, before

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is None:
            stop, _ = self._again(name, lambda: self._head(name))
        if stop <= start:
            return b""
        # A range is named in any case: s3fs fills what is lacking of a whole file with zeros.
        path, size = f"{self._bucket}/{self._key(name)}", stop - start
        data: bytes = self._again(name, lambda: self._wait("_cat_file", path, start=start, end=stop, size=size))
        # A body that was cut is an error of the connection. This file is shorter than it was said to be.
        if len(data) != size:
            raise OSError(f"{self.scheme}://{path} ends at {start + len(data)}, before {stop}")
        return data

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        more: str | None = None
        while True:
            page, more = self._again(prefix, lambda: self._page(prefix, more))  # noqa: B023
            found |= {key.removeprefix(self._prefix): size for key, size in page.items()}
            if not more:
                return dict(sorted(found.items()))

    def write(self, name: str, blocks: Iterable[memoryview], size: int) -> None:
        # S3 takes 10,000 parts, and Google parts that are multiples of 2^18 bytes.
        parts = _parts(blocks, max(_PART, -(-size // (10_000 << 18)) << 18))
        first = next(parts, b"")
        if len(first) == size:
            self.put(name, first)
        else:
            before = self._found(name)

            def written() -> bool:
                # Another tag tells the new file from an older one of the same size.
                now = self._found(name)
                return now is not None and now != before and now[0] == size

            self._send(name, chain([first], parts), size, written)

    def discard_unfinished(self) -> None:
        """A bucket has no unfinished files: it drops the parts of an upload that never ends by its own rules."""

    @abstractmethod
    def _put(self, name: str, data: bytes, tag: str | None) -> None:
        """Try to write a file that has this tag now; "": that is not there; None: whatever is there."""

    @abstractmethod
    def _head(self, name: str) -> tuple[int, str]:
        """Try to return the size of a file and its tag."""

    @abstractmethod
    def _page(self, prefix: str, more: str | None) -> tuple[dict[str, int], str | None]:
        """Try to return sizes by key, and what the call for the next page is given as `more`."""

    @abstractmethod
    def _send(self, name: str, parts: Iterator[bytes], size: int, written: Callable[[], bool]) -> None:
        """Write a file of several parts. `written` tells, after a refusal of the last call, whether it is there."""

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _found(self, name: str) -> tuple[int, str] | None:
        """Return the size of a file and its tag, None if there is none."""
        with suppress(FileNotFoundError):
            return self._again(name, lambda: self._head(name))
        return None

    def _holds(self, name: str, data: bytes) -> bool:
        with suppress(FileNotFoundError):
            return self.read(name) == data
        return False

    def _wait(self, coroutine: str, *how: Any, size: int = 0, **more: Any) -> Any:
        """Wait for a coroutine of the file system, by its name. `size` has the bytes that it moves."""
        try:
            filesystem = self.connect(os.getpid())
        except ImportError as error:
            what = f"{self.scheme}:// needs {PACKAGES[self.scheme]}, which is not installed here"
            raise ConfigError(f"{what}: pip install 'sagetrain[{self.scheme}]'") from error
        # This import loads asyncio and more.
        from fsspec.asyn import sync

        seconds = None if self._url in _ANSWERED else _FIRST_ANSWER + size / _A_SECOND
        return sync(filesystem.loop, getattr(filesystem, coroutine), *how, timeout=seconds, **more)

    def _again(self, name: str, act: Callable[[], T], done: Callable[[], bool] | None = None) -> T:
        """Call `act`, and again after failures that may pass.

        Args:
            done: tells, after a refusal that may be about this call's own first try, whether that one was carried out.
        """
        first, wait, began = self._url not in _ANSWERED, 0.1, time.monotonic()
        said = not first
        where = f"{self._url}/{self._key(name)}"
        ended, why = _SILENT.get(self._url, (-_REMEMBERED, ""))
        if first and began - ended < _REMEMBERED:
            raise OSError(f"{where}: {why}")
        while True:
            try:
                found = act()
                _ANSWERED.add(self._url)
                return found
            except Exception as error:
                (kind, status), text = _judged(error), _text_of(error)
                if kind in ("refused", "missing") or status in _TOO_BUSY:
                    _ANSWERED.add(self._url)
                if done and kind in ("refused", "missing") and done():
                    return None  # type: ignore[return-value]
                if kind == "refused":
                    raise FileExistsError(f"{where}: another writer was first") from error
                if kind == "missing":
                    raise FileNotFoundError(f"{where}: no such file or bucket ({text})") from error
                if kind == "expired":
                    self.connect.cache_clear()
                elif kind == "denied":
                    raise PermissionError(f"{where}: {text}. {self.rights}") from error
                elif not kind:
                    raise
                first = self._url not in _ANSWERED
                patience = min(self._patience, _FIRST_PATIENCE) if first else self._patience
                if not said:
                    print(f"waiting for {where}, for {patience:.0f} s: {text}", file=sys.stderr, flush=True)
                    said = True
                if time.monotonic() + wait > began + patience:
                    expired = kind == "expired"
                    why = f"{text} (tried for {patience:.0f} s){f'. {self.rights}' if expired else ''}"
                    if first and status is None:
                        why += "" if expired else f"; {self.reach}"
                        _SILENT[self._url] = time.monotonic(), why
                        # The endpoint may be another one at the next call.
                        self.connect.cache_clear()
                    raise (PermissionError if expired else OSError)(f"{where}: {why}") from error
                time.sleep(wait * (0.5 + random.random()))
                wait = min(2 * wait, 20.0)


def _judged(error: Exception) -> tuple[str, int | None]:
    """Return what an error means, and its HTTP status if the server has answered. It means refused, missing, expired
    (read the credentials again), denied, passing, or "", a mistake of ours. s3fs has the answer in the cause of an
    error; a refused If-Match is an OSError. gcsfs has the status in the error, but for 400 and 403."""
    cause, text, code = error.__cause__, str(error), getattr(error, "code", None)
    answer, told = getattr(cause, "response", None), repr(cause)
    status = answer["ResponseMetadata"].get("HTTPStatusCode") if answer else code
    if isinstance(error, FileExistsError) or "PreconditionFailed" in told:
        return "refused", status
    if isinstance(error, FileNotFoundError):
        return "missing", status
    if "ExpiredToken" in told or code == 401 or type(error).__name__ == "DefaultCredentialsError":
        return "expired", status
    if isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS or text.startswith("Forbidden: "):
        return "denied", status
    # Errors of the network have the types of the libraries that meet them.
    passing = isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _LIBRARIES
    return "passing" if passing or text.startswith("Bad Request: ") else "", status


def _text_of(error: BaseException) -> str:
    """Return the text of an error in one line, without the numbers that are put before it."""
    if type(error).__name__ == "FSTimeoutError":
        return "no answer in time"
    if type(error).__module__ == "gcsfs.retry" and (cause := error.__cause__):  # Credentials cannot be renewed.
        return str(cause.args[0] if cause.args else cause)
    if type(error).__name__ == "DefaultCredentialsError":  # The file of Google's credentials cannot be read.
        return ": ".join(map(str, error.args))
    text = str(error.args[1] if isinstance(error, OSError) and len(error.args) > 1 else error)
    return " ".join(text.split()) or repr(error)


def _parts(blocks: Iterable[memoryview], size: int) -> Iterator[bytes]:
    """Yield the bytes of blocks in parts of `size`. The last part may be shorter."""
    held = bytearray()
    for block in blocks:
        view = block.cast("B")
        for low in range(0, len(view), size):
            held += view[low : low + size]
            if len(held) >= size:
                yield bytes(held[:size])
                del held[:size]
    if held:
        yield bytes(held)
