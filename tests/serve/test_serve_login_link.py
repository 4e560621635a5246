"""Login links of ``relight serve``: they work once, expire, and are printed at a terminal only."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from tests.serve.made_server import FREE, serving
from tests.serve.made_stores import make_store

from relight.serve.login_links import LINK_S, LoginLinks
from relight.serve.state import SESSION_S, TokenFile


def test_a_link_works_once(tmp_path: Path) -> None:
    """A link begins a session of an admin. Its second use is refused, and so is a wrong one."""
    with serving([make_store(tmp_path / "runs", 1, 1)], tmp_path, FREE) as server:
        secret = server.app.state.links.new()
        assert server.client.get("/login?once=wrong").status_code == 401
        entered = server.client.get(f"/login?once={secret}", follow_redirects=False)
        assert entered.status_code == 200 and entered.headers["refresh"] == "0; url=/"
        assert "HttpOnly" in entered.headers["set-cookie"] and "SameSite=strict" in entered.headers["set-cookie"]
        assert secret not in entered.text and entered.headers["cache-control"] == "no-store"
        assert server.client.get("/settings").status_code == 200
        (row,) = [token for token in server.app.state.store.tokens() if "login link" in token.name]
        server.client.cookies.clear()
        again = server.client.get(f"/login?once={secret}")
        assert again.status_code == 401 and "used already" in again.text and "set-cookie" not in again.headers
        assert server.client.get("/", follow_redirects=False).status_code == 401
        assert row.role == "admin" and row.ends_at is not None


def test_a_link_expires(tmp_path: Path) -> None:
    """A link that was not used within ten minutes is refused."""
    now = [0.0]
    links = LoginLinks(TokenFile(tmp_path / "serve.sqlite"), clock=lambda: now[0])
    secret, other = links.new(), links.new()
    now[0] = LINK_S - 1
    assert links.begin_session(other)
    now[0] = LINK_S
    assert links.begin_session(secret) is None


def test_used_links_leave_no_tokens_that_have_expired(tmp_path: Path) -> None:
    """A login a day does not fill the list of tokens. Other tokens stay, with their states."""
    now = [1000.0]
    state = TokenFile(tmp_path / "serve.sqlite", clock=lambda: now[0])
    state.new_token("grafana", "viewer", lasts_s=60)
    for _ in range(3):
        links = LoginLinks(state)
        assert links.begin_session(links.new())
        now[0] += 2 * SESSION_S
    assert [(token.name.split(", ")[-1], token.state) for token in state.tokens()] == [
        ("grafana", "expired"),
        ("by login link", "expired"),
    ]


def printed(tmp_path: Path, *options: str, terminal: bool = True) -> tuple[str, dict[str, int]]:
    """Start ``relight serve``, use the link that it prints twice, and return its output and both statuses."""
    make_store(tmp_path / "runs", 1, 1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "relight", "serve", str(tmp_path / "runs"), "--listen", f"127.0.0.1:{port}"]
    ours, theirs = pty.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        [*command, "--state", str(tmp_path / "serve.sqlite"), *options],
        stderr=theirs,
        stdout=theirs,
        env={**os.environ, "BROWSER": "true"},
    )
    os.close(theirs)
    output, statuses = b"", dict[str, int]()
    try:
        ends = time.monotonic() + 60
        wanted = b"once=" if terminal else b"Ctrl-C"
        while not (wanted in output and output.endswith(b"\n")) and time.monotonic() < ends:
            output += os.read(ours, 4096)
        if link := re.search(rb"http://\S+once=\S+", output):
            statuses = {use: httpx.get(link[0].decode()).status_code for use in ("first", "second")}
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
        while True:
            try:
                more = os.read(ours, 4096)
            except OSError:  # the terminal was closed
                break
            if not more:
                break
            output += more
        os.close(ours)
    return output.decode(), statuses


@pytest.mark.parametrize("options", [(), ("--open",)])
def test_the_command_prints_a_link_at_a_terminal(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The printed link logs in once, without any token, and is in no file. ``--open`` leaves no file either."""
    output, statuses = printed(tmp_path, *options)
    assert statuses == {"first": 200, "second": 401}, output
    secret = output.partition("once=")[2].split()[0]
    assert output.count(secret) == 1 and "no token yet" not in output
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert not list(tmp_path.glob("open-*.html"))


def test_a_log_gets_no_link(tmp_path: Path) -> None:
    """Without a terminal, as under a service manager, no link is printed."""
    output, _ = printed(tmp_path, terminal=False)
    assert "Ctrl-C" in output and "once=" not in output and "no token yet" in output
