"""Termination notices of clouds are detected, and no other answer counts as one."""

from __future__ import annotations

import contextlib
import json
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import pytest
from tests.encryption.test_keys import private_authority
from tests.supervise.metadata_servers import CASES, TOKEN, Script, answer, drips, serving
from tests.supervise.test_run import Job

from relight.errors import ConfigError
from relight.observe import subscribe
from relight.supervise.launch import SAVED
from relight.supervise.metadata_server import LIMIT_S, request
from relight.supervise.notice_sources import CLOUDS, Notice, any_notice, sources_of
from relight.supervise.notices import Notices


class Metadata(BaseHTTPRequestHandler):
    """A metadata server. It has no notice until ``answer`` is set. ``status`` replaces the status of its answers."""

    answer: str | None = None
    status = 0
    asked = 0

    def do_GET(self) -> None:
        Metadata.asked += 1
        data = (self.answer or "").encode()
        self.send_response(self.status or (200 if self.answer is not None else 404))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    """Start a metadata server. Yield its address."""
    Metadata.answer, Metadata.status, Metadata.asked = None, 0, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/spot"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("body", "is_notice"), [
    ('{"action": "terminate", "time": "2026-01-01T00:00:00Z"}', True), ("TRUE", True), ("FALSE", False), ("", False), ("NONE\n", False),
    ('{"DocumentIncarnation": 1, "Events": []}', False), ('{"Events": [{"EventType": "Reboot"}]}', True),
    ('{"Events": [{"EventType": "Freeze"}, {"EventType": "Preempt", "NotBefore": "x"}]}', True), ('{"Events": [4, {}]}', False), ("{", True),  # a truncated notice counts
])  # fmt: skip
def test_answers_of_clouds(body: str, is_notice: bool) -> None:
    """Return a reason for notices of three clouds, and nothing for their usual answers."""
    assert bool(any_notice(body, lambda: "")) is is_notice


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


@pytest.fixture
def reports() -> Iterator[list[dict[str, Any]]]:
    """Collect the fields of ``run.notices`` events."""
    events: list[dict[str, Any]] = []
    undo = subscribe(lambda event: events.append(dict(event.fields)) if event.name == "run.notices" else None)
    yield events
    undo()


class Outcome(NamedTuple):
    """How a case ended: seconds from the notice to the announcement (None: there was none), and the events."""

    announcement: str
    after_s: float | None
    events: list[dict[str, Any]]
    script: Script


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Outcome]]:
    """Poll all servers of ``CASES`` at the same time, publish their notices, and return how each case ended."""
    events: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            patch.setenv(name, "http://127.0.0.1:9")  # would be refused
        stack.callback(
            subscribe(lambda event: events.append(dict(event.fields)) if event.name == "run.notices" else None)
        )
        scripts, polled, urls = {}, {}, {}
        for name, case in CASES.items():
            scripts[name] = Script(case.play)
            address = stack.enter_context(serving(scripts[name]))
            source = CLOUDS.get(case.source)
            if source is not None:
                parts = urlsplit(source.url)
                patch.setitem(CLOUDS, name, source._replace(url=f"{address}{parts.path}?{parts.query}".rstrip("?")))
            (polled_source,) = sources_of([name if source else f"{address}{case.source}"])
            urls[name] = polled_source.url
            polled[name] = Notices([name if source else urls[name]])
            stack.callback(polled[name].close)
        time.sleep(2.5)
        for script in scripts.values():
            script.has_notice = True
        published, after_s = time.monotonic(), dict[str, float]()
        while (
            time.monotonic() - published < 10.0
        ):  # beyond the event of the slowest one, to see that it is the only one
            for name, notices in polled.items():
                if notices.announcement and name not in after_s:
                    after_s[name] = time.monotonic() - published
            time.sleep(0.01)
        yield {
            name: Outcome(
                polled[name].announcement,
                after_s.get(name),
                [event for event in events if event["url"] == urls[name]],
                scripts[name],
            )
            for name in CASES
        }


@pytest.mark.parametrize("name", CASES)
def test_each_notice_is_received_or_its_absence_explained(name: str, outcomes: dict[str, Outcome]) -> None:
    """A notice is announced within 2 s. Where it cannot be received, one event states the reason and what to do."""
    case, outcome = CASES[name], outcomes[name]
    if case.received:
        assert outcome.after_s is not None and outcome.after_s < 2.0, outcome
        assert "announces" in outcome.announcement and not outcome.events
        return
    assert not outcome.announcement
    assert [case.why in event["why"] for event in outcome.events] == ([True] if case.why else []), outcome.events
    assert len(outcome.script.requests) > 3, "it is polled further"
    for event in outcome.events:
        hint = CLOUDS[case.source].hint if case.source in CLOUDS else "correct the address"
        assert hint in event["message"] or "is asked to end" in event["message"]


