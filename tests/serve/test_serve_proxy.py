"""``relight serve`` through a TLS proxy, also a real nginx: logins, cookies, headers and clients' addresses."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from tests.serve.made_server import HOST, Server, serving
from tests.serve.made_stores import make_store

from relight.errors import ConfigError
from relight.serve.app import ServerSettings, create_app
from relight.serve.auth_middleware import AccessRules
from relight.serve.gate import Gate, bounds_of
from relight.serve.proxies import Proxies, asker_of, check_proxies, public_origin

PUBLIC = "https://relight.lab"
ROOT = Path(__file__).parents[2]
NGINX = os.environ.get("NGINX") or shutil.which("nginx") or ""
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


def log_in(server: Server, origin: str, host: str = "relight.lab", token: str = "") -> Any:
    """Send the login form as a browser does."""
    data = {"token": token or server.tokens["admin"]}
    return server.client.post("/login", data=data, headers={"origin": origin, "host": host}, follow_redirects=False)


def test_a_browser_logs_in_through_a_tls_proxy(tmp_path: Path) -> None:
    """--public sets the origin, the names, ``Secure`` and HSTS for every Host header. Other origins are refused."""
    with serving([make_store(tmp_path / "runs", 1, 1)], tmp_path, AccessRules(public=PUBLIC)) as server:
        for host in ("relight.lab", "127.0.0.1:8484", "relight.lab:443"):
            entered = log_in(server, PUBLIC, host)
            assert entered.status_code == 303, (host, entered.text)
            cookie = entered.headers["set-cookie"]
            assert (
                cookie.startswith("__Host-relight=")
                and "Secure" in cookie
                and "HttpOnly" in cookie
                and "SameSite=strict" in cookie
            )
            assert "max-age" in entered.headers["strict-transport-security"]
            server.client.cookies.clear()
        for origin in (
            "http://relight.lab",
            "https://relight.lab:8443",
            "https://relight.lab.evil.example",
            "null",
            HOST,
        ):
            assert log_in(server, origin).status_code == 403, origin
        assert server.client.get("/healthz", headers={"host": "evil.example"}).status_code == 400


def test_without_public_the_refusal_names_the_way_out(tmp_path: Path) -> None:
    """The origin of a TLS proxy is refused, and the answer names the option that allows it."""
    with serving([make_store(tmp_path / "runs", 1, 1)], tmp_path, AccessRules(hosts=("relight.lab",))) as server:
        refused = log_in(server, PUBLIC)
        assert refused.status_code == 403 and "--public https://NAME" in refused.text


def test_wrong_tokens_lock_no_client_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After thirty wrong tokens from the proxy's address, a valid one is admitted at once, by header and by form."""
    with serving([make_store(tmp_path / "runs", 1, 1)], tmp_path, AccessRules(public=PUBLIC)) as server:
        waited: list[float] = []

        async def sleep(seconds: float) -> None:
            waited.append(seconds)

        monkeypatch.setattr(server.app.state.failures, "_sleep", sleep)
        for number in range(30):
            assert log_in(server, PUBLIC, token=f"rl_{number:010d}.{'A' * 43}").status_code == 401
        assert len(waited) == 20
        assert log_in(server, PUBLIC).status_code == 303
        server.client.cookies.clear()
        assert server.get("/api/v1/runs", "admin").status_code == 200
        assert len(waited) == 20


