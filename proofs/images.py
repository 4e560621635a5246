"""Make, attach, mount and cut the power of file systems in image files. Uses system calls directly, because thousands
of cuts use it.

Needs root, Linux and loop devices; ``EngineUnavailable`` names what is missing. Mounts are made in a namespace of this
process (``private_mounts``). They end with the process, however it ends, and so do their loop devices.
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
from collections.abc import Iterator
from typing import NamedTuple

from proofs.engine_process import scratch_directory
from proofs.report import EngineUnavailable

IMAGE_BYTES = 64 << 20
"""Twice the size of the largest of some thousand lives. A full disk loses nothing, so it would test nothing."""
SHUTDOWN = {"default": 0, "log flushed": 1, "log not flushed": 2}
"""Moment of the cut: after everything is written, after the running transaction, or at once.

``EXT4_IOC_SHUTDOWN``; XFS has the same number.
"""

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000
_IOC_SHUTDOWN = 0x8004587D
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE, _LOOP_MAJOR = 0x4C82, 0x4C0A, 7
_LO_FLAGS_AUTOCLEAR, _LO_FLAGS_AT = 4, 52
_TRIES = 50
PIECE_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class FileSystem(NamedTuple):
    """Kind of file system: how it is made and mounted. Never without barriers, as then fsync guarantees nothing."""

    name: str
    make: tuple[str, ...]
    """The command without the image's path."""
    options: str
    size: int = IMAGE_BYTES
    reorders: bool = True
    """Whether it survives that writes between two flushes are reordered, torn or lost."""

    whole: int = 512
    """Bytes of the aligned unit that it assumes to be written atomically."""

    @property
    def type(self) -> str:
        """Return the type for mount(2)."""
        return self.make[0].removeprefix("mkfs.")


def _ext4(name: str, block: int, options: str, *, reorders: bool = True) -> FileSystem:
    eager = "lazy_itable_init=0,lazy_journal_init=0"  # no kernel thread may write later
    return FileSystem(
        name,
        ("mkfs.ext4", "-q", "-F", "-m", "0", "-N", "2048", "-E", eager, "-b", str(block)),
        options,
        reorders=reorders,
    )


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
"""``data=ordered`` is the default. With ``journal_async_commit``, if the journal is torn after its last flush, the
kernel (6.18) refuses the disk. ``e2fsck`` (1.47.0) repairs it by discarding the whole journal, including what had
been flushed.

``fast_commit`` is left out. It is off by default. The kernel refused some disks after a cut, and ``e2fsck`` did
not repair them.
"""
XFS = FileSystem("xfs", ("mkfs.xfs", "-q", "-f"), "nouuid", 300 << 20, whole=4096)
"""The smallest size that mkfs accepts. ``nouuid``: copies of an image have the same UUID, which XFS would refuse.

If a directory's block is torn, its first sector marks it as new. Recovery then skips it, and the mount fails for its
checksum. So blocks are written as a whole or not at all.
"""


def kinds_called(word: str) -> list[FileSystem]:
    """Return the kinds with names that begin with ``word`` and that can be made here.

    Raise ``EngineUnavailable`` if there are none.
    """
    kinds = [kind for kind in (*EXT4, XFS) if kind.name.startswith(word)]
    able = [kind for kind in kinds if shutil.which(kind.make[0])]
    if not able:
        raise EngineUnavailable(
            f"{kinds[0].make[0]} is not installed" if kinds else f"no file system is called {word!r}"
        )
    return able


def private_mounts() -> None:
    """Make later mounts visible only to this process and its children.

    Raise ``EngineUnavailable`` without permission.
    """
    if not os.path.exists("/dev/loop-control"):
        raise EngineUnavailable("there are no loop devices")
    if _libc.unshare(_CLONE_NEWNS) or _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise EngineUnavailable(f"mounting is not allowed: {os.strerror(ctypes.get_errno())}")


def make_image(path: str, kind: FileSystem) -> None:
    """Make an empty file system of that kind in a sparse file."""
    whole = f"{path}.whole"
    with open(whole, "wb") as file:
        file.truncate(kind.size)
    done = subprocess.run([*kind.make, whole], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineUnavailable(f"{kind.make[0]} fails: {done.stderr.strip()}")
    copy_image(whole, path, zeros=True)
    os.unlink(whole)


def copy_image(source: str, target: str, *, zeros: bool = False) -> None:
    """Copy a file and its holes. Fast, as most of an image is holes. ``zeros``: pieces of zeros become holes, too."""
    with open(source, "rb") as read, open(target, "wb") as write:
        write.truncate(os.fstat(read.fileno()).st_size)
        position = 0
        while True:
            try:
                begin = os.lseek(read.fileno(), position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # the rest of the file is a hole
                    return
                raise
            position = min(os.lseek(read.fileno(), begin, os.SEEK_HOLE), begin + PIECE_BYTES)
            data = os.pread(read.fileno(), position - begin, begin)
            if not zeros or data.strip(b"\0"):
                os.pwrite(write.fileno(), data, begin)


def find_damage(path: str, kind: FileSystem) -> str:
    """Return what fsck reports about an unmounted image; empty if it reports nothing or is not installed."""
    tool = ("e2fsck", "-f", "-n") if kind.type == "ext4" else ("xfs_repair", "-n")
    if shutil.which(tool[0]) is None:
        return ""
    done = subprocess.run([*tool, path], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()[-300:] if done.returncode else ""


@contextlib.contextmanager
def attached(path: str) -> Iterator[str]:
    """Attach ``path`` to a loop device and yield it.

    If a mount still uses the device afterwards, it goes with the mount.
    """
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
                raise EngineUnavailable(f"no loop device is free: {error}") from error
            device = f"/dev/loop{number}"
            if not os.path.exists(device):
                with contextlib.suppress(FileExistsError):
                    os.mknod(device, 0o600 | stat.S_IFBLK, os.makedev(_LOOP_MAJOR, number))
            loop = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # another process took it
                    raise
            else:
                return device, loop
    finally:
        os.close(control)
    raise EngineUnavailable("every free loop device was taken by another process")


def mount(image: str, where: str, kind: FileSystem) -> None:
    """Mount an image. Raise ``OSError`` if its file system is damaged."""
    with attached(image) as device:
        mount_any(device, where, kind.type, kind.options)


def mount_any(source: str, where: str, type_: str, options: str) -> None:
    """mount(2)."""
    if _libc.mount(source.encode(), where.encode(), type_.encode(), 0, options.encode()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), where)


def unmount(where: str) -> None:
    """Call umount(2). Writes everything that is pending, or nothing if the power was cut."""
    if _libc.umount2(where.encode(), 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), where)


def cut_power(where: str, how: str) -> None:
    """Shut a mounted file system down: nothing reaches its disk after this call. ``how``: a key of ``SHUTDOWN``."""
    fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _IOC_SHUTDOWN, struct.pack("I", SHUTDOWN[how]))
    finally:
        os.close(fd)


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[str]:
    """Make a scratch directory with a mount point. Unmount what is still mounted there at the end."""
    with scratch_directory(prefix) as directory:
        where = f"{directory}/mounted"
        os.mkdir(where)
        try:
            yield directory
        finally:
            with contextlib.suppress(OSError):
                unmount(where)
