"""Find all checkpoints below a directory or a prefix of a bucket, of any framework, and the runs they belong to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from relight.errors import CheckpointNotFound, ConfigError, IncompatibleState, RelightError, StoreUnavailable
from relight.format.names import STORE_FILE, is_run_name
from relight.importers import DetectedCheckpoint, detect
from relight.importers.bucket import SCHEMES, BucketFiles, Listing, is_bucket
from relight.importers.detect import detect_files
from relight.migrate.checkpoint_names import is_checkpoint_name
from relight.migrate.journal import HOME
from relight.settings.utf8 import escaped, is_utf8

NEVER = (
    ".json",
    ".txt",
    ".md",
    ".yaml",
    ".yml",
    ".log",
    ".py",
    ".csv",
    ".jsonl",
    ".html",
    ".png",
    ".lock",
    ".toml",
    ".sh",
)
"""Suffixes of files that are never a checkpoint by themselves."""
LEVELS_MAX = 16
_ODD = re.compile(r"[^A-Za-z0-9._-]+")
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class MigrationSource:
    """A checkpoint to import. ``name``: its path below the searched directory."""

    name: str
    path: str
    run: str
    step: int
    format: str
    bytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Findings:
    """Result of a search: checkpoints, by run and step; unreadable ones with the reason; the number of excluded ones."""

    sources: list[MigrationSource]
    unreadable: list[tuple[str, str]]
    excluded: int = 0


def find(old: str, run: str | None = None, skip: str = "", exclude: Sequence[str] = ()) -> Findings:
    """Search everything below ``old``, a directory or the URL of an object store.

    A folder that is a checkpoint is not searched further. Links are not followed. ``skip`` and stores of Relight are not searched.

    Each folder with checkpoints becomes a run, named by its path; ``run`` is the run of checkpoints directly in ``old``. A checkpoint that
    does not record its step gets the last number in its name. What has a checkpoint's name and cannot be read is ``unreadable``, unless
    its path matches a pattern of ``exclude``.
    """
    place: _Candidate = _Bucket(old) if is_bucket(old) else _Folder(old)
    root = place.path
    checkpoints: list[tuple[str, DetectedCheckpoint]] = []
    unreadable: list[tuple[str, str]] = []
    excluded = 0
    for name, what in _walk(place, "", skip):
        if any(fnmatchcase(name, pattern) or fnmatchcase(os.path.basename(name), pattern) for pattern in exclude):
            excluded += 1
        elif not isinstance(what, DetectedCheckpoint):
            unreadable.append((escaped(name) or ".", str(what.what)))
        elif is_utf8(name):
            checkpoints.append((name, what))
        else:
            unreadable.append((escaped(name), "its name is not UTF-8, and the journal records it: rename it"))
    names = _runs({os.path.dirname(name) for name, _ in checkpoints}, run or os.path.basename(root))
    sources = [
        MigrationSource(
            name or os.path.basename(root),
            checkpoint.path,
            names[os.path.dirname(name)],
            _step(name or root, checkpoint),
            checkpoint.format,
            checkpoint.bytes,
            checkpoint.tensors,
        )
        for name, checkpoint in checkpoints
    ]
    return Findings(
        sorted(sources, key=lambda source: (source.run, source.step, source.name)), sorted(unreadable), excluded
    )


class _Candidate(Protocol):
    """A folder, or an entry of one, that may be a checkpoint."""

    path: str

    def is_folder(self) -> bool:
        """Return whether it is a folder."""

    def has(self, name: str) -> bool:
        """Return whether it contains a file of that name."""

    def detect(self) -> DetectedCheckpoint:
        """Detect the checkpoint, as ``importers.detect``."""

    def inside(self) -> list[tuple[str, bool, _Candidate]]:
        """Return its entries, sorted by name: name, whether it is a folder, and the candidate."""


class _Folder:
    def __init__(self, path: str) -> None:
        if not os.path.exists(path):
            hint = f"buckets are read by {', '.join(f'{scheme}://' for scheme in SCHEMES)}" if "://" in path else ""
            raise CheckpointNotFound("this path does not exist", where=path, hint=hint)
        self.path = os.path.realpath(path)

    def is_folder(self) -> bool:
        return os.path.isdir(self.path)

    def has(self, name: str) -> bool:
        return os.path.exists(os.path.join(self.path, name))

    def detect(self) -> DetectedCheckpoint:
        return detect(self.path)

    def inside(self) -> list[tuple[str, bool, _Candidate]]:
        try:
            with os.scandir(self.path) as entries:
                listed = sorted(
                    (entry.name, entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False))
                    for entry in entries
                )
        except OSError as error:
            raise StoreUnavailable(f"cannot be listed: {error.strerror}", where=self.path) from error
        candidates: list[tuple[str, bool, _Candidate]] = []
        for name, is_dir, is_file in listed:
            if is_dir or is_file:
                candidates.append((name, is_dir, _below(self.path, name)))
            elif not _leads_inside(self.path, name):
                candidates.append((name, False, _NotAFile(os.path.join(self.path, name))))
        return candidates


class _NotAFile:
    """A link to another place, a pipe or a socket: never opened, and reported if it has a checkpoint's name."""

    def __init__(self, path: str) -> None:
        self.path = path

    def is_folder(self) -> bool:
        return False

    def has(self, name: str) -> bool:
        return False

    def detect(self) -> DetectedCheckpoint:
        what = "a link, which is not followed" if os.path.islink(self.path) else "not a regular file"
        raise IncompatibleState(what, where=self.path)

    def inside(self) -> list[tuple[str, bool, _Candidate]]:
        return []


