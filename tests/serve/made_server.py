"""The real server over made stores, for tests: without a socket, each asker with a token of his own."""

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
    warnings.simplefilter("ignore")  # it would rather have httpx2; httpx is what the other tests have
    from fastapi.testclient import TestClient

HOST = "http://127.0.0.1:8484"
FREE = AccessRules(requests_per_second=100_000, burst=100_000, failures_per_minute=100_000)
"""Rules under which no test is held up; those of limits have their own."""


@dataclass
class Server:
    """An application that is served, and who may ask it."""

    app: Any
    client: TestClient
    tokens: dict[str, str] = field(default_factory=dict)

    def headers(self, role: str) -> dict[str, str]:
        """What somebody of that role sends; ``nobody`` sends nothing."""
        return {"authorization": f"Bearer {self.tokens[role]}"} if role != "nobody" else {}

    def get(self, path: str, role: str = "viewer", **more: Any) -> Any:
        """As that role."""
        return self.client.get(path, headers=self.headers(role) | more.pop("headers", {}), follow_redirects=False, **more)

    def post(self, path: str, role: str = "viewer", **more: Any) -> Any:
        """As that role."""
        return self.client.post(path, headers=self.headers(role) | more.pop("headers", {}), follow_redirects=False, **more)


@contextmanager
def serving(stores: list[Path], state: Path, rules: AccessRules = FREE, poll_s: float = 0.2) -> Iterator[Server]:
    """A server that has read everything, with a token for each role, and one that sees ``run-000`` of the first store alone."""
    app = create_app(ServerSettings([str(one) for one in stores], state / "serve.sqlite", rules=rules, poll_s=poll_s))
    tokens = {role: app.state.store.new_token(role, role)[1] for role in ("viewer", "operator", "admin")}
    first = app.state.readers[0].id
    tokens["scoped"] = app.state.store.new_token("scoped", "admin", f"{first}/run-000")[1]
    for reader in app.state.readers:
        reader.poll()
    with TestClient(app, base_url=HOST, raise_server_exceptions=False) as client:
        yield Server(app, client, tokens)
