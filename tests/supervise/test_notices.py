"""Announcements that the machine goes: heard where they are, and nothing else is taken for one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.supervise.test_run import Job

from relight.errors import ConfigError
from relight.supervise.launch import SAVED
from relight.supervise.notices import CLOUDS, Notices, says, sources_of


class Metadata(BaseHTTPRequestHandler):
    """A machine's own address, which has nothing to say until it has."""

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
    """Its address."""
    Metadata.answer = None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/spot"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("body", "heard"), [
    ('{"action": "terminate", "time": "2026-01-01T00:00:00Z"}', True), ("TRUE", True), ("FALSE", False), ("", False), ("NONE\n", False),
    ('{"DocumentIncarnation": 1, "Events": []}', False), ('{"Events": [{"EventType": "Reboot"}]}', False),
    ('{"Events": [{"EventType": "Freeze"}, {"EventType": "Preempt", "NotBefore": "x"}]}', True), ('{"Events": [4, {}]}', False), ("{", True),
])  # fmt: skip
def test_what_clouds_say(body: str, heard: bool) -> None:
    """Spot instances of three of them, and what they say when nothing is the matter."""
    assert bool(says(body)) is heard


def test_an_announcement_is_heard(metadata: str) -> None:
    """Not before it is made; and an address where nobody is says nothing."""
    notices = Notices([metadata, "http://127.0.0.1:9/none"], 0.05)
    time.sleep(0.4)
    assert not notices.heard
    Metadata.answer = '{"action": "terminate"}'
    ends = time.monotonic() + 20
    while not notices.heard and time.monotonic() < ends:
        time.sleep(0.02)
    assert "terminate" in notices.heard
    notices.close()


def test_names_of_clouds_and_nonsense() -> None:
    """What can be written into relight.toml."""
    assert [one.url for one in sources_of(["aws", "http://x/y"])] == [CLOUDS["aws"].url, "http://x/y"]
    with pytest.raises(ConfigError, match="notices"):
        sources_of(["ftp://x"])


def test_a_job_ends_as_it_is_announced(tmp_path: Path, metadata: str) -> None:
    """It saves its last step and says so by its exit code; SIGUSR1 before that only had it save."""
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
        said = process.communicate(timeout=100)[0]
    finally:
        process.kill()
    assert process.returncode == SAVED, said
    assert "announces" in said and "SIGUSR1" in said, said
