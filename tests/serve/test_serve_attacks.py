"""Attacks on the dashboard from the list in docs/security.md. Each is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.made_server import HOST, Server, serving
from tests.serve.made_stores import make_store

from relight.serve.auth_middleware import AccessRules


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server over one run of three checkpoints."""
    root = tmp_path_factory.mktemp("attack")
    with serving([make_store(root / "runs", 1, 3)], root) as made:
        yield made


@pytest.fixture
def session(server: Server) -> Iterator[dict[str, str]]:
    """Yield the cookie of a browser in which an admin has logged in."""
    entered = server.client.post(
        "/login", data={"token": server.tokens["admin"]}, headers={"origin": HOST}, follow_redirects=False
    )
    server.client.cookies.clear()
    yield {"cookie": entered.headers["set-cookie"].partition(";")[0]}


def word_of(server: Server, session: dict[str, str]) -> str:
    """Return the CSRF token of this session."""
    session_user = server.app.state.store.session_user(session["cookie"].partition("=")[2])
    assert session_user is not None
    return str(session_user[1])


TAG = {"store": "runs", "run": "run-000", "which": "latest", "name": "evil"}
BAD_CREDENTIALS = {
    "an empty bearer": "Bearer ", "no scheme": "rl_aaaaaaaaaa.b", "basic": "Basic YTpi", "a long one": "Bearer " + "a" * 30_000,
    "a known id with another secret": "Bearer rl_aaaaaaaaaa." + "A" * 43, "a token of no algorithm": "Bearer eyJhbGciOiJub25lIn0.e30.",
}  # fmt: skip


@pytest.mark.parametrize("given", BAD_CREDENTIALS.values(), ids=BAD_CREDENTIALS)
def test_invalid_credentials_open_nothing(server: Server, session: dict[str, str], given: str) -> None:
    """Invalid credentials are refused even with a valid cookie: they never fall back to lesser ones."""
    assert server.client.get("/api/v1/runs", headers={"authorization": given} | session).status_code == 401


def test_two_credentials_are_refused(server: Server) -> None:
    """Two credentials are refused, because a proxy may have checked only one of them."""
    good = server.tokens["admin"]
    both = [("authorization", f"Bearer {good}"), ("authorization", f"Bearer {good}")]
    assert server.client.get("/api/v1/runs", headers=both).status_code == 401


def test_a_token_in_an_address_is_refused(server: Server) -> None:
    """A token in an address would be in the logs of every proxy, so it is refused."""
    for name in ("token", "access_token", "ACCESS_TOKEN"):
        assert server.get(f"/api/v1/runs?{name}={server.tokens['admin']}", "admin").status_code == 400


ORIGINS = {
    "none": None, "null": "null", "elsewhere": "https://evil.example", "http for https": "https://127.0.0.1:8484", "another port": "http://127.0.0.1:9999",
    "a longer name": "http://127.0.0.1:8484.evil.example",
}  # fmt: skip


@pytest.mark.parametrize("origin", ORIGINS.values(), ids=ORIGINS)
@pytest.mark.parametrize("path", ["/act/tag", "/login", "/logout", "/api/v1/actions/tag"])
def test_another_site_cannot_act_through_a_user_s_browser(
    server: Server, session: dict[str, str], origin: str | None, path: str
) -> None:
    """A POST from another origin is refused, even with the cookie and the CSRF token."""
    headers = session | {"x-csrf-token": word_of(server, session)} | ({"origin": origin} if origin is not None else {})
    given = {"json": {"fields": TAG}} if path.startswith("/api") else {"data": TAG}
    assert server.client.post(path, headers=headers, follow_redirects=False, **given).status_code == 403


def test_a_form_without_its_word_is_refused_and_with_it_is_not(server: Server, session: dict[str, str]) -> None:
    """Only the session's own CSRF token is accepted: an empty, cut or foreign one is refused."""
    word, here = word_of(server, session), session | {"origin": HOST}
    for wrong in ("", word[:-1], word + "x", "x" * 43):
        assert server.client.post("/act/tag", headers=here, data=TAG | {"csrf": wrong}).status_code == 403
    assert server.client.post("/act/tag", headers=here, data=TAG | {"csrf": word}).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_the_api_takes_json_alone(server: Server, kind: str) -> None:
    """The API refuses the content types that a page of another origin may send without a preflight request."""
    answered = server.post("/api/v1/actions/tag", "admin", content=b'{"fields": {}}', headers={"content-type": kind})
    assert answered.status_code == 415


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8484", "127.0.0.1.evil.example", "localhost.evil.example", "", "a" * 3000]
)
def test_a_foreign_dns_name_that_points_here_is_refused(server: Server, host: str) -> None:
    """DNS rebinding, in which the browser takes this server for the attacker's, is refused."""
    assert server.get("/healthz", "admin", headers={"host": host}).status_code == 400


PATHS = [
    "../../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "..%5c..%5cetc%5cpasswd", "%252e%252e%252fetc%252fpasswd", "%2e%2e/%2e%2e/etc/passwd",
    "....//....//etc/passwd", "/etc/passwd", "%00", "runs%00", "~root", "C:%5cwindows", "\u2025/etc/passwd", "a" * 199,
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_path_leads_nowhere(server: Server, path: str) -> None:
    """Names are compared with the existing ones; none is used as a path of the file system."""
    for before in (
        "/static/",
        "/api/v1/runs/",
        "/api/v1/runs/runs/",
        "/api/v1/runs/runs/run-000/checkpoints/",
        "/api/v1/storage/",
        "/runs/runs/",
    ):
        answered = server.get(before + path, "admin")
        assert answered.status_code in (404, 422, 307), (before, path, answered.status_code)
        assert "root:" not in answered.text and "Traceback" not in answered.text


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "CONNECT", "PROPFIND"])
def test_methods_that_are_not_used_are_refused(server: Server, method: str) -> None:
    """A header that overrides the method has no effect."""
    assert server.client.request(method, "/api/v1/runs", headers=server.headers("admin")).status_code == 405
    overridden = server.client.post(
        "/api/v1/actions/prune",
        json={"fields": {}},
        headers=server.headers("viewer") | {"x-http-method-override": method},
    )
    assert overridden.status_code == 403