def _leads_inside(folder: str, name: str) -> bool:
    """Return whether this is a link into the same folder, such as ``latest.pt``: its target is found under its own name."""
    path = os.path.join(folder, name)
    return (
        os.path.islink(path)
        and os.path.exists(path)
        and os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep)
    )


def _below(path: str, name: str) -> _Folder:
    """Return the candidate of an entry that was just listed, without checking that it exists."""
    folder = object.__new__(_Folder)
    folder.path = os.path.join(path, name)
    return folder


class _Bucket:
    """A prefix of a bucket. One listing of the bucket serves all prefixes."""

    def __init__(self, url: str, listing: Listing | None = None, name: str = "", *, is_folder: bool = True) -> None:
        if listing is None:
            files = BucketFiles.from_url(url)
            listing, name, is_folder = files.listing, files.at, files.is_folder
        self._listing, self._name, self._is_folder = listing, name, is_folder
        self.path = f"{listing.url}/{name}" if name else listing.url

    def is_folder(self) -> bool:
        return self._is_folder

    def has(self, name: str) -> bool:
        return f"{self._name}/{name}".lstrip("/") in self._listing.versions

    def detect(self) -> DetectedCheckpoint:
        return detect_files(BucketFiles(self._listing, self._name, is_folder=self._is_folder))

    def inside(self) -> list[tuple[str, bool, _Candidate]]:
        home = f"{self._name}/" if self._name else ""
        return [
            (name, is_folder, _Bucket("", self._listing, f"{home}{name}", is_folder=is_folder))
            for name, is_folder in self._listing.inside(self._name)
        ]


def _walk(
    place: _Candidate, name: str, skip: str, level: int = 0
) -> Iterator[tuple[str, DetectedCheckpoint | RelightError]]:
    if place.path == skip or place.has(STORE_FILE):
        return
    is_folder = place.is_folder()
    named = bool(name) and is_checkpoint_name(os.path.basename(name), is_folder=is_folder)
    try:
        yield name, place.detect()
        return
    except IncompatibleState as error:
        unknown: RelightError = error
    except RelightError as error:
        yield name, error  # of a known format, but broken
        if is_folder:
            yield from _inside(place, name, skip, level, files=False)  # its files are parts of it
        return
    inner = list(_inside(place, name, skip, level))
    yield from inner
    if (named and not inner) or (not name and not is_folder):
        yield name, unknown


def _inside(
    place: _Candidate, name: str, skip: str, level: int, *, files: bool = True
) -> Iterator[tuple[str, DetectedCheckpoint | RelightError]]:
    if not place.is_folder():
        return
    try:
        inside = place.inside()
    except StoreUnavailable as error:
        yield name, error
        return
    for entry, is_folder, what in inside:
        if not files and not is_folder:
            continue
        if is_folder or (not entry.startswith(".") and not entry.endswith(NEVER)):
            path = f"{name}/{entry}" if name else entry
            if level >= LEVELS_MAX:
                yield path, IncompatibleState(f"more than {LEVELS_MAX} folders deep", where=what.path)
                return
            yield from _walk(what, path, skip, level + 1)


def _step(name: str, detected: DetectedCheckpoint) -> int:
    return detected.step if detected.step is not None else number_in(name) or 0


def number_in(path: str) -> int | None:
    """Return the last number in a file's or directory's name, None if it has none: many frameworks put the step there."""
    numbers = _NUMBER.findall(os.path.basename(path.rstrip("/")))
    return int(numbers[-1]) % 10**15 if numbers else None


def _runs(folders: set[str], top: str) -> dict[str, str]:
    """Return a unique run name for each folder."""
    names: dict[str, str] = {}
    taken: set[str] = {HOME}
    for folder in sorted(folders):
        plain = _ODD.sub("-", folder.replace("/", "-") or top).strip("-.")[:120] or "run"
        name, number = plain, 2
        while name in taken or not is_run_name(name):
            name, number = f"{plain if is_run_name(plain) else 'run'}-{number}", number + 1
            if number > 10**6:
                raise ConfigError("no name for a run", where=folder)
        taken.add(name)
        names[folder] = name
    return names
