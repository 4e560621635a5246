"""Event files for other processes: a thread appends events, as lines of JSON, to files of this process.

The training thread puts an event into a queue and continues: it makes no system call, and waits for no disk. The files
have bounded size and number, in a directory that only this user may read. Their errors never reach training.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from relight.observe.events import Event, emit, subscribe
from relight.observe.own_files import OwnFiles, check_private
from relight.observe.thread_start import start_thread

QUEUED_MAX = 4096
"""Events that may wait for the disk. Further ones are dropped and counted; the count is reported once there is room."""
FILE_BYTES_MAX = 4 << 20
FILES_KEPT = 2
"""Files kept for one process: the present one, and the one before it."""
LINE_BYTES_MAX = 16 << 10
DIRECTORY_BYTES_MAX = 256 << 20
DIRECTORY_FILES_MAX = 1000
OLD_S = 14 * 86400.0
EVENT_FILE = r"\d{13}-\d{1,10}-\d{6}\.jsonl"
"""Form of an event file's name: start of its process in milliseconds, process id, number of the file."""
_DEFAULT_PARENT = f"relight-{os.getuid()}"
_LAST_WORDS_S = 0.5
"""Seconds that the end of a process may wait for unwritten events."""


def events_directory() -> Path | None:
    """Return the files' directory: ``RELIGHT_EVENTS``, else a private directory of this machine; None if it is
    ``0``."""
    from relight.settings.environment import environment  # here, for a fast start of commands

    setting = environment().events
    if setting == "0":
        return None
    return Path(setting).expanduser().absolute() if setting else Path(tempfile.gettempdir(), _DEFAULT_PARENT, "events")


def write_events(store: str, run: str, *, rank: int = 0, role: str = "trainer", yields: bool = False) -> None:
    """Write this process's events to files from now on, as those of that rank of that run. Cost: one thread, for all
    calls.

    With several runs in one process, events count for the run that was named last. ``yields``: unless one was named before.
    """
    global _writer
    directory = events_directory()
    if directory is None:
        return
    with _lock:
        if _writer is None:
            try:
                _writer = EventWriter(directory)
            # the process is at its limit of threads: training continues without a file of events
            except RuntimeError as error:
                emit("events.lost", f"events are not written to a file: {error}", count=0)
                return
    if not yields or not _writer.has_names:
        _writer.names({"store": store, "run": run, "rank": rank, "role": role})


def flush_events(timeout: float = _LAST_WORDS_S) -> None:
    """Return when all events so far are in the file, or after ``timeout`` seconds."""
    if _writer is not None:
        _writer.flush(timeout)


