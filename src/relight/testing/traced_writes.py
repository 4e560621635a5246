"""What a store has made durable by the time it returns, from the system calls of the process that writes, recorded by strace.

Bytes that are written to a mapped file are not seen. Calls that fail are ignored.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import time
import unittest
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from relight.comm.children import safe_spawn
from relight.store import ByteStore

MARK = "relight-mark-"
"""Begins the name of a file that does not exist. The traced process checks for it after each operation."""
ATTACH_S = 60.0
_WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "copy_file_range", "sendfile")
_OTHERS = (
    "open", "openat", "creat", "fsync", "fdatasync", "sync", "syncfs", "link", "linkat", "rename", "renameat", "renameat2",
    "mkdir", "mkdirat", "unlink", "unlinkat", "rmdir", "access", "faccessat", "faccessat2",
)  # fmt: skip
_LINE = re.compile(r"(?P<pid>\d+) +(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>\d+)(?:<(?P<path>.*)>)?")
_UNFINISHED, _RESUMED = re.compile(r"(\d+) +(.*) <unfinished \.\.\.>"), re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")
_PATHS = re.compile(r'(?:(?:AT_FDCWD|\d+)(?:<(?P<directory>[^>]*)>)?, )?"(?P<path>(?:[^"\\]|\\.)*)"')
_DESCRIPTOR = re.compile(r"\d+<([^>]*)>")
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class TracedCall(NamedTuple):
    """A system call that succeeded, with the paths of its arguments."""

    name: str
    paths: tuple[str, ...]
    flags: str
    """All arguments, as strace prints them."""
    opened: int = -1
    """The descriptor that it opened, or that it writes to."""


class NotDurable(NamedTuple):
    """What a power cut may lose at a mark: files with unsynced bytes, and names in unsynced directories."""

    operation: str
    bytes_of: list[str]
    names: list[str]


@dataclass(eq=False)
class _TracedFile:
    """A file, under any number of names, and whether some of its bytes are unsynced."""

    dirty: bool = False


@dataclass
class _Directories:
    """The state of the files below a directory."""

    root: str
    files: dict[str, _TracedFile] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    """New names in directories that have not been synced since."""
    synchronous: set[int] = field(default_factory=set)
    """Descriptors that were opened with ``O_SYNC`` or ``O_DSYNC``."""

    def apply(self, call: TracedCall) -> None:
        """Follow one call."""
        name, paths = call.name, call.paths
        if name in ("open", "openat", "creat"):
            if "O_CREAT" in call.flags or name == "creat":
                self._create(paths[0])
            (self.synchronous.add if "SYNC" in call.flags else self.synchronous.discard)(call.opened)
        elif name in ("mkdir", "mkdirat"):
            self.names.add(paths[0])
        elif name in _WRITES:
            if paths and call.opened not in self.synchronous:
                self.files.setdefault(paths[0], _TracedFile()).dirty = True
        elif name in ("fsync", "fdatasync"):
            self.files.get(paths[0], _TracedFile()).dirty = False
            self.names = {path for path in self.names if os.path.dirname(path) != paths[0]}
        elif name in ("sync", "syncfs"):
            self.names.clear()
            for file in self.files.values():
                file.dirty = False
        elif name.startswith(("link", "rename")):
            self.files[paths[1]] = self.files.get(paths[0], _TracedFile())
            self.names.add(paths[1])
        if name.startswith(("rename", "unlink", "rmdir")):
            self.files.pop(paths[0], None)
            self.names.discard(paths[0])

    def _create(self, path: str) -> None:
        if path not in self.files:
            self.files[path] = _TracedFile()
            self.names.add(path)

    def lost(self, operation: str) -> NotDurable:
        """Return what a power cut now may lose."""
        below = f"{self.root}/"
        dirty = [path for path, file in self.files.items() if file.dirty and path.startswith(below)]
        return NotDurable(operation, sorted(dirty), sorted(path for path in self.names if path.startswith(below)))


def traced_marks(
    store: ByteStore, act: Callable[[ByteStore, Callable[[str], None]], None], root: Path
) -> list[NotDurable]:
    """Run ``act(store, mark)`` in another process, and return what was not durable at each call of ``mark``.

    Raise ``unittest.SkipTest`` if there is no strace, if it may not trace, or if the process wrote no file below ``root``.
    """
    if shutil.which("strace") is None:
        raise unittest.SkipTest("strace is not installed")
    output = root.parent / f"{root.name}-calls"
    directories = _Directories(str(root), {str(path): _TracedFile() for path in root.rglob("*")})
    fresh = get_context("spawn")
    with safe_spawn():
        ready, go = fresh.Event(), fresh.Event()
        child = fresh.Process(target=_act, args=(store, act, str(root), ready, go), daemon=True)
        child.start()
    names = ",".join(f"?{name}" for name in (*_WRITES, *_OTHERS))
    ready.wait(ATTACH_S)
    command = ["strace", "-f", "-y", "-qq", "-s", "4096", "-o", str(output), f"-etrace={names}", "-p", str(child.pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as strace:
        _wait_traced(child.pid, strace)
        go.set()
        child.join()
        strace.wait()
    assert child.exitcode == 0, "the process that writes has failed"
    marks = list(_marks(directories, _calls(output.read_text(encoding="utf-8", errors="replace").splitlines())))
    if not any(path.startswith(f"{root}/") for path in directories.files):
        raise unittest.SkipTest(f"the store has no files below {root}")
    return marks


def _act(store: ByteStore, act: Callable[..., None], root: str, ready: Any, go: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # without it only an ancestor may trace where Yama is on
    ready.set()
    go.wait()
    act(store, lambda name: os.access(f"{root}/{MARK}{name}", os.F_OK))


def _wait_traced(pid: int | None, strace: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + ATTACH_S
    while b"TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_bytes():
        if strace.poll() is not None or time.monotonic() > until:
            strace.kill()
            why = strace.stderr.read().decode(errors="replace").strip() if strace.stderr is not None else ""
            raise unittest.SkipTest(f"strace cannot trace here: {why}")
        time.sleep(0.001)


def _marks(directories: _Directories, calls: Iterable[TracedCall | str]) -> Iterator[NotDurable]:
    for call in calls:
        if isinstance(call, str):
            yield directories.lost(call)
        else:
            directories.apply(call)


def _calls(lines: Iterable[str]) -> Iterator[TracedCall | str]:
    """Yield the calls in the order of their ends. A text is a mark."""
    begun: dict[str, str] = {}
    for line in lines:
        if match := _UNFINISHED.match(line):
            begun[match[1]] = match[2]
            continue
        if match := _RESUMED.match(line):
            line = f"{match[1]} {begun.pop(match[1], '')}{match[2]}"
        name = line.partition("(")[0].split()[-1]
        if "access" in name:
            if MARK in line:
                yield line.partition(MARK)[2].partition('"')[0]
        elif match := _LINE.match(line):
            yield _call(match)


def _call(match: re.Match[str]) -> TracedCall:
    name, arguments = match["name"], match["arguments"]
    if name in _WRITES or name in ("fsync", "fdatasync", "syncfs"):
        descriptors = _DESCRIPTOR.findall(arguments if name == "copy_file_range" else arguments.partition(", ")[0])
        number = int(re.match(r"\d+", arguments)[0]) if arguments[:1].isdecimal() else -1  # type: ignore[index]
        return TracedCall(name, tuple(descriptors[-1:]), arguments, number)
    paths = [os.path.join(path["directory"] or os.getcwd(), path["path"]) for path in _PATHS.finditer(arguments)]
    if name in ("open", "openat", "creat"):
        return TracedCall(name, (match["path"] or paths[0],), arguments, int(match["result"]))
    return TracedCall(name, tuple(map(os.path.normpath, paths)), arguments)
