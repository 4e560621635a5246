"""Event files: their cost for a step, their limits, and disk errors."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from relight.monitoring.files import EventFiles
from relight.observe import Event, emit, file
from relight.observe.file import EventWriter, events_directory, make_private, tidy


@pytest.fixture
def kept(tmp_path: Path):
    """Make a writer. Return it and its directory."""
    writer = EventWriter(tmp_path / "events")
    writer.names({"store": "runs", "run": "demo", "rank": 3, "role": "trainer"})
    yield writer, tmp_path / "events"
    writer.close()


def test_events_arrive_with_their_process(kept: tuple[EventWriter, Path]) -> None:
    """Each event is one line after a header line. A reader's second read returns only new events."""
    writer, directory = kept
    emit("save.durable", "hello", step=7, id="abc", reason="asked", bytes=1, seconds=0.5, blocked_s=0.1)
    writer.flush(10)
    files = EventFiles(directory)
    (event,) = files.new()
    assert (event.name, event.fields["step"], event.fields["message"], event.head.run, event.head.rank) == (
        "save.durable",
        7,
        "hello",
        "demo",
        3,
    )
    assert list(files.new()) == []
    emit("save.coalesced", step=8)
    writer.flush(10)
    assert [event.name for event in files.new()] == ["save.coalesced"]
    assert files.unreadable == 0


def test_only_this_user_may_read_them(kept: tuple[EventWriter, Path]) -> None:
    """The directory is 0700 and files are 0600.

    A directory in which other users may write is neither written nor read.
    """
    writer, directory = kept
    writer.flush(10)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    directory.chmod(0o777)
    with pytest.raises(PermissionError):
        make_private(directory)
    files = EventFiles(directory)
    assert list(files.new()) == []
    assert "only this user" in files.why


def test_a_symbolic_link_in_its_place_is_refused(tmp_path: Path) -> None:
    """A link in place of the directory is not followed."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "events").symlink_to(tmp_path / "elsewhere")
    writer = EventWriter(tmp_path / "events")
    writer.names({"store": "s", "run": "r", "rank": 0, "role": "trainer"})
    writer.flush(10)
    writer.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_files_are_bounded_and_each_begins_with_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``FILE_BYTES_MAX`` a new file begins. Two files of one process are kept."""
    monkeypatch.setattr(file, "FILE_BYTES_MAX", 2000)
    writer = EventWriter(tmp_path / "events")
    writer.names({"store": "s", "run": "r", "rank": 0, "role": "trainer"})
    for number in range(100):
        emit("save.coalesced", "x" * 100, step=number)
        writer.flush(10)
    writer.close()
    left = sorted((tmp_path / "events").iterdir())
    assert len(left) == 2
    assert all(path.stat().st_size <= 2500 for path in left)
    assert all(json.loads(path.read_text().splitlines()[0])["run"] == "r" for path in left)
    assert [event.fields["step"] for event in EventFiles(tmp_path / "events").new()][-1] == 99


def test_a_flood_is_counted_and_blocks_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk hangs the queue fills up.

    Further events are counted, and the count is written once the disk is back.
    """
    go = threading.Event()
    monkeypatch.setattr(file, "QUEUED_MAX", 50)
    append = EventWriter._append
    monkeypatch.setattr(EventWriter, "_append", lambda self, *arguments: (go.wait(20), append(self, *arguments))[1])
    writer = EventWriter(tmp_path / "events")
    writer.names({"store": "s", "run": "r", "rank": 0, "role": "trainer"})
    writer._undo()  # otherwise events of other tests' threads in this process count too
    started = time.monotonic()
    for number in range(1000):
        writer.on_event(Event("save.coalesced", {"step": number}))
    assert time.monotonic() - started < 2
    go.set()
    writer.flush(10)
    writer.flush(10)
    writer.close()
    events = list(EventFiles(tmp_path / "events").new())
    lost = sum(event.fields["count"] for event in events if event.name == "events.lost")
    assert lost > 0
    assert lost + sum(event.name == "save.coalesced" for event in events) == 1000


def test_a_full_disk_costs_events_and_nothing_else(
    kept: tuple[EventWriter, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events of a failed write are dropped; the next write is tried."""
    writer, directory = kept
    writer.flush(10)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    emit("save.coalesced", step=1)
    writer.flush(10)
    monkeypatch.setattr(os, "write", real)
    emit("save.coalesced", step=2)
    writer.flush(10)
    assert [event.fields["step"] for event in EventFiles(directory).new()] == [2]