class EventWriter:
    """Writer of one process's events.

    ``names`` and ``on_event`` may be called by any thread, and by signal handlers.
    """

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._directory, self._clock = directory, clock
        self._queue: SimpleQueue[Event | dict[str, Any] | threading.Event | None] = SimpleQueue()
        self._lost = self._reported_lost = 0
        """Events that were dropped, and how many of them were reported."""
        self._forked = False
        self._stem = f"{int(clock() * 1000):013d}-{os.getpid()}"
        self._number, self._fd, self._size = 0, -1, 0
        self._head: dict[str, Any] = {}
        self._named: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._work, name="relight-events", daemon=True)
        start_thread(self._thread)
        self._undo = subscribe(self.on_event)

    def on_event(self, event: Event) -> None:
        """Put an event into the queue. It never blocks, and a signal handler may call it during another call."""
        if self._forked or event.name == "events.lost":  # the writer's thread writes this one directly
            return
        if self._queue.qsize() < QUEUED_MAX:
            self._queue.put(event)
        else:
            self._lost += 1

    def names(self, words: dict[str, Any]) -> None:
        """Set the store, run, rank and role of the events from now on."""
        if words != self._named:
            self._named = words
            self._queue.put(words)

    @property
    def has_names(self) -> bool:
        """Whether ``names`` was called."""
        return bool(self._named)

    def flush(self, timeout: float) -> None:
        """Return when all events so far are written, or after ``timeout`` seconds."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(timeout)

    def close(self) -> None:
        """Unsubscribe, and write the remaining events. Waits at most half a second for a disk that hangs."""
        self._undo()
        self._queue.put(None)
        self._thread.join(_LAST_WORDS_S)

    # -- in the thread

    def _work(self) -> None:
        tidy(self._directory, self._clock())
        while True:
            batch = [self._queue.get()]
            with contextlib.suppress(Empty):
                while len(batch) < 256:
                    batch.append(self._queue.get_nowait())
            lines, begins = bytearray(), False
            if self._head and (lost := self._lost - self._reported_lost):
                self._reported_lost += lost
                lines += _line(emit("events.lost", f"{lost} events came faster than they could be written", count=lost))
            for entry in batch:
                if entry is None:
                    self._append(lines, begins)
                    self._close_file()
                    return
                if isinstance(entry, threading.Event):
                    self._append(lines, begins)
                    lines, begins = bytearray(), False
                    entry.set()
                elif isinstance(entry, Event):
                    lines += _line(entry)
                else:
                    self._append(lines, begins)
                    lines, begins = self._begin(entry), True
            self._append(lines, begins)

    def _begin(self, words: dict[str, Any]) -> bytearray:
        self._head = {
            "relight": "events", "version": 1, "pid": os.getpid(), "host": socket.gethostname()[:64], "since": self._clock(),
            "monotonic": time.monotonic(), **words,
        }  # fmt: skip
        return bytearray(_json(self._head))

    def _append(self, lines: bytearray, begins: bool) -> None:
        """Write lines to the file. Lines that cannot be written are dropped; the next batch tries again, in a new file.

        ``begins``: whether the first line is the head, as ``_begin`` returns it.
        """
        if not lines:
            return
        try:
            if self._fd < 0 or self._size + len(lines) > FILE_BYTES_MAX:
                head = self._next_file()
                lines = lines if begins else bytearray(head + lines)
            written = os.write(self._fd, lines)
            self._size += written
            if written < len(lines):  # a full disk: the next line must not be appended to half a line
                self._close_file()
        except OSError:
            self._close_file()

    def _next_file(self) -> bytes:
        """Open a new file. Return its first line: without it, readers drop all others."""
        self._close_file()
        make_private(self._directory)
        self._number += 1
        path = self._path(self._number)
        self._fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        self._size = 0
        with contextlib.suppress(OSError):
            self._path(self._number - FILES_KEPT).unlink(missing_ok=True)
        return _json(self._head) if self._head else b""

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _path(self, number: int) -> Path:
        return self._directory / f"{self._stem}-{number:06d}.jsonl"


def make_private(directory: Path) -> None:
    """Create the directory for this user alone. ``OSError`` if it exists and is not private.

    The default directory is in a temporary one, where another user may have created its parent first, so the parent is
    checked too.
    """
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.parent.name == _DEFAULT_PARENT:
        check_private(directory.parent)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    check_private(directory)


def tidy(directory: Path, now: float) -> None:
    """Delete old event files, and the oldest ones beyond the limits of bytes and files. Other files, and other users'
    files, stay.

    Nothing is deleted from a directory that is a link, or that another user could have exchanged or written to.
    """
    with contextlib.suppress(OSError), OwnFiles(directory, EVENT_FILE) as files:
        kept = kept_bytes = 0
        for file in sorted(files, key=lambda file: file.changed, reverse=True):
            kept, kept_bytes = kept + 1, kept_bytes + file.size
            if kept > DIRECTORY_FILES_MAX or kept_bytes > DIRECTORY_BYTES_MAX or now - file.changed > OLD_S:
                files.remove(file.name)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, default=str, ensure_ascii=True).encode() + b"\n"


def _line(event: Event) -> bytes:
    try:
        data = event.to_json().encode("utf-8", "backslashreplace") + b"\n"
    except (TypeError, ValueError, RecursionError):  # a field that JSON cannot represent
        data = _json({"event": event.name, "time": event.time_s, "cut": True})
    if len(data) <= LINE_BYTES_MAX:
        return data
    short = {
        name: value
        for name, value in event.fields.items()
        if isinstance(value, (int, float, bool)) or len(str(value)) < 200
    }
    short.pop("message", None)
    data = _json({"event": event.name, "time": event.time_s, "cut": True, **short})
    return data if len(data) <= LINE_BYTES_MAX else _json({"event": event.name, "time": event.time_s, "cut": True})


_writer: EventWriter | None = None
"""One file of events for each process."""
_lock = threading.Lock()
"""Replaced in a forked child, where the parent may have held it."""


def _in_child() -> None:
    """Detach a forked child from the parent's thread and file. It writes no events until it calls ``write_events``."""
    global _writer, _lock
    old, _writer, _lock = _writer, None, threading.Lock()
    if old is not None:
        old._forked = True  # not unsubscribed: another thread may have held the lock at the fork


def _at_exit() -> None:
    if _writer is not None:
        _writer.close()


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)
