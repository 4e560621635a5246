"""Reading a store through a web server that serves files and nothing else."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.log.test_log_stale_listings import save

from relight.commit import Attempt
from relight.errors import CheckpointNotFound, ConfigError
from relight.log import Log, fold
from relight.reader.verify import verify_checkpoint
from relight.store import LocalStore, open_bytes, put
from relight.store.web import WebStore
from relight.testing.store_suite import refuses


class Ranges(SimpleHTTPRequestHandler):
    """A server of whole files and ranges, without listings."""

    asked: list[str] = []

    def log_message(self, format: str, *args: object) -> None:
        pass

    def list_directory(self, path: object) -> None:
        self.send_error(403)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.translate_path(self.path)
        if not os.path.isfile(path):
            self.send_error(404)
            return
        data = Path(path).read_bytes()
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
            if begin >= len(data):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end}/{len(data)}")
            body = data[begin : end + 1]
        else:
            self.send_response(200)
            body = data
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", self.date_time_string(int(os.path.getmtime(path))))
        self.send_header("ETag", f'"{len(data)}"')
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[LocalStore, str]]:
    """A store on disk, and the URL under which it is served."""
    handler = lambda *args: Ranges(*args, directory=str(tmp_path))  # noqa: E731
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield LocalStore(tmp_path / "ck"), f"http://127.0.0.1:{server.server_address[1]}/ck"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("saves", [0, 1, 2, 5, 14, 30])
def test_a_run_is_found_and_verified_without_a_listing(served: tuple[LocalStore, str], saves: int) -> None:
    """For any number of records the history is right and every checkpoint verifies. Requests grow with the
    logarithm."""
    local, url = served
    attempt = Attempt.begin(local, "run")
    ids = [save(attempt, step) for step in range(saves)]
    web = open_bytes(url)
    assert isinstance(web, WebStore)
    view = Log(web, "run").read()
    assert (view.head, not view.faults) == (attempt.view().head, True)
    assert [checkpoint.id for checkpoint in fold(view).live] == ids
    for checkpoint in fold(view).live[-2:]:
        assert verify_checkpoint(web, view, checkpoint) == []


def test_a_missing_record_hides_nothing_after_it(served: tuple[LocalStore, str]) -> None:
    """A gap in the log is a fault, not its end."""
    local, url = served
    attempt = Attempt.begin(local, "run")
    for step in range(6):
        save(attempt, step)
    local.delete("run/log/000000000004.json")
    view = Log(open_bytes(url), "run").read()
    assert view.head == attempt.view().head
    assert [fault.seq for fault in view.faults] == [4]


def test_nothing_is_written(served: tuple[LocalStore, str]) -> None:
    """Attempts, tags and sweeps are refused by name."""
    local, url = served
    save(Attempt.begin(local, "run"), 0)
    web = open_bytes(url)
    for call in (
        lambda: Attempt.begin(web, "run"),
        lambda: put(web, "a", b""),
        lambda: web.put_once("a", b""),
        lambda: web.delete("a"),
    ):
        assert "read-only" in str(refuses(ConfigError, call))
    refuses(CheckpointNotFound, lambda: Log(web, "other").read())


def test_commands_take_such_a_url(served: tuple[LocalStore, str], tmp_path: Path) -> None:
    """``ls``, ``verify`` and ``cp`` read a run through a web server."""
    local, url = served
    attempt = Attempt.begin(local, "run")
    checkpoint = save(attempt, 7)

    def relight(*arguments: str) -> str:
        done = subprocess.run([sys.executable, "-m", "relight", *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert checkpoint in relight("ls", f"{url}/run")
    assert "as committed" in relight("verify", f"{url}/run")
    relight("cp", f"{url}/run", str(tmp_path / "copy" / "run"))
    shutil.rmtree(tmp_path / "ck")
    assert checkpoint in relight("ls", str(tmp_path / "copy" / "run"))


def test_large_files_come_in_ranges(served: tuple[LocalStore, str]) -> None:
    """A pack is read in pieces, from any offset."""
    local, url = served
    data = random.Random(1).randbytes((9 << 20) + 5)
    put(local, "big", data)
    reader = open_bytes(url).open("big")
    room = bytearray(len(data) - 3)
    reader.read_into(3, memoryview(room))
    assert room == data[3:]
