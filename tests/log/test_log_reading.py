"""Long logs: folders, summaries, and what reading one costs."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relight.commit import Attempt
from relight.errors import StoreUnavailable
from relight.format import encode_record
from relight.format.names import flat_record_file, parse_summary_file, record_file, summary_file
from relight.format.records import NoteBody, Record
from relight.format.topics import SUMMARY
from relight.log import History, Log, LogView, fold
from relight.log.listing import Folders
from relight.log.summary import SUMMARY_EVERY, vouched
from relight.store import LocalStore, MemoryStore
from relight.store.base import Entry, Properties
from relight.testing.scenario import save

RUN = "run"


class Counting(MemoryStore):
    """A store that counts its calls. Writes of summaries may fail."""

    def properties(self) -> Properties:
        return dataclasses.replace(super().properties(), parallel_reads=16, needs_sync=False)

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.fails: Callable[[str, str], bool] = lambda operation, key: False

    def _enter(self, operation: str, key: str) -> None:
        self.calls[operation] += 1
        if self.fails(operation, key):
            raise StoreUnavailable("no answer", where=key)

    def get(self, key: str, limit: int) -> bytes:
        self._enter("get", key)
        return super().get(key, limit)

    def list(self, prefix: str) -> Iterator[Entry]:
        self._enter("list", prefix)
        return super().list(prefix)

    def put_once(self, key: str, data: bytes) -> bool:
        self._enter("put", key)
        return super().put_once(key, data)


def grown(store: MemoryStore | LocalStore, records: int, log: Log | None = None) -> Log:
    """A log with at least so many records."""
    log = log or Log(store, RUN)
    head = log.start().head
    while head < records:
        written = log.append(lambda view: (NoteBody(topic="n", data={"n": view.head}), 0))
        assert written is not None
        head = written.seq
    return log


def visible_to_all(view: LogView) -> list[object]:
    """Return the head, counts, and NOTEs that every kind of reader must see."""
    history: History = fold(view)
    return [
        view.head,
        view.head_hash,
        view.counted,
        len(view.faults),
        [note.body for note in history.notes[-20:] if _plain(note)],
    ]


def _plain(note: Record) -> bool:
    return isinstance(note.body, NoteBody) and note.body.topic != SUMMARY.name


def test_a_first_read_costs_the_same_however_long_the_log_is() -> None:
    """A first read takes the newest records, a summary and two listings. A writer keeps no more than that in memory."""
    store = Counting()
    log: Log | None = None
    costs = []
    for length in (300, 1500, 4500):
        log = grown(store, length, log)
        assert len(log._slots) <= 5 * SUMMARY_EVERY
        store.calls.clear()
        view = Log(store, RUN).read()
        costs.append(store.calls.copy())
        assert store.calls["get"] <= 2 * SUMMARY_EVERY + 5 and store.calls["list"] <= 2
        assert view.base > view.head - 2 * SUMMARY_EVERY and visible_to_all(view) == visible_to_all(
            Log(store, RUN, whole=True).read()
        )
    assert len(Log(store, RUN, whole=True).read().records) == 4501 or Log(store, RUN).read().head > 4500


def test_an_append_costs_the_same_however_long_the_log_is() -> None:
    """An append is one listing and one creation. Each 64th append also writes a summary and its NOTE."""
    store = Counting()
    log = grown(store, 2100)
    store.calls.clear()
    grown(store, 2100 + 10 * SUMMARY_EVERY, log)
    assert store.calls["put"] <= 10 * SUMMARY_EVERY + 14 and store.calls["list"] <= 12 * SUMMARY_EVERY
    assert store.calls["get"] <= 20


def test_records_are_in_folders_from_number_1024_on(tmp_path: Path) -> None:
    """A listing has a folder's records, and nothing is deleted."""
    grown(LocalStore(tmp_path), 1100)
    log = tmp_path / RUN / "log"
    assert (log / "000000001023.json").is_file() and (log / "000000001" / "000000001024.json").is_file()
    assert not (log / "000000001024.json").exists()
    seen = [entry.name for entry in log.iterdir() if entry.suffix == ".json"]
    assert len(seen) == 1024 and len(list((log / "000000001").glob("*.json"))) >= 77
    assert (
        parse_summary_file(sorted(entry.name for entry in log.iterdir() if entry.name.startswith("summary-"))[0])
        == SUMMARY_EVERY - 1
    )


def test_a_folder_has_only_the_records_that_belong_there(tmp_path: Path) -> None:
    """A listing skips other names, records of other folders, and deleted files that an NFS client still has open."""
    last = tmp_path / RUN / "log" / "976562499"
    names = ["000000003072.json", "000000004095.json", "000000003071.json", "000000004096.json", "0000000003080.json",
             "000000003090.JSON", "00000000309².json", "summary-000000003199-0123456789abcdef", ".nfs0123456789abcdef0000"]  # fmt: skip
    folder = tmp_path / RUN / "log" / "000000003"
    for place, files in ((folder, names), (last, ["999999999999.json", "1000000000000.json"]), (folder.parent, names)):
        place.mkdir(parents=True, exist_ok=True)
        for name in files:
            (place / name).touch()
    store = LocalStore(tmp_path)
    assert Folders(store, RUN).numbers(3) == {3072, 4095}
    assert Folders(store, RUN).numbers(976562499) == {999999999999}
    listing = Folders(store, RUN).all()
    assert (listing.flat, listing.folders) == (set(), [3, 976562499])
    assert sorted(entry.name for entry in store.list(f"{RUN}/log/000000003")) == sorted(names[:-1])
    assert {entry.is_dir for entry in store.list(RUN)} == {True}


