"""Write output atomically: to a directory next to the target, which takes the target's place when all files are durable.

A crash leaves a directory ``.NAME.exporting-…`` without a lock. The next export to the same target removes it. No
incomplete file ever has the target's name.

Some file systems have no locks, and a lock on a directory of NFS excludes only processes of the same machine. So the name of an unfinished
directory has its writer's machine. What another machine's writer left, or any writer without locks, is removed ``ABANDONED_S`` after its
last change.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Sequence

from relight.comm.local_sockets import boot_digits
from relight.errors import ConfigError
from relight.store.disk import Disk
from relight.store.durable import make_dirs, sync_dir, translate

_WEIGHTS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors\Z|model\.safetensors\.index\.json\Z")
"""Files of a directory of weights, by the names that transformers uses."""
_STAGING = ".exporting-"
WRITER = "(?:[0-9a-f]{8})?[0-9a-f]{16}"
"""Pattern of what ``new_writer`` returns. Earlier versions did not name the machine."""
ABANDONED_S = 3600.0
"""Seconds without a change after which an unfinished export is removed although its writer may exist."""
_TRIES = 10
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system without locks, such as Lustre without the mount option ``flock``."""


class Landing:
    """The temporary directory of an export. Context manager: files that were not ``put`` are removed at its end.

    ``path``: the target, which is a file, or, with ``folder``, a directory.
    """

    def __init__(self, path: str, *, folder: bool, overwrite: bool) -> None:
        self.path, self._folder, self._overwrite = os.path.abspath(path), folder, overwrite
        self._parent, self._name = os.path.split(self.path)
        self._disk = Disk()
        self.staging, self._lock = "", -1

    def __enter__(self) -> Landing:
        check_free(self.path, folder=self._folder, overwrite=self._overwrite)
        try:
            make_dirs(self._disk, "/", os.path.realpath(self._parent))
            self._sweep()
            self._make()
        except OSError as error:
            self.__exit__()
            raise translate(error, "making room for an export", self.path) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self.staging:
            shutil.rmtree(self.staging, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _make(self) -> None:
        """Create the directory and lock it. If another export removes it before it is locked, create another one."""
        for _ in range(_TRIES):
            self.staging = os.path.join(self._parent, f".{self._name}{_STAGING}{new_writer()}")
            os.mkdir(self.staging)
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                lock_directory(self._lock, wait=True)
                if os.path.isdir(self.staging):
                    return
                os.close(self._lock)
                self._lock = -1
        raise OSError(errno.EAGAIN, "other exports remove its directory")

    def put(self, names: Sequence[str]) -> None:
        """Move the files to the target. The last of several files is the index by which a reader finds the others."""
        # again, as late as possible: another process may have written the target since, and a rename would replace it
        check_free(self.path, folder=self._folder, overwrite=self._overwrite)
        sync_dir(self._disk, self.staging)
        try:
            if not self._folder:
                os.replace(os.path.join(self.staging, names[0]), self.path)
            elif os.path.isdir(self.path):
                self._into(names)
            else:
                os.rename(self.staging, self.path)
        except OSError as error:
            raise translate(error, "putting an export in its place", self.path) from error
        sync_dir(self._disk, self._parent)

    def _into(self, names: Sequence[str]) -> None:
        """Move the files into an existing directory. The index of old weights is removed first; the new index is moved last."""
        old = sorted(
            (name for name in os.listdir(self.path) if _is_ours(name)), key=lambda name: not name.endswith(".json")
        )
        for name in old:
            os.unlink(os.path.join(self.path, name))
        sync_dir(self._disk, self.path)
        for name in names:
            os.replace(os.path.join(self.staging, name), os.path.join(self.path, name))
        sync_dir(self._disk, self.path)

    def _sweep(self) -> None:
        """Remove what killed exports to the same target left."""
        form = re.compile(re.escape(f".{self._name}{_STAGING}") + f"({WRITER})")
        for name in os.listdir(self._parent):
            match = form.fullmatch(name)
            if match is not None:
                leftover = os.path.join(self._parent, name)
                with contextlib.suppress(OSError):
                    descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                    try:
                        is_locked = lock_directory(descriptor)
                        is_mine = os.fstat(descriptor).st_uid == os.geteuid()
                        if is_mine and is_locked is not False and is_abandoned(leftover, match[1], bool(is_locked)):
                            shutil.rmtree(leftover, ignore_errors=True)
                    finally:
                        os.close(descriptor)


def new_writer() -> str:
    """Return a name for one writer of unfinished files: the digits of this machine's boot, then random ones."""
    return boot_digits() + secrets.token_hex(8)


def is_abandoned(path: str, writer: str, is_locked: bool) -> bool:
    """Return whether the unfinished export at ``path`` has no writer any more.

    ``is_locked``: this process has a lock that the writer would have, if it ran on this machine. Otherwise the time of the last change
    below ``path`` decides. It is compared with a new change there, as the server of a network file system has another clock.
    """
    if is_locked and (len(writer) <= 16 or writer.startswith(boot_digits())):
        return True
    times = [os.lstat(path).st_mtime]
    for folder, folders, files in os.walk(path):
        times += [os.lstat(os.path.join(folder, name)).st_mtime for name in (*folders, *files)]
    parent = os.path.dirname(path)
    os.utime(parent)
    return os.stat(parent).st_mtime - max(times) > ABANDONED_S


def lock_directory(descriptor: int, *, wait: bool = False) -> bool | None:
    """Lock a directory until its descriptor is closed. Return False if another process has the lock and ``wait`` is False.

    Return None if the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def check_free(path: str, *, folder: bool, overwrite: bool) -> None:
    """Raise ``ConfigError`` if the target exists and ``overwrite`` is False, or if it is of the wrong kind."""
    path = os.path.abspath(path)
    if not os.path.lexists(path):
        return
    if os.path.isdir(path) != folder:
        message = "this is a file, or a link to nothing" if folder else "this is a directory"
        raise ConfigError(message, where=path, hint="name another target")
    if folder:
        existing = sorted(name for name in os.listdir(path) if _is_ours(name))
        if not existing or overwrite:
            return
        raise ConfigError(
            f"{existing[0]} is there already", where=path, hint="--overwrite replaces it, or name another directory"
        )
    if not overwrite:
        raise ConfigError("this is there already", where=path, hint="--overwrite replaces it")


def _is_ours(name: str) -> bool:
    return (
        _WEIGHTS.match(name) is not None
        or name == ".metadata"
        or re.match(r"__[0-9]+_[0-9]+\.distcp\Z", name) is not None
    )