def test_session_tokens_are_used_as_documented(outcomes: dict[str, Outcome]) -> None:
    """A token is renewed before it ends, so that no request is refused, and is otherwise used again.

    If the token's address fails, no request is sent without a token.
    """
    methods = [request.method for request in outcomes["IMDSv2"].script.requests]
    assert methods.count("PUT") == 1 and methods[0] == "PUT"
    assert all(TOKEN in request.headers for request in outcomes["IMDSv2"].script.requests[1:])
    short = outcomes["IMDSv2, tokens of a second"].script
    assert 401 not in short.statuses and len(short.tokens) > 1
    assert 401 in outcomes["IMDSv2, tokens end too early"].script.statuses
    for name in ("tokens fail", "tokens are silent", "tokens are elsewhere", "tokens are empty"):
        assert {request.method for request in outcomes[name].script.requests} == {"PUT"}, name


def test_azures_first_event_counts() -> None:
    """Of several events the first end counts. An event that has begun, or has no valid time, ends the job at once."""
    parse = CLOUDS["azure"].parse
    events = [
        {"EventType": "Reboot", "NotBefore": "Mon, 30 Nov 2026 10:00:00 GMT"},
        {"EventType": "Redeploy", "NotBefore": "Mon, 30 Nov 2026 09:00:00 GMT"},
        {"EventType": "Freeze", "NotBefore": ""},
    ]
    notice = parse(json.dumps({"Events": events}), lambda: "")
    assert notice is not None and notice.text.startswith("Redeploy at Mon") and notice.ends_at is not None
    for when in ("", "soon", None, 7):
        started = parse(json.dumps({"Events": [*events, {"EventType": "Reboot", "NotBefore": when}]}), lambda: "")
        assert started == Notice("Reboot")
    assert parse('{"Events": [4, {}]}', lambda: "") is None


def test_a_source_that_answers_again_is_reported(metadata: str, reports: list[dict[str, Any]]) -> None:
    """After a reported failure the first valid answer is reported too, and a notice is detected.

    Two reasons by turns are reported once each.
    """
    notices = Notices([metadata], 0.01)
    ends = time.monotonic() + 20
    for round_ in range(3):
        for status in (500, 403):
            Metadata.status = status
            asked = Metadata.asked
            while (Metadata.asked < asked + 6 or (not round_ and len(reports) < 1)) and time.monotonic() < ends:
                time.sleep(0.01)
    Metadata.status = 404
    while len(reports) < 3 and time.monotonic() < ends:
        time.sleep(0.01)
    Metadata.status, Metadata.answer = 200, "TRUE"
    while not notices.announcement and time.monotonic() < ends:
        time.sleep(0.01)
    assert [event["why"][:15] for event in reports] == ["HTTP status 500", "HTTP status 403", ""]
    assert "TRUE" in notices.announcement


def test_a_source_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An https address is read if its certificate is valid. The limit of time holds there, too."""
    ca = private_authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca, tmp_path / "key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    for play, notice in ((lambda *_: answer(200, "it ends"), "it ends"), (drips(answer(200, " " * 500)), "")):
        with serving(Script(play), tls=context) as address:
            began = time.monotonic()
            if notice:
                assert request(f"https://localhost:{address.rpartition(':')[2]}/", {}).body == notice
            else:
                with pytest.raises(TimeoutError):
                    request(f"https://localhost:{address.rpartition(':')[2]}/", {})
                assert time.monotonic() - began < 2 * LIMIT_S
            monkeypatch.delenv("SSL_CERT_FILE")
            with pytest.raises(ssl.SSLCertVerificationError):
                request(f"https://localhost:{address.rpartition(':')[2]}/", {})
            monkeypatch.setenv("SSL_CERT_FILE", str(ca))


def test_names_of_clouds_and_nonsense() -> None:
    """relight.toml takes names of clouds and http URLs."""
    assert [source.url for source in sources_of(["aws", "http://x/y"])] == [CLOUDS["aws"].url, "http://x/y"]
    assert urljoin(CLOUDS["aws"].url, CLOUDS["aws"].token_path) == "http://169.254.169.254/latest/api/token"
    with pytest.raises(ConfigError, match="notices"):
        sources_of(["ftp://x"])


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
