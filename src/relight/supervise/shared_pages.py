"""Supervisors' private directories in memory (tmpfs), with the pages that a supervisor shares with its ranks.

Makes a directory, finds those of running supervisors, and removes those of killed ones.
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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from relight.heartbeat import (
    SETTING,
    Heartbeat,
    RiskWarning,
    lost_of,
    make_rank_state,
    rank_state_path,
    read_beat,
    risk_path,
    write_request,
    write_risk,
)
from relight.heartbeat.ease import Eased, write_ease
from relight.heartbeat.heartbeat_page import make_page
from relight.observe.own_files import check_unexchangeable
from relight.save_reason import SaveReason
from relight.supervise import stacks
from relight.supervise.procfs import sample_process

MEMORY = "/dev/shm"  # noqa: S108 - each supervisor makes a private directory there
LEAST_BYTES, LEAST_FILES = 1 << 20, 128
"""Free bytes and inodes that pages and states of a node's ranks need at most, for some twenty ranks."""
PREFIX = "relight-run-"
MARKER = ".relight-supervisor"
_FORM = re.compile(r"relight-run-([0-9]{1,9})-[a-z0-9_]{8}", re.ASCII)


class SharedPages:
    """The directory that one supervisor shares with its ranks: their heartbeats, and what it asks of them.

    The main thread makes the object and closes it, and owns both attributes, which never change between. Any thread may
    read pages. Each writing method replaces one file: the main thread calls all of them, and the prediction thread
    ``ease`` and ``warn``.
    """

    def __init__(self, top: Path) -> None:
        """Make a directory in ``top``, and remove there those of killed supervisors."""
        sweep_memory(top)
        self._directory, self._lock_fd = make_directory(top)

    def begin(self, ranks: Iterable[int], settings: Mapping[str, str]) -> dict[int, dict[str, str]]:
        """Make the pages of an incarnation with these ranks. Return the environment variables of each rank.

        ``settings``: further variables for all ranks.
        """
        environments: dict[int, dict[str, str]] = {}
        for claim in self._directory.glob("heir-*"):
            claim.unlink(missing_ok=True)
        lost_of(self._page(0)).unlink(missing_ok=True)
        # the predicted failure has happened, or the prediction was for the last incarnation
        risk_path(self._page(0)).unlink(missing_ok=True)
        for rank in ranks:
            page = self._page(rank)
            make_page(page)
            write_request(page, None)
            for ahead in (False, True):
                make_rank_state(rank_state_path(page, rank, ahead))
            self.stack_file(rank).unlink(missing_ok=True)
            environments[rank] = {SETTING: str(page), stacks.SETTING: str(self.stack_file(rank)), **settings}
        return environments

    def beat(self, rank: int) -> Heartbeat | None:
        """Return a rank's last heartbeat; None before the first."""
        return read_beat(self._page(rank))

    def stack_file(self, rank: int) -> Path:
        """Return the file to which a rank writes its stacks."""
        return self._directory / f"stacks-{rank}"

    def request_save(self, rank: int, reason: SaveReason | None) -> None:
        """Write the reason of the next requested save where ``rank`` reads it. None: the signal is the reason."""
        write_request(self._page(rank), reason)

    def publish_loss(self) -> None:
        """Publish that a rank has failed. The others read it when their step ends, if no collective fails before."""
        with contextlib.suppress(OSError):
            lost_of(self._page(0)).touch()

    def warn(self, warning: RiskWarning) -> None:
        """Publish that this node is likely to fail."""
        with contextlib.suppress(OSError):
            write_risk(self._page(0), warning)

    def ease(self, share: float, until: float) -> bool:
        """Have this node's ranks pause for a share of the time until ``until``; 0: no pause.

        Return whether that could be published.
        """
        try:
            write_ease(self._page(0), Eased(share, until) if share else None)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Remove the directory, and release its lock."""
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _page(self, rank: int) -> Path:
        return self._directory / f"heartbeat-{rank}"


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
