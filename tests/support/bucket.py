"""Servers of S3, moto's, and of Google Cloud Storage (google_server.py) on this machine, whose faults a test chooses.
Tests talk to them through sockets, as to Amazon's and Google's.

with served("s3") as bucket:
    bucket.faults(**{"500": 0.3})    # of all requests, drawn
    bucket.faults(expired=2)         # the next two requests
    bucket.faults(lost=1)            # the next request is carried out, and answered with an error
    bucket.faults(hold=1)            # moments after the first file of them do not arrive until the faults change
"""

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote

import google_server

DENIED = "readonly"
"""A bucket in which nothing may be written."""
_ERRORS = {
    "s3": {
        "500": ("500 fault", "InternalError"),
        "lost": ("500 fault", "InternalError"),
        "503": ("503 fault", "SlowDown"),
        "expired": ("400 fault", "ExpiredToken"),
        "denied": ("403 fault", "AccessDenied"),
    },
    "gs": {
        "500": ("500 fault", "backendError"),
        "lost": ("500 fault", "backendError"),
        "503": ("503 fault", "slow down"),
        "expired": ("401 fault", "Invalid Credentials"),
        "denied": ("403 fault", "run@project does not have storage.objects.create access"),
    },
}


class Bucket:
    """The server, and a bucket of it whose URL is `url`. `folder` is one for the files of credentials."""

    name = "bucket"

    def __init__(self, kind: str, port: int, folder: Path) -> None:
        self.kind, self.port, self.url, self.denied = kind, port, f"{kind}://{self.name}", f"{kind}://{DENIED}"
        if kind == "gs":
            google_server.write_key(folder / "key.json", port)
            self.environment = {
                "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
                "GOOGLE_APPLICATION_CREDENTIALS": str(folder / "key.json"),
                "CLOUDSDK_CONFIG": str(folder),
                "NO_GCE_CHECK": "true",
            }
            return
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def faults(self, **shares: float) -> dict[str, int]:
        """Replace the faults, and return how many there were of each kind since the last call. A share below 1 is
        drawn, the same way each time; a number from 1 on counts the requests to come."""
        url = f"http://127.0.0.1:{self.port}/_faults"
        request = urllib.request.Request(url, json.dumps(shares).encode(), method="PUT")
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())


@contextmanager
def served(kind: str) -> Iterator[Bucket]:
    """Start the server in a process of its own, on a port that the kernel chooses, with empty buckets."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    command = [sys.executable, __file__, kind]
    with (
        TemporaryDirectory() as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process,
    ):
        try:
            yield Bucket(kind, int(process.stdout.readline()), Path(folder))
        finally:
            process.kill()


def amazon() -> Callable:
    """Return moto's application, with empty buckets."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = str(google_server.PAGE)
    from moto.s3.models import s3_backends
    from moto.server import DomainDispatcherApplication, create_backend_app

    for name in (Bucket.name, DENIED):
        s3_backends["123456789012"]["aws"].create_bucket(name, "us-east-1")
    return DomainDispatcherApplication(create_backend_app)


def main(kind: str) -> None:
    """Serve until killed, and print the port."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    app = amazon() if kind == "s3" else google_server.application((Bucket.name, DENIED))
    shares, count, draw = {}, {}, random.Random(1)

    def failed(start, fault):
        status, code = _ERRORS[kind][fault]
        if kind == "gs":
            return google_server.failure(start, status, code)
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}, a fault</Message></Error>".encode()
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    def is_due(fault):
        share = shares[fault]
        if share >= 1:
            shares[fault] -= 1
        due = share >= 1 or draw.random() < share
        count[fault] = count.get(fault, 0) + due
        return due

    def is_object(query):
        return "list-type" not in query if kind == "s3" else "alt=media" in query

    def serve(environ, start):
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path == "/_faults":
            told = json.dumps(count).encode()
            shares.clear()
            count.clear()
            draw.seed(1)
            shares.update(json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))))
            start("200 OK", [("Content-Length", str(len(told)))])
            return [told]
        if path.startswith(google_server.TOKENS):
            return app(environ, start)
        if f"/{DENIED}/" in path and method not in ("GET", "HEAD"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return failed(start, "denied")
        if "hold" in shares and method in ("POST", "PUT") and "/moments-" in unquote(environ["RAW_URI"]):
            shares["hold"] -= 1
            while shares.get("hold", 0) < 0:
                time.sleep(0.05)
        for fault in list(shares):
            if fault in _ERRORS[kind] and is_due(fault):
                # Half of the failures come after the server has done the work, as real ones may.
                if fault == "lost" or (fault != "expired" and draw.random() < 0.5):
                    list(app(environ, lambda *_: None))
                else:
                    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                if fault == "expired" and kind == "gs":
                    app.tokens.clear()
                return failed(start, fault)
            if fault == "slow" and is_due(fault):
                time.sleep(0.05)
            if fault == "cut" and method == "GET" and is_object(environ["QUERY_STRING"]) and is_due(fault):
                whole = b"".join(app(environ, start))
                return [whole[: len(whole) // 2]]
        return app(environ, start)

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_):
            pass

    server = make_server("127.0.0.1", 0, serve, threaded=True, request_handler=Quiet)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