PROXIES = ["10.0.0.0/24", "fd00::7", "testclient"]
HOPS = [
    ("10.0.0.7", ["198.51.100.9"], "198.51.100.9"), ("10.0.0.7", ["1.2.3.4, 198.51.100.9"], "198.51.100.9"),
    ("10.0.0.7", ["1.2.3.4", "198.51.100.9, 10.0.0.8"], "198.51.100.9"), ("fd00::7", ["2001:db8::1"], "2001:db8::1"),
    ("::ffff:10.0.0.7", ["::ffff:198.51.100.9"], "198.51.100.9"), ("10.0.0.7", [], "10.0.0.7"), ("10.0.0.7", ["", "x" * 9000], "10.0.0.7"),
    ("10.0.0.7", ["1.2.3.4:5555"], "1.2.3.4"), ("10.0.0.7", ["[2001:db8::1]:443"], "2001:db8::1"), ("10.0.0.7", ["[2001:db8::1]"], "2001:db8::1"),
    ("10.0.0.7", ["9.9.9.9, 1.2.3.4:80, 10.0.0.8:443"], "1.2.3.4"), ("10.0.0.7", ["1.2.3.4:x"], "10.0.0.7"), ("10.0.0.7", ["2001:db8::1"], "2001:db8::1"),
    ("10.0.0.7", ["198.51.100.9, evil"], "10.0.0.7"), ("203.0.113.5", ["1.2.3.4"], "203.0.113.5"), ("10.0.1.7", ["1.2.3.4"], "10.0.1.7"),
]  # fmt: skip


@pytest.mark.parametrize(("peer", "forwarded", "client"), HOPS)
def test_the_clients_address_is_the_last_that_a_trusted_proxy_wrote(
    peer: str, forwarded: list[str], client: str
) -> None:
    """Text that the client itself wrote into the header is ignored, and the header of a peer that is not a proxy."""
    assert Proxies(PROXIES).client_of(peer, forwarded) == client


def test_clients_are_counted_by_what_one_of_them_owns() -> None:
    """All IPv6 addresses of one /64 count as one client, and an IPv4 address written as IPv6 as the same client."""
    assert asker_of("2001:db8::1") == asker_of("2001:db8::ffff:2") != asker_of("2001:db8:0:1::1")
    assert asker_of("::ffff:192.0.2.1") == asker_of("192.0.2.1") == "192.0.2.1"


def test_clients_of_a_proxy_are_counted_by_their_own_address(tmp_path: Path) -> None:
    """A client with too many requests is refused. Another client of the same proxy is not."""
    rules = AccessRules(public=PUBLIC, proxy_from=("testclient",), requests_per_second=0.1, burst=5)
    with serving([make_store(tmp_path / "runs", 1, 1)], tmp_path, rules) as server:
        flood = [
            server.client.get("/api/v1/runs", headers={"x-forwarded-for": f"9.9.9.{n}, 198.51.100.9"}).status_code
            for n in range(8)
        ]
        assert flood == [401] * 5 + [429] * 3
        assert server.client.get("/api/v1/runs", headers={"x-forwarded-for": "198.51.100.10"}).status_code == 401


def test_options_that_cannot_mean_what_is_wanted_are_refused() -> None:
    """Options that would open the server by mistake are refused: an http address, a path, every address as a proxy."""
    assert public_origin("https://Relight.LAB:443/") == PUBLIC
    assert public_origin("https://relight.lab:8443") == PUBLIC + ":8443"
    assert (
        public_origin("https://relight.lab.") == PUBLIC
        and public_origin("https://node_7.lab:8443/") == "https://node_7.lab:8443"
    )
    for text in (
        "http://relight.lab",
        "relight.lab",
        "https://",
        "https://a/b",
        "https://u:p@a",
        "https://a?b",
        "https://a b",
        "https://a:99999",
    ):
        with pytest.raises(ConfigError):
            public_origin(text)
    check_proxies(["10.0.0.7", "fd00::/8"])
    for text in ("0.0.0.0/0", "::/0", "proxy.lab", ""):
        with pytest.raises(ConfigError):
            check_proxies([text])


def test_a_refused_action_of_each_user_of_a_proxy_is_recorded(tmp_path: Path) -> None:
    """These users have no token. What one of them tries does not keep the other one out of the audit log."""
    rules = AccessRules(public=PUBLIC, proxy_from=("testclient",), proxy_header="X-Remote-User", proxy_role="viewer")
    with serving([make_store(tmp_path / "runs", 1, 2)], tmp_path, rules) as server:
        for name in ("anna", "bob", "anna"):
            headers = {"host": "relight.lab", "x-remote-user": name, "origin": PUBLIC}
            assert server.client.post("/act/prune", headers=headers).status_code == 403
        assert [(entry.who, entry.how) for entry in server.app.state.book.entries()] == [
            ("anna", "refused"),
            ("bob", "refused"),
        ]


