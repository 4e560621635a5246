"""A record that a log does not show at the moment may still exist. No append relies on its absence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import Fenced, StoreUnavailable
from relight.format import Leaf, encode_tree
from relight.format.records import NoteBody
from relight.layout import Bytes, Item
from relight.log import fold
from relight.store import MemoryStore
from relight.store.base import Entry, Uncertain


class Doubtful(MemoryStore):
    """Shows the contents of another store, except for the names that the test hides."""

    unread = hidden = ""
    is_synced = True

    def __init__(self, other: MemoryStore) -> None:
        super().__init__()
        self._files = other._files

    def get(self, key: str, limit: int) -> bytes:
        """Fails for one record."""
        if self.unread and key.endswith(self.unread):
            raise StoreUnavailable("EIO", where=key)
        return super().get(key, limit)

    def list(self, prefix: str) -> Iterator[Entry]:
        """Misses one."""
        return iter([entry for entry in super().list(prefix) if not self.hidden or entry.name != self.hidden])

    def put_once(self, key: str, data: bytes) -> bool:
        """Answers the second of two tries."""
        made = super().put_once(key, data)
        return made and self.is_synced

    def sync(self, prefix: str) -> None:
        """Fails when the test requests it."""
        if not self.is_synced:
            raise StoreUnavailable("EIO", where=prefix)
        super().sync(prefix)


def request() -> SaveRequest:
    item = Item("t", "uint8", (4,), "param", Bytes(b"1234"), None, True)
    return SaveRequest(SaveInfo(step=0), tree=encode_tree({"t": Leaf("tensor", (0,))}), items=[item])


@pytest.fixture
def superseded() -> tuple[Attempt, Attempt, Doubtful]:
    """Return an attempt, the attempt that fenced it with record 2 and appended record 3, and the store as the first attempt sees it."""
    store = MemoryStore()
    seen = Doubtful(store)
    old = Attempt.begin(seen, "run")
    new = Attempt.begin(store, "run")
    new.note(NoteBody(topic="hello", data={}))
    return old, new, seen


def test_a_record_that_cannot_be_read_now_stops_a_commit(superseded: tuple[Attempt, Attempt, Doubtful]) -> None:
    """The record is the FENCE: the save was acknowledged, and was void. Found by the simulator (seed 2000415)."""
    old, new, seen = superseded
    seen.unread = "000000000002.json"
    with pytest.raises(StoreUnavailable):
        old.save(request())
    seen.unread = ""
    with pytest.raises(Fenced):
        old.save(request())
    assert fold(new.view()).live == [] and fold(new.view()).void == []


def test_a_record_that_a_listing_missed_is_asked_for_by_name(superseded: tuple[Attempt, Attempt, Doubtful]) -> None:
    """A listing during which two records are appended shows the second and not the first."""
    old, new, seen = superseded
    seen.hidden = "000000000002.json"
    with pytest.raises(Fenced):
        old.save(request())
    assert fold(new.view()).live == []


def test_an_own_record_without_a_durable_name_is_in_doubt() -> None:
    """If a retry created a record and the directory cannot be fsynced, ``Uncertain`` is raised, the record kept."""
    store = MemoryStore()
    seen = Doubtful(store)
    attempt = Attempt.begin(seen, "run")
    attempt.save(request())
    seen.is_synced = False
    with pytest.raises(Uncertain):
        attempt.note(NoteBody(topic="hello", data={}))
    assert fold(Attempt.begin(store, "run").view()).notes[-1].body.topic == "hello"
