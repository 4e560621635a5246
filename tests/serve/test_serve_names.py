"""Names of runs that are escaped on disk: pages, API, addresses and tokens have the original name."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest
from tests.serve.made_server import HOST, serving

import relight

NAME = "lr=0.1, bs=32 (größer)"


def test_pages_and_api_show_and_take_the_name(tmp_path: Path) -> None:
    """No page or answer has the escaped directory. Addresses have the quoted name, and a token's scope has the name."""
    pytest.importorskip("fastapi")
    relight.save(tmp_path / "runs" / NAME, {"x": 1}, step=5)
    with serving([tmp_path / "runs"], tmp_path) as server:
        first = server.app.state.readers[0].id
        address_of_run = f"{quote(first)}/{quote(NAME, safe='')}"
        server.tokens["mine"] = server.app.state.store.new_token("mine", "operator", f"{first}/{NAME}")[1]
        for role in ("viewer", "mine"):
            for address in (
                "/", f"/runs/{address_of_run}", f"/runs/{address_of_run}/checkpoints/latest", "/lineage", "/api/v1/runs", f"/api/v1/runs/{address_of_run}",
                f"/api/v1/runs/{address_of_run}/checkpoints", f"/api/v1/runs/{address_of_run}/checkpoints/5", f"/runs/{address_of_run}/checkpoints/99",
            ):  # fmt: skip
                answer = server.get(address, role)
                assert answer.status_code == (404 if address.endswith("99") else 200), (address, answer.text[:300])
                assert "_-" not in answer.text, address
        assert server.get("/api/v1/runs").json()["rows"][0]["run"] == NAME
        assert f"/runs/{address_of_run}" in server.get("/").text
        planned = server.post(
            "/api/v1/actions/tag",
            "mine",
            json={"fields": {"store": first, "run": NAME, "which": "5", "name": "good"}},
            headers={"origin": HOST},
        )
        assert planned.status_code == 200 and "_-" not in planned.text, planned.text
