"""Attempts that were stopped in the middle of a commit, and wake up when another one is in charge: nothing of theirs ever counts."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from thread_ranks import Ranks

from relight.commit import Attempt, SaveReport
from relight.commit.save import CommitTarget
from relight.errors import RelightError
from relight.log import Log, fold
from relight.reader import verify_checkpoint
from relight.store import LocalStore

TRIALS = 160


class Stopping(LocalStore):
    """A store that blocks its ``at``-th call until a signal, like a process that was stopped there."""

    def __init__(self, folder: Path, at: int) -> None:
        super().__init__(str(folder))
        self.stopped, self.released = threading.Event(), threading.Event()
        self._at, self._calls = at, 0

    def _pass(self) -> None:
        self._calls += 1
        if self._calls == self._at:
            self.stopped.set()
            assert self.released.wait(60)

    def put_once(self, key: str, data: bytes) -> bool:
        self._pass()
        return super().put_once(key, data)

    def sync(self, prefix: str) -> None:
        self._pass()
        super().sync(prefix)

    def list(self, prefix: str) -> Any:
        self._pass()
        return super().list(prefix)

    def get(self, key: str, limit: int) -> bytes:
        self._pass()
        return super().get(key, limit)


def refused(folder: Path, seed: int) -> bool:
    """Block all ranks of an attempt in their save, save in a new attempt, then release the ranks. Return False if
    their checkpoint already existed when the new attempt began.
    """
    rng = random.Random(seed)
    folder.mkdir()
    ranks = Ranks(folder, rng.choice((1, 2, 4)))
    stores = [Stopping(folder, rng.randint(1, 12)) for _ in range(ranks.world)]
    own = ranks.attempt.place
    ranks.places = [CommitTarget(store, Log(store, "run"), own.store_id, own.run_id, own.epoch) for store in stores]
    results: list[Any] = []
    old = threading.Thread(target=lambda: results.extend(ranks.save(0, timeout_s=20.0)))
    old.start()
    # the other ranks wait for the stopped one
    while old.is_alive() and not any(store.stopped.wait(0.01) for store in stores):
        pass
    was_there = ranks.committed()
    newer = Attempt.begin(LocalStore(str(folder)), "run")
    mine = Ranks.__new__(Ranks)
    mine.folder, mine.world, mine.run, mine.attempt = folder, 1, "run", newer
    mine.places = [mine.place()]
    (report,) = mine.save(1)
    assert isinstance(report, SaveReport), report
    for store in stores:
        store.released.set()
    old.join(60)
    assert not old.is_alive()
    view = newer.view()
    assert [checkpoint.id for checkpoint in fold(view).live] == [*was_there, report.id], seed
    assert was_there or all(isinstance(result, RelightError) for result in results), results
    for checkpoint in fold(view).live:
        assert verify_checkpoint(newer.store, view, checkpoint) == []
    return not was_there


def test_a_hundred_zombies_commit_nothing(tmp_path: Path) -> None:
    """A hundred that had not committed when the other began: each of their commits is refused, and the other's checkpoint is whole."""
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda seed: refused(tmp_path / str(seed), seed), range(TRIALS)))
    assert sum(counts) >= 100, (
        f"{sum(counts)} refused, {len(counts) - sum(counts)} had committed before the other began"
    )
