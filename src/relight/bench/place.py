"""Directory of a bench inside the store, removed in any case; and signals that wait until it can be removed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from relight.catalog.locate import locate
from relight.errors import CheckpointNotFound, ConfigError, StoreUnavailable
from relight.store import LocalStore, open_bytes
from relight.store.durable import translate

PREFIX = ".relight-bench-"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class BenchDir(NamedTuple):
    """An empty directory on the store's file system."""

    store: LocalStore
    folder: Path
    left: list[str]
    """Bench directories that existed before: another bench is running, or was killed."""


def find_store(url: str) -> LocalStore:
    """Return the store that ``url`` names, or the store of the run that it names. It need not exist yet.

    Raise ``ConfigError`` for a store that is not on a disk.
    """
    try:
        store = locate(url).store
    except CheckpointNotFound:
        store = open_bytes(url)
    if not isinstance(store, LocalStore):
        raise ConfigError(
            "only a store on a disk can be measured", where=url, hint="give a directory on the disk for the runs"
        )
    return store


@contextmanager
def make_place(store: LocalStore) -> Iterator[BenchDir]:
    """Create a directory in ``store``. At the end remove it, and the directories above it that were created."""
    root = Path(store.url)
    missing = [path for path in (root, *root.parents) if not path.exists()]
    folder = root / f"{PREFIX}{secrets.token_hex(4)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        leftovers = sorted(str(path) for path in root.glob(f"{PREFIX}*"))
        folder.mkdir()
    except OSError as error:
        _remove_empty(missing)
        raise translate(error, "making a directory to measure in", str(folder)) from error
    try:
        yield BenchDir(store, folder, leftovers)
    except BaseException:
        _remove(folder, missing)  # what remains is in the next bench's ``left``; this error has the cause
        raise
    if _remove(folder, missing):
        raise StoreUnavailable("removal of the bench's files failed", where=str(folder), hint="remove that directory")


def _remove(folder: Path, missing: list[Path]) -> bool:
    """Remove the bench's directory. Return whether something remains."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # a second Ctrl-C must not leave half of it
    try:
        shutil.rmtree(folder, ignore_errors=True)
        remains = folder.exists()
        _remove_empty(missing)
        return remains
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _remove_empty(made: list[Path]) -> None:
    for path in made:  # the deepest first
        with contextlib.suppress(OSError):
            os.rmdir(path)


@contextmanager
def end_between() -> Iterator[Callable[[], None]]:
    """Yield a function that ends the bench if Ctrl-C, SIGTERM or SIGHUP arrived. It is called between measurements.

    A signal in the middle of a measurement could leave an agent that is just being started. A second signal ends the bench at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:
            _end(number)

    previous = {number: signal.signal(number, note) for number in _ENDING}

    def end_if_asked() -> None:
        if signals:
            _end(signals[0])

    try:
        yield end_if_asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
