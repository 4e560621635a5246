"""Events kept for those who look from outside: a thread appends them, as lines of JSON, to files of this process's own.

The step's thread puts an event into a queue and goes on: it makes no system call for it, and waits for no disk. The files are of bounded
size and number, and lie in a directory that only this user may read. Whatever goes wrong with them, training does not hear of it.
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

SETTING = "RELIGHT_EVENTS"
QUEUED_MAX = 4096
"""Events that may wait for the disk; what comes beyond is counted, and told once there is room."""
FILE_BYTES_MAX = 4 << 20
FILES_KEPT = 2
"""Of one process: the one that is written, and the one before it."""
LINE_BYTES_MAX = 16 << 10
DIRECTORY_BYTES_MAX = 256 << 20
DIRECTORY_FILES_MAX = 1000
OLD_S = 14 * 86400.0
EVENT_FILE = r"\d{13}-\d{1,10}-\d{6}\.jsonl"
"""The form of an event file's name: when its process began, in milliseconds; the process; the number of the file."""
_DEFAULT_PARENT = f"relight-{os.getuid()}"
_LAST_WORDS_S = 0.5
"""How long the end of a process may be put off by what was not written yet."""


def events_directory() -> Path | None:
    """Where the files lie: what ``RELIGHT_EVENTS`` says, else a private directory of this machine; None for ``0``."""
    told = os.environ.get(SETTING, "")
    if told == "0":
        return None
    return Path(told).expanduser().absolute() if told else Path(tempfile.gettempdir(), _DEFAULT_PARENT, "events")


def write_events(store: str, run: str, *, rank: int = 0, role: str = "trainer") -> None:
    """From now on, events of this process are kept, as that rank's of that run. Any number of times; it costs a thread, once.

    Of two runs in one process, the one that was named last gets what comes from then on.
    """
    global _writer
    directory = events_directory()
    if directory is None:
        return
    with _lock:
        if _writer is None:
            try:
                _writer = EventWriter(directory)
            except RuntimeError as error:  # the process is at its limit of threads: training goes on without a file of events
                emit("events.lost", f"events are not written to a file: {error}", count=0)
                return
    _writer.names({"store": store, "run": run, "rank": rank, "role": role})


def flush_events(timeout: float = _LAST_WORDS_S) -> None:
    """Return when what has happened is in the file, or the time is over."""
    if _writer is not None:
        _writer.flush(timeout)


