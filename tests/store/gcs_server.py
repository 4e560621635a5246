"""Google Cloud Storage, as far as reading goes: the XML interface that obstore uses, and the JSON interface that tensorstore uses."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

TIME = "2026-11-28T00:00:00.000Z"


class Bucket:
    """Objects by name, and the requests that were sent."""

    def __init__(self, name: str) -> None:
        self.name, self.address = name, ""
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []

    def add(self, folder: Path, prefix: str) -> None:
        """Add the files below ``folder``."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.objects[f"{prefix}/{path.relative_to(folder)}"] = path.read_bytes()

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which obstore and tensorstore find this server."""
        return {
            "GOOGLE_BASE_URL": self.address, "GOOGLE_SKIP_SIGNATURE": "true", "TENSORSTORE_GCS_HTTP_URL": self.address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "abc",
        }  # fmt: skip


def generation(data: bytes) -> str:
    """Return a number that stands for an object's version."""
    return str(int(hashlib.sha256(data).hexdigest()[:12], 16))


@contextmanager
def gcs(name: str) -> Iterator[Bucket]:
    """Serve a bucket."""
    bucket = Bucket(name)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            bucket.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            json_path = re.fullmatch(rf"/storage/v1/b/{name}/o(?:/(.*))?", parts.path)
            if json_path is not None and json_path[1] is None:
                items = [self._facts(key) for key in sorted(bucket.objects) if key.startswith(query.get("prefix", ""))]
                self._answer(200, json.dumps({"items": items}).encode())
            elif json_path is not None and query.get("alt") != "media":
                key = unquote(json_path[1])
                self._answer(200, json.dumps(self._facts(key)).encode()) if key in bucket.objects else self._answer(404)
            elif json_path is not None:
                self._object(unquote(json_path[1]))
            elif "list-type" in query:
                self._answer(200, self._listing(query).encode())
            else:
                self._object(unquote(parts.path).removeprefix(f"/{name}/"))

        do_HEAD = do_GET

        def _facts(self, key: str) -> dict[str, str]:
            data = bucket.objects[key]
            return {"name": key, "size": str(len(data)), "generation": generation(data), "updated": TIME}

        def _listing(self, query: dict[str, str]) -> str:
            entries = "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><LastModified>{TIME}</LastModified>"
                f'<ETag>"{generation(data)}"</ETag></Contents>'
                for key, data in sorted(bucket.objects.items())
                if key.startswith(query.get("prefix", ""))
            )
            return f"<ListBucketResult><Name>{name}</Name>{entries}</ListBucketResult>"

        def _object(self, key: str) -> None:
            data = bucket.objects.get(key)
            if data is None:
                return self._answer(404)
            tag = f'"{generation(data)}"'
            if self.headers.get("If-Match", tag) != tag:
                return self._answer(412)
            span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
            headers = {"ETag": tag, "x-goog-generation": generation(data), "Last-Modified": formatdate(0, usegmt=True)}
            if span is None:
                return self._answer(200, data, headers)
            start = int(span[1]) if span[1] else max(0, len(data) - int(span[2]))
            end = min(len(data), int(span[2]) + 1) if span[1] and span[2] else len(data)
            if start >= len(data):
                return self._answer(416)
            return self._answer(
                206, data[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
            )

        def _answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for header, value in (headers or {}).items():
                self.send_header(header, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    bucket.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