def test_a_long_body_is_refused_with_and_without_content_length(server: Server) -> None:
    """A body of more than 64 KiB is refused, with or without Content-Length."""

    def stream() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 1024

    for content in (b" " * 200_000, stream()):
        answered = server.post(
            "/api/v1/actions/tag", "admin", content=content, headers={"content-type": "application/json"}
        )
        assert answered.status_code in (400, 413), answered.status_code
    assert server.get("/api/v1/runs", "admin", headers={"content-length": "9" * 30}).status_code == 400


def test_more_than_was_asked_for_is_refused(server: Server) -> None:
    """Mass assignment is refused: unknown fields of an action, and unknown keys next to its fields."""
    for body in (
        {"fields": TAG, "role": "admin"},
        {"fields": TAG | {"role": "admin"}},
        {"fields": [TAG]},
        {"fields": TAG | {"which": 5}},
        [],
    ):
        assert server.post("/api/v1/actions/tag", "operator", json=body).status_code == 422, body


def test_no_answer_reveals_the_implementation(server: Server) -> None:
    """There are no documentation pages, CORS headers, server names or stack traces."""
    for path in ("/docs", "/redoc", "/openapi.json", "/debug", "/metrics", "/.git/config", "/api/v0/runs", "/api/runs"):
        assert server.get(path, "admin").status_code == 404, path
    answered = server.get("/api/v1/runs", "admin", headers={"origin": "https://evil.example"})
    assert not [name for name in answered.headers if name.startswith("access-control") or name == "server"]


def test_every_answer_has_the_headers_that_browsers_go_by(server: Server) -> None:
    """Pages, errors, refusals and files have the security headers."""
    for path, role in (
        ("/", "viewer"),
        ("/", "anonymous"),
        ("/nowhere", "viewer"),
        ("/static/relight.css", "anonymous"),
        ("/login", "anonymous"),
    ):
        headers = server.get(path, role).headers
        assert (
            "default-src 'self'" in headers["content-security-policy"]
            and "unsafe" not in headers["content-security-policy"]
        ), path
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"


def test_guessing_and_flooding_are_slowed_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrong token is answered later; a valid token is never delayed. A flood of requests is refused, but health checks are not."""
    with serving(
        [make_store(tmp_path / "runs", 1, 1)], tmp_path, AccessRules(requests_per_second=1, burst=60)
    ) as server:
        delays: list[float] = []

        async def sleep(seconds: float) -> None:
            delays.append(seconds)

        monkeypatch.setattr(server.app.state.failures, "_sleep", sleep)
        guesses = [
            server.client.get("/api/v1/runs", headers={"authorization": f"Bearer rl_{n:010d}.{'A' * 43}"})
            for n in range(20)
        ]
        assert [response.status_code for response in guesses] == [401] * 20
        assert len(delays) == 10 and delays == sorted(delays) and delays[0] < 0.2 and delays[-1] == 5.0
        form = server.client.post(
            "/login", data={"token": server.tokens["admin"]}, headers={"origin": HOST}, follow_redirects=False
        )
        assert form.status_code == 303
        server.client.cookies.clear()
        assert server.get("/api/v1/runs", "admin").status_code == 200 and len(delays) == 10
        flood = [server.client.get("/api/v1/runs").status_code for _ in range(80)]
        assert flood.count(429) >= 30
        assert server.client.get("/healthz").status_code == 200 == server.client.get("/login").status_code
        assert server.get("/api/v1/runs", "viewer").status_code == 200, "the rate limit counts by token, not by address"


def test_a_proxy_is_believed_from_its_own_address_alone(tmp_path: Path) -> None:
    """The proxy header is ignored unless a trusted proxy sends it."""
    store = make_store(tmp_path / "runs", 1, 1)
    user_header = {"x-user": "anna"}
    with serving([store], tmp_path, AccessRules(proxy_header="x-user", proxy_from=("10.0.0.1",))) as server:
        assert server.client.get("/api/v1/runs", headers=user_header).status_code == 401
    (tmp_path / "two").mkdir()
    with serving([store], tmp_path / "two", AccessRules(proxy_header="x-user", proxy_from=("testclient",))) as server:
        assert server.client.get("/api/v1/runs", headers=user_header).status_code == 200
        assert server.client.get("/api/v1/runs", headers=[("x-user", "anna"), ("x-user", "root")]).status_code == 401
        assert server.client.post("/act/tag", headers=user_header | {"origin": HOST}, data=TAG).status_code == 403


def test_anonymous_readers_read_and_never_write(tmp_path: Path) -> None:
    """With ``anonymous_read``, clients without credentials can read and never write."""
    with serving([make_store(tmp_path / "runs", 1, 1)], tmp_path, AccessRules(anonymous_read=True)) as server:
        assert server.get("/api/v1/runs", "anonymous").status_code == 200
        assert server.get("/api/v1/audit", "anonymous").status_code == 403
        for path, given in (("/act/tag", {"data": TAG}), ("/api/v1/actions/tag", {"json": {"fields": TAG}})):
            assert server.post(path, "anonymous", headers={"origin": HOST}, **given).status_code == 403
