"""Stale caches, forgotten handles and lost replies of an NFS client, simulated (``test_nfs`` has a real one)."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from relight.errors import CheckpointNotFound, NoSpace, StoreUnavailable
from relight.store import Disk, LocalStore, put
from relight.store.durable import create_once
from relight.testing.disks import FailNth


class Remembering(Disk):
    """Reports names as absent that were absent at the last request, until their directory is opened, as NFS clients do."""

    def __init__(self) -> None:
        self.absent: set[str] = set()

    def _remembered(self, call, path):  # type: ignore[no-untyped-def]
        if any(path == absent_path or path.startswith(f"{absent_path}/") for absent_path in self.absent):
            raise FileNotFoundError(errno.ENOENT, "remembered", path)
        try:
            return call(path)
        except FileNotFoundError:
            while not os.path.lexists(os.path.dirname(path)):
                path = os.path.dirname(path)
            self.absent.add(path)
            raise

    def open_read(self, path: str) -> int:
        return self._remembered(super().open_read, path)

    def lstat(self, path: str) -> os.stat_result:
        return self._remembered(super().lstat, path)

    def unlink(self, path: str) -> None:
        self._remembered(super().unlink, path)

    def rmdir(self, path: str) -> None:
        self._remembered(super().rmdir, path)

    def scan(self, path: str):  # type: ignore[no-untyped-def]
        return iter(list(self._remembered(super().scan, path)))

    def open_dir(self, path: str) -> int:
        fd = self._remembered(super().open_dir, path)
        self.absent = {absent_path for absent_path in self.absent if os.path.dirname(absent_path) != path}
        return fd


def absent(store: LocalStore, key: str) -> bool:
    try:
        store.get(key, 99)
    except CheckpointNotFound:
        return True
    return False


@pytest.mark.parametrize("key", ["file", "run/log/file", "new/directories/too/file"])
def test_absence_is_not_believed_from_memory(tmp_path: Path, key: str) -> None:
    """A name that the client remembers as absent, and another machine has made since, is read, listed, synced and
    deleted."""
    (tmp_path / "store").mkdir()
    here, elsewhere = LocalStore(tmp_path / "store", disk=Remembering()), LocalStore(tmp_path / "store")
    parent = os.path.dirname(key)

    def forget_nothing() -> None:
        elsewhere.delete(key)
        for above in (parent, os.path.dirname(parent), "new"):
            if above:
                elsewhere.delete_dir(above)
        assert absent(here, key)
        put(elsewhere, key, b"x")

    forget_nothing()
    assert here.get(key, 9) == b"x"
    forget_nothing()
    assert [entry.name for entry in here.list(parent)] == ["file"]
    forget_nothing()
    here.sync(parent)
    forget_nothing()
    here.delete(key)
    assert not (tmp_path / "store" / key).exists(), "it was believed to be gone, and is there"
    if parent:
        assert here.delete_dir(parent) is True
        assert not (tmp_path / "store" / parent).exists()


class StaleRead(Disk):
    """The first descriptor of each file goes stale at its second read."""

    def __init__(self, code: int) -> None:
        self.code, self.reads, self.first = code, 0, -1

    def open_read(self, path: str) -> int:
        fd = super().open_read(path)
        self.first = fd if self.first < 0 else self.first
        return fd

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        self.reads += fd == self.first
        if fd == self.first and self.reads > 1:
            raise OSError(self.code, os.strerror(self.code))
        return super().preadv(fd, into, offset)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EBADF])
@pytest.mark.parametrize("fate", ["there", "deleted", "replaced"])
def test_stale_handle_is_opened_again_once(tmp_path: Path, code: int, fate: str) -> None:
    """A handle that the server forgot is opened again if the name is still the same file.

    Otherwise the error states what happened to the file.
    """
    store = LocalStore(tmp_path, disk=StaleRead(code))
    put(store, "file", b"first and second")
    reader = store.open("file")
    try:
        data = bytearray(5)
        reader.read_into(0, memoryview(data))
        assert bytes(data) == b"first"
        if fate != "there":
            os.rename(tmp_path / "file", tmp_path / "kept")  # its inode is not given to another
        if fate == "replaced":
            put(store, "file", b"other and second")
        if fate == "there":
            reader.read_into(10, memoryview(data))
            reader.read_into(0, memoryview(data))
            assert bytes(data) == b"first"
        else:
            with pytest.raises(StoreUnavailable, match="another file has its name" if fate == "replaced" else "ENOENT"):
                reader.read_into(10, memoryview(data))
    finally:
        reader.close()


def test_stale_handle_past_the_cache(tmp_path: Path) -> None:
    """A read with direct I/O continues through the page cache."""

    class Stale(Disk):
        direct = -1

        def reopen_direct(self, fd: int) -> int:
            self.direct = os.dup(fd)
            return self.direct

        def resident(self, fd: int, offset: int, length: int) -> bytes:
            return bytes(-(-length // 4096))

        def preadv(self, fd: int, into: memoryview, offset: int) -> int:
            if fd == self.direct:
                raise OSError(errno.ESTALE, "stale")
            return super().preadv(fd, into, offset)

    store = LocalStore(tmp_path, disk=Stale())
    data = os.urandom(2 << 20)
    (tmp_path / "file").write_bytes(data)
    reader = store.open("file")
    try:
        assert reader.fetch(0, 4096, memoryview(bytearray(3 * 4096))) is None
        got = bytearray(len(data))
        reader.read_into(0, memoryview(got))
        assert bytes(got) == data
    finally:
        reader.close()


def test_another_thread_reopens_during_a_direct_read(tmp_path: Path) -> None:
    """A thread between two direct reads continues through the page cache. No descriptor is closed twice."""
    other: list[threading.Thread] = []
    closed: list[int] = []

    class Stale(Disk):
        first, direct = -1, -1

        def open_read(self, path: str) -> int:
            fd = super().open_read(path)
            self.first = fd if self.first < 0 else self.first
            return fd

        def reopen_direct(self, fd: int) -> int:
            self.direct = os.dup(fd)
            return self.direct

        def resident(self, fd: int, offset: int, length: int) -> bytes:
            return bytes(-(-length // 4096))

        def close(self, fd: int) -> None:
            closed.append(fd)
            super().close(fd)

        def preadv(self, fd: int, into: memoryview, offset: int) -> int:
            if fd == self.first:
                raise OSError(errno.ESTALE, "stale")
            if fd != self.direct:
                return super().preadv(fd, into, offset)
            got = super().preadv(fd, into[:4096], offset)
            other.append(threading.Thread(target=lambda: reader.read_into(0, memoryview(bytearray(10)))))
            other[-1].start()
            other[-1].join()
            return got

    data = os.urandom(2 << 20)
    (tmp_path / "file").write_bytes(data)
    reader = LocalStore(tmp_path, disk=Stale()).open("file")
    try:
        assert reader.fetch(0, 8192, memoryview(bytearray(3 * 4096))) is None
        got = bytearray(len(data))
        reader.read_into(0, memoryview(got))
        assert bytes(got) == data and len(other) == 1
    finally:
        reader.close()
        reader.close()
    assert len(closed) == len(set(closed)) == 3


@pytest.mark.parametrize("name", ["open_read", "scan", "unlink", "rmdir", "open_new", "mkdir"])
def test_stale_names_are_asked_for_again(tmp_path: Path, name: str) -> None:
    """A directory that was deleted and created again elsewhere gives ESTALE once: every operation still succeeds."""
    LocalStore(tmp_path).put_once("dir/file", b"x")
    store = LocalStore(tmp_path, disk=FailNth(1, errno.ESTALE, name))
    if name == "open_read":
        assert store.get("dir/file", 9) == b"x"
    elif name == "scan":
        assert [entry.name for entry in store.list("dir")] == ["file"]
    elif name in ("unlink", "rmdir"):
        store.delete("dir/file")
        assert store.delete_dir("dir") is True
        assert not (tmp_path / "dir").exists()
    else:
        assert store.put_once("new/name", b"y") is True
        assert (tmp_path / "new" / "name").read_bytes() == b"y"


def test_what_stays_stale_is_an_error(tmp_path: Path) -> None:
    """A second ESTALE is ``StoreUnavailable``, which states what may have happened."""

    class Always(Disk):
        def open_read(self, path: str) -> int:
            raise OSError(errno.ESTALE, "stale")

    LocalStore(tmp_path).put_once("file", b"x")
    with pytest.raises(StoreUnavailable, match="ESTALE") as caught:
        LocalStore(tmp_path, disk=Always()).get("file", 9)
    assert "another machine" in caught.value.hint and caught.value.retryable


class LostReply(Disk):
    """A disk like Linux's client of a killed server: ``link`` works and answers EEXIST, ``lstat`` has the old link
    count."""

    def __init__(self, *, swept: bool, taken: bool) -> None:
        self.swept, self.taken = swept, taken
        self.remembered: os.stat_result | None = None

    def link(self, source: str, target: str) -> None:
        self.remembered = os.lstat(source)
        if not self.taken:
            super().link(source, target)
        if self.swept:
            os.unlink(source)
        raise FileExistsError(errno.EEXIST, "it has been done before", target)

    def lstat(self, path: str) -> os.stat_result:
        if ".tmp-" in path and self.remembered is not None:
            return self.remembered
        return super().lstat(path)


@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("taken", [False, True])
def test_link_with_a_lost_reply(tmp_path: Path, swept: bool, taken: bool) -> None:
    """A creation that worked returns True, even if the reply is EEXIST, the link count is cached, or a sweep took the temporary."""
    path = tmp_path / "name"
    if taken:
        path.write_bytes(b"theirs")
    assert create_once(LostReply(swept=swept, taken=taken), str(path), b"mine") is not taken
    assert path.read_bytes() == (b"theirs" if taken else b"mine")
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_silly_renamed_files_are_in_no_listing(tmp_path: Path) -> None:
    """NFS's names of files that were deleted while open are not listed. Other hidden names are."""
    store = LocalStore(tmp_path)
    put(store, "dir/.nfsrc", b"a user's")
    (tmp_path / "dir" / ".nfs00000000002b409c00000001").write_bytes(b"kept")
    assert [entry.name for entry in store.list("dir")] == [".nfsrc"]
    store.delete("dir/.nfsrc")
    assert store.delete_dir("dir") is False


