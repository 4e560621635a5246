"""The log as a whole: appending, damage, other writers, the clock."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proofs.disk_scenario import ROOT
from proofs.invariants import commit_body, directory_of, flip, record, rewrite, saves, simulated
from relight.commit import Attempt
from relight.errors import CheckpointNotFound, Fenced, UnsafeContent
from relight.format.names import record_file
from relight.format.records import Body, CommitBody, FenceBody, NoteBody, Record, RetireBody, RunBody, TagBody
from relight.log import History, Log, fold, read_store
from relight.store import ByteStore, LocalStore, MemoryStore
from relight.testing.disks import SimClock
from relight.testing.scenario import RUN, examine, perform, save

IDS = [letter * 10 for letter in "abc"]
bodies = st.one_of(
    st.builds(FenceBody, attempt=st.just("x"), reason=st.just("")),
    st.builds(commit_body, st.sampled_from(IDS), st.integers(0, 3), st.integers(0, 3)),
    st.builds(RetireBody, ids=st.lists(st.sampled_from(IDS), max_size=2), reason=st.just("")),
    st.builds(TagBody, name=st.sampled_from(["t", "u"]), id=st.none() | st.sampled_from(IDS)),
    st.builds(NoteBody, topic=st.just("n"), data=st.just({})),
)


def naive(records: list[Record]) -> tuple[list[str], set[str], dict[str, str], int]:
    """Live ids, retired ids, tags, epoch: the page's words, slowly."""
    live: list[str] = []
    retired: set[str] = set()
    tags: dict[str, str] = {}
    epoch = 0
    for entry in records:
        body: Body = entry.body
        if isinstance(body, FenceBody):
            epoch = max(epoch, entry.epoch)
        elif isinstance(body, (CommitBody, RetireBody, TagBody)) and entry.epoch >= epoch:
            epoch = entry.epoch
            if isinstance(body, CommitBody):
                if body.dir.endswith(f"-e{entry.epoch}") and body.id not in live and body.id not in retired:
                    live.append(body.id)
            elif isinstance(body, RetireBody):
                retired |= set(body.ids) & set(live)
                live = [other for other in live if other not in body.ids]
                tags = {name: target for name, target in tags.items() if target in live}
            elif body.id is None:
                tags.pop(body.name, None)
            elif body.id in live:
                tags[body.name] = body.id
    return live, retired, tags, epoch


def summary(history: History) -> tuple[list[str], set[str], dict[str, str], int]:
    """The same of a history."""
    return [checkpoint.id for checkpoint in history.live], set(history.retired), history.tags, history.epoch


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(bodies, st.integers(0, 3)), max_size=14))
def test_fold_follows_the_format(entries: list[tuple[Body, int]]) -> None:
    """Records in any order fold to the same result as the sentences of docs/format.md, applied one after the other."""
    records = [
        record(0, 0, RunBody(name="run")),
        *(record(n, epoch, body) for n, (body, epoch) in enumerate(entries, start=1)),
    ]
    assert summary(fold(records)) == naive(records)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(bodies, st.integers(0, 3)), max_size=12), st.integers(0, 12))
def test_epochs_never_fall_and_retired_never_returns(entries: list[tuple[Body, int]], cut: int) -> None:
    """A longer log never has a lower epoch than its beginning, and what was retired stays so."""
    records = [record(n, epoch, body) for n, (body, epoch) in enumerate(entries, start=1)]
    before, after = fold(records[:cut]), fold(records)
    assert before.epoch <= after.epoch
    assert set(before.retired) <= set(after.retired)


@settings(max_examples=60, deadline=None)
@given(hurt=st.sets(st.integers(1, 6), max_size=3), gone=st.booleans())
def test_damaged_records_cost_themselves_only(hurt: set[int], gone: bool) -> None:
    """Each damaged or missing record is a fault, all others count, and the log accepts appends."""
    disk, store = simulated()
    _, ids, _ = saves(store, 1, 2, 3, 4, 5)  # records 2 … 6 are their commits, 1 the fence
    for seq in hurt:
        path = f"{ROOT}/{RUN}/log/{record_file(seq)}"
        if gone:
            disk.unlink(path)
        else:
            rewrite(disk, path, flip)
    expected = [checkpoint_id for seq, checkpoint_id in enumerate(ids, start=2) if seq not in hurt]
    head = max(seq for seq in range(7) if not (gone and seq in hurt))
    view = Log(store, RUN).read()
    assert view.head == head
    assert sum(1 for seq in hurt if seq < head or not gone) == 0 or view.faults
    assert [checkpoint.id for checkpoint in fold(view).live] == expected
    _, more, _ = saves(store, 6)
    assert [checkpoint.id for checkpoint in fold(Log(store, RUN).read()).live] == expected + more


