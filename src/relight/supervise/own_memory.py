"""Makes supervisors' private directories in memory (tmpfs), finds them, and removes those of killed supervisors.

A directory is a supervisor's only if its name has the exact form, it belongs to this user alone, and it has the marker
that supervisors write. All checks use a descriptor that was opened without following links.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from relight.observe.own_files import check_unexchangeable
from relight.supervise.procfs import sample_process

MEMORY = "/dev/shm"  # noqa: S108 - each supervisor makes a private directory there
LEAST_BYTES, LEAST_FILES = 1 << 20, 128
"""Free bytes and inodes that pages and states of a node's ranks need at most, for some twenty ranks."""
PREFIX = "relight-run-"
MARKER = ".relight-supervisor"
_FORM = re.compile(r"relight-run-([0-9]{1,9})-[a-z0-9_]{8}", re.ASCII)


def memory() -> Path:
    """Return where supervisors make directories: a file system in memory, or the directory for temporary files.

    Without room in memory a rank could not map its page: its steps and its hangs would not be seen.
    """
    return Path(MEMORY if os.access(MEMORY, os.W_OK) and _has_room(MEMORY) else tempfile.gettempdir())


def _has_room(directory: str) -> bool:
    with contextlib.suppress(OSError):
        status = os.statvfs(directory)
        inodes = not status.f_files or status.f_favail >= LEAST_FILES
        return inodes and status.f_bavail * status.f_frsize >= LEAST_BYTES
    return False


def make_directory(top: Path) -> tuple[Path, int]:
    """Make a directory of this process. Return it and a descriptor: the descriptor's lock protects the directory."""
    directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=top))
    os.close(os.open(directory / MARKER, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return directory, descriptor


def sweep_memory(top: Path) -> list[Path]:
    """Remove the directories that killed supervisors of this user left in ``top``. Return the removed ones."""
    removed = []
    for directory in _directories_of_dead(top):
        with contextlib.suppress(OSError), _held(directory):
            shutil.rmtree(directory, ignore_errors=True)
        if not os.path.lexists(directory):
            removed.append(directory)
    return removed


def left_in(top: Path) -> list[Path]:
    """Return the directories that ``sweep_memory`` would remove there."""
    removable = []
    for directory in _directories_of_dead(top):
        with contextlib.suppress(OSError), _held(directory):
            removable.append(directory)
    return removable


def directories() -> dict[int, Path]:
    """Return the directory of each supervisor of this user that runs on this machine, by its process id."""
    by_pid: dict[int, Path] = {}
    for top in {MEMORY, tempfile.gettempdir()}:
        by_pid |= {pid: directory for pid, directory in _own_in(Path(top)) if sample_process(pid).state}
    return by_pid


def _directories_of_dead(top: Path) -> Iterator[Path]:
    """Yield the directories of supervisors that have no process in this container's view."""
    for pid, directory in _own_in(top):
        if not sample_process(pid).state:
            yield directory


def _own_in(top: Path) -> Iterator[tuple[int, Path]]:
    try:
        names = sorted(os.listdir(top))
    except OSError:
        return
    for name in names:
        if (form := _FORM.fullmatch(name)) is None:
            continue
        with contextlib.suppress(OSError):
            os.close(_opened(top / name))
            yield int(form[1]), top / name


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Hold the lock of a dead supervisor's directory.

    Raise ``OSError`` if a living supervisor holds it, or if the directory is not a supervisor's.
    """
    descriptor = _opened(directory)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _opened(directory: Path) -> int:
    """Return a descriptor of a supervisor's directory.

    Raise ``OSError`` if it is a link, another user's, open to others, or has no marker.
    """
    check_unexchangeable(directory)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        marker = os.stat(MARKER, dir_fd=descriptor, follow_symlinks=False)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077 or not stat.S_ISREG(marker.st_mode):
            raise PermissionError(f"{directory} is not a supervisor's of this user")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
