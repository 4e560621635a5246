"""A directory of a local or network file system as a store.

On a network file system, "not found" may come from the client's cache, and another machine may have deleted an open file. Such operations
are repeated once (``_retried``) after the cache was revalidated. Listings omit the names of deleted files that are still open on an
NFS client (``.nfs…``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import TypeVar

from relight.errors import CheckpointNotFound, StoreUnavailable, UnsafeContent
from relight.store.base import Entry, Properties, Reader, StoreBase, Writer, check_key
from relight.store.disk import Disk
from relight.store.durable import (
    Addition,
    JoinedFile,
    NewFile,
    OpenFile,
    Replacement,
    StaleHandle,
    create_once,
    make_dirs,
    revalidate_directory,
    sync_dir,
    translate,
)

T = TypeVar("T")
_GONE_MAX = 20
_SILLY = re.compile(r"\.nfs[0-9a-f]{16,}\Z")
"""Name of a file that was deleted while open on an NFS client, until it is closed there."""
_entry_of = tuple.__new__
"""``_entry_of(Entry, pair)`` is ``Entry(*pair)`` without a Python function call: folders of 1,024 names are listed at each append."""
_FILE_THERE = "this is a file, and a directory was expected"
_PROPERTIES = Properties(exclusive_create=True, durable=True, shared=True)
DIRECT_FROM_BYTES = 1 << 20
"""Smallest file that is written and read with direct I/O, if the file system supports it."""


class LocalStore(StoreBase):
    """A store in the directory ``root``, which is created at the first write."""

    def __init__(self, root: str | os.PathLike[str], *, disk: Disk | None = None, direct: bool = True) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._disk = disk or Disk()
        self._direct = direct
        self.must_exist = False
        """Whether the directory is never created, because it was there: its drive may not be mounted now."""
        self.url = self._root

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    def properties(self) -> Properties:
        """Exclusive by ``link``, durable by fsync."""
        return _PROPERTIES

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``; see ``durable.create_once`` for the order of calls."""
        return self._made(self._path(key), lambda path: create_once(self._disk, path, data))

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``."""
        direct = self._direct and size >= DIRECT_FROM_BYTES
        return self._made(self._path(key), lambda path: NewFile(self._disk, path, size, direct=direct))

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``."""
        path = self._path(key)
        self._check_parents(path)
        return Replacement(self._disk, path, size, direct=self._direct and size >= DIRECT_FROM_BYTES)

    def share(self, writer: Writer) -> str:
        """See ``SharesWrites``."""
        assert isinstance(writer, Replacement)
        return os.path.relpath(writer.temporary, self._root)

    def join(self, name: str) -> Writer:
        """See ``SharesWrites``."""
        return JoinedFile(self._path(name))

    def install(self, key: str, size: int, *, only_if_missing: bool = False) -> Writer:
        """Return a writer. Its ``finish`` creates or replaces the file at ``key``, atomically and durably.

        ``only_if_missing``: if the file exists by then, it stays.
        """
        direct = self._direct and size >= DIRECT_FROM_BYTES
        kind = Addition if only_if_missing else Replacement
        return self._made(self._path(key), lambda path: kind(self._disk, path, size, direct=direct))

    def sync(self, prefix: str) -> None:
        """fsync the directory. For the store itself, also fsync its parent directories on the same device.

        The process that created the store may have been killed between a mkdir and the fsync of its parent. Later processes cannot
        detect that.
        """
        path = self._path(prefix)
        self._retried(path, lambda: sync_dir(self._disk, path))
        while (
            not prefix and self._device(path) == self._device(os.path.dirname(path)) and path != os.path.dirname(path)
        ):
            path = os.path.dirname(path)
            try:
                sync_dir(self._disk, path)
            except StoreUnavailable as error:
                if error.retryable:
                    raise
                break  # no permission to open it, so we did not create it

    def open(self, key: str) -> Reader:
        """See ``ByteStore``. Symbolic links below the root are refused, also in the middle of the path."""
        path = self._path(key)
        self._check_parents(path)
        return self._retried(
            path, lambda: OpenFile(self._disk, path, direct_from=DIRECT_FROM_BYTES if self._direct else None)
        )

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``. Opening a directory revalidates a network client's cache, so the listing is current."""
        path = self._path(prefix)
        self._check_parents(os.path.join(path, "x"))
        listed = False
        for last in (False, True):
            try:
                for pair in self._disk.scan(path):
                    listed = True
                    if not (pair[0].startswith(".nfs") and _SILLY.match(pair[0])):
                        yield _entry_of(Entry, pair)
            except OSError as error:
                if not last and not listed and error.errno in (errno.ENOENT, errno.ESTALE):
                    revalidate_directory(self._disk, os.path.dirname(path))
                    continue
                if isinstance(error, FileNotFoundError):
                    return
                raise translate(error, "listing a directory", path) from error
            return

    def delete(self, key: str) -> None:
        """See ``ByteStore``."""
        path = self._path(key)
        self._check_parents(path)
        with contextlib.suppress(CheckpointNotFound):
            self._retried(path, lambda: self._removed(self._disk.unlink, path, "deleting"))

    def delete_dir(self, prefix: str) -> bool:
        """See ``ByteStore``. On NFS, a directory of deleted files is not empty until the client that has one open closes it."""
        path = self._path(prefix)
        self._check_parents(path)
        with contextlib.suppress(CheckpointNotFound):
            return self._retried(path, lambda: self._removed(self._disk.rmdir, path, "deleting a directory"))
        return True

    def free_bytes(self) -> int | None:
        """Return the free bytes of the root's file system, or of the nearest existing parent directory."""
        path = self._root
        while True:
            with contextlib.suppress(OSError):
                return self._disk.free_bytes(path)
            parent = os.path.dirname(path)
            if parent == path:
                return None
            path = parent

    def _path(self, key: str) -> str:
        return os.path.join(self._root, *(part for part in check_key(key).split("/") if part))

    def _made(self, path: str, make: Callable[[str], T]) -> T:
        """Create the parent directory and return ``make(path)``. Retry if another process deletes the empty directory meanwhile."""
        for _ in range(_GONE_MAX):
            try:
                self._make_parent(path)
                return make(path)
            except (CheckpointNotFound, StaleHandle) as error:
                last = error
            if file := self._file_above(path):
                hint = "move the file away, and the directory back if there was one"
                raise StoreUnavailable(_FILE_THERE, where=file, hint=hint) from None
            revalidate_directory(self._disk, os.path.dirname(path))
        raise StoreUnavailable(
            f"creating a file failed, because another process keeps deleting its directory: {last.what}", where=path
        ) from last

    def _file_above(self, path: str) -> str:
        """Return the file that has the name of a parent directory of ``path``; empty if there is none."""
        parent = os.path.dirname(path)
        while len(parent) >= len(self._root):
            with contextlib.suppress(OSError):
                if stat.S_ISREG(self._disk.lstat(parent).st_mode):
                    return parent
            parent = os.path.dirname(parent)
        return ""

    def _retried(self, path: str, call: Callable[[], T]) -> T:
        """Return ``call()``. After "not found" or "stale handle", revalidate the directory and call again."""
        try:
            return call()
        except (CheckpointNotFound, StaleHandle):
            revalidate_directory(self._disk, os.path.dirname(path))
        return call()

    def _removed(self, remove: Callable[[str], None], path: str, doing: str) -> bool:
        """Remove ``path``. Return False if it is a directory that is not empty."""
        try:
            remove(path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise translate(error, doing, path) from error
        return True

    def _make_parent(self, path: str) -> None:
        parent = os.path.dirname(path)
        if not os.path.isabs(parent) or not parent.startswith(self._root):
            raise UnsafeContent("this path leads out of the store", where=path)
        self._check_parents(path)  # a symbolic link in the middle of the path could lead outside the store
        base = self._root
        while True:  # the root and directories above it may be missing
            try:
                self._disk.lstat(base)
                break
            except FileNotFoundError as error:
                if self.must_exist:
                    raise StoreUnavailable(
                        "the directory is not there", where=base, hint="is its drive mounted?"
                    ) from error
                base = os.path.dirname(base)
            except OSError as error:
                raise translate(error, "reading the attributes of a directory", base) from error
        make_dirs(self._disk, base, parent)

    def _device(self, path: str) -> int:
        try:
            return self._disk.lstat(path).st_dev
        except OSError as error:
            raise translate(error, "reading the attributes of a file", path) from error

    def _check_parents(self, path: str) -> None:
        parent = os.path.dirname(path)
        while len(parent) > len(self._root):
            try:
                mode = self._disk.lstat(parent).st_mode
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ESTALE):  # the operation itself reports it, or creates it
                    parent = os.path.dirname(parent)
                    continue
                if error.errno == errno.ENOTDIR and (file := self._file_above(parent)):
                    raise CheckpointNotFound(_FILE_THERE, where=file) from error
                raise translate(error, "reading the attributes of a directory", parent) from error
            if not stat.S_ISDIR(mode):
                raise UnsafeContent(
                    "not a directory, or a symbolic link, where a directory of the store should be", where=parent
                )
            parent = os.path.dirname(parent)
