"""A bucket of Google Cloud Storage, through its JSON interface and fsspec's gcsfs (extra gs).

Credentials come from where Google's tools look for them: GOOGLE_APPLICATION_CREDENTIALS, gcloud, or the service account
of the machine; without any, the bucket must be public. STORAGE_EMULATOR_HOST names another server.
The tag of a file is its generation. A write that names a generation in ifGenerationMatch is refused with 412 if the
file has another one by then; 0 stands for no file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any

from sagetrain.storage.bucket import AT_ONCE, Bucket


@lru_cache(maxsize=1)
def _filesystem(process: int) -> Any:
    from aiohttp import ClientTimeout
    from gcsfs.core import GCSFileSystem

    class Once(GCSFileSystem):  # type: ignore[misc]
        """gcsfs without its own retries, which take half a minute in silence. The store tries again, and says so."""

        _request = GCSFileSystem._request.__wrapped__

        async def upload(self, bucket: str, **how: Any) -> Any:
            """Begin or do an upload, and return the headers of the answer."""
            return (await self._call("POST", f"{self._location}/upload/storage/v1/b/{bucket}/o", **how))[0]

    timeout = ClientTimeout(total=None, sock_connect=5, sock_read=60)
    # Without a token gcsfs passes over a key that it cannot read, and goes on without credentials.
    token = "google_default" if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") else None
    return Once(token=token, skip_instance_cache=True, use_listings_cache=False, requests_timeout=timeout)


class GS(Bucket):
    """A store in a bucket of Google Cloud Storage."""

    scheme = "gs"
    connect = staticmethod(_filesystem)
    reach = "look at the bucket's name, the way to storage.googleapis.com, and STORAGE_EMULATOR_HOST if it is set"
    rights = (
        "Give these credentials the role Storage Object User there (storage.objects.create, get, list and delete), or "
        "name others (GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`)"
    )

    def delete(self, names: Iterable[str]) -> None:
        def one(name: str) -> None:
            with suppress(FileNotFoundError):
                self._again(name, lambda: self._wait("_call", "DELETE", "b/{}/o/{}", self._bucket, self._key(name)))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, names))

    def _put(self, name: str, data: bytes, tag: str | None) -> None:
        how: Any = {"uploadType": "media", "name": self._key(name), "ifGenerationMatch": "0" if tag == "" else tag}
        self._wait("upload", self._bucket, data=data, size=len(data), **how)

    def _head(self, name: str) -> tuple[int, str]:
        found = self._wait("_call", "GET", "b/{}/o/{}", self._bucket, self._key(name), json_out=True)
        return int(found["size"]), str(found["generation"])

    def _page(self, prefix: str, more: str | None) -> tuple[dict[str, int], str | None]:
        key = self._key(prefix)
        page = self._wait("_call", "GET", "b/{}/o", self._bucket, prefix=key, pageToken=more, json_out=True)
        return {each["name"]: int(each["size"]) for each in page.get("items", ())}, page.get("nextPageToken")

    def _send(self, name: str, parts: Iterator[bytes], size: int, written: Callable[[], bool]) -> None:
        how: Any = {"uploadType": "resumable", "name": self._key(name), "json": {}}
        session = self._again(name, lambda: self._wait("upload", self._bucket, **how))["Location"]
        held, low = 0, 0

        def put(part: str, data: bytes = b"") -> int:
            """Send bytes of the file, and return how many of its first bytes the server has then."""
            span = {"Content-Range": f"bytes {part}/{size}"}
            status, headers, *_ = self._wait("_request", "PUT", session, headers=span, data=data, size=len(data))
            return int(headers.get("Range", "-1").rpartition("-")[2]) + 1 if status == 308 else size

        def send(part: bytes) -> None:
            nonlocal held
            # After a try that failed, the server says how far it came.
            while (begin := put("*") if held < 0 else held) < low + len(part):
                held = -1
                if begin < low:
                    raise OSError(f"the server has lost bytes {begin} to {low} of an upload")
                held = put(f"{begin}-{low + len(part) - 1}", part[begin - low :])
            held = begin

        for part in parts:
            last = low + len(part) == size  # It makes the file.
            self._again(name, lambda: send(part), written if last else None)  # noqa: B023
            low += len(part)
