"""Two drives with each file on both: nothing is lost with one of them, and nothing that differs stays unseen."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.descriptors import new_descriptors, open_descriptors

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, NoSpace, StoreUnavailable
from relight.format.names import pack_file
from relight.format.strict import seal
from relight.store import ByteStore, Disk, mirror_files, page_buffer, put
from relight.store.mirror_calls import Drive
from relight.store.mirror_files import MirrorReader
from relight.store.mirror_rebuild import EqualizeReport, admit, differs, equalize, settle
from relight.store.mirrored import MirroredStore
from relight.store.striped import StripedStore
from relight.store.urls import absolute, open_bytes, split_run
from relight.testing.store_suite import StoreSuite, read_all, write_all

DIR = "run/0000000007-abcdefghij-e1"
PACK = pack_file(0, 0)
RECORD = "run/log/000000000000.json"
SEALED = seal(b'{"a":1}')
DATA = bytes(range(256)) * 8192


class TestMirrored(StoreSuite):
    def make(self, tmp_path: Path) -> ByteStore:
        return MirroredStore([tmp_path / name for name in ("n0", "n1")])


class TestMirroredOnThree(StoreSuite):
    def make(self, tmp_path: Path) -> ByteStore:
        return MirroredStore([tmp_path / name for name in ("n0", "n1", "n2")])


def make(tmp_path: Path, **more: Any) -> MirroredStore:
    """Return a store on two drives with a log record, a small file and a pack."""
    store = MirroredStore([tmp_path / "n0", tmp_path / "n1"], **more)
    assert store.put_once("relight.json", SEALED)
    assert store.put_once(RECORD, SEALED)
    write_all(store, f"{DIR}/{PACK}", DATA)
    put(store, f"{DIR}/root.json", SEALED)
    store.sync(DIR)
    return store


def again(tmp_path: Path, **more: Any) -> MirroredStore:
    """Return the store as another process opens it."""
    return MirroredStore([tmp_path / "n0", tmp_path / "n1"], **more)


def status_of(tmp_path: Path) -> list[str]:
    return [drive.status for drive in again(tmp_path).statuses()]


def files(root: Path) -> dict[str, bytes]:
    """Return the files of a drive, without those that name the drive or its state."""
    own = ("stripe.json", "mirrors-", ".tmp-", ".rekey-")
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(own)
    }


def test_each_file_is_on_two_drives(tmp_path: Path) -> None:
    """Two drives have the same files; of three drives, each two neighbours share some."""
    make(tmp_path)
    assert files(tmp_path / "n0") == files(tmp_path / "n1") != {}
    three = MirroredStore([tmp_path / name for name in ("a", "b", "c")])
    for rank in range(3):
        put(three, f"{DIR}/{pack_file(rank, 0)}", DATA)
    copies = [files(tmp_path / name).keys() for name in ("a", "b", "c")]
    assert sorted(len(names) for names in copies) == [2, 2, 2]


def test_the_url_names_the_mirrors(tmp_path: Path) -> None:
    """``mirrors=2`` before the directories opens a mirrored store; the same drives without it are refused, and the other way round."""
    store = make(tmp_path)
    assert isinstance(open_bytes(store.url), MirroredStore)
    assert open_bytes(store.url).url == store.url == f"stripe:mirrors=2,{tmp_path}/n0,{tmp_path}/n1,"
    assert split_run(f"{store.url}/demo") == (store.url, "demo")
    assert absolute(f"stripe:mirrors=2,{tmp_path}/n0/,{tmp_path}/n1,/x/../demo") == f"{store.url}/demo"
    with pytest.raises(ConfigError, match="2 of each file"):
        open_bytes(f"stripe:{tmp_path}/n0,{tmp_path}/n1,").get("relight.json", 999)
    put(StripedStore([tmp_path / "p0", tmp_path / "p1"]), "x", b"x")
    with pytest.raises(ConfigError, match="1 of each file"):
        MirroredStore([tmp_path / "p0", tmp_path / "p1"]).get("x", 9)
    with pytest.raises(ConfigError, match="1 or 2"):
        open_bytes(f"stripe:mirrors=3,{tmp_path}/n0,{tmp_path}/n1,")


@pytest.mark.parametrize("lost", ["n0", "n1"])
def test_a_lost_drive_is_noted_before_anything_is_written_without_it(tmp_path: Path, lost: str) -> None:
    """Reads continue and change nothing. The first write sets the drive away; its return with old contents changes nothing."""
    make(tmp_path)
    (tmp_path / lost).rename(tmp_path / "gone")
    store = again(tmp_path)
    assert store.get(RECORD, 999) == SEALED
    assert read_all(store, f"{DIR}/{PACK}") == DATA
    assert {entry.name for entry in store.list(DIR)} == {PACK, "root.json"}
    (tmp_path / "gone").rename(tmp_path / lost)
    assert status_of(tmp_path) == ["good", "good"], "only read meanwhile"
    (tmp_path / lost).rename(tmp_path / "gone")
    assert store.put_once("run/log/000000000001.json", SEALED)
    assert not (tmp_path / lost).exists()
    (tmp_path / "gone").rename(tmp_path / lost)
    number = int(lost[1])
    assert status_of(tmp_path)[number] == "away"
    assert again(tmp_path).get("run/log/000000000001.json", 999) == SEALED
    (tmp_path / ("n1" if lost == "n0" else "n0")).rename(tmp_path / "both")
    with pytest.raises(StoreUnavailable, match="no whole copy|lacks|gone"):
        again(tmp_path).put_once("run/log/000000000002.json", SEALED)


def test_drives_that_were_used_without_each_other_are_refused(tmp_path: Path) -> None:
    """Each was written while the other was missing: neither is right, and a person must choose."""
    make(tmp_path)
    for lost, key in (("n0", "run/log/000000000001.json"), ("n1", "run/log/000000000002.json")):
        (tmp_path / lost).rename(tmp_path / "gone")
        assert again(tmp_path).put_once(key, SEALED)
        (tmp_path / "gone").rename(tmp_path / lost)
    with pytest.raises(CorruptCheckpoint, match="while the other was missing"):
        again(tmp_path).get(RECORD, 999)


def test_a_name_that_only_the_first_drive_has_is_completed(tmp_path: Path) -> None:
    """A power cut came between the two creations: the next reader or creator of the name completes it, so no reader loses it later."""
    make(tmp_path)
    key = "run/log/000000000001.json"
    for act in (lambda store: store.get(key, 999), lambda store: store.put_once(key, seal(b'{"b":1}'))):
        (tmp_path / "n0" / key).write_bytes(SEALED)
        (tmp_path / "n1" / key).unlink(missing_ok=True)
        assert act(again(tmp_path)) in (SEALED, False)
        assert (tmp_path / "n1" / key).read_bytes() == SEALED


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("damage", ["zeros", "missing", "flipped"])
def test_wrong_bytes_come_from_the_other_drive(tmp_path: Path, place: int, damage: str) -> None:
    """A damaged record is recognised by its seal, other bytes by the caller that refuses them. The drive is then doubted."""
    make(tmp_path)
    for key in (RECORD, f"{DIR}/{PACK}"):
        path = tmp_path / f"n{place}" / key
        good = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(bytes(len(good)) if damage == "zeros" else bytes([good[0], good[1] ^ 1, *good[2:]]))
    store = again(tmp_path)
    assert store.get(RECORD, 999) == SEALED
    for _ in range(2):
        reader = store.open(f"{DIR}/{PACK}")
        data = memoryview(bytearray(reader.size))
        reader.read_into(0, data)
        reader.close()
        if data == DATA:
            break
        store.invalidate(f"{DIR}/{PACK}", 0, len(DATA))  # what the reader of chunks does if a hash does not fit
    assert data == DATA
    if damage == "missing" and place == 1:
        assert (tmp_path / "n1" / RECORD).read_bytes() == SEALED, "completed"
    assert status_of(tmp_path) == ["doubted" if place == number else "good" for number in range(2)]


class Hanging(Disk):
    """Writes, reads and fsyncs below a directory hang until they are let go."""

    def __init__(self, root: Path) -> None:
        self.root, self.hangs, self.go = str(root), False, threading.Event()

    def _hang(self, fd: int) -> None:
        if self.hangs and os.readlink(f"/proc/self/fd/{fd}").startswith(self.root):
            self.go.wait(60)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write late."""
        self._hang(fd)
        return super().pwrite(fd, data, offset)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Read late, and something else."""
        self._hang(fd)
        return super().preadv(fd, into, offset)


@pytest.mark.parametrize("place", [0, 1])
def test_a_hanging_drive_stops_nothing(tmp_path: Path, place: int) -> None:
    """Reads come from the other drive after half a second. Writes wait for ``wait_s``; late calls harm nothing that came after."""
    make(tmp_path)
    disk = Hanging(tmp_path / f"n{place}")
    store = again(tmp_path, disk=disk, wait_s=0.5)
    reader = store.open(f"{DIR}/{PACK}")
    disk.hangs = True
    began = time.monotonic()
    data = memoryview(bytearray(len(DATA)))
    reader.read_into(0, data)
    assert data == DATA
    assert time.monotonic() - began < 5
    assert store.statuses()[place].status == "good", "slow reads are no fault"
    more = os.urandom(3 << 20)
    began = time.monotonic()
    write_all(store, f"{DIR}/{pack_file(1, 0)}", more)
    assert store.put_once("run/log/000000000001.json", SEALED)
    assert time.monotonic() - began < 10
    assert store.statuses()[place].status == "away"
    assert "waiting" in store.statuses()[place].why
    disk.go.set()
    reader.close()
    assert read_all(again(tmp_path), f"{DIR}/{pack_file(1, 0)}") == more
    assert data == DATA


def test_lack_of_space_on_one_drive_is_lack_of_space(tmp_path: Path) -> None:
    """A full drive is not set away: retention makes room on both."""

    class Full(Disk):
        def fallocate(self, fd: int, size: int) -> None:
            if size > 1 << 20 and "/n1/" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.ENOSPC, "full")
            super().fallocate(fd, size)

    make(tmp_path)
    store = again(tmp_path, disk=Full())
    with pytest.raises(NoSpace):
        store.write(f"{DIR}/{pack_file(1, 0)}", 2 << 20)
    assert status_of(tmp_path) == ["good", "good"]
    assert not (tmp_path / "n0" / DIR / pack_file(1, 0)).exists()


def test_one_winner_while_a_drive_fails_for_one_of_the_writers(tmp_path: Path) -> None:
    """Writers with different views of the drives create the same names: each name has one winner, and one content everywhere."""
    make(tmp_path)

    class Failing(Disk):
        after = 10**9

        def link(self, source: str, target: str) -> None:
            self.after -= 1
            if self.after < 0 and str(tmp_path / "n0") in target:
                raise OSError(errno.EIO, "dead")
            super().link(source, target)

    for round_ in range(12):
        disk = Failing()
        disk.after = round_ * 3
        stores = [again(tmp_path), again(tmp_path, disk=disk), again(tmp_path)]
        won: dict[int, list[tuple[int, bool]]] = {}
        gate = threading.Barrier(len(stores))

        def create(me: int, round_: int = round_, stores: Any = stores, won: Any = won, gate: Any = gate) -> None:
            gate.wait()
            won[me] = [
                (name, stores[me].put_once(f"run/log/{1000 * round_ + name + 1:012d}.json", seal(b'{"me":%d}' % me)))
                for name in range(20)
            ]

        threads = [threading.Thread(target=create, args=(me,)) for me in range(len(stores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reader = again(tmp_path)
        for name in range(20):
            content = reader.get(f"run/log/{1000 * round_ + name + 1:012d}.json", 999)
            winners = [me for me in won if won[me][name][1]]
            assert len(winners) <= 1
            assert not winners or content == seal(b'{"me":%d}' % winners[0])
        if "away" in status_of(tmp_path):
            report = EqualizeReport()
            assert admit(reader, []) == [str(tmp_path / "n0")]
            equalize(reader, report)
            equalize(reader, report, verified=lambda prefix: False)
            assert settle(reader) == [str(tmp_path / "n0")]
        assert files(tmp_path / "n0") == files(tmp_path / "n1")


@pytest.mark.parametrize("read", [read_all, lambda store, key: store.get(key, 999)], ids=["open", "get"])
@pytest.mark.parametrize("operation", ["put_once", "delete"])
@pytest.mark.parametrize("key", [f"{DIR}/ready/new", "run/log/000000000001.json"])
def test_a_file_that_is_being_created_or_deleted_makes_no_drive_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, operation: str, read: Callable[..., bytes]
) -> None:
    """A reader between the two calls of a creation, or of a deletion, sees the file on one drive only. Both drives stay good."""
    store, between = make(tmp_path), threading.Event()
    if operation == "delete":
        store.put_once(key, SEALED)
    second = store._places[store.copies_of(key)[1]]
    call = getattr(second, operation)

    def late(*words: Any) -> Any:
        between.set()
        time.sleep(0.15)
        return call(*words)

    monkeypatch.setattr(second, operation, late)
    change = threading.Thread(
        target=getattr(store, operation), args=(key, SEALED) if operation == "put_once" else (key,)
    )
    change.start()
    assert between.wait(10)
    with contextlib.suppress(CheckpointNotFound):
        read(again(tmp_path), key)
    change.join(10)
    assert status_of(tmp_path) == ["good", "good"]


def test_a_store_that_was_deleted_and_created_again_is_read(tmp_path: Path) -> None:
    """A process that had the first store open reads the second one, as it would in a single directory."""
    reader = make(tmp_path)
    assert reader.get(RECORD, 999) == SEALED
    for name in ("n0", "n1"):
        shutil.rmtree(tmp_path / name)
    with pytest.raises(StoreUnavailable, match="missing"):
        reader.get(RECORD, 999)
    new = seal(b'{"a":2}')
    again(tmp_path).put_once(RECORD, new)
    assert reader.get(RECORD, 999) == new
    assert reader.put_once("run/log/000000000001.json", new)
    assert status_of(tmp_path) == ["good", "good"]


@pytest.mark.parametrize("read", [read_all, lambda store, key: store.get(key, 999)], ids=["open", "get"])
def test_a_file_that_one_drive_has_lost_makes_it_doubted(tmp_path: Path, read: Callable[..., bytes]) -> None:
    """The read succeeds with the other drive's copy."""
    store = make(tmp_path)
    first = store.copies_of(RECORD)[0]
    (tmp_path / f"n{first}" / RECORD).unlink()
    assert read(again(tmp_path), RECORD) == SEALED
    assert status_of(tmp_path)[first] == "doubted"