def test_fields_of_any_kind_and_length_make_a_line(
    kept: tuple[EventWriter, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that JSON cannot express are written as text.

    An event that is too long for a line loses its texts, not its numbers.
    """
    writer, directory = kept
    # pytest-xdist cannot send a lone surrogate in a test's report
    monkeypatch.setattr(logging.getLogger("relight"), "disabled", True)
    emit("signal.received", signal={1, 2})
    emit("save.durable", "y" * 100_000, step=1, seconds=2.5)
    emit("save.failed", "\ud800", step=2)
    writer.flush(10)
    events = list(EventFiles(directory).new())
    assert [event.name for event in events] == ["signal.received", "save.durable", "save.failed"]
    assert events[1].fields == {"cut": True, "step": 1, "seconds": 2.5}


def test_a_fork_keeps_nothing_unless_it_asks(tmp_path: Path) -> None:
    """A forked child does not write to its parent's file.

    After ``write_events`` it has its own file, and the parent's continues.
    """
    script = """
import os, sys
from relight.observe import emit, write_events, flush_events
write_events("s", "r")
emit("save.coalesced", step=1)
child = os.fork()
if child == 0:
    emit("save.coalesced", step=2)
    if len(sys.argv) > 1:
        write_events("s", "r", role="child")
        emit("save.coalesced", step=3)
        flush_events(5)
    os._exit(0)
os.waitpid(child, 0)
emit("save.coalesced", step=4)
flush_events(5)
"""
    for asks, steps in (([], [1, 4]), (["ask"], [1, 3, 4])):
        where = tmp_path / f"events{len(asks)}"
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, *asks],
            check=True,
            env={**os.environ, "RELIGHT_EVENTS": str(where)},
        )
        events = list(EventFiles(where).new())
        assert sorted(event.fields["step"] for event in events) == steps
        assert len({event.head.pid for event in events}) == 1 + len(asks)


def test_what_was_emitted_last_is_there_when_the_process_has_ended(tmp_path: Path) -> None:
    """A process that ends at once has written its events."""
    script = "from relight.observe import emit, write_events; write_events('s', 'r'); emit('save.coalesced', step=5)"
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "RELIGHT_EVENTS": str(tmp_path / "events")}
    )
    assert [event.fields["step"] for event in EventFiles(tmp_path / "events").new()] == [5]


def test_no_call_of_the_system_is_made_for_an_event(tmp_path: Path) -> None:
    """The emitting thread makes no system call except a futex call if the writer sleeps. strace counts them."""
    script = """
import os, sys, time
from relight.observe import emit, write_events
write_events("s", "r")
emit("save.coalesced", step=0)
time.sleep(0.5)
os.access("/begin", 0)
for step in range(200):
    emit("save.span", span="write", id="x", step=step, start=0.0, end=1.0)
os.access("/end", 0)
"""
    trace = tmp_path / "trace"
    try:
        done = subprocess.run(
            ["strace", "-o", str(trace), "-f", sys.executable, "-c", script], check=False, capture_output=True, text=True,
            env={**os.environ, "RELIGHT_EVENTS": str(tmp_path / "events")},
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no strace")
    if "ptrace" in done.stderr.lower():
        pytest.skip(f"strace is not permitted here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    lines = trace.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if '"/begin"' in line)
    end = next(number for number, line in enumerate(lines) if '"/end"' in line)
    pid = lines[begin].split()[0]
    calls = [re.match(r"\d+ +(?:<\.\.\. )?(\w+)", line)[1] for line in lines[begin + 1 : end] if line.split()[0] == pid]
    assert set(calls) <= {"futex", "sched_yield"}, calls
    assert len(calls) <= 200


def test_old_files_and_too_many_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is bounded by age, number and bytes.

    The newest files stay, and files with other names are not touched.
    """
    monkeypatch.setattr(file, "DIRECTORY_FILES_MAX", 3)
    now = 1e9
    names = [f"{number:013d}-77-000001.jsonl" for number in range(6)]
    for number, name in enumerate(names):
        path = tmp_path / name
        path.write_text("x")
        os.utime(path, (now - number * 86400 * 5, now - number * 86400 * 5))
    (tmp_path / "mine.txt").write_text("x")
    os.utime(tmp_path / "mine.txt", (0, 0))
    tidy(tmp_path, now)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names[:3], "mine.txt"]


def test_the_setting_names_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The setting is a path, or 0 for no files. The default is a private directory of the machine."""
    monkeypatch.setenv("RELIGHT_EVENTS", str(tmp_path))
    assert events_directory() == tmp_path
    monkeypatch.setenv("RELIGHT_EVENTS", "0")
    assert events_directory() is None
    monkeypatch.delenv("RELIGHT_EVENTS")
    assert str(events_directory()).endswith(f"relight-{os.getuid()}/events")


def test_a_full_disk_at_the_first_line_loses_no_later_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head cannot be written. The next file begins with it, so that readers know the run of its events."""
    write, fails = os.write, [True]

    def full(fd: int, data: bytes) -> int:
        if fails and bytes(data).startswith(b'{"relight"'):
            fails.pop()
            raise OSError(errno.ENOSPC, "full")
        return write(fd, data)

    monkeypatch.setattr("relight.observe.file.os.write", full)
    writer = EventWriter(tmp_path / "events")
    writer.names({"store": "s", "run": "r", "rank": 0, "role": "trainer"})
    writer.flush(5.0)
    emit("save.failed", "later")
    writer.close()
    heads = [path.read_bytes()[:10] for path in (tmp_path / "events").iterdir() if path.stat().st_size]
    assert not fails and heads == [b'{"relight"']
