"""A destination that always has a whole export of one checkpoint, and is replaced atomically by that of another.

A file is replaced by a rename. A directory is a symbolic link to one of the versions in ``.NAME.versions`` next to it, and the link
is replaced by a rename. A reader sees one version as long as it resolves the link once. The version before stays until the next one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from relight.engines import IN_PROCESS, Engine
from relight.errors import ConfigError
from relight.export.atomic_output import WRITER, is_abandoned, lock_directory, new_writer
from relight.export.execute import ExportReport, execute_export
from relight.export.plan import ExportPlan, is_folder, plan_export
from relight.export.selection import Options
from relight.reader.opened import Opened
from relight.store.disk import Disk
from relight.store.durable import make_dirs, sync_dir, translate

KEPT = 2
"""Versions that are kept: the present one, and the one before."""
_VERSION = re.compile(rf"[0-9]+-([0-9a-z]{{10}})-([0-9a-f]{{8}})(?:-{WRITER})?\Z")
"""STEP-ID-DIGEST, with a digest of the options, and a writer if that name existed. Such a directory is complete and durable."""
_NEW, _LINK, _REMOVED = ".new", ".link", ".removed"
_LEFT = re.compile(rf"\.?\.(?:new|link|removed)(?:-({WRITER}))?(?:\.exporting-{WRITER})?\Z")
"""Names of what an interrupted export leaves, and their writer. Earlier versions did not name it."""


class NewestVersion(NamedTuple):
    """An export that the destination has now."""

    plan: ExportPlan
    report: ExportReport


class NewestExport:
    """The destination ``path``. Context manager: one process at a time replaces a directory.

    Without locks, or from several machines, several may: each has its unfinished files under other names, and the last one counts.

    ``files``: a directory with files to copy into each version, such as ``config.json``.
    """

    def __init__(self, path: str, options: Options, files: str | None = None) -> None:
        self.path = os.path.abspath(path)
        self._options, self._files = replace(options, overwrite=True), files
        self._parent, self._name = os.path.split(self.path)
        self._versions = os.path.join(self._parent, f".{self._name}.versions")
        self._folder = is_folder(path, options)
        self._digest = hashlib.blake2b(repr((self._options, files)).encode(), digest_size=4).hexdigest()
        self._disk, self._lock, self._is_locked = Disk(), -1, False
        writer = new_writer()
        self._new, self._link, self._removed = (
            os.path.join(self._versions, f"{name}-{writer}") for name in (_NEW, _LINK, _REMOVED)
        )
        if files is not None and not (self._folder and os.path.isdir(files)):
            what = "no directory is there" if self._folder else "the export is one file"
            raise ConfigError(f"--files copies a directory's files into the export: {what}", where=files)

    def __enter__(self) -> NewestExport:
        if self._folder:
            self._check()
            with self._errors("making room for an export"):
                make_dirs(self._disk, "/", os.path.join(os.path.realpath(self._parent), f".{self._name}.versions"))
                self._lock = os.open(self._versions, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with contextlib.ExitStack() as failed:
                failed.callback(self.__exit__)
                with self._errors("locking the directory of an export"):
                    is_locked = lock_directory(self._lock)
                self._is_locked = bool(is_locked)
                if is_locked is False:
                    raise ConfigError("another process exports to this directory", where=self.path)
                with self._errors("removing what an interrupted export left"):
                    self._clean(interrupted=self._is_locked)
                failed.pop_all()
        elif os.path.isdir(self.path):
            raise ConfigError("this is a directory", where=self.path, hint="name another target")
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def checkpoint_id(self) -> str | None:
        """The id of the checkpoint that the directory has. None for a file, for other options, and if there is none yet or no longer."""
        name = self._present
        match = _VERSION.match(name) if name is not None else None
        is_complete = match is not None and match[2] == self._digest and os.path.isdir(self.path)
        return match[1] if match is not None and is_complete else None

    def export(
        self, opened: Opened, progress: Callable[[int], None] | None = None, *, engine: Engine = IN_PROCESS
    ) -> NewestVersion:
        """Export a checkpoint, and replace the destination. If that fails, the destination is unchanged. Raises as ``execute_export``."""
        if not self._folder:
            plan = plan_export(opened, self.path, self._options)
            return NewestVersion(plan, execute_export(plan, progress, engine=engine))
        shutil.rmtree(self._new, ignore_errors=True)
        plan = plan_export(opened, self._new, self._options)
        report = execute_export(plan, progress, engine=engine)
        version = f"{opened.root.step}-{opened.root.id}-{self._digest}"
        with self._errors("putting an export in its place"):
            self._copy_files(self._new)
            version = self._install(version)
            sync_dir(self._disk, self._versions)
            self._switch(version)
        with contextlib.suppress(OSError):  # the next export removes it
            self._clean()
        return NewestVersion(replace(plan, path=self.path), report)

    @property
    def _present(self) -> str | None:
        """The name of the version to which the link points."""
        try:
            folder, name = os.path.split(os.readlink(self.path))
        except OSError:
            return None
        return name if folder == os.path.basename(self._versions) else None

    def _check(self) -> None:
        if os.path.lexists(self.path) and self._present is None:
            raise ConfigError(
                "this exists, and --follow has not made it",
                where=self.path,
                hint="name another target, or move it away",
            )

    def _copy_files(self, folder: str) -> None:
        """Copy the further files, durably. Weights have precedence over a file of the same name."""
        for name in sorted(os.listdir(self._files)) if self._files is not None else ():
            source, target = os.path.join(self._files or "", name), os.path.join(folder, name)
            if os.path.isfile(source) and not os.path.exists(target):
                shutil.copyfile(source, target)
                with open(target, "rb") as file:
                    os.fsync(file.fileno())
        sync_dir(self._disk, folder)

    def _install(self, version: str) -> str:
        """Give the complete export its final name, and return that. A version that exists stays: the link may point at it by now."""
        os.utime(self._new)  # the newest from now on: another process's ``_clean`` keeps it until the link points at it
        try:
            os.rename(self._new, os.path.join(self._versions, version))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            version = f"{version}-{new_writer()}"
            os.rename(self._new, os.path.join(self._versions, version))
        return version

    def _switch(self, version: str) -> None:
        """Point the link at a version. Its time of change then orders it after all others."""
        os.utime(os.path.join(self._versions, version))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._link)
        os.symlink(os.path.join(os.path.basename(self._versions), version), self._link)
        self._check()  # as late as possible: a rename would replace a file
        os.rename(self._link, self.path)
        sync_dir(self._disk, self._parent)

    def _clean(self, *, interrupted: bool = False) -> None:
        """Remove old versions, and everything incomplete. ``interrupted``: also versions to which the link never pointed."""
        present = self._present
        names = os.listdir(self._versions)
        versions = sorted(filter(_VERSION.match, names), key=self._changed_ns, reverse=True)
        linked = versions
        if interrupted:
            linked = versions[versions.index(present) :] if present in versions else []
        kept = {present, *linked[:KEPT]}
        for name in versions:
            # the link is read again: without locks, another process may have pointed it at this version meanwhile
            if name not in kept and name != self._present:
                self._discard(name)
        for name in names:
            left = _LEFT.match(name)
            if left is not None:
                with contextlib.suppress(FileNotFoundError):  # its writer is there, or another process removes it
                    if is_abandoned(os.path.join(self._versions, name), left[1] or "", self._is_locked):
                        self._discard(name)

    def _changed_ns(self, name: str) -> int:
        """Return the time of a version's last change; 0 if another process has removed it."""
        try:
            return os.stat(os.path.join(self._versions, name)).st_mtime_ns
        except FileNotFoundError:
            return 0

    def _discard(self, name: str) -> None:
        """Remove a file or a directory below the versions. First it loses its name, which states that it is complete."""
        path = os.path.join(self._versions, name)
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            if os.path.islink(path) or os.path.isfile(path):
                os.unlink(path)
            elif path != self._removed and os.path.isdir(path):
                shutil.rmtree(self._removed, ignore_errors=True)
                os.rename(path, self._removed)
        shutil.rmtree(self._removed, ignore_errors=True)

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOTDIR:
                raise ConfigError("a part of this path is a file", where=self.path) from error
            raise translate(error, doing, self.path) from error
