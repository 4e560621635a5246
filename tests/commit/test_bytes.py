"""Bytes that one rank moves for a commit of several ranks: listed names, root, record. They are counted, not timed."""

from __future__ import annotations

import socket
import time

import pytest

from relight.commit import Attempt, SaveInfo, SaveRequest, plan_save
from relight.commit.multi_rank import _proven, save_multi_rank
from relight.commit.save import CommitTarget, Participant, write_part
from relight.format import encode_tree
from relight.format.names import READY_DIR, CheckpointDir, is_written_file
from relight.layout import Box, Bytes, Item
from relight.log import Log
from relight.store import MemoryStore, put
from relight.testing.counting import CountingStore

ID = "0" * 10
WORLDS = (2, 16, 64, 256)
FIXED_BYTES = 2000
"""Bytes that do not depend on the number of ranks: draft, the root's head, the record, the log's names."""


def apart(name: str) -> bool:
    """Each rank writes its own packs and part and reads them back, whichever rank commits."""
    return is_written_file(name) and name.startswith(("pack-", "part-"))


class Ranks:
    """Ranks of one save, run one after the other in one thread. Each has a store that counts bytes."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: "node-0123.cluster")  # the record has the host's name
        self.world, self.memory = world, MemoryStore()
        self.own = Attempt.begin(self.memory, "run").place
        self.stores = [CountingStore(self.memory, apart=apart) for _ in range(world)]
        self.places = []
        for store in self.stores:
            place = CommitTarget(store, Log(store, "run"), self.own.store_id, self.own.run_id, self.own.epoch)
            place.log.read()
            store.bytes.clear()
            store.asked.clear()
            self.places.append(place)

    def request(self, rank: int) -> SaveRequest:
        row = Item("t", "uint8", (self.world, 64), "value", Bytes(bytes(64)), Box((rank, 0), (1, 64)))
        return SaveRequest(
            SaveInfo(step=1),
            tree=encode_tree({}),
            items=[row],
            id=ID,
            seat=Participant(rank, self.world, "0" * 16, 60.0),
        )

    def ready(self, rank: int) -> None:
        """Write the packs and part of ``rank`` and report that it is ready."""
        request, place = self.request(rank), self.places[rank]
        plan = plan_save(request.items, id=ID, rank=rank)
        directory = CheckpointDir(1, ID, place.epoch)
        prefix = f"run/{directory}"
        part, data = write_part(place, request, plan, directory, prefix, {})
        ready = _proven(place, request, directory, prefix, part, data, plan)
        put(place.store, f"{prefix}/{READY_DIR}/{ready.file}", b"")

    def save(self) -> tuple[CountingStore, CountingStore]:
        """Save on all ranks. The last rank commits, and the last but one waits for it. Return the stores of these two
        ranks."""
        for rank in range(self.world - 2):
            self.ready(rank)
        last = self.world - 1
        rest = [lambda: save_multi_rank(self.places[last], self.request(last))]

        def run_last_rank(seconds: float) -> None:
            for rank in rest:
                rank()
            rest.clear()

        save_multi_rank(self.places[last - 1], self.request(last - 1), time.monotonic, run_last_rank)
        assert not rest
        return self.stores[last], self.stores[last - 1]


@pytest.mark.parametrize("world", WORLDS)
def test_the_committing_rank_moves_few_bytes_for_each_rank(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committing rank and a waiting rank move at most 128 bytes per rank. Their number of calls does not depend on
    the number of ranks."""
    commits, waits = Ranks(world, monkeypatch).save()
    assert commits.through <= 128 * world + FIXED_BYTES, commits.bytes
    assert waits.through <= 128 * world + FIXED_BYTES, waits.bytes
    assert (commits.asked["list"], commits.asked["put_once"]) == (4, 2) and commits.asked["get"] <= 2
    assert waits.asked["get"] <= 2 and waits.asked["put_once"] == 0


def test_64_ranks_move_128_bytes_a_rank_in_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 ranks, 128 bytes per rank include the fixed bytes."""
    commits, waits = Ranks(64, monkeypatch).save()
    assert commits.through <= 128 * 64, commits.bytes
    assert waits.through <= 128 * 64, waits.bytes


def test_each_further_rank_costs_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 64 to 256 ranks, each added rank costs at most 120 bytes for the committer, and 80 for a waiting rank."""
    (few, few_waits), (many, many_waits) = Ranks(64, monkeypatch).save(), Ranks(256, monkeypatch).save()
    assert many.through - few.through <= 120 * (256 - 64)
    assert many_waits.through - few_waits.through <= 80 * (256 - 64)