def test_a_proxy_that_logs_in_by_basic_auth(tmp_path: Path) -> None:
    """Basic credentials belong to the proxy. Only Bearer is read as a token, and only Bearer needs no CSRF token."""
    rules = AccessRules(public=PUBLIC, proxy_from=("testclient",), proxy_header="X-Remote-User", proxy_role="operator")
    with serving([make_store(tmp_path / "runs", 1, 2)], tmp_path, rules) as server:
        anna = {"host": "relight.lab", "x-remote-user": "anna", "authorization": "Basic YW5uYTp4"}
        assert server.client.get("/api/v1/runs", headers=anna).status_code == 200
        fields = {"store": "runs", "run": "run-000", "which": "latest", "name": "x"}
        for headers in (anna, anna | {"origin": PUBLIC}, anna | {"origin": "https://evil.example"}):
            assert (
                server.client.post("/api/v1/actions/tag", json={"fields": fields}, headers=headers).status_code == 403
            )
        page = server.client.get("/", headers=anna).text
        word = re.search(r'name="csrf" value="([0-9a-f]+)"', page)
        assert word is not None
        sent = anna | {"origin": PUBLIC, "x-csrf-token": word[1]}
        assert server.client.post("/api/v1/actions/tag", json={"fields": fields}, headers=sent).status_code == 200
        wrong = server.client.get("/api/v1/runs", headers=anna | {"authorization": "Bearer rl_x"})
        assert wrong.status_code == 401
        bearer = anna | {"authorization": f"bearer {server.tokens['operator']}"}
        assert server.client.post("/api/v1/actions/tag", json={"fields": fields}, headers=bearer).status_code == 200
        away = server.client.get(
            "/",
            headers={"host": "relight.lab", "authorization": "Basic x", "accept": "text/html"},
            follow_redirects=False,
        )
        assert away.status_code == 303, "a client without a name from the proxy logs in here"
    (tmp_path / "two").mkdir()
    with serving(
        [make_store(tmp_path / "two" / "runs", 1, 1)], tmp_path / "two", AccessRules(anonymous_read=True)
    ) as server:
        assert server.client.get("/api/v1/runs", headers={"authorization": "Basic YW5uYTp4"}).status_code == 401


ODD = [
    'prefs={"theme":"dark"}',
    "x=a b",
    "_xsrf=2|a,b",
    "a[b]=1",
    "flag",
    "=",
    "relightx=1",
    'q="a\\"b',
    "é=1",
    "x" * 9000 + "=1",
]


@pytest.mark.parametrize("odd", ODD, ids=[str(n) for n in range(len(ODD))])
def test_cookies_of_other_programs_log_no_user_out(tmp_path: Path, odd: str) -> None:
    """Browsers send the cookies of every port of this host. Those of other programs have no effect."""
    with serving([make_store(tmp_path / "runs", 1, 1)], tmp_path, AccessRules()) as server:
        entered = log_in(server, HOST, "127.0.0.1:8484")
        ours = entered.headers["set-cookie"].partition(";")[0]
        server.client.cookies.clear()
        for text in (f"{odd}; {ours}", f"{ours}; {odd}", f"{ours.lower()}x; {odd};{ours}"):
            assert server.client.get("/api/v1/runs", headers={"cookie": text.encode("latin-1")}).status_code == 200, (
                text[:40]
            )
        assert server.client.get("/api/v1/runs", headers={"cookie": odd.encode("latin-1")}).status_code == 401