def test_more_than_there_is_room_for_where_none_can_be_reserved(tmp_path: Path) -> None:
    """On a file system that cannot reserve room (NFS before 4.2), a file larger than what is free is refused before anything is written."""
    disk = FailNth(1, errno.EOPNOTSUPP, "fallocate", forever=False)
    store = LocalStore(tmp_path, disk=disk)
    with pytest.raises(NoSpace):
        store.write("huge", (store.free_bytes() or 0) + (1 << 40))
    assert list(store.list("")) == []
    disk = FailNth(1, errno.EOPNOTSUPP, "fallocate")
    LocalStore(tmp_path, disk=disk).write("fits", 1 << 20).abort()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "close"])
def test_write_errors_that_come_late(tmp_path: Path, code: int, call: str) -> None:
    """An error at fsync or close is raised. The file is not trusted again and is gone, and its name is free."""
    store = LocalStore(tmp_path, disk=FailNth(1, code, call))
    with pytest.raises(NoSpace if code in (errno.ENOSPC, errno.EDQUOT) else StoreUnavailable):
        put(store, "file", b"x")
    assert list(store.list("")) == []
    with pytest.raises(NoSpace if code in (errno.ENOSPC, errno.EDQUOT) else StoreUnavailable):
        LocalStore(tmp_path, disk=FailNth(1, code, call)).put_once("name", b"x")
    assert list(store.list("")) == []
    assert store.put_once("name", b"x") is True
