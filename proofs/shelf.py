"""Contents of a simulated store: files and names, which of them are durable, and the recent changes.

A listener is notified of each change at once. Nothing here waits or fails; ``simulated_store`` adds that.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Protocol

from relight.errors import CheckpointNotFound


class ChangeListener(Protocol):
    """Listener that is notified of each change, at once."""

    def created(self, key: str, data: bytes, process: str, over: bool) -> None:
        """A complete file was created, as by ``put_once``."""

    def deleted(self, key: str, process: str) -> None:
        """A file was deleted."""

    def on_durable(self, keys: list[str]) -> None:
        """These names are durable from now on."""


class DurableFile:
    """Bytes, and whether they were made durable."""

    __slots__ = ("data", "finished")

    def __init__(self, size: int = 0, data: bytes = b"", finished: bool = False) -> None:
        self.data = bytearray(data) if data else bytearray(size)
        self.finished = finished


class DurableNames:
    """Files and directories, which of their names are not durable, and what has changed in each directory."""

    def __init__(self) -> None:
        self.files: dict[str, DurableFile] = {}
        self.dirs: dict[str, dict[str, bool]] = {"": {}}
        self.loose: set[str] = set()
        self.changes: dict[str, list[tuple[str, str, bool, bool]]] = {}
        self.watch: ChangeListener | None = None
        self.under_way: list[tuple[str, bytes, str]] = []
        """Creations that failed with ``Uncertain`` for their callers and take effect later."""

    def put(self, key: str, file: DurableFile, process: str) -> None:
        """Add a file. Raise ``CheckpointNotFound`` if its directory is gone."""
        self._enter(key, False, process)
        self.files[key] = file

    def make_dir(self, key: str, process: str) -> None:
        """Make a directory, unless it exists."""
        if key not in self.dirs:
            self._enter(key, True, process)
            self.dirs[key] = {}

    def remove(self, key: str, process: str) -> None:
        """Remove a file's name, if it exists. Open files stay readable."""
        if self.files.pop(key, None) is not None:
            self._leave(key, False, process)
            if self.watch is not None:
                self.watch.deleted(key, process)

    def lose(self, folder: str, names: Iterable[str]) -> None:
        """Remove files as an accident does: without notifying the listener. Listings are not stale afterwards."""
        for key in [f"{folder}/{name}" for name in names]:
            self.files.pop(key, None)
            self.loose.discard(key)
            self._forget(key)
        self.changes.clear()

    def remove_dir(self, key: str, process: str) -> bool:
        """Remove an empty directory. Return whether it is gone."""
        if self.dirs.get(key):
            return False
        if self.dirs.pop(key, None) is not None:
            self._leave(key, True, process)
        return True

    def sync(self, prefix: str) -> None:
        """Make the names directly below ``prefix`` durable."""
        start = f"{prefix}/" if prefix else ""
        keys = [key for key in self.loose if key.startswith(start) and "/" not in key[len(start) :]]
        self.loose.difference_update(keys)
        if keys and self.watch is not None:
            self.watch.on_durable(sorted(keys))

    def past(self, prefix: str, process: str, rng: random.Random) -> dict[str, bool]:
        """Return the names below ``prefix`` some changes ago, but not before the last change that ``process`` made there."""
        names = dict(self.dirs.get(prefix, {}))
        changes = self.changes.get(prefix, [])
        for by, name, is_dir, added in reversed(changes[-rng.randrange(1, 6) :]):
            if by == process:
                break
            if added:
                names.pop(name, None)
            else:
                names[name] = is_dir
        return names

    def cut(self, rng: random.Random) -> list[str]:
        """Cut the power: drop a random subset of the names that are not durable, and truncate unfinished files.

        Return the dropped names.
        """
        share = rng.choice((0.3, 0.7, 1.0))
        dropped = [key for key in sorted(self.loose) if rng.random() < share]
        for key in dropped:
            for name in [path for path in self.files if path == key or path.startswith(f"{key}/")]:
                del self.files[name]
                self._forget(name)
            for folder in [path for path in self.dirs if path == key or path.startswith(f"{key}/")]:
                del self.dirs[folder]
                self._forget(folder)
        for file in self.files.values():
            if not file.finished:
                del file.data[len(file.data) // 2 :]
        self.loose.clear()
        self.under_way.clear()
        return dropped

    def _enter(self, key: str, is_dir: bool, process: str) -> None:
        parent, _, name = key.rpartition("/")
        if parent not in self.dirs:
            raise CheckpointNotFound("creating a file name failed: its directory is gone", where=key)
        self.dirs[parent][name] = is_dir
        self.loose.add(key)
        self.changes.setdefault(parent, []).append((process, name, is_dir, True))

    def _leave(self, key: str, is_dir: bool, process: str) -> None:
        self._forget(key)
        self.loose.discard(key)
        self.changes.setdefault(key.rpartition("/")[0], []).append((process, key.rpartition("/")[2], is_dir, False))

    def _forget(self, key: str) -> None:
        parent, _, name = key.rpartition("/")
        self.dirs.get(parent, {}).pop(name, None)


def create(shelf: DurableNames, key: str, data: bytes, process: str) -> bool:
    """Create a name atomically. Exactly one caller gets True."""
    over = key in shelf.files
    if over:
        return False
    shelf.put(key, DurableFile(data=data, finished=True), process)
    if shelf.watch is not None:
        shelf.watch.created(key, data, process, over)
    return True
