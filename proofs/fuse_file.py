"""One file, served through FUSE, that logs every write and flush: a disk with a log, as the backing file of a loop
device.

Speaks the kernel's protocol over ``/dev/fuse`` (Linux, ``include/uapi/linux/fuse.h``) without a library. A file
system that consists of one file needs ten of its messages. Each write and each flush is appended to a log file, then
counted in a *counter* file that other processes map, then answered. So a process that has its answer finds the
request counted.

``logged_file`` mounts the file and starts the server as a process of its own. A server in the process that uses the
file would deadlock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from proofs.child_processes import COUNTER_BYTES
from proofs.engine_process import start_engine
from proofs.images import mount_any, unmount
from proofs.report import EngineUnavailable

WRITE_BYTES_MAX = 1 << 20
_MAJOR, _MINOR = 7, 31
_FORGET, _GETATTR, _OPEN, _READ, _WRITE, _RELEASE, _FSYNC, _FLUSH, _INIT, _INTERRUPT, _DESTROY, _BATCH_FORGET = (
    *(2, 3, 14, 15, 16, 18, 20, 25, 26, 36, 38, 42),
)
_ASYNC_READ, _BIG_WRITES, _MAX_PAGES = 1 << 0, 1 << 5, 1 << 22
_HEADER = struct.Struct("<IIQQIIIHH")
_ANSWER = struct.Struct("<IiQ")
_RANGE = struct.Struct("<QQI")
_INIT_ANSWER = struct.Struct("<IIIIHHIIHHI28x")
_ENTRY = struct.Struct("<QI")
_FLUSHED = (1 << 64) - 1
"""Marks a flush, in place of an offset."""


class DiskEntry(NamedTuple):
    """A request that reached the disk: ``data`` written at ``offset``.

    Empty ``data`` is a flush: all before it is on the medium.
    """

    offset: int
    data: bytes

    @property
    def is_flush(self) -> bool:
        """Return whether the entry is a flush."""
        return not self.data


def read_log(path: str) -> list[DiskEntry]:
    """Return the log that a server has written."""
    entries: list[DiskEntry] = []
    with open(path, "rb") as file:
        while head := file.read(_ENTRY.size):
            offset, length = _ENTRY.unpack(head)
            entries.append(DiskEntry(0, b"") if offset == _FLUSHED else DiskEntry(offset, file.read(length)))
    return entries


@contextlib.contextmanager
def logged_file(disk: str, where: str, log: str, counter: str) -> Iterator[None]:
    """Serve the file ``disk`` also at ``where``, an empty file.

    Log its requests in ``log`` and count them in ``counter``.
    """
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise EngineUnavailable(f"there is no FUSE: {error}") from error
    for path, size in ((where, 0), (log, 0), (counter, COUNTER_BYTES)):
        with open(path, "wb") as file:
            file.truncate(size)
    try:
        mount_any("relight", where, "fuse", f"fd={fd},rootmode={stat.S_IFREG | 0o600:o},user_id=0,group_id=0")
        process = start_engine("fuse_file", str(fd), disk, log, counter, pass_fds=(fd,))
    except OSError as error:
        raise EngineUnavailable(f"FUSE does not mount here: {error}") from error
    finally:
        os.close(fd)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            unmount(where)
        try:
            process.wait(10)  # the kernel ends the server after the last close of the file
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _FuseServer:
    def __init__(self, disk: int, log: int, counter: mmap.mmap) -> None:
        self._disk, self._log, self._counter = disk, log, counter
        self._count = 0

    def answer(self, operation: int, body: memoryview) -> bytes | int | None:
        """Return the answer: bytes, an error number, or None for no answer."""
        if operation == _READ:
            _, offset, length = _RANGE.unpack_from(body)
            return os.pread(self._disk, length, offset)
        if operation == _WRITE:
            _, offset, length = _RANGE.unpack_from(body)
            data = body[40 : 40 + length]
            os.pwrite(self._disk, data, offset)
            self._note(offset, data)
            return struct.pack("<II", length, 0)
        if operation == _FSYNC:
            self._note(_FLUSHED, memoryview(b""))
            return b""
        if operation == _GETATTR:
            return struct.pack("<QII", 3600, 0, 0) + self._attributes()
        if operation == _OPEN:
            return struct.pack("<QII", 1, 0, 0)
        if operation == _INIT:
            flags = _ASYNC_READ | _BIG_WRITES | _MAX_PAGES
            pages = WRITE_BYTES_MAX // mmap.PAGESIZE
            return _INIT_ANSWER.pack(_MAJOR, _MINOR, 1 << 17, flags, 64, 48, WRITE_BYTES_MAX, 1, pages, 0, 0)
        if operation in (_RELEASE, _FLUSH, _DESTROY):
            return b""
        if operation in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            return None
        return errno.ENOSYS  # also for punching holes: the file system then writes zeros, which are logged

    def _note(self, offset: int, data: memoryview) -> None:
        os.writev(self._log, [_ENTRY.pack(offset, len(data)), data])
        self._count += 1
        self._counter[:COUNTER_BYTES] = self._count.to_bytes(COUNTER_BYTES, "little")

    def _attributes(self) -> bytes:
        size = os.fstat(self._disk).st_size
        return struct.pack("<6Q10I", 1, size, size // 512, 0, 0, 0, 0, 0, 0, stat.S_IFREG | 0o600, 1, 0, 0, 0, 4096, 0)


def serve(fd: int, disk: str, log: str, counter: str) -> None:
    """Answer requests until the file is unmounted. One at a time, so that the log has the order of the answers."""
    ctypes.CDLL(None).mlockall(3)  # the server must not wait for memory that the kernel frees by writing to this file
    with open(counter, "r+b") as file:
        counted = mmap.mmap(file.fileno(), COUNTER_BYTES)
    server = _FuseServer(os.open(disk, os.O_RDWR), os.open(log, os.O_WRONLY | os.O_APPEND), counted)
    buffer = bytearray(WRITE_BYTES_MAX + (64 << 10))
    while True:
        try:
            length = os.readv(fd, [buffer])
        except OSError as error:
            if error.errno == errno.ENODEV:  # unmounted
                return
            if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                continue
            raise
        _, operation, unique, *_ = _HEADER.unpack_from(buffer)
        try:
            answer = server.answer(operation, memoryview(buffer)[_HEADER.size : length])
        except OSError as error:
            answer = error.errno or errno.EIO
        if answer is None:
            continue
        data, code = (b"", -answer) if isinstance(answer, int) else (answer, 0)
        try:
            os.writev(fd, [_ANSWER.pack(_ANSWER.size + len(data), code, unique), data])
        except OSError as error:
            if error.errno != errno.ENOENT:  # the process that made the request was killed
                raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server: descriptor, disk, log, counter."""
    fd, disk, log, counter = arguments or sys.argv[1:]
    serve(int(fd), disk, log, counter)
    return 0


if __name__ == "__main__":
    sys.exit(main())
