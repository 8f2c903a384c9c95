"""An S3 server on this machine, moto's, whose faults a test chooses. Tests talk to it through sockets, as to Amazon's.

with served() as bucket:
    bucket.faults(**{"500": 0.3})    # of all requests, drawn
    bucket.faults(expired=2)         # the next two requests
    bucket.faults(hold=1)            # moments after the first file of them do not arrive until the faults change
"""

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

DENIED = "readonly"
"""A bucket in which nothing may be written."""
_ERRORS = {
    "500": ("500 fault", "InternalError"),
    "503": ("503 fault", "SlowDown"),
    "expired": ("400 fault", "ExpiredToken"),
}


class Bucket:
    """The server, and a bucket of it whose name is `name`."""

    name = "bucket"

    def __init__(self, port: int) -> None:
        self.port = port
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
def served() -> Iterator[Bucket]:
    """Start the server in a process of its own, on a port that the kernel chooses, with empty buckets."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield Bucket(int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Serve until killed, and print the port."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    from moto.s3.models import s3_backends
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    app = DomainDispatcherApplication(create_backend_app)
    shares, count, draw = {}, {}, random.Random(1)
    for name in (Bucket.name, DENIED):
        s3_backends["123456789012"]["aws"].create_bucket(name, "us-east-1")

    def failed(start, status, code):
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}, a fault</Message></Error>".encode()
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    def is_due(kind):
        share = shares[kind]
        if share >= 1:
            shares[kind] -= 1
        due = share >= 1 or draw.random() < share
        count[kind] = count.get(kind, 0) + due
        return due

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
        if path.startswith(f"/{DENIED}/") and method not in ("GET", "HEAD"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return failed(start, "403 fault", "AccessDenied")
        if "hold" in shares and method == "PUT" and "/moments-" in path:
            shares["hold"] -= 1
            while shares.get("hold", 0) < 0:
                time.sleep(0.05)
        for kind in list(shares):
            if kind in _ERRORS and is_due(kind):
                # Half of the failures come after the server has done the work, as real ones may.
                if kind != "expired" and draw.random() < 0.5:
                    list(app(environ, lambda *_: None))
                else:
                    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                return failed(start, *_ERRORS[kind])
            if kind == "slow" and is_due(kind):
                time.sleep(0.05)
            if kind == "cut" and method == "GET" and "list-type" not in environ["QUERY_STRING"] and is_due(kind):
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
    main()
