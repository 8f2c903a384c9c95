"""A bucket of S3, or of a server that speaks its protocol, through fsspec's s3fs (extra s3).

Credentials, region and endpoint come from where every AWS tool looks for them: AWS_PROFILE, AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, the role of the machine, or fsspec's own configuration.

An answer "it exists already" or "it has changed" may be about this call's own first try, so the bytes are compared
before it counts. A refused If-Match arrives as an OSError with EINVAL.

A bucket that has answered this process may be away for minutes. One that has not is most likely a wrong name, endpoint
or network, so the first call to it ends within some 20 s.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

from sagetrain.config.errors import ConfigError
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
"""The bytes of a part of a large file. S3 takes 10,000 parts."""
_AT_ONCE = 4
"""The number of parts that are on their way at once, each with a copy in memory."""
_MOST_DELETED = 1000


class S3(Store):
    """A store in a bucket.

    Args:
        root: bucket and prefix, without s3://.
        patience: the seconds for which a call that fails is tried again.
    """

    def __init__(self, root: str, patience: float = PATIENCE) -> None:
        self._bucket, _, prefix = root.partition("/")
        self._prefix, self._patience = f"{prefix}/" if prefix else "", patience

    def put(self, name: str, data: bytes, *, absent: bool = False) -> None:
        condition = {"IfNoneMatch": "*"} if absent else {}
        self._again(name, lambda: self._call("put_object", name, Body=data, **condition), self._holds(name, data))

    def swap(self, name: str, data: bytes, tag: str) -> None:
        self._again(name, lambda: self._call("put_object", name, Body=data, IfMatch=tag), self._holds(name, data))

    def tagged(self, name: str) -> tuple[bytes, str]:
        while True:
            before = self._tag(name)
            data = self.read(name)
            if self._tag(name) == before:
                return data, before

    def _tag(self, name: str) -> str:
        return self._again(name, lambda: str(self._call("head_object", name)["ETag"]))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is None:
            stop = self._again(name, lambda: int(self._call("head_object", name)["ContentLength"]))
        if stop <= start:
            return b""

        # A range is named in any case: s3fs fills what is lacking of a whole file with zeros.
        path = f"{self._bucket}/{self._prefix}{name}"
        data: bytes = self._again(name, lambda: self._wait("_cat_file", path, start=start, end=stop))
        # A body that was cut is an error of the connection. This file is shorter than it was said to be.
        if len(data) != stop - start:
            raise OSError(f"s3://{path} ends at {start + len(data)}, before {stop}")
        return data

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        more: dict[str, str] = {}
        while True:
            page = self._again(prefix, lambda: self._call("list_objects_v2", prefix, **more))  # noqa: B023
            for entry in page.get("Contents", ()):
                found[entry["Key"].removeprefix(self._prefix)] = entry["Size"]
            if not page.get("IsTruncated"):
                return dict(sorted(found.items()))
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, names: Iterable[str]) -> None:
        keys = [{"Key": f"{self._prefix}{name}"} for name in names]
        for low in range(0, len(keys), _MOST_DELETED):
            some = keys[low : low + _MOST_DELETED]

            def once() -> None:
                answer = self._call("delete_objects", "", Delete={"Objects": some, "Quiet": True})  # noqa: B023
                for error in answer.get("Errors", ()):
                    kind = PermissionError if error["Code"] == "AccessDenied" else OSError
                    raise kind(f"{error['Key']}: {error['Message']}")

            self._again(some[0]["Key"], once)

    def write(self, name: str, blocks: Iterable[memoryview], size: int) -> None:
        parts = _parts(blocks, max(_PART, -(-size // 10_000)))
        first = next(parts, b"")
        if len(first) == size:
            self.put(name, first)
            return
        upload = self._again(name, lambda: self._call("create_multipart_upload", name))["UploadId"]

        def send(number: int, part: bytes) -> dict[str, Any]:
            sent = self._again(name, lambda: self._call(
                "upload_part", name, PartNumber=number, UploadId=upload, Body=part))  # fmt: skip
            return {"PartNumber": number, "ETag": sent["ETag"]}

        try:
            waiting, done = [], []
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                for number, part in enumerate(_behind(first, parts), 1):
                    waiting.append(pool.submit(send, number, part))
                    if len(waiting) == _AT_ONCE:
                        done.append(waiting.pop(0).result())
            done += map(Future.result, waiting)
            self._again(name, lambda: self._call(
                "complete_multipart_upload", name, UploadId=upload, MultipartUpload={"Parts": done}
            ), lambda: self.sizes(name).get(name) == size)  # fmt: skip
        except BaseException:
            with suppress(Exception):  # Parts that stay cost money, until the bucket's rules remove them.
                self._call("abort_multipart_upload", name, UploadId=upload)
            raise

    def _holds(self, name: str, data: bytes) -> Callable[[], bool]:
        return lambda: self.read(name) == data

    def _call(self, method: str, name: str, **arguments: Any) -> Any:
        """Call a method of botocore's client."""
        key = f"{self._prefix}{name}"
        if method == "list_objects_v2":
            arguments["Prefix"] = key
        elif method != "delete_objects":
            arguments["Key"] = key
        return self._wait("_call_s3", method, Bucket=self._bucket, **arguments)

    def _wait(self, coroutine: str, *how: Any, **more: Any) -> Any:
        """Wait for a coroutine of s3fs, by its name."""
        filesystem = _filesystem(os.getpid())
        # This import loads asyncio and more.
        from fsspec.asyn import sync

        size = len(more.get("Body", b"")) or more.get("end", 0) - more.get("start", 0)
        seconds = None if self._bucket in _ANSWERED else _FIRST_ANSWER + size / _A_SECOND
        return sync(filesystem.loop, getattr(filesystem, coroutine), *how, timeout=seconds, **more)

    def _again(self, name: str, act: Callable[[], T], done: Callable[[], bool] | None = None) -> T:
        """Call `act`, and again after failures that may pass.

        Args:
            done: tells, after a refusal that may be about this call's own first try, whether that one was carried out.
        """
        first, wait, began = self._bucket not in _ANSWERED, 0.1, time.monotonic()
        said = not first
        where = f"s3://{self._bucket}/{self._prefix}{name}"
        ended, why = _SILENT.get(self._bucket, (-_REMEMBERED, ""))
        if first and began - ended < _REMEMBERED:
            raise OSError(f"{where}: {why}")
        while True:
            try:
                found = act()
                _ANSWERED.add(self._bucket)
                return found
            except Exception as error:
                refused = isinstance(error, FileExistsError) or "PreconditionFailed" in repr(error.__cause__)
                missing = isinstance(error, FileNotFoundError)
                answer = getattr(error.__cause__, "response", None)
                status = answer["ResponseMetadata"].get("HTTPStatusCode") if answer else None
                if refused or missing or status in _TOO_BUSY:
                    _ANSWERED.add(self._bucket)
                if done and (refused or missing) and _true(done):
                    return None  # type: ignore[return-value]
                if refused:
                    raise FileExistsError(f"{where}: another writer was first") from error
                if missing:
                    raise FileNotFoundError(f"{where}: {_said(error)}") from error
                expired = "ExpiredToken" in repr(error.__cause__)
                if expired:  # New connections read credentials that were renewed in their file.
                    _filesystem.cache_clear()
                elif isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS:
                    raise PermissionError(f"{where}: {_said(error)}") from error
                # Errors of the network have the types of the libraries that meet them.
                if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in _LIBRARIES:
                    raise
                first = self._bucket not in _ANSWERED
                patience = min(self._patience, _FIRST_PATIENCE) if first else self._patience
                if not said:
                    print(f"waiting for {where}, for {patience:.0f} s: {_said(error)}", file=sys.stderr, flush=True)
                    said = True
                if time.monotonic() + wait > began + patience:
                    why = f"{_said(error)} (tried for {patience:.0f} s)"
                    if first and not answer:
                        why += f"; {_REACH}"
                        _SILENT[self._bucket] = time.monotonic(), why
                        # The endpoint may be another one at the next call.
                        _filesystem.cache_clear()
                    raise (PermissionError if expired else OSError)(f"{where}: {why}") from error
                time.sleep(wait * (0.5 + random.random()))
                wait = min(2 * wait, 20.0)


