"""Probe whether a server supports conditional puts ("create if absent").

The commit is a put that must fail if the name exists. Some servers ignore the condition and report success: two processes that commit at
once would then both succeed. So each process creates a key twice, and another key from several threads at once. The result is not stored
on disk, as servers are upgraded or replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from typing import Protocol

from relight.comm.new_threads import ThreadPool
from relight.errors import RelightError
from relight.observe import emit
from relight.store.object_client import surroundings

PROBE_PREFIX = ".relight-probe-"
CREATORS = 8
_found: dict[tuple[object, ...], bool] = {}
"""Results by store: a probe costs several requests."""
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


class Creates(Protocol):
    """Operations of a store that the probe needs."""

    url: str

    def create(self, path: str, data: bytes) -> bool:
        """Create by a conditional put."""

    def probe_path(self, name: str) -> str:
        """Return the path of a probe's object."""

    def delete(self, key: str) -> None:
        """Remove."""


def exclusive_create(store: Creates) -> bool:
    """Return whether exactly one of several creations of a name succeeds, as far as a trial shows. Probed once per process and store."""
    key = (store.url, surroundings())
    with _lock:
        if key not in _found:
            _found[key] = _probe(store) or _probe(store)  # a sweep may have deleted the first probe's objects
        return _found[key]


def forget() -> None:
    """Discard the results: the next use probes again."""
    with _lock:
        _found.clear()


def _probe(store: Creates) -> bool:
    names = [PROBE_PREFIX + secrets.token_hex(8) for _ in range(2)]
    paths = [store.probe_path(name) for name in names]
    try:
        first, second = store.create(paths[0], b"1"), store.create(paths[0], b"2")
        if not first or second:
            return False
        with ThreadPool(CREATORS, "relight-probe") as pool:
            won = sum(pool.map(lambda number: store.create(paths[1], b"%d" % number), range(CREATORS)))
        if won != 1:
            emit(
                "store.no_conditional_put",
                f"{store.url}: {won} of {CREATORS} concurrent creations of one file succeeded, and only one should",
                url=store.url,
            )
        return won == 1
    finally:
        for name in names:
            with contextlib.suppress(RelightError):
                store.delete(name)
