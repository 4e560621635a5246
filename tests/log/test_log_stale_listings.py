"""Listings older than what they list, and records that come damaged once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import CheckpointNotFound, StoreUnavailable
from relight.format import Leaf, encode_tree
from relight.format.names import record_file
from relight.format.records import NoteBody
from relight.layout import Bytes, Item
from relight.log import Log, fold, log
from relight.log.log import DAMAGED_READS
from relight.observe import counters
from relight.store import MemoryStore
from relight.store.base import Entry


class Odd(MemoryStore):
    """A store with stale listings and reads on request."""

    listed: Callable[[str], bool] = staticmethod(lambda name: True)
    damage: Callable[[str], bytes | None] = staticmethod(lambda key: None)

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def list(self, prefix: str) -> Iterator[Entry]:
        return iter([entry for entry in super().list(prefix) if "/log" not in prefix or self.listed(entry.name)])

    def get(self, key: str, limit: int) -> bytes:
        self.reads[key] += 1
        return self.damage(key) or super().get(key, limit)


def save(attempt: Attempt, step: int) -> str:
    item = Item("t", "uint8", (4,), "param", Bytes(bytes([step] * 4)), None, True)
    return attempt.save(
        SaveRequest(SaveInfo(step=step), tree=encode_tree({"t": Leaf("tensor", (0,))}), items=[item])
    ).id


@pytest.mark.parametrize("missing", [1, 2, 4, 99], ids=lambda n: f"the last {n}")
def test_a_first_read_finds_records_that_a_stale_listing_lacks(missing: int) -> None:
    """A process that opens a run sees its newest record, although the listing is short or empty."""
    store = Odd()
    attempt = Attempt.begin(store, "run")
    ids = [save(attempt, step) for step in range(4)]
    head = attempt.view().head
    store.listed = lambda name: int(name.split(".")[0]) <= head - missing
    view = Log(store, "run").read()
    assert view.head == head
    assert [checkpoint.id for checkpoint in fold(view).live] == ids
    assert not view.faults


def test_a_listing_older_than_a_record_that_was_read_is_ignored() -> None:
    """A process that has seen a record appends after it, whatever a listing shows. No number is used twice."""
    store = Odd()
    attempt = Attempt.begin(store, "run")
    save(attempt, 0)
    head = attempt.view().head
    for shown in (head - 1, -1, head + 1, 0):
        store.listed = lambda name, shown=shown: int(name.split(".")[0]) <= shown
        save(attempt, 1)
        head += 1
        assert attempt.view().head == head
    store.listed = lambda name: True
    assert not Log(store, "run").read().faults


def test_a_loser_of_a_race_chains_to_a_record_that_no_listing_shows() -> None:
    """If another writer took a number, its record is read and chained to before any listing shows it.

    In schedule 2712 of the simulator, the next record had no link to it, and an acknowledged COMMIT became void.
    """
    store = Odd()
    first = Attempt.begin(store, "run")
    other = Log(store, "run")
    head = other.read().head
    saved = save(first, 0)
    store.listed = lambda name: int(name.split(".")[0]) <= head
    note = other.append(lambda view: (NoteBody(topic="simulated", data={}), fold(view).epoch))
    assert note is not None and note.seq == head + 2
    store.listed = lambda name: True
    view = Log(store, "run").read()
    assert not view.faults and [checkpoint.id for checkpoint in fold(view).live] == [saved]


def test_a_log_that_is_gone_is_gone() -> None:
    """Deleted records are absent, even for a process that has read them."""
    store = Odd()
    log = Attempt.begin(store, "run").place.log
    for entry in list(store.list("run/log")):
        store.delete(f"run/log/{entry.name}")
    with pytest.raises(CheckpointNotFound):
        log.read()


def test_an_unanswered_request_is_not_taken_for_absence() -> None:
    """If a store does not answer for the record after the last listed one, it is not taken for absent."""
    store = Odd()
    next_record = f"run/log/{record_file(Attempt.begin(store, 'run').view().head + 1)}"

    def damage(key: str) -> bytes | None:
        if key == next_record:
            raise StoreUnavailable("503", where=key)
        return None

    store.damage = damage
    with pytest.raises(StoreUnavailable, match="newer record"):
        Log(store, "run").read()


def test_a_record_that_comes_damaged_once_is_read_once_more() -> None:
    """One failed transfer makes no record void.

    A record that is damaged in the store is read a few times, and is a fault.
    """
    store = Odd()
    attempt = Attempt.begin(store, "run")
    checkpoint = save(attempt, 0)
    key = f"run/log/{max(entry.name for entry in store.list('run/log'))}"
    whole = store.get(key, 1 << 20)
    store.reads.clear()
    flipped = whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]
    store.damage = lambda asked: flipped if asked == key and store.reads[key] == 1 else None
    before = counters["read.retried"]
    view = Log(store, "run").read()
    assert (not view.faults, fold(view).live[-1].id, store.reads[key]) == (True, checkpoint, 2)
    assert counters["read.retried"] == before + 1
    store.reads.clear()
    store.damage = lambda asked: flipped if asked == key else None
    assert [fault.file for fault in Log(store, "run").read().faults] == [key]
    assert store.reads[key] == DAMAGED_READS


def test_nothing_is_chained_to_bytes_that_only_came_damaged() -> None:
    """A head that comes damaged, otherwise each time, stops an append: chained to such bytes, it would make the good record count for
    nothing. Found by many broken requests (seed 20)."""
    store = Odd()
    attempt = Attempt.begin(store, "run")
    checkpoint = save(attempt, 0)
    key = f"run/log/{max(entry.name for entry in store.list('run/log'))}"
    whole = store.get(key, 1 << 20)
    store.damage = lambda asked: whole[: 1 + store.reads[key] % 7] if asked == key else None
    with pytest.raises(StoreUnavailable):
        Attempt.begin(store, "run")
    store.damage = lambda asked: None
    view = Attempt.begin(store, "run").view()
    assert not view.faults and fold(view).live[-1].id == checkpoint


def test_a_number_that_is_taken_and_does_not_show_is_waited_for() -> None:
    """A network file system may report a new file of another client as absent: the append waits until it is visible, then appends after it."""
    store = Odd()
    attempt = Attempt.begin(store, "run")
    other = Attempt(attempt.place._replace(log=Log(store, "run")))
    attempt.view()
    save(other, 0)
    hidden = f"run/log/{record_file(other.view().head)}"
    asked: list[float] = []

    def damage(key: str) -> bytes | None:
        if key == hidden and len(asked) < 6:
            asked.append(0.0)
            raise CheckpointNotFound("ENOENT", where=key)
        return None

    store.damage = damage
    store.listed = lambda name: len(asked) >= 6 or not hidden.endswith(name)
    save(attempt, 1)
    assert len(asked) == 6
    store.damage, store.listed = (lambda key: None), (lambda name: True)
    assert [checkpoint.step for checkpoint in fold(Log(store, "run").read()).live] == [0, 1]


def test_a_number_that_never_shows_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a taken number never becomes readable, the append fails in bounded time with an error that names it."""
    monkeypatch.setattr(log, "SHOWN_PAUSE_MAX_S", 0.1)
    store = Odd()
    attempt = Attempt.begin(store, "run")
    other = Attempt(attempt.place._replace(log=Log(store, "run")))
    attempt.view()
    save(other, 0)
    hidden = f"run/log/{record_file(other.view().head)}"

    def damage(key: str) -> bytes | None:
        if key == hidden:
            raise CheckpointNotFound("ENOENT", where=key)
        return None

    store.damage = damage
    store.listed = lambda name: not hidden.endswith(name)
    with pytest.raises(StoreUnavailable, match="the file of the next record exists, but cannot be read"):
        save(attempt, 1)