def test_a_writer_that_began_before_a_rebuild_completes_its_copy(tmp_path: Path) -> None:
    """A drive comes back while a file is written without it: at its end the file is on both."""
    make(tmp_path)
    (tmp_path / "n0").rename(tmp_path / "gone")
    store = again(tmp_path)
    key = f"run/0000000008-abcdefghij-e1/{PACK}"
    writer = store.write(key, 4096)
    room = page_buffer(4096)
    writer.write_at(0, room)
    (tmp_path / "gone").rename(tmp_path / "n0")
    other = again(tmp_path)
    assert admit(other, []) == [str(tmp_path / "n0")]
    equalize(other, EqualizeReport())
    equalize(other, EqualizeReport(), verified=lambda prefix: False)
    writer.finish()
    assert (tmp_path / "n0" / key).read_bytes() == bytes(room)
    settle(other)
    assert files(tmp_path / "n0") == files(tmp_path / "n1")


def test_an_empty_directory_is_only_a_drive_if_it_is_named(tmp_path: Path) -> None:
    """It may be the mount point of a drive that is not mounted, so nothing is written there. A directory with other contents is refused."""
    store = make(tmp_path)
    for path in sorted((tmp_path / "n1").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    store = again(tmp_path)
    assert store.put_once("run/log/000000000001.json", SEALED)
    assert list((tmp_path / "n1").iterdir()) == []
    assert admit(store, []) == []
    (tmp_path / "n1" / "photos").mkdir()
    with pytest.raises(ConfigError, match="not empty"):
        admit(store, [str(tmp_path / "n1")])
    (tmp_path / "n1" / "photos").rmdir()
    with pytest.raises(ConfigError, match="not a drive of this store"):
        admit(store, [str(tmp_path / "elsewhere")])
    with pytest.raises(ConfigError, match="in use"):
        admit(store, [str(tmp_path / "n0")])
    assert admit(store, [str(tmp_path / "n1")]) == [str(tmp_path / "n1")]
    equalize(store, EqualizeReport())
    settle(store)
    assert files(tmp_path / "n0") == files(tmp_path / "n1")
    assert status_of(tmp_path) == ["good", "good"]


def test_a_damaged_state_counts_as_missed(tmp_path: Path) -> None:
    """A newer state that is unreadable on one drive stops nothing: the other drive has it, or that drive is doubted."""
    store = make(tmp_path)
    (tmp_path / "n0" / "mirrors-000000000001.json").write_bytes(bytes(200))
    assert store.get(RECORD, 999) == SEALED
    assert again(tmp_path).get(RECORD, 999) == SEALED
    (tmp_path / "n1").rename(tmp_path / "gone")
    assert again(tmp_path).put_once("run/log/000000000001.json", SEALED)
    (tmp_path / "gone").rename(tmp_path / "n1")
    assert status_of(tmp_path) == ["good", "away"]


def test_a_slow_drive_gets_no_help_from_one_with_refused_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller refuses what it read. The second read waits for the other drive, however slow, and takes no refused bytes again."""
    store = make(tmp_path)
    key = f"{DIR}/{PACK}"
    reader, room = store.open(key), memoryview(bytearray(4096))
    reader.read_into(0, room)
    refused = store._served[-1][3]
    (tmp_path / f"n{refused}" / key).write_bytes(bytes(len(DATA)))
    store.invalidate(key, 0, 4096)
    read = MirrorReader._read

    def slow(self: MirrorReader, drive: Drive, offset: int, length: int) -> Any:
        if drive.number != refused:
            time.sleep(0.3)
        return read(self, drive, offset, length)

    monkeypatch.setattr(mirror_files, "HEDGE_S", 0.01)
    monkeypatch.setattr(MirrorReader, "_read", slow)
    reader.read_into(0, room)
    assert bytes(room) == DATA[:4096] and store._served[-1][3] != refused
    reader.close()


@pytest.mark.parametrize("lacks", ["n0", "n1"])
def test_a_comparison_closes_the_first_copy_if_the_second_is_gone(tmp_path: Path, lacks: str) -> None:
    """A rebuild compares many files: each open descriptor would stay until the process ends."""
    store = make(tmp_path)
    (tmp_path / lacks / DIR / PACK).unlink()
    before = open_descriptors(str(tmp_path))
    with pytest.raises(CheckpointNotFound):
        differs(store, f"{DIR}/{PACK}")
    assert not new_descriptors(before, target=str(tmp_path), wait_s=0)
