"""Vault's transit engine, as far as its documented HTTP interface for encrypt and decrypt:

keys in memory, a token, AES-GCM.
"""

from __future__ import annotations

import base64
import json
import secrets
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

TOKEN = "hvs.a-token-for-tests-61c2"  # noqa: S105


@contextmanager
def vault(*names: str, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve keys of these names, and return the address. With ``tls`` it speaks https as ``localhost``."""
    keys = {name: AESGCM(secrets.token_bytes(32)) for name in names}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            parts = self.path.strip("/").split("/")
            if self.headers.get("X-Vault-Token") != TOKEN:
                return self._answer(403, {"errors": ["permission denied"]})
            if len(parts) != 4 or parts[:2] != ["v1", "transit"] or parts[3] not in keys:
                return self._answer(404, {"errors": ["no such path"]})
            key = keys[parts[3]]
            if parts[2] == "encrypt":
                nonce = secrets.token_bytes(12)
                sealed = key.encrypt(nonce, base64.b64decode(request["plaintext"]), b"")
                return self._answer(
                    200,
                    {"data": {"ciphertext": f"vault:v1:{base64.b64encode(nonce + sealed).decode()}", "key_version": 1}},
                )
            try:
                data = base64.b64decode(request["ciphertext"].removeprefix("vault:v1:"))
                plain = key.decrypt(data[:12], data[12:], b"")
            except (InvalidTag, ValueError):
                return self._answer(400, {"errors": ["cipher: message authentication failed"]})
            return self._answer(200, {"data": {"plaintext": base64.b64encode(plain).decode()}})

        do_PUT = do_POST

        def _answer(self, code: int, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"https://localhost:{server.server_port}" if tls is not None else f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
