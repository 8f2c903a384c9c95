"""A server of Google Cloud Storage, gcp-storage-emulator's, as a WSGI application that tests/support/bucket.py serves.

The emulator lacks five rules that Google documents, and here they are: ifGenerationMatch, which refuses a writer; a
question after an upload that has ended, or of which nothing has arrived; pages of a listing; empty files; and
credentials: a service account signs a request for a token, and each call carries one.
"""

from __future__ import annotations

import io
import json
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

PAGE = 5
"""The most names in a page of a listing. Google gives 1000."""
TOKENS = "/token"
GONE = f"{TOKENS}/gone"
"""The path that the key of an account that is gone names in place of TOKENS."""


def write_key(path: Path, port: int) -> None:
    """Write the key of a service account, whose tokens the server on this port gives."""
    from cryptography.hazmat.primitives import serialization as write
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048)
    text = key.private_bytes(write.Encoding.PEM, write.PrivateFormat.PKCS8, write.NoEncryption()).decode()
    uri = f"http://127.0.0.1:{port}{TOKENS}"
    tree = {"type": "service_account", "project_id": "project", "client_email": "run@project", "private_key": text}
    path.write_text(json.dumps(tree | {"token_uri": uri}))


def failure(start: Callable, status: str, text: str) -> list[bytes]:
    """Answer with an error as Google's JSON interface does."""
    body = json.dumps({"error": {"code": int(status.split()[0]), "message": text}}).encode()
    start(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]


def application(names: tuple[str, ...]) -> Callable:
    """Return the application, with empty buckets."""
    from gcp_storage_emulator import server
    from gcp_storage_emulator.handlers.buckets import create_bucket
    from gcp_storage_emulator.storage import Storage
    from werkzeug.datastructures import EnvironHeaders

    storage, lock, ended, tokens = Storage(use_memory_fs=True), threading.Lock(), {}, set()
    for name in names:
        create_bucket(name, storage)
    read_data = server._read_data
    server._read_data = lambda *how: read_data(*how) or b""

    def routed(environ, body):
        """Call the emulator, which answers into a handler of http.server. Return status, headers and content."""
        told = []
        handler = SimpleNamespace(
            path=environ["RAW_URI"], headers=EnvironHeaders(environ), rfile=io.BytesIO(body), wfile=io.BytesIO(),
            server=SimpleNamespace(server_address=("127.0.0.1", 0)), storage=storage, end_headers=lambda: None,
            send_response=lambda code, text: told.append(f"{code} {text}"),
            send_header=lambda name, value: told.append((name, value)),
        )  # fmt: skip
        server.Router(handler).handle(environ["REQUEST_METHOD"])
        return told[0], dict(told[1:]), handler.wfile.getvalue()

    def ruled(environ, body):
        url = urlsplit(environ["RAW_URI"])
        asked = {name: values[-1] for name, values in parse_qs(url.query).items()}
        upload = asked.get("upload_id")
        if upload in ended:
            return "200 OK", {}, ended[upload]
        if "ifGenerationMatch" in asked:
            files = storage.objects.get(url.path.split("/b/")[1].split("/")[0], {})
            if files.get(asked["name"], {}).get("generation", "0") != asked["ifGenerationMatch"]:
                return "412 Precondition Failed", {}, b"Precondition Failed"
        status, headers, content = routed(environ, body)
        if upload and status.startswith("200"):
            ended[upload] = content
        elif upload and not storage.get_resumable_byte_count(upload):
            headers.pop("Range", None)
        if url.path.endswith("/o") and environ["REQUEST_METHOD"] == "GET" and status.startswith("200"):
            tree, begin = json.loads(content), int(asked.get("pageToken", 0))
            if len(tree["items"]) > begin + PAGE:
                tree["nextPageToken"] = str(begin + PAGE)
            content = json.dumps(tree | {"items": tree["items"][begin : begin + PAGE]}).encode()
        return status, headers, content

    def app(environ, start):
        size = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(size)
        if environ["PATH_INFO"].startswith(TOKENS):
            if environ["PATH_INFO"] == GONE:
                status, tree = "400 Bad Request", {"error": "invalid_grant", "error_description": "account not found"}
            else:
                token = uuid.uuid4().hex
                tokens.add(f"Bearer {token}")
                status, tree = "200 OK", {"access_token": token, "expires_in": 3600}
            headers, content = {"Content-Type": "application/json"}, json.dumps(tree).encode()
        elif environ.get("HTTP_AUTHORIZATION") not in tokens:
            return failure(start, "401 Unauthorized", "Anonymous caller does not have storage.objects access")
        elif len(body) < size:  # The client has died. What it began to send is no file.
            return failure(start, "400 Bad Request", "cut")
        else:
            with lock:
                status, headers, content = ruled(environ, body)
        start(status, [*({**headers, "Content-Length": str(len(content))}.items())])
        return [content]

    app.tokens = tokens
    return app