_REACH = "look at the bucket's name, the endpoint (AWS_ENDPOINT_URL, endpoint_url in ~/.aws/config) and the way to it"
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "SSOTokenLoadError",
                   "UnauthorizedSSOTokenError", "CredentialRetrievalError"}  # fmt: skip
_TOO_BUSY = 429, 503
_LIBRARIES = {"aiobotocore", "aiohttp", "asyncio", "botocore", "fsspec", "urllib3"}


def _true(done: Callable[[], bool]) -> bool:
    with suppress(FileNotFoundError):
        return done()
    return False


def _said(error: BaseException) -> str:
    """Return the text of an error without the numbers that are put before it."""
    if type(error).__name__ == "FSTimeoutError":
        return "no answer in time"
    return str(error.args[1] if isinstance(error, OSError) and len(error.args) > 1 else error) or repr(error)


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


def _behind(first: bytes, others: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from others


@lru_cache(maxsize=1)
def _filesystem(process: int) -> Any:
    """Return this process's connections. Those of a parent cannot be used. Raises ConfigError if s3fs is not
    installed."""
    try:
        from s3fs import S3FileSystem
    except ImportError as error:
        raise ConfigError("s3:// needs s3fs, which is not installed here: pip install 'sagetrain[s3]'") from error
    found = S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        config_kwargs={"retries": {"max_attempts": 0}, "connect_timeout": 5, "read_timeout": 60},
    )
    found.retries = 1  # S3 tries again, and says so.
    return found
