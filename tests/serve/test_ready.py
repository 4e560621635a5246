"""Probes of Kubernetes: whether the server is alive, and whether it has read its stores."""

from __future__ import annotations

from pathlib import Path

from tests.serve.made_server import HOST, TestClient
from tests.serve.made_stores import make_store

from relight.serve.app import ServerSettings, create_app


def test_ready_when_each_store_was_tried_once(tmp_path: Path) -> None:
    """The server is alive from the beginning, and ready after one attempt to read each store."""
    stores = [str(make_store(tmp_path / "runs", 1, 1)), str(make_store(tmp_path / "more", 1, 1))]
    app = create_app(ServerSettings(stores, tmp_path / "serve.sqlite"))
    client = TestClient(app, base_url=HOST)  # without ``with``, so its readers do not start by themselves
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 503
    app.state.readers[0].poll()
    assert client.get("/readyz").status_code == 503
    app.state.readers[1].poll()
    assert client.get("/readyz").json() == {"ok": True}
