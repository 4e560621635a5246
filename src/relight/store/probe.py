"""What a server really honours, found out by trying.

The commit is a put that must fail if the name is taken. Some servers ignore the condition, and answer as if all were well: two processes
that commit at once would then both believe that they did. So a key is created twice, and one by several threads at the same moment, once
in each process; nothing is remembered for longer: servers are upgraded, and others answer to their names.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from typing import Protocol

from relight.comm.new_threads import ThreadPool
from relight.errors import ConfigError, RelightError
from relight.observe import emit
from relight.store.object_client import surroundings

PROBE_PREFIX = ".relight-probe-"
RACERS = 8
_found: dict[tuple[object, ...], bool] = {}
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


class Creates(Protocol):
    """What the probe needs of a store."""

    url: str

    def create(self, path: str, data: bytes) -> bool:
        """Create by a conditional put."""

    def probe_path(self, name: str) -> str:
        """Where a name of the probe's lies."""

    def delete(self, key: str) -> None:
        """Remove."""


def exclusive_create(store: Creates) -> bool:
    """Whether of any number of creations of one name exactly one succeeds, as far as trying can tell. Asked once a process and store."""
    key = (store.url, surroundings())
    with _lock:
        if key not in _found:
            _found[key] = _probe(store) or _probe(store)  # a sweep may have taken the first one's objects away
        return _found[key]


def forget() -> None:
    """Ask again at the next use."""
    with _lock:
        _found.clear()


def _probe(store: Creates) -> bool:
    names = [PROBE_PREFIX + secrets.token_hex(8) for _ in range(2)]
    paths = [store.probe_path(name) for name in names]
    try:
        first, second = store.create(paths[0], b"1"), store.create(paths[0], b"2")
        if not first or second:
            return False
        with ThreadPool(RACERS, "relight-probe") as pool:
            won = sum(pool.map(lambda number: store.create(paths[1], b"%d" % number), range(RACERS)))
        if won != 1:
            emit("store.no_conditional_put", f"{store.url}: {won} of {RACERS} creations of one name at once succeeded", url=store.url)
        return won == 1
    finally:
        for name in names:
            with contextlib.suppress(RelightError):
                store.delete(name)


def single_writer_promised() -> bool:
    """Whether the user says that one process at most writes to the store: ``RELIGHT_SINGLE_WRITER``."""
    text = os.environ.get("RELIGHT_SINGLE_WRITER", "0").lower()
    if text not in ("0", "1", "false", "true", "no", "yes"):
        raise ConfigError(f"RELIGHT_SINGLE_WRITER is 1 or 0, not {text[:40]!r}")
    return text in ("1", "true", "yes")