class EventWriter:
    """One process's. ``names`` and being told of an event may be called by any thread, and by signal handlers."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._directory, self._clock = directory, clock
        self._queue: SimpleQueue[Event | dict[str, Any] | threading.Event | None] = SimpleQueue()
        self._lost = self._told = 0
        """Events there was no room for, and how many of them were told of."""
        self._forked = False
        self._stem = f"{int(clock() * 1000):013d}-{os.getpid()}"
        self._number, self._fd, self._size = 0, -1, 0
        self._head: dict[str, Any] = {}
        self._named: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._work, name="relight-events", daemon=True)
        start_thread(self._thread)
        self._undo = subscribe(self.on_event)

    def on_event(self, event: Event) -> None:
        """An event: one put into a queue that never blocks, and may be interrupted by itself."""
        if self._forked or event.name == "events.lost":  # that one is written down at once
            return
        if self._queue.qsize() < QUEUED_MAX:
            self._queue.put(event)
        else:
            self._lost += 1

    def names(self, words: dict[str, Any]) -> None:
        """Whose the events are that come from now on."""
        if words != self._named:
            self._named = words
            self._queue.put(words)

    def flush(self, timeout: float) -> None:
        """Return when all that was heard so far is written, or the time is over."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(timeout)

    def close(self) -> None:
        """Hear of nothing more, and write what was heard; of a disk that hangs, no longer than a moment."""
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
            lines = bytearray()
            if self._head and (lost := self._lost - self._told):
                self._told += lost
                lines += _line(emit("events.lost", f"{lost} events came faster than they could be written down", count=lost))
            for one in batch:
                if one is None:
                    self._append(lines)
                    self._close_file()
                    return
                if isinstance(one, threading.Event):
                    self._append(lines)
                    lines = bytearray()
                    one.set()
                elif isinstance(one, Event):
                    lines += _line(one)
                else:
                    self._append(lines)
                    lines = self._begin(one)
            self._append(lines)

    def _begin(self, words: dict[str, Any]) -> bytearray:
        self._head = {
            "relight": "events", "version": 1, "pid": os.getpid(), "host": socket.gethostname()[:64], "since": self._clock(),
            "monotonic": time.monotonic(), **words,
        }  # fmt: skip
        return bytearray(_json(self._head))

    def _append(self, lines: bytearray) -> None:
        """What cannot be written is dropped: the next try is the next batch's."""
        if not lines:
            return
        with contextlib.suppress(OSError):
            if self._fd < 0 or self._size + len(lines) > FILE_BYTES_MAX:
                self._next_file()
            written = os.write(self._fd, lines)
            self._size += written
            if written < len(lines):  # a full disk: what follows must not be glued to half a line
                self._close_file()

    def _next_file(self) -> None:
        self._close_file()
        make_private(self._directory)
        self._number += 1
        path = self._path(self._number)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._size = 0
        with contextlib.suppress(OSError):
            self._path(self._number - FILES_KEPT).unlink(missing_ok=True)
        if self._number > 1:
            self._size += os.write(self._fd, _json(self._head))

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _path(self, number: int) -> Path:
        return self._directory / f"{self._stem}-{number:06d}.jsonl"


def make_private(directory: Path) -> None:
    """The directory, this user's own and readable by nobody else; ``OSError`` if that is not what is there.

    The default directory lies in a temporary one, where another user may have made the directory above it first: that one is checked, too.
    """
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.parent.name == _DEFAULT_PARENT:
        check_private(directory.parent)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    check_private(directory)


def tidy(directory: Path, now: float) -> None:
    """Delete event files that are old, and the oldest beyond so many bytes and files. Other files, and files of others, stay.

    Nothing is deleted from a directory that is a link, or that another user could have exchanged or written to.
    """
    with contextlib.suppress(OSError), OwnFiles(directory, EVENT_FILE) as files:
        kept = kept_bytes = 0
        for one in sorted(files, key=lambda one: one.changed, reverse=True):
            kept, kept_bytes = kept + 1, kept_bytes + one.size
            if kept > DIRECTORY_FILES_MAX or kept_bytes > DIRECTORY_BYTES_MAX or now - one.changed > OLD_S:
                files.remove(one.name)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, default=str, ensure_ascii=True).encode() + b"\n"


def _line(event: Event) -> bytes:
    try:
        data = event.to_json().encode("utf-8", "backslashreplace") + b"\n"
    except (TypeError, ValueError, RecursionError):  # a field that is no plain value
        data = _json({"event": event.name, "time": event.time_s, "cut": True})
    if len(data) <= LINE_BYTES_MAX:
        return data
    short = {name: value for name, value in event.fields.items() if isinstance(value, (int, float, bool)) or len(str(value)) < 200}
    short.pop("say", None)
    data = _json({"event": event.name, "time": event.time_s, "cut": True, **short})
    return data if len(data) <= LINE_BYTES_MAX else _json({"event": event.name, "time": event.time_s, "cut": True})


_writer: EventWriter | None = None
_lock = threading.Lock()


def _in_child() -> None:
    """A fork has neither the thread nor a right to the file: it keeps nothing until it asks to."""
    global _writer, _lock
    old, _writer, _lock = _writer, None, threading.Lock()
    if old is not None:
        old._forked = True  # and not unsubscribed: another thread may have held that lock at the fork


def _at_exit() -> None:
    if _writer is not None:
        _writer.close()


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)
