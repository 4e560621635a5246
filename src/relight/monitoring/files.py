"""Reads the event files of this machine's processes as they grow: only new, complete lines, within bounds."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from relight.observe.file import DIRECTORY_FILES_MAX, LINE_BYTES_MAX, events_directory
from relight.observe.own_files import check_private

READ_MAX = 1 << 20
"""Most bytes of one read."""
CALL_BYTES_MAX = 16 << 20
"""Most bytes of one call, from all files together. The next call reads the rest."""


class Head(NamedTuple):
    """Process, rank and run of the events that follow."""

    store: str = ""
    run: str = ""
    rank: int = 0
    role: str = ""
    pid: int = 0
    host: str = ""
    offset_s: float = 0.0
    """Offset from seconds since the epoch to that machine's monotonic clock."""


class FileEvent(NamedTuple):
    """One event that was read from a file."""

    head: Head
    name: str
    time_s: float
    fields: dict[str, Any]


@dataclass(slots=True)
class _Tail:
    offset: int = 0
    rest: bytes = b""
    head: Head = field(default_factory=Head)
    skipping: bool = False
    """Whether the present line is too long, so it is skipped."""


class EventFiles:
    """The event files of one directory; by default, this user's on this machine. One thread at a time."""

    def __init__(self, directory: Path | None = None, changed_since: float = 0.0) -> None:
        """``changed_since``: files that did not change since then, in seconds since 1970, are not read."""
        self._changed_since = changed_since
        self.directory = directory if directory is not None else events_directory()
        self.unreadable = 0
        """Number of lines that were not events."""
        self.why = ""
        """Why no events are read; empty if they are."""
        self._tails: dict[str, _Tail] = {}

    def new(self) -> Iterator[FileEvent]:
        """Yield the events since the last call, file by file, each file's in their order."""
        bytes_left = CALL_BYTES_MAX
        for name in self._names():
            if name not in self._tails and not self._is_current(name):
                continue
            tail = self._tails.setdefault(name, _Tail())
            while bytes_left > 0:
                data = self._read(name, tail.offset)
                if not data:
                    break
                bytes_left -= len(data)
                tail.offset += len(data)
                yield from self._events(tail, data)

    def runs_of(self, pid: int) -> set[tuple[str, str]]:
        """Return store and run of the events that a process of this machine writes, as far as its files were read."""
        host = socket.gethostname()[:64]
        heads = [tail.head for tail in self._tails.values()]
        return {(head.store, head.run) for head in heads if (head.pid, head.host) == (pid, host) and head.run}

    def _names(self) -> list[str]:
        self.why = ""
        if self.directory is None:
            self.why = "RELIGHT_EVENTS=0: no events are kept"
            return []
        try:
            check_private(self.directory)
            names = sorted(name for name in os.listdir(self.directory) if name.endswith(".jsonl"))[
                -2 * DIRECTORY_FILES_MAX :
            ]
        except FileNotFoundError:
            self.why = f"no process has kept events in {self.directory} yet"
            names = []
        except OSError as error:
            self.why = str(error)
            return []  # the tails stay: read again from the start, the files' events would count twice
        self._tails = {name: tail for name, tail in self._tails.items() if name in set(names)}
        return names

    def _is_current(self, name: str) -> bool:
        assert self.directory is not None
        try:
            return not self._changed_since or (self.directory / name).stat().st_mtime >= self._changed_since
        except OSError:
            return False

    def _read(self, name: str, offset: int) -> bytes:
        assert self.directory is not None
        try:
            fd = os.open(self.directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return b""
        try:
            return os.pread(fd, READ_MAX, offset) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        except OSError:
            return b""
        finally:
            os.close(fd)

    def _events(self, tail: _Tail, data: bytes) -> Iterator[FileEvent]:
        *lines, tail.rest = (tail.rest + data).split(b"\n")
        for line in lines:
            if tail.skipping:
                tail.skipping = False
                continue
            event = self._parse_event(tail, line)
            if event is not None:
                yield event
        if len(tail.rest) > LINE_BYTES_MAX:
            self.unreadable += not tail.skipping
            tail.rest, tail.skipping = b"", True

    def _parse_event(self, tail: _Tail, line: bytes) -> FileEvent | None:
        try:
            value = json.loads(line)
            if value.get("relight") == "events":
                tail.head = Head(
                    str(value["store"]),
                    str(value["run"]),
                    int(value["rank"]),
                    str(value["role"]),
                    int(value["pid"]),
                    str(value["host"]),
                    float(value["monotonic"]) - float(value["since"]),
                )
                return None
            name, time_s = value.pop("event"), float(value.pop("time"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.unreadable += bool(line.strip())
            return None
        return FileEvent(tail.head, str(name), time_s, value) if tail.head.run else None
