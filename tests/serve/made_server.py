"""The real server over synthetic stores, for tests: without a socket, with a token for each role."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relight.serve.app import ServerSettings, create_app
from relight.serve.auth_middleware import AccessRules

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it prefers httpx2, but the other tests use httpx
    from fastapi.testclient import TestClient

HOST = "http://127.0.0.1:8484"
FREE = AccessRules(requests_per_second=100_000, burst=100_000, failures_per_minute=100_000)
"""Rules that limit no test. Tests of limits have their own rules."""


@dataclass
class Server:
    """A served application, and the tokens for it."""

    app: Any
    client: TestClient
    tokens: dict[str, str] = field(default_factory=dict)

    def headers(self, role: str) -> dict[str, str]:
        """Return the headers of a client with that role. ``anonymous`` has none."""
        return {"authorization": f"Bearer {self.tokens[role]}"} if role != "anonymous" else {}

    def get(self, path: str, role: str = "viewer", **more: Any) -> Any:
        """Send a GET as that role."""
        return self.client.get(
            path, headers=self.headers(role) | more.pop("headers", {}), follow_redirects=False, **more
        )

    def post(self, path: str, role: str = "viewer", **more: Any) -> Any:
        """Send a POST as that role."""
        return self.client.post(
            path, headers=self.headers(role) | more.pop("headers", {}), follow_redirects=False, **more
        )


@contextmanager
def serving(stores: list[Path], state: Path, rules: AccessRules = FREE, poll_s: float = 0.2) -> Iterator[Server]:
    """Yield a server that has read its stores, with a token for each role, and one with scope ``run-000``."""
    app = create_app(
        ServerSettings([str(store) for store in stores], state / "serve.sqlite", rules=rules, poll_s=poll_s)
    )
    tokens = {role: app.state.store.new_token(role, role)[1] for role in ("viewer", "operator", "admin")}
    first = app.state.readers[0].id
    tokens["scoped"] = app.state.store.new_token("scoped", "admin", f"{first}/run-000")[1]
    for reader in app.state.readers:
        reader.poll()
    with TestClient(app, base_url=HOST, raise_server_exceptions=False) as client:
        yield Server(app, client, tokens)
