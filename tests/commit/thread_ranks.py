"""Ranks that are threads, for tests of what they commit together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.commit.multi_rank import save_multi_rank
from relight.commit.save import CommitTarget, Participant
from relight.format import encode_tree
from relight.format.names import parse_ready
from relight.format.tree import Leaf
from relight.layout import Box, Bytes, Item
from relight.log import Log, fold
from relight.reader import verify_checkpoint
from relight.store import LocalStore

ROW = 64


class Ranks:
    """Ranks that are threads, each with a store and a log of its own, in one attempt."""

    def __init__(self, folder: Path, world: int, run: str = "run") -> None:
        self.folder, self.world, self.run = folder, world, run
        self.attempt = Attempt.begin(LocalStore(str(folder)), run)
        self.places = [self.place() for _ in range(world)]

    def place(self) -> CommitTarget:
        store, own = LocalStore(str(self.folder)), self.attempt.place
        return CommitTarget(store, Log(store, self.run), own.store_id, own.run_id, own.epoch)

    def request(self, rank: int, step: int, timeout_s: float, value: int) -> SaveRequest:
        """A tensor of a row a rank."""
        row = Item("t", "uint8", (self.world, ROW), "value", Bytes(bytes([value]) * ROW), Box((rank, 0), (1, ROW)))
        tree = encode_tree({"t": Leaf("tensor", (0,))} if rank == 0 else {"rank": {}})
        seat = Participant(rank, self.world, "0" * 16, timeout_s)
        return SaveRequest(
            SaveInfo(step=step, metrics={"rank": rank}), tree=tree, items=[row], id=f"{step:010d}", seat=seat
        )

    def save(
        self, step: int = 0, timeout_s: float = 20.0, before: Callable[[int], Any] = lambda rank: None
    ) -> list[Any]:
        """Return each rank's report or error. ``before`` is called first on each rank, and may raise."""
        results: list[Any] = [None] * self.world

        def work(rank: int) -> None:
            try:
                before(rank)
                results[rank] = save_multi_rank(self.places[rank], self.request(rank, step, timeout_s, rank + 1))
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def committed(self) -> list[str]:
        return [checkpoint.id for checkpoint in fold(self.attempt.view()).live]

    def check(self) -> None:
        """Assert that all committed checkpoints are undamaged."""
        view = self.attempt.view()
        for checkpoint in fold(view).live:
            assert verify_checkpoint(self.attempt.store, view, checkpoint) == []

    def files(self) -> list[str]:
        """Return the names of the files. Ready files have one common name."""
        names = [path.name for path in self.folder.glob("run/0*-e*/**/*") if path.is_file()]
        return sorted("ready" if parse_ready(name) else name for name in names)