def test_every_reader_sees_the_same_as_an_incremental_one() -> None:
    """A log that is read again and again gives what a new reader gives."""
    store = MemoryStore()
    attempt = Attempt.begin(store, RUN)
    reader = Log(store, RUN)
    for step in range(6):
        list(save(attempt, f"log/{step}", step))
        assert summary(fold(reader.read())) == summary(fold(Log(store, RUN).read()))


def test_many_appenders_lose_nothing() -> None:
    """Records that many threads append at the same time are all there, once, in a chain without gaps."""
    store: ByteStore = MemoryStore()
    Log(store, RUN).start()

    def append(who: int) -> None:
        log = Log(store, RUN)
        log.read()
        for n in range(10):
            log.append(lambda view, n=n: (NoteBody(topic=f"{who}/{n}", data={}), fold(view).epoch))

    threads = [threading.Thread(target=append, args=(who,)) for who in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    view = Log(store, RUN).read()
    assert view.faults == ()
    topics = [record.body.topic for record in view.records if isinstance(record.body, NoteBody)]
    assert sorted(topics) == sorted(f"{who}/{n}" for who in range(5) for n in range(10))
    for who in range(5):
        assert [topic for topic in topics if topic.startswith(f"{who}/")] == [f"{who}/{n}" for n in range(10)]


def test_attempts_that_begin_at_once_get_epochs_of_their_own() -> None:
    """Attempts that begin at the same time get different epochs, and only the last one can save."""
    store = MemoryStore()
    gate = threading.Barrier(4)
    begun: list[Attempt] = []

    def begin() -> None:
        gate.wait()
        begun.append(Attempt.begin(store, RUN))

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun_attempt.epoch for begun_attempt in begun) == [1, 2, 3, 4]
    for attempt in begun:
        if attempt.epoch == 4:
            list(save(attempt, "log/at once", 1))
        else:
            with pytest.raises(Fenced):
                list(save(attempt, "log/late", 1))
    assert len(fold(Log(store, RUN).read()).live) == 1


def test_nothing_is_decided_by_a_clock() -> None:
    """Clocks that jump by years in both directions give the same history as a correct one."""
    results = []
    for clock in (SimClock(1), SimClock(2), None):
        store = MemoryStore()
        for round_ in range(4):
            attempt = Attempt.begin(store, RUN, now=clock) if clock else Attempt.begin(store, RUN)
            list(save(attempt, f"clock/{round_}", round_))
        history = fold(Log(store, RUN).read())
        results.append(([checkpoint.step for checkpoint in history.live], history.epoch))
    assert results[0] == results[1] == results[2] == ([0, 1, 2, 3], 4)


def test_a_record_that_no_reader_takes_is_not_written() -> None:
    """An appender refuses what would be too long or malformed for readers, and writes nothing."""
    store = MemoryStore()
    log = Log(store, RUN)
    view = log.start()
    with pytest.raises(UnsafeContent):
        log.append(lambda _: (NoteBody(topic="n", data={"x": "y" * (2 << 20)}), 0))
    with pytest.raises(UnsafeContent):
        log.append(lambda _: (RetireBody(ids=["../../etc"], reason=""), 0))
    assert Log(store, RUN).read().head == view.head


def test_reading_needs_a_run() -> None:
    """A run that is not there is ``CheckpointNotFound``, and reading makes none."""
    store = MemoryStore()
    with pytest.raises(CheckpointNotFound):
        Log(store, RUN).read()
    assert list(store.list("")) == []


def test_one_store_has_one_identity() -> None:
    """Processes that make a store at the same time agree on its id."""
    _, store = simulated()
    gate = threading.Barrier(4)
    shared = MemoryStore()
    seen: list[str] = []

    def begin(name: str) -> None:
        gate.wait()
        seen.append(Log(shared, name).start().store_id)

    threads = [threading.Thread(target=begin, args=(f"run{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {read_store(shared).id}


def test_a_deleted_checkpoint_directory_harms_no_other() -> None:
    """``rm -r`` of one checkpoint is noticed, and the others restore."""
    disk, store = simulated()
    _, ids, facts = saves(store, 1, 2, 3)
    directory = f"{ROOT}/{RUN}/{directory_of(store, ids[1])}"
    for name, _ in list(disk.scan(directory)):
        disk.unlink(f"{directory}/{name}")
    disk.rmdir(directory)
    problems = examine(store, Log(store, RUN), facts)
    assert len(problems) == 1
    assert ids[1] in problems[0]
    more = list(facts)
    perform(save(Attempt.begin(LocalStore(ROOT, disk=disk), RUN), "log/after", 9), more)
    assert len(examine(store, Log(store, RUN), more)) == 1
