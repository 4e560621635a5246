"""Permissions: every route with every role, scopes, sessions, revocation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serve.made_server import HOST, Server, serving
from tests.serve.made_stores import make_store

from relight.serve.app import OPEN
from relight.serve.pages_views import ACTIONS
from relight.serve.scope import ROLES, rank_of

PARTS = {"store": "runs", "run": "run-001", "which": "latest", "verb": "tag", "task": "0123456789abcdef"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server with two runs of three checkpoints."""
    root = tmp_path_factory.mktemp("serve")
    with serving([make_store(root / "runs", 2, 3)], root) as made:
        yield made


def routes(app: Any) -> list[tuple[str, str, str | None]]:
    """Return each method and address, with the role that it declares."""
    declared = []

    def walk(one: Any) -> None:
        for route in getattr(one, "routes", ()):
            if hasattr(route, "dependant"):
                roles = [role for need in route.dependant.dependencies if (role := getattr(need.call, "role", None))]
                declared.extend((method, route.path, roles[0] if roles else None) for method in route.methods)
            elif hasattr(route, "original_router"):
                walk(route.original_router)

    walk(app)
    return declared


def test_every_route_admits_exactly_the_roles_that_it_declares(server: Server) -> None:
    """Each route, requested with each role, admits exactly the roles that it declares."""
    table = routes(server.app)
    asked = 0
    for method, path, role in table:
        if role is None:
            assert path in OPEN, f"{path} declares no role"
            continue
        if path == "/events":
            continue  # this request does not end; the tests of streams send it
        address = re.sub(r"\{(\w+)\}", lambda part: PARTS[part[1]], path)
        for who in ("anonymous", *ROLES):
            answered = server.client.request(
                method,
                address,
                headers=server.headers(who),
                follow_redirects=False,
                **({"json": {"fields": {}}} if method == "POST" else {}),
            ).status_code
            asked += 1
            if who == "anonymous":
                assert answered == 401 or (method == "POST" and answered == 403), (method, path, answered)
            elif rank_of(who) < rank_of(role):
                assert answered == 403, (method, path, who, answered)
            else:
                assert answered not in (401, 403) and answered < 500, (method, path, who, answered)
    assert asked >= 100


@pytest.mark.parametrize(("verb", "role"), ACTIONS.items())
def test_an_action_of_the_api_takes_the_role_that_its_page_takes(server: Server, verb: str, role: str) -> None:
    """All actions have one address, but each has its own role."""
    for who in ROLES:
        answered = server.post(f"/api/v1/actions/{verb}", who, json={"fields": {}}).status_code
        assert (answered == 403) == (rank_of(who) < rank_of(role)), who


def test_what_a_scope_leaves_out_is_not_there(server: Server) -> None:
    """A token for one run cannot reach another run in lists, by name, in actions or in comparisons."""
    assert [row["run"] for row in server.get("/api/v1/runs", "scoped").json()["rows"]] == ["run-000"]
    assert server.get("/api/v1/runs/runs/run-000", "scoped").status_code == 200
    for path in (
        "/api/v1/runs/runs/run-001",
        "/api/v1/runs/runs/run-001/checkpoints",
        "/api/v1/diff?a=run-000@latest&b=run-001@latest",
    ):
        hidden = server.get(path, "scoped")
        assert hidden.status_code == 404, path
    fields = {"store": "runs", "run": "run-001", "which": "latest", "name": "mine"}
    assert server.post("/api/v1/actions/tag", "scoped", json={"fields": fields}).status_code == 404
    assert "run-001" not in server.get("/", "scoped").text
    assert "run-001" not in server.get("/lineage", "scoped").text
    assert server.get("/api/v1/settings", "scoped").json()["tokens"] == []


def test_a_scoped_admin_cannot_revoke_the_tokens_of_others(server: Server) -> None:
    """Tokens belong to no run, so a scoped admin cannot revoke them."""
    victim = server.app.state.store.new_token("victim", "viewer")[0]
    assert server.post("/api/v1/actions/revoke", "scoped", json={"fields": {"id": victim}}).status_code == 404
    assert {token.id: token.state for token in server.app.state.store.tokens()}[victim] == "valid"


def test_a_revoked_token_and_its_sessions_open_nothing_from_the_next_request_on(server: Server) -> None:
    """After a token was revoked, it and its sessions are refused."""
    token_id, token = server.app.state.store.new_token("leaver", "viewer")
    bearer = {"authorization": f"Bearer {token}"}
    assert server.client.get("/api/v1/runs", headers=bearer).status_code == 200
    entered = server.client.post("/login", data={"token": token}, headers={"origin": HOST}, follow_redirects=False)
    cookie = entered.headers["set-cookie"]
    assert entered.status_code == 303
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    kept = {"cookie": cookie.partition(";")[0]}
    server.client.cookies.clear()
    assert server.client.get("/api/v1/runs", headers=kept).status_code == 200
    server.app.state.store.revoke(token_id)
    assert server.client.get("/api/v1/runs", headers=bearer).status_code == 401
    assert server.client.get("/api/v1/runs", headers=kept).status_code == 401


def test_tokens_are_kept_as_hashes_alone_in_a_file_of_their_owner(server: Server) -> None:
    """The server's files contain no part of a secret, and other users cannot read them."""
    state = server.app.state.store
    written = b"".join(path.read_bytes() for path in state.path.parent.glob("serve.sqlite*") if path.is_file())
    assert len(written) > 4096
    for token in server.tokens.values():
        assert token.partition(".")[2].encode() not in written
    assert state.path.stat().st_mode & 0o077 == 0


def test_a_refusal_by_role_of_an_action_is_in_the_audit_log(tmp_path: Path) -> None:
    """An action that a token's role does not allow is recorded once a minute with the token, for every route."""
    with serving([make_store(tmp_path / "runs", 1, 1)], tmp_path) as made:
        for path, who in (
            ("/api/v1/actions/tag", "viewer"),
            ("/act/tag", "viewer"),
            ("/act/revoke", "operator"),
            ("/api/v1/actions/../x", "viewer"),
        ):
            for _ in range(2):
                asked = {"json": {"fields": {}}} if "api" in path else {"data": {}}
                assert made.client.post(path, headers=made.headers(who), **asked).status_code in (403, 404, 405)
        rows = made.get("/api/v1/audit", "admin").json()["rows"]
        entries = [(row["who"], row["what"], row["how"]) for row in rows]
        assert sorted(row[1:] for row in entries) == [("revoke", "refused"), ("tag", "refused")]
