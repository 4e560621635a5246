"""Google Cloud KMS and Azure Key Vault, as far as their documented REST interfaces for wrapping a key, with their sources of tokens."""

from __future__ import annotations

import base64
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

GOOGLE_KEY = "projects/p-1/locations/europe-west4/keyRings/training/cryptoKeys/store"
OAEP = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), None)


@dataclass
class Service:
    """A server's address and state. ``token``: the one that it accepts. ``broken``: the answer to each request for a key."""

    address: str = ""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    requests: list[str] = field(default_factory=list)
    broken: tuple[int, bytes, dict[str, str]] | None = None
    gives_token: bool = True
    rotate: Callable[[], None] = lambda: None


def service_account(folder: Path, address: str) -> Path:
    """Write the file of a service account, which gets its tokens at ``address``. Return the file's path."""
    key = rsa.generate_private_key(65537, 2048)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    value = {
        "type": "service_account", "project_id": "p-1", "private_key_id": "1", "client_id": "1",
        "private_key": key.private_bytes(*form).decode(), "client_email": "trainer@p-1.iam.gserviceaccount.com",
        "token_uri": f"{address}/token",
    }  # fmt: skip
    path = folder / "account.json"
    path.write_text(json.dumps(value))
    return path


@contextmanager
def _serving(
    service: Service, reply: Callable[[str, str, dict[str, str], bytes], tuple[int, object]]
) -> Iterator[Service]:
    """Serve. ``reply`` takes method, path, headers (in lower case) and body, and returns a status and a value."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            service.requests.append(f"{self.command} {self.path}")
            status, value = reply(self.command, self.path, headers, body)
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            if service.broken is not None and data == service.broken[1]:
                for name, text in service.broken[2].items():
                    self.send_header(name, text)
            self.send_header("Content-Type", "application/json")
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _do

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def google_kms(*names: str) -> Iterator[Service]:
    """Serve keys of these names; tokens at ``/token``, and as a machine's metadata server."""
    service, keys = Service(), {name: AESGCM(secrets.token_bytes(32)) for name in names}

    def refusal(code: int, status: str) -> tuple[int, object]:
        return code, {"error": {"code": code, "message": "no", "status": status}}

    def reply(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, object]:
        token = {"access_token": service.token, "expires_in": 3600, "token_type": "Bearer"}
        if path == "/token":
            assert parse_qs(body.decode())["assertion"]
            return (200, token) if service.gives_token else (401, {"error": "invalid_grant"})
        if path.startswith("/computeMetadata/v1/instance/service-accounts/") and "/token" in path:
            return (200, token) if headers.get("metadata-flavor") == "Google" else (403, {})
        if path.startswith("/computeMetadata/v1/instance/service-accounts/"):
            return 200, {"email": "trainer@p-1.iam.gserviceaccount.com", "scopes": [], "aliases": ["default"]}
        if path.startswith("/computeMetadata/v1/project/project-id"):
            return 200, b"p-1"
        if method == "GET":
            # a machine's metadata server is recognized by its header
            return (200, b"") if path == "/" else (404, b"")
        if service.broken is not None:
            return service.broken[:2]
        if headers.get("authorization") != f"Bearer {service.token}":
            return refusal(401, "UNAUTHENTICATED")
        name, _, call = path.removeprefix("/v1/").rpartition(":")
        if name not in keys:
            return refusal(404, "NOT_FOUND")
        request = {field: base64.b64decode(text) for field, text in json.loads(body).items()}
        bound = request["additionalAuthenticatedData"]
        if call == "encrypt":
            nonce = secrets.token_bytes(12)
            sealed = nonce + keys[name].encrypt(nonce, request["plaintext"], bound)
            return 200, {"name": f"{name}/cryptoKeyVersions/1", "ciphertext": base64.b64encode(sealed).decode()}
        try:
            plain = keys[name].decrypt(request["ciphertext"][:12], request["ciphertext"][12:], bound)
        except (InvalidTag, ValueError):
            return refusal(400, "INVALID_ARGUMENT")
        return 200, {"plaintext": base64.b64encode(plain).decode()}

    with _serving(service, reply):
        yield service


def _url_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


@contextmanager
def azure_vault(*names: str) -> Iterator[Service]:
    """Serve keys of these names; tokens of a managed identity at ``/identity``. ``rotate`` makes new versions."""
    service = Service()
    versions: dict[str, dict[str, rsa.RSAPrivateKey]] = {name: {} for name in names}

    def rotate() -> None:
        for name in names:
            versions[name][secrets.token_hex(16)] = rsa.generate_private_key(65537, 2048)

    def refusal(code: int, what: str) -> tuple[int, object]:
        return code, {"error": {"code": what, "message": "no"}}

    def reply(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, object]:
        parts = urlsplit(path)
        query: dict[str, Any] = parse_qs(parts.query)
        if parts.path == "/identity":
            assert headers["x-identity-header"] == "one-of-this-machine"
            assert query["resource"] == ["https://vault.azure.net"]
            token = {
                "access_token": service.token,
                "expires_on": "4102444800",
                "resource": query["resource"][0],
                "token_type": "Bearer",
            }
            return (200, token) if service.gives_token else (400, {"error": "no identity"})
        if service.broken is not None:
            return service.broken[:2]
        if headers.get("authorization") != f"Bearer {service.token}":
            return refusal(401, "Unauthorized")
        assert query["api-version"] == ["7.4"] and method == "POST"
        _, keys, name, *version, call = parts.path.split("/")
        key = versions.get(name, {}).get(version[0] if version else list(versions.get(name, {"": 0}))[-1])
        if keys != "keys" or key is None:
            return refusal(404, "KeyNotFound")
        request = json.loads(body)
        assert request["alg"] == "RSA-OAEP-256"
        value = base64.urlsafe_b64decode(request["value"] + "==")
        used = version[0] if version else list(versions[name])[-1]
        kid = f"{service.address}/keys/{name}/{used}"
        if call == "wrapkey":
            return 200, {"kid": kid, "value": _url_text(key.public_key().encrypt(value, OAEP))}
        try:
            return 200, {"kid": kid, "value": _url_text(key.decrypt(value, OAEP))}
        except ValueError:
            return refusal(400, "BadParameter")

    service.rotate = rotate
    rotate()
    with _serving(service, reply):
        yield service