def test_a_reader_that_follows_sees_what_a_new_one_sees() -> None:
    """Across folders, with pauses short and long, of others' records."""
    store = MemoryStore()
    log = grown(store, 10)
    reader, lazy = Log(store, RUN), Log(store, RUN)
    reader.read()
    lazy.read()
    for length in (500, 1020, 1025, 1100, 2060, 2200):
        grown(store, length, log)
        assert visible_to_all(reader.read()) == visible_to_all(Log(store, RUN, whole=True).read())
    grown(store, 9000, log)
    assert visible_to_all(lazy.read()) == visible_to_all(reader.read()) == visible_to_all(Log(store, RUN).read())
    assert len(lazy._slots) < 1000


def _files(store: MemoryStore, prefix: str = f"{RUN}/log") -> list[str]:
    keys = []
    for entry in list(store.list(prefix)):
        keys += _files(store, f"{prefix}/{entry.name}") if entry.is_dir else [f"{prefix}/{entry.name}"]
    return sorted(keys)


def summaries_in(store: MemoryStore) -> list[str]:
    """Keys of the summaries, oldest first."""
    keys = [key for key in _files(store) if parse_summary_file(key.rpartition("/")[2]) is not None]
    return sorted(keys, key=lambda key: parse_summary_file(key.rpartition("/")[2]) or 0)


def replace(store: MemoryStore, key: str, data: bytes) -> None:
    """Put other bytes in the place of a file."""
    store.delete(key)
    assert store.put_once(key, data)


@functools.cache
def _long_log() -> dict[str, bytes | bytearray]:
    """Return the files of a store with a log of 1300 records. Cost: 3 s."""
    store = MemoryStore()
    grown(store, 1300)
    return store._files


