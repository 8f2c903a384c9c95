"""A bucket of S3, or of a server that speaks its protocol, through fsspec's s3fs (extra s3).

Credentials, region and endpoint come from where every AWS tool looks for them: AWS_PROFILE, AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, the role of the machine, or fsspec's own configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any

from sagetrain.storage.bucket import AT_ONCE, Bucket


@lru_cache(maxsize=1)
def _filesystem(process: int) -> Any:
    from s3fs import S3FileSystem

    config = {"retries": {"max_attempts": 0}, "connect_timeout": 5, "read_timeout": 60}
    found = S3FileSystem(skip_instance_cache=True, use_listings_cache=False, config_kwargs=config)
    found.retries = 1  # The store tries again, and says so.
    return found


class S3(Bucket):
    """A store in a bucket of S3."""

    scheme = "s3"
    connect = staticmethod(_filesystem)
    reach = "look at the bucket's name, the endpoint (AWS_ENDPOINT_URL, endpoint_url in ~/.aws/config), the way to it"
    rights = (
        "Give these credentials the rights to put, get, list and delete there (s3:PutObject, s3:GetObject, "
        "s3:ListBucket, s3:DeleteObject), or name others (AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
    )

    def delete(self, names: Iterable[str]) -> None:
        keys = [{"Key": self._key(name)} for name in names]
        for low in range(0, len(keys), 1000):  # S3 takes no more at once.
            some = keys[low : low + 1000]

            def once() -> None:
                answer = self._call("delete_objects", Delete={"Objects": some, "Quiet": True})  # noqa: B023
                for error in answer.get("Errors", ()):
                    kind = PermissionError if error["Code"] == "AccessDenied" else OSError
                    raise kind(f"{error['Key']}: {error['Message']}")

            self._again(some[0]["Key"], once)

    def _put(self, name: str, data: bytes, tag: str | None) -> None:
        condition = {} if tag is None else {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
        self._call("put_object", Key=self._key(name), Body=data, **condition)

    def _head(self, name: str) -> tuple[int, str]:
        found = self._call("head_object", Key=self._key(name))
        return int(found["ContentLength"]), str(found["ETag"])

    def _page(self, prefix: str, more: str | None) -> tuple[dict[str, int], str | None]:
        page = self._call("list_objects_v2", Prefix=self._key(prefix), **({"ContinuationToken": more} if more else {}))
        return {entry["Key"]: entry["Size"] for entry in page.get("Contents", ())}, page.get("NextContinuationToken")

    def _send(self, name: str, parts: Iterator[bytes], size: int, written: Callable[[], bool]) -> None:
        key = self._key(name)
        upload = self._again(name, lambda: self._call("create_multipart_upload", Key=key))["UploadId"]

        def send(number: int, part: bytes) -> dict[str, Any]:
            sent = self._again(name, lambda: self._call(
                "upload_part", Key=key, PartNumber=number, UploadId=upload, Body=part))  # fmt: skip
            return {"PartNumber": number, "ETag": sent["ETag"]}

        try:
            waiting, done = [], []
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for number, part in enumerate(parts, 1):
                    waiting.append(pool.submit(send, number, part))
                    if len(waiting) == AT_ONCE:
                        done.append(waiting.pop(0).result())
            done += map(Future.result, waiting)
            self._again(name, lambda: self._call(
                "complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": done}
            ), written)  # fmt: skip
        except BaseException:
            with suppress(Exception):  # Parts that stay cost money, until the bucket's rules remove them.
                self._call("abort_multipart_upload", Key=key, UploadId=upload)
            raise

    def _call(self, method: str, **arguments: Any) -> Any:
        """Call a method of botocore's client."""
        return self._wait("_call_s3", method, Bucket=self._bucket, size=len(arguments.get("Body", b"")), **arguments)