class Site:
    """nginx with TLS, configured as in the documentation, and a server that it forwards to."""

    def __init__(self, root: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.origin = f"https://localhost:{self.port}"
        rules = AccessRules(public=public_origin(self.origin), proxy_from=("127.0.0.1",))
        app = create_app(ServerSettings([str(make_store(root / "runs", 1, 1))], root / "serve.sqlite", rules=rules))
        self.token = app.state.store.new_token("me", "admin")[1]
        gate = Gate(bounds_of(1024, 32))
        listening = gate.listen(("127.0.0.1", 0))
        here = listening[0].getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(app, loop="asyncio", http=gate.protocol(), log_level="critical", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": list(listening)})
        self._thread.start()
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        made = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-keyout",
            "key.pem",
            "-out",
            "cert.pem",
            *names,
        ]
        subprocess.run(made, cwd=root, check=True, capture_output=True)
        text = re.search(r"```nginx\n(.*?)```", (ROOT / "docs/dashboard.md").read_text(), re.DOTALL)
        assert text is not None
        block = (
            text[1]
            .replace("443", str(self.port))
            .replace("relight.lab", "localhost")
            .replace("127.0.0.1:8484", f"127.0.0.1:{here}")
        )
        block = block.replace("/etc/ssl/", f"{root}/").replace("listen ", "listen 127.0.0.1:", 1)
        paths = "".join(
            f"{kind}_temp_path {root}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        start = f"pid {root}/pid; error_log {root}/error.log; daemon off; user root; events {{}} http {{ access_log off; {paths}\n{block}}}\n"
        (root / "nginx.conf").write_text(start if os.geteuid() == 0 else start.replace("user root; ", ""))
        self._nginx = subprocess.Popen(
            [NGINX, "-p", str(root), "-c", str(root / "nginx.conf"), "-e", str(root / "error.log")]
        )
        ends = time.monotonic() + 20
        while time.monotonic() < ends and not self._answers():
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            return self.client().get("/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    def client(self) -> httpx.Client:
        """Return a client that accepts the certificate."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return httpx.Client(base_url=self.origin, verify=context, trust_env=False)

    def close(self) -> None:
        """End nginx and the server."""
        self._nginx.terminate()
        self._nginx.wait(10)
        self._server.should_exit = True
        self._thread.join(30)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Yield nginx with a server, or skip the test without nginx."""
    if not NGINX or shutil.which("openssl") is None:
        pytest.skip("nginx or openssl is missing: set NGINX=PATH")
    made = Site(tmp_path)
    yield made
    made.close()


def test_a_real_nginx(site: Site) -> None:
    """The documented configuration works, also after wrong tokens. A foreign origin is refused."""
    with site.client() as client:
        for number in range(12):
            wrong = client.post(
                "/login", data={"token": f"rl_{number:010d}.{'A' * 43}"}, headers={"origin": site.origin}
            )
            assert wrong.status_code == 401
        assert (
            client.post("/login", data={"token": site.token}, headers={"origin": "https://evil.example"}).status_code
            == 403
        )
        entered = client.post("/login", data={"token": site.token}, headers={"origin": site.origin})
        assert entered.status_code == 303 and "Secure" in entered.headers["set-cookie"]
        page = client.get("/", headers={"accept": "text/html"})
        assert page.status_code == 200 and "run-000" in page.text and "strict-transport-security" in page.headers
        with client.stream("GET", "/events") as stream:
            for text in stream.iter_text():
                assert "hello" in text
                break


@pytest.mark.slow
def test_a_real_browser_through_a_real_nginx(site: Site) -> None:
    """A browser can use the login form, the cookie and a page."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="make pages has it")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(ignore_https_errors=True).new_page()
        page.goto(site.origin + "/login")
        page.fill("input[name=token]", site.token)
        page.click("button[type=submit]")
        page.wait_for_url(site.origin + "/")
        page.click("text=run-000")
        assert "run-000" in page.title() or "run-000" in page.content()
        page.click("form[action='/act/save'] button")
        assert "Save now" in page.content()
        browser.close()
