"""A path or URL as people type it: a store, a run, or a checkpoint directory in one."""

from __future__ import annotations

from typing import NamedTuple

from relight.catalog.run import list_runs
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, UnsafeContent
from relight.format.names import STORE_FILE, is_run_name, parse_dir
from relight.store import ByteStore, open_bytes
from relight.store.urls import split_run


class Place(NamedTuple):
    """Where a path leads. ``run`` is None for a whole store; ``which`` is set if a checkpoint's directory was given."""

    store: ByteStore
    run: str | None
    which: str | None = None


def locate(url: str) -> Place:
    """The store, run or checkpoint at ``url``; ``CheckpointNotFound`` says what is there instead."""
    text = url.rstrip("/") or url
    whole = open_bytes(text)
    if _is_store(whole):
        return Place(whole, None)
    try:
        parent, name = split_run(text)
    except ConfigError:
        raise CheckpointNotFound("no Relight store here", where=url) from None
    parsed = parse_dir(name)
    if parsed is not None:
        above = locate(parent)
        if above.run is not None:
            return Place(above.store, above.run, parsed.id)
    store = open_bytes(parent)
    if is_run_name(name) and any(True for _ in store.list(f"{name}/log")):
        return Place(store, name)
    if _is_store(store):
        runs = ", ".join(list_runs(store)[:8]) or "no runs yet"
        raise CheckpointNotFound(f"no run {name[:80]!r} in this store", where=parent, hint=f"there are: {runs}")
    raise CheckpointNotFound("no Relight store or run here", where=url, hint="give a store (it has a relight.json) or store/run")


def _is_store(store: ByteStore) -> bool:
    try:
        reader = store.open(STORE_FILE)
    except (CheckpointNotFound, CorruptCheckpoint, UnsafeContent):
        return False
    reader.close()
    return True
