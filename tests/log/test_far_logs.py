"""Logs of stores that are far away: many records at once, each once, and nothing asked for that such a store does not need."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from tests.log.test_log_stale_listings import save

from relight.catalog.tiers import announce
from relight.commit import Attempt
from relight.drain import drain
from relight.format.records import NoteBody
from relight.log import Log, fold
from relight.policy import Tiers
from relight.store import MemoryStore
from relight.store.base import Entry, Properties


class Far(MemoryStore):
    """A store that takes its time to answer, and counts."""

    def properties(self) -> Properties:
        return replace(super().properties(), parallel_reads=16, needs_sync=False)

    def __init__(self) -> None:
        super().__init__()
        self.gets: Counter[str] = Counter()
        self.lists: Counter[str] = Counter()
        self.at_once = self.most = 0
        self._lock = threading.Lock()

    def get(self, key: str, limit: int) -> bytes:
        with self._lock:
            self.gets[key] += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        time.sleep(0.005)
        try:
            return super().get(key, limit)
        finally:
            with self._lock:
                self.at_once -= 1

    def list(self, prefix: str) -> Iterator[Entry]:
        self.lists[prefix] += 1
        return super().list(prefix)


def test_a_long_log_is_read_side_by_side() -> None:
    """Many at once, in order all the same, each record once."""
    store = Far()
    attempt = Attempt.begin(store, "run")
    ids = [save(attempt, step) for step in range(20)]
    store.gets.clear()
    view = Log(store, "run").read()
    assert [checkpoint.id for checkpoint in fold(view).live] == ids and not view.faults
    assert 4 < store.most <= 16
    assert all(count == 1 for key, count in store.gets.items() if "/log/" in key)


def test_a_store_with_durable_names_is_not_listed_for_them() -> None:
    """An append lists the log once, to find its end, and nothing else."""
    store = Far()
    Attempt.begin(store, "run")
    store.lists.clear()
    Log(store, "run").append(lambda view: (NoteBody(topic="x", data={}), fold(view).epoch))
    assert store.lists == {"run/log": 1}


def test_a_drain_reads_a_record_once(monkeypatch) -> None:
    """However many checkpoints it copies, and however long the further tier's log is."""
    near, far = Far(), Far()
    attempt = Attempt.begin(near, "run")
    announce(attempt.place.log, Tiers(near="memory://near/run", far="memory://far/run").tiers, attempt.epoch)
    monkeypatch.setattr("relight.drain.outwards.open_tier", lambda tier, guard: (far, "run"))
    for step in range(12):
        save(attempt, step)
        drain(near, "run")
    attempt = Attempt.begin(near, "run")
    far.gets.clear()
    for step in range(12, 15):
        save(attempt, step)
    assert len(drain(near, "run").copied) == 1
    assert max(count for key, count in far.gets.items() if "/log/" in key) == 1
    assert [checkpoint.step for checkpoint in fold(Log(far, "run").read()).live][-1] == 14
