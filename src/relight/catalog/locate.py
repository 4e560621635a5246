"""Resolve a path or URL that a user typed to a store, run or checkpoint, and suggest what was meant if it is neither."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import NamedTuple

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError, UnsafeContent
from relight.format.names import (
    LOG_DIR,
    STORE_FILE,
    check_run_name,
    is_run_name,
    is_written_file,
    parse_dir,
    parse_record_file,
)
from relight.log.identity import ENTRIES_MAX, checkpoint_dirs
from relight.log.listing import has_records
from relight.store import ByteStore, open_bytes
from relight.store.anchored import anchor_of, anchored_runs
from relight.store.urls import absolute, split_run

_ENTRIES_MAX = 200
"""Largest number of names in one directory that are checked for a hint."""


class Location(NamedTuple):
    """Store, run and checkpoint that a path names.

    ``run`` is None for a whole store; ``which`` is set if a checkpoint was given.
    """

    store: ByteStore
    run: str | None
    which: str | None = None


def locate(url: str) -> Location:
    """Return the store, run or checkpoint at ``url``. ``CheckpointNotFound`` states what is there instead.

    A checkpoint is ``RUN@WHICH``, its directory, or a file in it. A store that lost its ``relight.json`` is recognised by its runs.
    """
    location = _parse_location(url)
    at_sign = url.rfind("@")
    while location is None and at_sign > 0:
        if url[at_sign + 1 :]:
            location = _parse_location(url[:at_sign])
            if location is not None and location.which is None:
                return location._replace(which=url[at_sign + 1 :])
            location = None
        at_sign = url.rfind("@", 0, at_sign)
    if location is None:
        raise _not_found(url)
    return location


def locate_destination(url: str, run: str) -> Location:
    """Return the store and run name for a new run at ``url``. The store is created if it does not exist.

    If ``url`` is an existing store, or ends in ``/``, the new run is called ``run``. Raise ``ConfigError`` for a path that exists and is
    neither a store nor a run: no store is created around it by accident.
    """
    path = absolute(url)
    store = open_bytes(path)
    if url.endswith("/") or _is_store(store):
        return Location(store, check_run_name(run))
    parent, name = split_run(path)
    above = open_bytes(parent)
    name = check_run_name(name)
    existing = next((entry for entry in above.list("") if entry.name == name), None)
    if existing and not existing.is_dir:
        raise ConfigError(
            "this is a file", where=url, hint="name a run, such as backup/demo; it is created if it does not exist"
        )
    if existing and not _is_store(above) and not _is_run(above, name):
        raise ConfigError(
            "this exists, and is neither a store nor a run",
            where=url,
            hint=f"{url}/{run} would make a store of it, with the run {run}",
        )
    return Location(above, name)


def _parse_location(url: str) -> Location | None:
    path = absolute(url)
    store = open_bytes(path)
    if _is_store(store):
        return Location(store, None)
    try:
        parent, name = split_run(path)
    except ConfigError:
        return None
    if parse_dir(name):
        above = _parse_location(parent)
        return above._replace(which=name.split("-")[1]) if above and above.run and above.which is None else None
    if is_written_file(name) or name == LOG_DIR or parse_record_file(name) is not None:
        above = _parse_location(parent)
        if above and above.run:
            return above
    if name == STORE_FILE:
        return _parse_location(parent)
    above_bytes = open_bytes(parent)
    if is_run_name(name) and _is_run(above_bytes, name):
        return Location(above_bytes, name)
    return Location(store, None) if any(True for _ in _runs(store)) else None


def _is_store(store: ByteStore) -> bool:
    try:
        reader = store.open(STORE_FILE)
    except (CheckpointNotFound, CorruptCheckpoint, UnsafeContent):
        return False
    reader.close()
    return True


def _is_run(store: ByteStore, name: str) -> bool:
    """Return whether ``name`` has a log with a record in it, or checkpoint directories without a log.

    False if it cannot be read; opening it by name reports the reason.
    """
    try:
        if has_records(store, name) or checkpoint_dirs(store, name, ENTRIES_MAX):
            return True
    except RelightError:
        pass
    # opening a run that vanished must fail, so it counts as existing; a failing anchor is an error
    anchor = anchor_of(store)
    return anchor is not None and bool(anchor.read(name).pins)


def _runs(store: ByteStore) -> Iterator[str]:
    names: set[str] = set()
    with contextlib.suppress(RelightError):
        for entry in islice(store.list(""), _ENTRIES_MAX):
            if entry.is_dir and is_run_name(entry.name) and _is_run(store, entry.name):
                names.add(entry.name)
                yield entry.name
    yield from anchored_runs(store, exclude=names)


def _not_found(url: str) -> CheckpointNotFound:
    path = absolute(url)
    try:
        parent, name = split_run(path)
    except ConfigError:
        return CheckpointNotFound("no Relight store here", where=url, hint=_below(url) or _FIRST)
    above = open_bytes(parent)
    runs = sorted(_runs(above))
    if _is_store(above):
        close = get_close_matches(name, runs, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        hint += f"the store has {_listed(runs)}" if runs else "the store has no run yet"
        if os.path.isfile(path):
            return CheckpointNotFound(
                "a file is in the place of the run's directory", where=path, hint=f"move the file away; {hint}"
            )
        return CheckpointNotFound(f"no run {name[:80]!r} in this store", where=parent, hint=hint)
    if os.path.islink(path):
        return CheckpointNotFound(
            "no Relight store or run here", where=url, hint=f"it is a link: try {os.path.realpath(path)}"
        )
    if os.path.isfile(path if os.path.exists(path) else path.rpartition("@")[0]):
        hint = "relight import reads checkpoint files of other tools"
        return CheckpointNotFound("this is a file, and no store or run", where=url, hint=hint)
    with contextlib.suppress(RelightError):
        if any(entry.name == name for entry in above.list("")):
            return CheckpointNotFound("no Relight store or run here", where=url, hint=_below(url) or _FIRST)
    return CheckpointNotFound("this path does not exist", where=url, hint=_above(parent) or _FIRST)


_FIRST = "give a store, such as runs, or a run in it, such as runs/demo"


def _below(url: str) -> str:
    """Return a hint with the stores and runs one level below ``url``; empty if there are none."""
    store = open_bytes(absolute(url))
    urls = []
    with contextlib.suppress(RelightError):
        for entry in islice(store.list(""), _ENTRIES_MAX):
            if entry.is_dir and _parse_quietly(f"{absolute(url)}/{entry.name}"):
                urls.append(f"{url.rstrip('/')}/{entry.name}")
    return f"below it are {_listed(sorted(urls))}" if urls else ""


def _above(path: str) -> str:
    """Return a hint with the nearest parent directory that is a store or run, or contains one."""
    while True:
        location = _parse_quietly(path)
        if location:
            return f"{path} is a run: name one of its checkpoints after @" if location.run else f"{path} is a store"
        below = _below(path)
        try:
            parent, _ = split_run(path)
        except ConfigError:
            return ""
        if below:
            return below.replace("below it", f"below {path}", 1)
        if any(True for _ in _entries(path)) or parent == path:
            return ""
        path = parent


def _entries(path: str) -> Iterator[str]:
    with contextlib.suppress(RelightError):
        yield from (entry.name for entry in open_bytes(path).list(""))


def _parse_quietly(path: str) -> Location | None:
    try:
        return _parse_location(path)
    except RelightError:
        return None


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