@pytest.mark.parametrize("how", ["gone", "cut", "other"])
@pytest.mark.parametrize("count", [1, 2, 99])
def test_a_summary_that_is_lost_or_damaged_costs_only_time(how: str, count: int) -> None:
    """The reader goes to the one before, at last to the whole log."""
    store = MemoryStore()
    store._files.update(_long_log())
    expected = visible_to_all(Log(store, RUN).read())
    keys = summaries_in(store)
    assert len(keys) >= 19
    for key in keys[-count:]:
        if how == "gone":
            store.delete(key)
        else:
            data = store.get(key, 1 << 20)
            replace(store, key, data[: len(data) // 2] if how == "cut" else store.get(keys[0], 1 << 20) + b"x")
    view = Log(store, RUN).read()
    assert visible_to_all(view) == expected
    assert (view.base == -1) == (count == 99)


def test_only_a_summary_for_which_a_record_vouches_counts() -> None:
    """A summary that no record names changes nothing, whatever its contents."""
    store = MemoryStore()
    grown(store, 200)
    expected = visible_to_all(Log(store, RUN).read())
    data = store.get(summaries_in(store)[0], 1 << 20)
    assert store.put_once(f"{RUN}/log/{summary_file(199, 'f' * 64)}", data)
    view = Log(store, RUN).read()
    assert visible_to_all(view) == expected and view.base != 199


def test_a_note_that_does_not_count_vouches_for_nothing() -> None:
    """A record to which the next one is not chained is void, and vouches for no summary."""
    store = MemoryStore()
    log = grown(store, 150)
    notes = [record for record in Log(store, RUN, whole=True).read().records if vouched(record) is not None]
    forged = notes[-1]
    replace(store, f"{RUN}/log/{record_file(forged.seq)}", encode_record(_with_time(forged)))
    view = Log(store, RUN).read()
    assert view.base == (vouched(notes[-2]) or (-2,))[0] and [fault.seq for fault in view.faults] == [forged.seq]
    assert log.run == RUN


def _with_time(record: Record) -> Record:
    import msgspec

    return msgspec.structs.replace(record, time="2031-01-01T00:00:00Z")


def test_a_summary_of_another_chain_is_not_taken() -> None:
    """The records after a summary must be chained to its last record."""
    store = MemoryStore()
    grown(store, 150)
    view = Log(store, RUN, whole=True).read()
    note = next(record for record in reversed(view.records) if vouched(record) is not None)
    upto = (vouched(note) or (0,))[0]
    after = next(record for record in view.records if record.seq == upto + 1)
    assert after.prev == next(record.file_hash for record in view.records if record.seq == upto)
    assert Log(store, RUN).read().base == upto


def test_a_writer_that_cannot_write_summaries_continues() -> None:
    """Each record is appended, and the log is read as a whole."""
    store = Counting()
    store.fails = lambda operation, key: operation == "put" and "/summary-" in key
    grown(store, 300)
    assert not summaries_in(store)
    store.fails = lambda operation, key: False
    view = Log(store, RUN).read()
    assert view.base == -1 and view.head == 300 and not view.faults
    grown(store, 310)
    assert Log(store, RUN).read().base > 300 - SUMMARY_EVERY


def test_a_stray_record_is_named_and_never_becomes_the_head() -> None:
    """A file with a number far above the end, for example of a failed copy: the next append gets the number that it would have without it."""
    store = MemoryStore()
    log = grown(store, 1100)
    data = store.get(f"{RUN}/log/{record_file(1100)}", 1 << 20)
    for key in (flat_record_file(999_999), record_file(999_999), flat_record_file(10**12 - 1)):
        assert store.put_once(f"{RUN}/log/{key}", data)
    for reader in (Log(store, RUN), Log(store, RUN, whole=True), log):
        view = reader.read()
        assert 1100 <= view.head < 1200
        written = reader.append(lambda view: (NoteBody(topic="n", data={}), 0))
        assert written is not None and written.seq < 1200
    assert any("above the log's end" in fault.reason for fault in Log(store, RUN, whole=True).read().faults)
    assert not Log(store, RUN).read().damaged


def test_a_stray_record_does_not_stop_a_short_log() -> None:
    """A stray record is reported. Attempts begin and save, and no record counts as damaged."""
    store = MemoryStore()
    attempt = Attempt.begin(store, RUN)
    list(save(attempt, "log/1", 1))
    assert store.put_once(f"{RUN}/log/000000999999.json", b"not a record")
    list(save(Attempt.begin(store, RUN), "log/2", 2))
    view = Log(store, RUN).read()
    assert len(fold(view).live) == 2 and view.head < 10
    assert [fault.seq for fault in view.faults] == [999_999] and not view.damaged


def test_a_log_that_an_earlier_version_wrote_is_read_and_continued() -> None:
    """A log with all records directly in log/ is read. New records go into folders."""
    store = MemoryStore()
    log = grown(store, 1500)
    flat = MemoryStore()
    assert flat.put_once("relight.json", store.get("relight.json", 1 << 20))
    before = Log(store, RUN, whole=True).read()
    for record in before.records:
        assert flat.put_once(
            f"{RUN}/log/{flat_record_file(record.seq)}", store.get(f"{RUN}/log/{record_file(record.seq)}", 1 << 20)
        )
    view = Log(flat, RUN).read()
    assert visible_to_all(view) == visible_to_all(before) and view.base == -1
    grown(flat, 1600)
    view = Log(flat, RUN).read()
    assert view.head >= 1600 and view.base > 1500 and not view.faults
    assert visible_to_all(view) == visible_to_all(Log(flat, RUN, whole=True).read())
    assert not any("/00000000160" in key and key.count("/") == 2 for key in _files(flat))
    assert log.run == RUN


def test_a_log_without_its_newest_folder_ends_before_it() -> None:
    """If the newest folder is lost, the remaining records count, and their summaries are used."""
    store = MemoryStore()
    grown(store, 2200)
    for key in _files(store, f"{RUN}/log/000000002"):
        store.delete(key)
    view = Log(store, RUN).read()
    assert view.head == 2047 and not view.faults and view.base > 1900
    assert visible_to_all(view) == visible_to_all(Log(store, RUN, whole=True).read())


def test_damage_below_a_summary_is_found_by_a_whole_read_only() -> None:
    """Readers begin at the summary. Only verify reads every record."""
    store = MemoryStore()
    grown(store, 400)
    replace(store, f"{RUN}/log/{record_file(17)}", b"junk")
    assert not Log(store, RUN).read().faults
    assert [fault.seq for fault in Log(store, RUN, whole=True).read().faults] == [17]


def test_damage_before_a_summary_is_named_by_it() -> None:
    """A fault that was there when the summary was written is one for each reader that begins at it."""
    store = MemoryStore()
    grown(store, 30)
    replace(store, f"{RUN}/log/{record_file(17)}", b"junk")
    grown(store, 400)
    view = Log(store, RUN).read()
    assert view.base > 300 and [fault.seq for fault in view.faults] == [17] and view.counted == view.head
    assert visible_to_all(view) == visible_to_all(Log(store, RUN, whole=True).read())


def test_two_writers_at_once_leave_one_line_of_summaries() -> None:
    """Each number is taken once, and a summary by either serves both."""
    store = MemoryStore()
    first, second = grown(store, 5), Log(store, RUN)
    second.read()
    for _ in range(200):
        for log in (first, second):
            assert log.append(lambda view: (NoteBody(topic="n", data={}), 0)) is not None
    view = Log(store, RUN).read()
    assert not view.faults and visible_to_all(view) == visible_to_all(
        Log(store, RUN, whole=True).read()
    ) == visible_to_all(first.read()) == visible_to_all(second.read())
    assert 5 <= len(summaries_in(store)) <= 8
