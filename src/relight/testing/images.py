"""File systems in image files: made, attached, mounted, cut off from power. By system calls, since thousands of cuts wait for each.

Everything here needs root, Linux and loop devices; ``Unavailable`` says what is missing. Mounts are made in a namespace of this process's
own (``private_mounts``), so they go when it goes, however it goes, and the loop devices with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

IMAGE_BYTES = 64 << 20
"""Twice of what the fullest of some thousand lives came to: one that is told its disk is full has lost nothing, and shows nothing."""
SHUTDOWN = {"default": 0, "log flushed": 1, "log not flushed": 2}
"""How the power goes (``EXT4_IOC_SHUTDOWN``; XFS's has the same number): behind everything, behind the running transaction, or at once."""

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000
_IOC_SHUTDOWN = 0x8004587D
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE, _LOOP_MAJOR = 0x4C82, 0x4C0A, 7
_LO_FLAGS_AUTOCLEAR, _LO_FLAGS_AT = 4, 52
_TRIES = 50
PIECE_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class MountUnavailable(RuntimeError):
    """File systems cannot be mounted this way here."""


class FileSystem(NamedTuple):
    """A kind of file system: how it is made, and how it is mounted. Never without barriers: what lies about fsync promises nothing."""

    name: str
    make: tuple[str, ...]
    """The command, but for the image's path."""
    options: str
    size: int = IMAGE_BYTES
    reorders: bool = True
    """Whether it survives that what was written between two flushes reaches the medium in another order, or torn, or not."""

    whole: int = 512
    """So many bytes, at a multiple of them, it takes for whole or old on the medium."""

    @property
    def type(self) -> str:
        """As mount(2) calls it."""
        return self.make[0].removeprefix("mkfs.")


def _ext4(name: str, block: int, options: str, *, reorders: bool = True) -> FileSystem:
    eager = "lazy_itable_init=0,lazy_journal_init=0"  # no thread of the kernel's may write behind our back
    return FileSystem(name, ("mkfs.ext4", "-q", "-F", "-m", "0", "-N", "2048", "-E", eager, "-b", str(block)), options, reorders=reorders)


PLAIN = _ext4("ext4, data=ordered", 4096, "data=ordered")
EXT4 = (
    PLAIN,
    _ext4("ext4, blocks of 1 KiB", 1024, "data=ordered"),
    _ext4("ext4, data=writeback", 4096, "data=writeback"),
    _ext4("ext4, data=journal", 4096, "data=journal"),
    _ext4("ext4, nodelalloc", 4096, "data=ordered,nodelalloc"),
    _ext4("ext4, noauto_da_alloc, commit=1", 1024, "data=ordered,noauto_da_alloc,commit=1"),
    _ext4("ext4, journal_async_commit", 4096, "data=writeback,journal_async_commit", reorders=False),
    _ext4("ext4, journal_checksum", 4096, "data=ordered,journal_checksum"),
    _ext4("ext4, dioread_lock", 4096, "data=ordered,dioread_lock"),
)
"""``data=ordered`` is what people have. With ``journal_async_commit``, if the journal is torn behind its last flush, the kernel (6.18)
refuses the disk, and ``e2fsck`` (1.47.0) repairs it by giving up all of the journal, with what had been flushed. Not here is ``fast_commit``, which
nobody has who did not ask for it: the kernel refused some disks as a cut leaves them, and ``e2fsck`` did not repair them."""
XFS = FileSystem("xfs", ("mkfs.xfs", "-q", "-f"), "nouuid", 300 << 20, whole=4096)
"""The smallest that can be made. Copies of an image have one UUID, by which XFS would tell them apart. Of a directory's block that is torn,
the first sector says that it is new: recovery leaves it alone, and the mount fails for its sum. So blocks are whole or old."""


def kinds_called(word: str) -> list[FileSystem]:
    """Those whose name begins with a word, which can be made here: ``Unavailable`` if none can."""
    found = [kind for kind in (*EXT4, XFS) if kind.name.startswith(word)]
    able = [kind for kind in found if shutil.which(kind.make[0])]
    if not able:
        raise MountUnavailable(f"{found[0].make[0]} is not installed" if found else f"no file system is called {word!r}")
    return able


def private_mounts() -> None:
    """From here on, what this process mounts is seen by it and its children alone. ``Unavailable`` without the right to."""
    if not os.path.exists("/dev/loop-control"):
        raise MountUnavailable("there are no loop devices")
    if _libc.unshare(_CLONE_NEWNS) or _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise MountUnavailable(f"mounting is not allowed: {os.strerror(ctypes.get_errno())}")


def make_image(path: str, kind: FileSystem) -> None:
    """An empty file system of that kind, in a sparse file."""
    whole = f"{path}.whole"
    with open(whole, "wb") as file:
        file.truncate(kind.size)
    done = subprocess.run([*kind.make, whole], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MountUnavailable(f"{kind.make[0]} fails: {done.stderr.strip()}")
    copy_image(whole, path, zeros=True)
    os.unlink(whole)


def copy_image(source: str, target: str, *, zeros: bool = False) -> None:
    """A copy with holes where ``source`` has them: quick, since most of an image is. ``zeros``: and where there are nothing but zeros."""
    with open(source, "rb") as read, open(target, "wb") as write:
        write.truncate(os.fstat(read.fileno()).st_size)
        at = 0
        while True:
            try:
                begin = os.lseek(read.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole is left
                    return
                raise
            at = min(os.lseek(read.fileno(), begin, os.SEEK_HOLE), begin + PIECE_BYTES)
            data = os.pread(read.fileno(), at - begin, begin)
            if not zeros or data.strip(b"\0"):
                os.pwrite(write.fileno(), data, begin)


def find_damage(path: str, kind: FileSystem) -> str:
    """What the file system's own tool says of an image that was unmounted; empty if it finds nothing, or is not there."""
    tool = ("e2fsck", "-f", "-n") if kind.type == "ext4" else ("xfs_repair", "-n")
    if shutil.which(tool[0]) is None:
        return ""
    done = subprocess.run([*tool, path], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()[-300:] if done.returncode else ""


@contextlib.contextmanager
def attached(path: str) -> Iterator[str]:
    """The loop device that ``path`` lies behind. Still used when this ends, by a mount, it goes with the last use."""
    backing = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        device, loop = _attach(backing)
    finally:
        os.close(backing)
    try:
        yield device
    finally:
        os.close(loop)


def _attach(backing: int) -> tuple[str, int]:
    info = bytearray(232)
    struct.pack_into("<I", info, _LO_FLAGS_AT, _LO_FLAGS_AUTOCLEAR)
    config = struct.pack("<II", backing, 0) + bytes(info) + bytes(64)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            try:
                number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            except OSError as error:
                raise MountUnavailable(f"no loop device is free: {error}") from error
            device = f"/dev/loop{number}"
            if not os.path.exists(device):
                with contextlib.suppress(FileExistsError):
                    os.mknod(device, 0o600 | stat.S_IFBLK, os.makedev(_LOOP_MAJOR, number))
            loop = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # somebody else took it
                    raise
            else:
                return device, loop
    finally:
        os.close(control)
    raise MountUnavailable("loop devices are taken as fast as they are given")


def mount(image: str, where: str, kind: FileSystem) -> None:
    """Mount an image. ``OSError`` if its file system is not one any more."""
    with attached(image) as device:
        mount_any(device, where, kind.type, kind.options)


def mount_any(source: str, where: str, type_: str, options: str) -> None:
    """mount(2)."""
    if _libc.mount(source.encode(), where.encode(), type_.encode(), 0, options.encode()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), where)


def unmount(where: str) -> None:
    """umount(2): everything is written that may still be, and nothing if the power has gone."""
    if _libc.umount2(where.encode(), 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), where)


def cut_power(where: str, how: str) -> None:
    """From this call on nothing reaches the disk of a mounted file system; ``how`` is a key of ``SHUTDOWN``."""
    fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _IOC_SHUTDOWN, struct.pack("I", SHUTDOWN[how]))
    finally:
        os.close(fd)


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[str]:
    """A directory in memory, if there is one, with a place to mount at. What is still mounted there in the end is unmounted."""
    memory = "/dev/shm"
    base = memory if os.path.isdir(memory) and os.access(memory, os.W_OK) else None
    directory = tempfile.mkdtemp(prefix=prefix, dir=base)
    where = f"{directory}/mounted"
    os.mkdir(where)
    try:
        yield directory
    finally:
        with contextlib.suppress(OSError):
            unmount(where)
        shutil.rmtree(directory, ignore_errors=True)
