"""Removes this user's own files from a directory that other users may have changed.

The directory is opened once, without following a link, and checked through its descriptor. Only regular files of this
user with a name of one exact form are listed, and each is removed through that descriptor. A directory that
another user could exchange is left alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_WRITABLE_BY_OTHERS = 0o022


class OwnFile(NamedTuple):
    """A file of this user in the directory."""

    name: str
    changed: float
    """When it was last written, in seconds since the epoch."""
    size: int
    """In bytes."""


class OwnFiles:
    """The files of ``directory`` with names that match ``form`` completely.

    Raise ``PermissionError`` if another user could have put files there.

    A context manager: it holds one descriptor. Cost: three system calls, and one for each file that matches.
    """

    def __init__(self, directory: str | os.PathLike[str], form: str) -> None:
        """``form``: a regular expression. ``FileNotFoundError`` if there is no such directory, ``NotADirectoryError`` for a link."""
        path = Path(directory).absolute()
        self._form = re.compile(form, re.ASCII)
        check_unexchangeable(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check_own(os.fstat(self._fd), path)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> OwnFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def __iter__(self) -> Iterator[OwnFile]:
        for name in os.listdir(self._fd):
            if self._form.fullmatch(name) is None:
                continue
            with suppress(OSError):
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                    yield OwnFile(name, status.st_mtime, status.st_size)

    def remove(self, name: str) -> bool:
        """Remove a file that matches the form.

        Return whether it is gone. ``ValueError`` for a name that does not match.
        """
        if self._form.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not the name of an own file")
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def check_private(directory: Path) -> None:
    """Raise ``PermissionError`` unless it is a directory (not a link) that only this user may write to: others could
    have put files there."""
    _check_own(directory.lstat(), directory)


def _check_own(status: os.stat_result, directory: Path) -> None:
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(f"{directory} is not a directory that only this user may write to")


def check_unexchangeable(directory: Path) -> None:
    """Raise ``PermissionError`` if another user could exchange ``directory``, or a directory or link on its path, for
    one of his own.

    That is so if a directory above belongs to another user, or if others may rename in it. Cost: two system calls for
    each.
    """
    above = dict.fromkeys([*Path(os.path.abspath(directory)).parents, *Path(os.path.realpath(directory)).parents])
    for path in above:
        status = path.stat()
        exchangeable = status.st_mode & _WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.getuid()) or exchangeable:
            raise PermissionError(f"{path} belongs to another user, or others may rename in it")
