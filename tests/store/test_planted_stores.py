"""The shipped store suite catches planted faults: missing fsyncs, and what ``abort`` does after ``finish``."""

from __future__ import annotations

import os
import shutil
import stat
import unittest
from pathlib import Path

import pytest

from relight.store import ByteStore, Disk, LocalStore
from relight.store.base import Writer
from relight.store.wrapper import StoreWrapper
from relight.testing import traced_writes
from relight.testing.store_suite import StoreSuite, write_in_each_way

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


class WithoutFileSync(Disk):
    """Makes directories durable, and no file."""

    def fsync(self, fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            super().fsync(fd)


class WithoutNameSync(Disk):
    """Makes files durable, and no name."""

    def fsync(self, fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            super().fsync(fd)


class EarlySync(Disk):
    """Writes once more after the fsync."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[bytes, int]] = {}

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._last[fd] = bytes(data), offset
        return super().pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        data, offset = self._last.pop(fd, (b"", 0))
        if 0 < len(data) < 1 << 16:  # not with direct I/O, which needs aligned memory
            super().pwrite(fd, memoryview(data), offset)


class WithoutParentSync(Disk):
    """Makes the names of files durable, and no name of a directory."""

    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        self._made = getattr(self, "_made", set()) | {os.path.dirname(path)}

    def fsync(self, fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") not in getattr(self, "_made", set()):
            super().fsync(fd)


class _Changed:
    """A writer with another ``abort``."""

    def __init__(self, inner: Writer, path: str = "") -> None:
        self._inner, self._path, self._finished, self.align = inner, path, False, inner.align

    def write_at(self, offset: int, data: memoryview) -> None:
        self._inner.write_at(offset, data)

    def finish(self, size: int | None = None) -> None:
        self._inner.finish(size)
        self._finished = True

    def abort(self) -> None:
        if not self._finished:
            self._inner.abort()
        elif self._path:
            Path(self._path).unlink()


class KeepsAborted(StoreWrapper):
    """``abort`` does nothing after ``finish``."""

    def write(self, key: str, size: int) -> Writer:
        return _Changed(super().write(key, size))


class DeletesReplaced(StoreWrapper):
    """``abort`` of a replacement deletes the file with the name."""

    def rewrite(self, key: str, size: int) -> Writer:
        return _Changed(super().rewrite(key, size), f"{self.url}/{key}")


class Planted(StoreSuite):
    """The suite on a faulty store."""

    __test__ = False

    def __init__(self, kind: type[Disk] | type[StoreWrapper]) -> None:
        self._kind = kind

    def make(self, tmp_path: Path) -> ByteStore:
        if issubclass(self._kind, Disk):
            return LocalStore(tmp_path, disk=self._kind())
        return self._kind(LocalStore(tmp_path))


@needs_strace
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (WithoutFileSync, "put_once: not fsynced after the last write"),
        (EarlySync, "put_once: not fsynced after the last write"),
        (WithoutNameSync, "put_once: new names in directories"),
        (WithoutParentSync, "put_once: new names in directories .*/run'"),
    ],
)
def test_a_missing_fsync_is_caught(tmp_path: Path, kind: type[Disk], why: str) -> None:
    """Files and names must be durable when the store acknowledges them."""
    with pytest.raises(AssertionError, match=why):
        Planted(kind).test_what_is_acknowledged_is_durable(tmp_path)


@pytest.mark.parametrize(
    ("kind", "check", "why"),
    [
        (KeepsAborted, "test_abort_after_finish_deletes_a_new_file", "left the new file"),
        (DeletesReplaced, "test_rewrite_replaces_a_file_as_a_whole", "deleted the replaced file"),
    ],
)
def test_a_wrong_abort_is_caught(tmp_path: Path, kind: type[StoreWrapper], check: str, why: str) -> None:
    """``abort`` after ``finish`` deletes a new file, and leaves a replaced one."""
    with pytest.raises(AssertionError, match=why):
        getattr(Planted(kind), check)(tmp_path)


@needs_strace
def test_a_sound_store_is_traced(tmp_path: Path) -> None:
    """The trace has each operation of the sound store, and nothing that is not durable but the names before ``sync``."""
    root = tmp_path / "files"
    root.mkdir()
    marks = traced_writes.traced_marks(LocalStore(root), write_in_each_way, root)
    assert [mark.operation for mark in marks] == ["put_once", "finish", "sync", "finish", "sync", "rewrite"]
    assert all(mark.bytes_of == [] and (mark.names == [] or mark.operation == "finish") for mark in marks)


def test_without_strace_the_test_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing tool is no failure of the store."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(unittest.SkipTest, match="strace is not installed"):
        Planted(Disk).test_what_is_acknowledged_is_durable(tmp_path)


LINES = """\
1 openat(AT_FDCWD</cwd>, "/r/a", O_WRONLY|O_CREAT|O_EXCL, 0666) = 5</r/a>
1 write(5</r/a>, "x", 1 <unfinished ...>
2 fsync(5</r/a>) = 0
1 <... write resumed>) = 1
1 access("/r/relight-mark-one", F_OK) = -1 ENOENT (No such file or directory)
2 fsync(5</r/a>) = -1 EIO (Input/output error)
1 fdatasync(5</r/a>) = 0
1 renameat2(4</r>, "a", AT_FDCWD</r>, "sub/b", RENAME_NOREPLACE) = 0
1 faccessat2(AT_FDCWD</cwd>, "/r/relight-mark-two", F_OK, AT_EACCESS) = -1 ENOENT (No such file or directory)
1 fsync(6</r/sub>) = 0
1 openat(AT_FDCWD</cwd>, "/r/sub/b", O_WRONLY|O_DSYNC) = 7</r/sub/b>
1 pwrite64(7</r/sub/b>, "y", 1, 0) = 1
1 access("/r/relight-mark-three", F_OK) = -1 ENOENT (No such file or directory)
1 --- SIGCHLD {si_signo=SIGCHLD} ---
1 +++ exited with 0 +++
"""


def test_traces_are_read() -> None:
    """Interrupted lines are joined, failed calls ignored, and renames and synchronous descriptors followed."""
    directories = traced_writes._Directories("/r")
    marks = list(traced_writes._marks(directories, traced_writes._calls(LINES.splitlines())))
    assert marks == [("one", ["/r/a"], ["/r/a"]), ("two", [], ["/r/sub/b"]), ("three", [], [])]
