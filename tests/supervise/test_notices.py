"""Termination notices of clouds are detected, and no other answer counts as one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.supervise.test_run import Job

from relight.errors import ConfigError
from relight.observe import subscribe
from relight.supervise.launch import SAVED
from relight.supervise.notices import CLOUDS, NoticeEndpoint, Notices, announcement_of, endpoints_of


class Metadata(BaseHTTPRequestHandler):
    """A metadata server. It has no notice until ``answer`` is set."""

    answer: str | None = None

    def do_GET(self) -> None:
        data = (self.answer or "").encode()
        self.send_response(200 if self.answer is not None else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    """Start a metadata server. Yield its address."""
    Metadata.answer = None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/spot"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("body", "is_notice"), [
    ('{"action": "terminate", "time": "2026-01-01T00:00:00Z"}', True), ("TRUE", True), ("FALSE", False), ("", False), ("NONE\n", False),
    ('{"DocumentIncarnation": 1, "Events": []}', False), ('{"Events": [{"EventType": "Reboot"}]}', False),
    ('{"Events": [{"EventType": "Freeze"}, {"EventType": "Preempt", "NotBefore": "x"}]}', True), ('{"Events": [4, {}]}', False), ("{", True),  # a truncated notice counts
])  # fmt: skip
def test_answers_of_clouds(body: str, is_notice: bool) -> None:
    """Return a reason for notices of three clouds, and nothing for their usual answers."""
    assert bool(announcement_of(body)) is is_notice


def test_an_announcement_is_received(metadata: str) -> None:
    """A notice is detected after it is published. An address without a server has none."""
    notices = Notices([metadata, "http://127.0.0.1:9/none"], 0.05)
    time.sleep(0.4)
    assert not notices.announcement
    Metadata.answer = '{"action": "terminate"}'
    ends = time.monotonic() + 20
    while not notices.announcement and time.monotonic() < ends:
        time.sleep(0.02)
    assert "terminate" in notices.announcement
    notices.close()


class Odd(BaseHTTPRequestHandler):
    """A source with an answer that depends on the first part of the path."""

    tokens: tuple[str, ...] = ()
    asked = 0

    def do_GET(self) -> None:
        Odd.asked += 1
        kind = self.path.split("/")[1]
        answers = {
            "status401": (401, b""), "status500": (500, b"oops"), "html": (200, b"<html>log in</html>"), "binary": (200, b"\x00\xff\x01"),
            "error": (200, b'{"error": "unauthorized"}'), "gone": (404, b""), "redirect": (302, b""),
        }  # fmt: skip
        if kind == "imds2":
            status, body = (
                (401, b"")
                if self.headers.get("X-aws-ec2-metadata-token") not in self.tokens
                else (200, b'{"action": "stop"}')
            )
        else:
            status, body = answers[kind]
        self.send_response(status)
        if kind == "redirect":
            self.send_header("Location", "/html/login")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        Odd.tokens = ("one token",) if self.headers.get("X-aws-ec2-metadata-token-ttl-seconds") else ()
        self.send_response(200)
        self.send_header("Content-Length", "9")
        self.end_headers()
        self.wfile.write(b"one token")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def odd() -> Iterator[str]:
    """Start a server with odd answers. Yield its address."""
    Odd.tokens, Odd.asked = (), 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def reports() -> Iterator[list[dict[str, Any]]]:
    """Collect the fields of ``run.notices`` events."""
    events: list[dict[str, Any]] = []
    undo = subscribe(lambda event: events.append(dict(event.fields)) if event.name == "run.notices" else None)
    yield events
    undo()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("status401", "HTTP status 401"), ("status500", "HTTP status 500"), ("html", "HTML"), ("binary", "binary"), ("error", "unauthorized"),
        ("redirect", "redirect to /html/login"), ("gone", ""), ("closed", "refused"),
    ],
)  # fmt: skip
def test_a_source_that_answers_with_an_error_is_reported_once(
    odd: str, reports: list[dict[str, Any]], kind: str, why: str
) -> None:
    """An answer that is neither a notice nor its absence is reported once with the reason, and never counts as a
    notice."""
    url = f"{odd}/{kind}/spot" if kind != "closed" else "http://127.0.0.1:9/none"
    notices = Notices([url], 0.01)
    ends = time.monotonic() + 10
    while time.monotonic() < ends and (Odd.asked < 8 if kind != "closed" else not reports):
        time.sleep(0.01)
    notices.close()
    assert not notices.announcement
    assert ([why in event["why"] and event["url"] == url for event in reports] == [True]) if why else not reports


def test_a_source_that_answers_again_is_reported(
    metadata: str, reports: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reported failure the first valid answer is reported too, and a notice is detected."""
    notices = Notices([metadata], 0.01)
    get = Notices._get
    monkeypatch.setattr(Notices, "_get", lambda self, source: (_ for _ in ()).throw(OSError(111, "Connection refused")))
    ends = time.monotonic() + 10
    while not reports and time.monotonic() < ends:
        time.sleep(0.01)
    monkeypatch.setattr(Notices, "_get", get)
    while len(reports) < 2 and time.monotonic() < ends:
        time.sleep(0.01)
    Metadata.answer = "TRUE"
    while not notices.announcement and time.monotonic() < ends:
        time.sleep(0.01)
    assert [bool(event["why"]) for event in reports] == [True, False] and "TRUE" in notices.announcement


def test_a_server_that_wants_a_session_token_gets_one(
    odd: str, reports: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With IMDSv2 the first answer is 401; a token is fetched and the notice is detected."""
    monkeypatch.setitem(CLOUDS, "aws", NoticeEndpoint(f"{odd}/imds2/spot", {}, f"{odd}/token"))
    notices = Notices(["aws"], 0.01)
    ends = time.monotonic() + 10
    while not notices.announcement and time.monotonic() < ends:
        time.sleep(0.01)
    notices.close()
    assert "stop" in notices.announcement and not reports


def test_names_of_clouds_and_nonsense() -> None:
    """relight.toml takes names of clouds and http URLs."""
    assert [source.url for source in endpoints_of(["aws", "http://x/y"])] == [CLOUDS["aws"].url, "http://x/y"]
    with pytest.raises(ConfigError, match="notices"):
        endpoints_of(["ftp://x"])


def test_a_job_ends_when_its_end_is_announced(tmp_path: Path, metadata: str) -> None:
    """After a notice the job saves its last step and ends with exit code ``SAVED``.

    A SIGUSR1 before that only saves.
    """
    job = Job(tmp_path, [], JOB_EVERY="1000", JOB_STEP_S="0.2")
    (tmp_path / "relight.toml").write_text(f'[supervise]\nnotices = ["{metadata}"]\nspares = false\n')
    process = job.start(steps=1000)
    try:
        ends = time.monotonic() + 60
        while time.monotonic() < ends and (not (tmp_path / "out").exists() or len(job.losses) < 5):
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        while time.monotonic() < ends and not (tmp_path / "store" / "run" / "ckpt").is_dir() and len(job.losses) < 60:
            time.sleep(0.05)
        Metadata.answer = '{"action": "terminate"}'
        output = process.communicate(timeout=100)[0]
    finally:
        process.kill()
    assert process.returncode == SAVED, output
    assert "announces" in output and "SIGUSR1" in output, output
