"""Disks that count calls, fail, fill up, kill the process, or lose data.

Each is a ``Disk``; all but ``SimulatedDisk`` wrap another.
"""

from __future__ import annotations

import errno as codes
import os
import random
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, ParamSpec, TypeVar

from relight.store.disk import Disk

P = ParamSpec("P")
R = TypeVar("R")

PAGE = 4096
CHANGING = frozenset(
    {"open_new", "pwrite", "fallocate", "truncate", "fsync", "close", "link", "unlink", "mkdir", "rmdir"}
)
"""Calls that change the disk, make a change durable, or may report one that failed."""
CUTS = ("lost", "names", "data", "zeros", "mixed")
"""Kinds of power cut; see ``SimulatedDisk``."""


class DiskCall(NamedTuple):
    """One call: its name, the path it is about (of the file, for a descriptor), and which inode generation that path is."""

    name: str
    path: str
    file: int
    """Number of the opened descriptor, which distinguishes two files that had one path. 0 for calls by path."""


class HookedDisk(Disk):
    """Passes every call to ``inner`` through ``around``, which subclasses override."""

    def __init__(self, inner: Disk | None = None) -> None:
        self.inner = inner or Disk()
        self._open: dict[int, tuple[str, int]] = {}
        self._opened = 0

    def around(self, call: DiskCall, go: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the call. Subclasses override this."""
        return go(*args, **kwargs)

    def _on_fd(self, name: str, fd: int) -> DiskCall:
        return DiskCall(name, *self._open.get(fd, ("?", 0)))

    def _opening(self, path: str, fd: int) -> int:
        self._opened += 1
        self._open[fd] = (path, self._opened)
        return fd

    def open_new(self, path: str, *, direct: bool = False) -> int:
        """See ``Disk``."""
        return self._opening(path, self.around(DiskCall("open_new", path, 0), self.inner.open_new, path, direct=direct))

    def open_read(self, path: str) -> int:
        """See ``Disk``."""
        return self._opening(path, self.around(DiskCall("open_read", path, 0), self.inner.open_read, path))

    def reopen_direct(self, fd: int) -> int:
        """See ``Disk``."""
        call = self._on_fd("reopen_direct", fd)
        return self._opening(call.path, self.around(call, self.inner.reopen_direct, fd))

    def resident(self, fd: int, offset: int, length: int) -> bytes:
        """See ``Disk``."""
        return self.around(self._on_fd("resident", fd), self.inner.resident, fd, offset, length)

    def open_dir(self, path: str) -> int:
        """See ``Disk``."""
        return self._opening(path, self.around(DiskCall("open_dir", path, 0), self.inner.open_dir, path))

    def revalidate(self, path: str) -> None:
        """See ``Disk``."""
        self.around(DiskCall("revalidate", path, 0), self.inner.revalidate, path)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """See ``Disk``."""
        return self.around(self._on_fd("pwrite", fd), self.inner.pwrite, fd, data, offset)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """See ``Disk``."""
        return self.around(self._on_fd("preadv", fd), self.inner.preadv, fd, into, offset)

    def fallocate(self, fd: int, size: int) -> None:
        """See ``Disk``."""
        self.around(self._on_fd("fallocate", fd), self.inner.fallocate, fd, size)

    def truncate(self, fd: int, size: int) -> None:
        """See ``Disk``."""
        self.around(self._on_fd("truncate", fd), self.inner.truncate, fd, size)

    def fsync(self, fd: int) -> None:
        """See ``Disk``."""
        self.around(self._on_fd("fsync", fd), self.inner.fsync, fd)

    def close(self, fd: int) -> None:
        """See ``Disk``."""
        call = self._on_fd("close", fd)
        self._open.pop(fd, None)
        self.around(call, self.inner.close, fd)

    def link(self, source: str, target: str) -> None:
        """See ``Disk``."""
        self.around(DiskCall("link", target, 0), self.inner.link, source, target)

    def unlink(self, path: str) -> None:
        """See ``Disk``."""
        self.around(DiskCall("unlink", path, 0), self.inner.unlink, path)

    def mkdir(self, path: str) -> None:
        """See ``Disk``."""
        self.around(DiskCall("mkdir", path, 0), self.inner.mkdir, path)

    def rmdir(self, path: str) -> None:
        """See ``Disk``."""
        self.around(DiskCall("rmdir", path, 0), self.inner.rmdir, path)

    def fstat(self, fd: int) -> os.stat_result:
        """See ``Disk``."""
        return self.around(self._on_fd("fstat", fd), self.inner.fstat, fd)

    def lstat(self, path: str) -> os.stat_result:
        """See ``Disk``."""
        return self.around(DiskCall("lstat", path, 0), self.inner.lstat, path)

    def scan(self, path: str) -> Iterator[tuple[str, bool]]:
        """See ``Disk``. Reads all names at once, so that the call is atomic."""
        return iter(self.around(DiskCall("scan", path, 0), lambda: list(self.inner.scan(path))))

    def free_bytes(self, path: str) -> int:
        """See ``Disk``."""
        return self.around(DiskCall("free_bytes", path, 0), self.inner.free_bytes, path)


class CountingDisk(HookedDisk):
    """Records every call in ``calls``."""

    def __init__(self, inner: Disk | None = None) -> None:
        super().__init__(inner)
        self.calls: list[DiskCall] = []

    def around(self, call: DiskCall, go: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Record the call, then do it."""
        self.calls.append(call)
        return go(*args, **kwargs)

    def count(self, name: str) -> int:
        """Return the number of calls of that name."""
        return sum(call.name == name for call in self.calls)


class FailNth(CountingDisk):
    """The ``n``-th call (of that ``name``, if given) fails with ``errno``; with ``forever`` all changing calls after it do too.

    A failing close has closed (Linux), a failing fsync or write has done nothing. ``lost_reply``: the call does its work first, and
    only then fails, as NFS has it. ``failed`` is the call that did.
    """

    def __init__(
        self,
        n: int,
        errno: int,
        name: str | None = None,
        *,
        inner: Disk | None = None,
        forever: bool = False,
        lost_reply: bool = False,
    ) -> None:
        super().__init__(inner)
        self.n, self.errno, self.name, self.forever, self.lost_reply = n, errno, name, forever, lost_reply
        self.seen = 0
        self.armed = True
        self.failed: DiskCall | None = None

    def around(self, call: DiskCall, go: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Fail if it is this call's turn."""
        self.calls.append(call)
        if self.armed and (self.name == call.name or (self.name is None and call.name in CHANGING)):
            self.seen += 1
            is_due = self.seen == self.n
        else:
            is_due = False
        if is_due or (self.armed and self.forever and self.failed and call.name in CHANGING):
            self.failed = self.failed or call
            if call.name == "close" or self.lost_reply:
                go(*args, **kwargs)
            raise OSError(self.errno, os.strerror(self.errno), call.path)
        return go(*args, **kwargs)


class InterruptNth(CountingDisk):
    """The ``n``-th changing call is interrupted by ``KeyboardInterrupt``, before or ``after`` it does its work; the disk lives on."""

    def __init__(self, n: int, *, after: bool, inner: Disk | None = None) -> None:
        super().__init__(inner)
        self.n, self.after = n, after
        self.seen = 0

    def around(self, call: DiskCall, go: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Interrupt if it is this call's turn."""
        self.calls.append(call)
        self.seen += call.name in CHANGING
        if call.name not in CHANGING or self.seen != self.n:
            return go(*args, **kwargs)
        if self.after:
            go(*args, **kwargs)
        raise KeyboardInterrupt


class ShortDisk(HookedDisk):
    """Reads and writes at most ``most`` bytes a call, as the system calls are free to."""

    def __init__(self, most: int, inner: Disk | None = None) -> None:
        super().__init__(inner)
        self.most = most

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Do a part of the call."""
        return super().pwrite(fd, data[: self.most], offset)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Do a part of the call."""
        return super().preadv(fd, into[: self.most], offset)


class QuotaDisk(HookedDisk):
    """Room for ``bytes_max`` bytes in whole pages, a page for each directory; then ``errno``: ``ENOSPC`` or ``EDQUOT``.

    Deleting frees space.
    """

    def __init__(self, bytes_max: int, errno: int = codes.ENOSPC, *, inner: Disk | None = None) -> None:
        super().__init__(inner)
        self.bytes_max, self.errno = bytes_max, errno
        self._pages: dict[int, int] = {}
        """Bytes by inode number."""

    @property
    def used(self) -> int:
        """Return the bytes in use."""
        return sum(self._pages.values()) * PAGE

    def _take(self, inode: int, bytes_: int) -> None:
        had = self._pages.get(inode, 0)
        pages = max(had, -(-bytes_ // PAGE))
        if self.used + (pages - had) * PAGE > self.bytes_max:
            raise OSError(self.errno, os.strerror(self.errno))
        self._pages[inode] = pages

    def open_new(self, path: str, *, direct: bool = False) -> int:
        """Count a new file, which uses no space yet."""
        fd = super().open_new(path, direct=direct)
        self._pages[self.inner.fstat(fd).st_ino] = 0
        return fd

    def fallocate(self, fd: int, size: int) -> None:
        """Reserve space."""
        self._take(self.inner.fstat(fd).st_ino, size)
        super().fallocate(fd, size)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Use space that was not reserved."""
        self._take(self.inner.fstat(fd).st_ino, offset + len(data))
        return super().pwrite(fd, data, offset)

    def mkdir(self, path: str) -> None:
        """Use one page."""
        if self.used + PAGE > self.bytes_max:
            raise OSError(self.errno, os.strerror(self.errno), path)
        super().mkdir(path)
        self._pages[self.inner.lstat(path).st_ino] = 1

    def unlink(self, path: str) -> None:
        """Free the file's space with its last name."""
        status = self.inner.lstat(path)
        super().unlink(path)
        if status.st_nlink <= 1:
            self._pages.pop(status.st_ino, None)

    def rmdir(self, path: str) -> None:
        """Free the page."""
        inode = self.inner.lstat(path).st_ino
        super().rmdir(path)
        self._pages.pop(inode, None)

    def free_bytes(self, path: str) -> int:
        """Return the free bytes."""
        return max(self.bytes_max - self.used, 0)


class CrashDisk(HookedDisk):
    """Dies at the ``n``-th changing call: ``before`` it, ``after`` it, or in the middle of a write (``half``, ``byte``, ``page``).

    ``die`` must not return. A torn mode dies before a call that is not a write, or a write too short for it.
    """

    MODES = ("before", "after", "half", "byte", "page")

    def __init__(self, n: int, mode: str, die: Callable[[], object], inner: Disk | None = None) -> None:
        super().__init__(inner)
        self.n, self.mode, self.die = n, mode, die
        self.seen = 0
        self.note: Callable[[DiskCall, int], None] | None = None
        """Called for every changing call, with the number of bytes that it writes."""

    def around(self, call: DiskCall, go: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Count changing calls, and die at the n-th."""
        if call.name not in CHANGING:
            return go(*args, **kwargs)
        self.seen += 1
        if self.note:
            self.note(call, len(args[1]) if call.name == "pwrite" else 0)  # type: ignore[arg-type]
        if self.seen == self.n:
            if self.mode == "after":
                go(*args, **kwargs)
            self.die()
        return go(*args, **kwargs)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Do a part of the write if it is the one to be torn."""
        if self.seen + 1 == self.n and self.mode in ("half", "byte", "page"):
            torn = data[: torn_length(self.mode, len(data))]
            if len(torn):
                self.inner.pwrite(fd, torn, offset)
        return super().pwrite(fd, data, offset)


def torn_length(mode: str, length: int) -> int:
    """Return how many bytes of a write of ``length`` bytes are done before the death."""
    return {"half": length // 2, "byte": 1, "page": PAGE if length > PAGE else 0}[mode]


class _DiskFile:
    __slots__ = ("data", "dirty", "inode", "links", "synced")

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self.data = bytearray()
        self.synced = b""
        self.dirty = False
        self.links = 1


class _Dir:
    __slots__ = ("inode", "names", "synced")

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self.names: dict[str, _DiskFile | _Dir] = {}
        self.synced: dict[str, _DiskFile | _Dir] = {}


class SimulatedDisk(Disk):
    """A POSIX file system in memory that knows which changes are durable and which are only visible.

    Durable are: a file's bytes and length as of the last ``fsync`` of that file, and a directory's names (created, linked, removed) as of
    the last ``fsync`` of that directory. Nothing else is, neither a new directory's own name after an fsync *of* it, nor a new file's
    name after an fsync of the file. (Ext4 and XFS keep more than that, POSIX does not ask them to.)

    Faults that a program on this disk must survive:

    - *its death at any call* (``clone``): everything written is still there, durable or not; descriptors are gone. A write may have
      been done in part
    - *a power cut at any call* (``power_cut``), also long after the death of the process that did not fsync:
      ``lost``: whatever was not durable is gone; ``names``: all names are there, but un-fsynced bytes are lost (files empty or short:
      "the link was kept but not the data"); ``data``: bytes are there, un-fsynced names are not, and removed ones are back;
      ``zeros``: names and lengths are there, un-fsynced bytes are zeros; ``mixed``: each un-fsynced name kept or lost on its own, each
      un-fsynced file with all, none, a random prefix of pages, or zeros in place of its new bytes

    Faults it does not make: durable bytes that change (``damage`` tests do that), fsyncs without effect, torn
    4096-byte pages within an fsynced file, new garbage in place of lost bytes.

    Not for threads. Absolute paths, from ``/``; no symbolic links. Deterministic: listings are in order of creation.
    """

    def __init__(self) -> None:
        self._inodes = 1
        self._root = _Dir(1)
        self._fds: dict[int, tuple[_DiskFile | _Dir, bool]] = {}
        self._next_fd = 3

    def clone(self) -> SimulatedDisk:
        """Return the disk as another process finds it after this one's death: with everything that was written, durable or not."""
        copies: dict[int, _DiskFile | _Dir] = {}

        def copy(node: _DiskFile | _Dir) -> _DiskFile | _Dir:
            new = copies.get(id(node))
            if new is not None:
                return new
            if isinstance(node, _DiskFile):
                file = copies[id(node)] = _DiskFile(node.inode)
                file.data, file.synced, file.dirty, file.links = (
                    bytearray(node.data),
                    node.synced,
                    node.dirty,
                    node.links,
                )
                return file
            copied = copies[id(node)] = _Dir(node.inode)
            copied.names = {name: copy(child) for name, child in node.names.items()}
            copied.synced = {name: copy(child) for name, child in node.synced.items()}
            return copied

        return self._like(copy(self._root))

    def power_cut(self, seed: int, mode: str = "mixed") -> SimulatedDisk:
        """Return the disk after a power cut and a reboot. ``mode`` as above; ``mixed`` is drawn from ``seed``."""
        rng = random.Random(seed)
        copies: dict[int, _DiskFile | _Dir] = {}

        def keep_name() -> bool:
            return mode in ("names", "zeros") or (mode == "mixed" and rng.random() < 0.5)

        def copy(node: _DiskFile | _Dir) -> _DiskFile | _Dir:
            new = copies.get(id(node))
            if new is not None:
                if isinstance(new, _DiskFile):
                    new.links += 1
                return new
            if isinstance(node, _DiskFile):
                file = copies[id(node)] = _DiskFile(node.inode)
                file.synced = _after_cut(node, rng, mode)
                file.data = bytearray(file.synced)
                return file
            copied = copies[id(node)] = _Dir(node.inode)
            for name, child in node.synced.items():
                if node.names.get(name) is child or not keep_name():
                    copied.names[name] = copy(child)
            for name, child in node.names.items():
                if node.synced.get(name) is not child and keep_name():
                    copied.names[name] = copy(child)
            copied.synced = dict(copied.names)
            return copied

        return self._like(copy(self._root))

    def sync(self) -> SimulatedDisk:
        """Make everything durable, as ``sync(1)`` does. Return the disk itself."""

        def settle(node: _DiskFile | _Dir) -> None:
            if isinstance(node, _DiskFile):
                node.synced, node.dirty = bytes(node.data), False
                return
            node.synced = dict(node.names)
            for child in node.names.values():
                settle(child)

        settle(self._root)
        return self

    def write_part(self, call_fd: int, data: memoryview, offset: int, other: SimulatedDisk) -> None:
        """Do on ``other``, a clone, what a torn write through this disk's descriptor would have done."""
        node = other.find_inode(self._fds[call_fd][0].inode)
        if isinstance(node, _DiskFile):
            _write(node, data, offset)

    def find_inode(self, inode: int) -> _DiskFile | _Dir | None:
        """Return the file or directory with this inode number; None if it has no name."""
        todo: list[_DiskFile | _Dir] = [self._root]
        while todo:
            node = todo.pop()
            if node.inode == inode:
                return node
            if isinstance(node, _Dir):
                todo += node.names.values()
        return None

    def _like(self, root: _DiskFile | _Dir) -> SimulatedDisk:
        assert isinstance(root, _Dir)
        new = SimulatedDisk()
        new._root, new._inodes = root, self._inodes
        return new

    def open_new(self, path: str, *, direct: bool = False) -> int:
        """See ``Disk``."""
        parent, name = self._parent(path)
        if name in parent.names:
            raise FileExistsError(codes.EEXIST, os.strerror(codes.EEXIST), path)
        file = parent.names[name] = _DiskFile(self._inode())
        return self._fd(file, direct)

    def open_read(self, path: str) -> int:
        """See ``Disk``."""
        return self._fd(self._find(path), False)

    def open_dir(self, path: str) -> int:
        """See ``Disk``."""
        return self._fd(self._dir(path), False)

    def revalidate(self, path: str) -> None:
        """See ``Disk``: nothing is remembered here."""
        self._dir(path)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """See ``Disk``. All of it; with ``direct``, only in whole pages."""
        node, direct = self._node(fd)
        if not isinstance(node, _DiskFile) or (direct and (offset % PAGE or len(data) % PAGE)):
            raise OSError(codes.EINVAL, os.strerror(codes.EINVAL))
        _write(node, data, offset)
        return len(data)

    def reopen_direct(self, fd: int) -> int:
        """See ``Disk``."""
        return self._fd(self._node(fd)[0], True)

    def resident(self, fd: int, offset: int, length: int) -> bytes:
        """Return that no page is in the page cache."""
        self._node(fd)
        return bytes(-(-length // PAGE))

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """See ``Disk``. With ``direct``, only in whole pages."""
        node, direct = self._node(fd)
        if not isinstance(node, _DiskFile):
            raise IsADirectoryError(codes.EISDIR, os.strerror(codes.EISDIR))
        if direct and (offset % PAGE or len(into) % PAGE):
            raise OSError(codes.EINVAL, os.strerror(codes.EINVAL))
        data = memoryview(node.data)[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def fallocate(self, fd: int, size: int) -> None:
        """See ``Disk``: zeros up to ``size``."""
        node, _ = self._node(fd)
        if isinstance(node, _DiskFile) and len(node.data) < size:
            node.data.extend(bytes(size - len(node.data)))
            node.dirty = True

    def truncate(self, fd: int, size: int) -> None:
        """See ``Disk``."""
        node, _ = self._node(fd)
        if isinstance(node, _DiskFile):
            del node.data[size:]
            node.data.extend(bytes(size - len(node.data)))
            node.dirty = True

    def fsync(self, fd: int) -> None:
        """See ``Disk``: this file's bytes, or this directory's names, are durable."""
        node, _ = self._node(fd)
        if isinstance(node, _Dir):
            node.synced = dict(node.names)
        elif node.dirty:
            node.synced, node.dirty = bytes(node.data), False

    def close(self, fd: int) -> None:
        """See ``Disk``."""
        self._node(fd)
        del self._fds[fd]

    def link(self, source: str, target: str) -> None:
        """See ``Disk``."""
        file = self._find(source)
        parent, name = self._parent(target)
        if name in parent.names:
            raise FileExistsError(codes.EEXIST, os.strerror(codes.EEXIST), target)
        if not isinstance(file, _DiskFile):
            raise PermissionError(codes.EPERM, os.strerror(codes.EPERM), source)
        parent.names[name] = file
        file.links += 1

    def replace(self, source: str, target: str) -> None:
        """See ``Disk``."""
        parent, name = self._parent(target)
        if name in parent.names:
            self.unlink(target)
        self.link(source, target)
        self.unlink(source)

    def unlink(self, path: str) -> None:
        """See ``Disk``."""
        parent, name = self._parent(path)
        file = parent.names.get(name)
        if file is None:
            raise FileNotFoundError(codes.ENOENT, os.strerror(codes.ENOENT), path)
        if isinstance(file, _Dir):
            raise IsADirectoryError(codes.EISDIR, os.strerror(codes.EISDIR), path)
        del parent.names[name]
        file.links -= 1

    def mkdir(self, path: str) -> None:
        """See ``Disk``."""
        parent, name = self._parent(path)
        if name in parent.names:
            raise FileExistsError(codes.EEXIST, os.strerror(codes.EEXIST), path)
        parent.names[name] = _Dir(self._inode())

    def rmdir(self, path: str) -> None:
        """See ``Disk``."""
        if self._dir(path).names:
            raise OSError(codes.ENOTEMPTY, os.strerror(codes.ENOTEMPTY), path)
        parent, name = self._parent(path)
        del parent.names[name]

    def fstat(self, fd: int) -> os.stat_result:
        """See ``Disk``."""
        return _stat(self._node(fd)[0])

    def lstat(self, path: str) -> os.stat_result:
        """See ``Disk``."""
        return _stat(self._find(path))

    def scan(self, path: str) -> Iterator[tuple[str, bool]]:
        """See ``Disk``."""
        return iter([(name, isinstance(node, _Dir)) for name, node in self._dir(path).names.items()])

    def free_bytes(self, path: str) -> int:
        """Return a large number."""
        self._dir(path)
        return 1 << 40

    def _inode(self) -> int:
        self._inodes += 1
        return self._inodes

    def _fd(self, node: _DiskFile | _Dir, direct: bool) -> int:
        self._next_fd += 1
        self._fds[self._next_fd] = (node, direct)
        return self._next_fd

    def _node(self, fd: int) -> tuple[_DiskFile | _Dir, bool]:
        try:
            return self._fds[fd]
        except KeyError:
            raise OSError(codes.EBADF, os.strerror(codes.EBADF)) from None

    def _find(self, path: str) -> _DiskFile | _Dir:
        node: _DiskFile | _Dir = self._root
        for name in path.split("/"):
            if not name:
                continue
            if not isinstance(node, _Dir):
                raise NotADirectoryError(codes.ENOTDIR, os.strerror(codes.ENOTDIR), path)
            try:
                node = node.names[name]
            except KeyError:
                raise FileNotFoundError(codes.ENOENT, os.strerror(codes.ENOENT), path) from None
        return node

    def _dir(self, path: str) -> _Dir:
        node = self._find(path)
        if not isinstance(node, _Dir):
            raise NotADirectoryError(codes.ENOTDIR, os.strerror(codes.ENOTDIR), path)
        return node

    def _parent(self, path: str) -> tuple[_Dir, str]:
        above, _, name = path.rstrip("/").rpartition("/")
        return self._dir(above), name


def _write(file: _DiskFile, data: memoryview, offset: int) -> None:
    if len(file.data) < offset:
        file.data.extend(bytes(offset - len(file.data)))
    file.data[offset : offset + len(data)] = data
    file.dirty = True


def _after_cut(file: _DiskFile, rng: random.Random, mode: str) -> bytes:
    if not file.dirty or mode == "data":
        return bytes(file.data)
    fate = rng.choice(("all", "none", "prefix", "zeros")) if mode == "mixed" else "zeros" if mode == "zeros" else "none"
    if fate in ("all", "none"):
        return bytes(file.data) if fate == "all" else file.synced
    if fate == "zeros":
        return (file.synced + bytes(max(0, len(file.data) - len(file.synced))))[: len(file.data)]
    pages = rng.randrange(-(-len(file.data) // PAGE) + 1)
    return bytes(file.data[: pages * PAGE]) + file.synced[pages * PAGE : len(file.data)]


def _stat(node: _DiskFile | _Dir) -> os.stat_result:
    if isinstance(node, _Dir):
        return os.stat_result((stat.S_IFDIR | 0o755, node.inode, 1, 2, 0, 0, 0, 0, 0, 0))
    return os.stat_result((stat.S_IFREG | 0o644, node.inode, 1, node.links, 0, 0, len(node.data), 0, 0, 0))


class SimClock:
    """A clock from a seed that jumps forwards, backwards and over years. No decision may depend on it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> str:
        """Return the time in the format of records."""
        jump = self._rng.choice((1.0, 1.0, 60.0, -3600.0, 3600.0, -400 * 86400.0, 10 * 365 * 86400.0))
        try:
            self._now += timedelta(seconds=self._rng.random() * jump)
        except OverflowError:
            self._now = datetime(1970, 1, 1, tzinfo=UTC)
        if not 1970 <= self._now.year < 2200:
            self._now = datetime(2026, 1, 1, tzinfo=UTC)
        return self._now.strftime("%Y-%m-%dT%H:%M:%SZ")
