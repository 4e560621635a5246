"""Several directories as one store: where files go, and that a drive which is not there is never taken for one that is empty."""

from __future__ import annotations

import os
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.commit import plan as plan_module
from relight.commit.parallel_packs import lanes_of_rank
from relight.errors import ConfigError, NoSpace, StoreUnavailable, UnsafeContent
from relight.format import encode_tree
from relight.format.names import STRIPE_FILE, pack_file
from relight.layout import Bytes, Item
from relight.store import ByteStore, Disk, LocalStore, put
from relight.store.striped import StripedStore, places_in
from relight.store.urls import absolute, open_bytes, split_run
from relight.testing.counting import CountingStore
from relight.testing.store_suite import StoreSuite, read_all

DIR = "run/0000000007-abcdefghij-e1"
PACKS = [f"{DIR}/{pack_file(0, index)}" for index in range(6)]


class Scattered(StripedStore):
    """A stripe with files at arbitrary places, so that the suite uses all of them."""

    def place_of(self, key: str) -> int:
        return zlib.crc32(key.encode()) % len(self._places)


class TestStriped(StoreSuite):
    def make(self, tmp_path: Path) -> ByteStore:
        return StripedStore([tmp_path / name for name in ("n0", "n1", "n2")])


class TestScattered(StoreSuite):
    across_processes = False  # a child would not find the class

    def make(self, tmp_path: Path) -> ByteStore:
        return Scattered([tmp_path / name for name in ("n0", "n1", "n2")])


@pytest.fixture
def store(tmp_path: Path) -> StripedStore:
    """Three places with packs in all of them, and what else there is in the first."""
    made = StripedStore([tmp_path / name for name in ("n0", "n1", "n2")])
    for key in (*PACKS, f"{DIR}/root.json", "run/log/000000000000.json", "relight.json"):
        put(made, key, key.encode())
    return made


def again(store: StripedStore) -> StripedStore:
    """Return the store as another process opens it."""
    return StripedStore(store._roots)


def test_packs_go_round_and_all_else_is_in_the_first(store: StripedStore) -> None:
    """Consecutive packs of a rank, or of consecutive ranks, are at consecutive places.

    All other files are at the first place.
    """
    places = [store.place_of(key) for key in PACKS]
    assert [(place - places[0]) % 3 for place in places] == [0, 1, 2, 0, 1, 2]
    by_rank = [store.place_of(f"{DIR}/{pack_file(rank, 0)}") for rank in range(6)]
    assert by_rank == places
    begins = Counter(
        store.place_of(f"run/{step:010d}-{random.Random(step).randbytes(5).hex()}-e1/{pack_file(0, 0)}")
        for step in range(300)
    )
    assert [begins[place] > 60 for place in range(3)] == [True] * 3, "small checkpoints fill all places alike"
    for key in (
        "relight.json",
        "run/log/000000000000.json",
        f"{DIR}/root.json",
        f"{DIR}/part-00001.msgpack",
        f"{DIR}/ready/x",
        pack_file(0, 1),
    ):
        assert store.place_of(key) == 0
    for place, root in enumerate(store._roots):
        names = {path.relative_to(root).as_posix() for path in Path(root).rglob("*") if path.is_file()}
        packs = {key for key in PACKS if store.place_of(key) == place}
        others = {f"{DIR}/root.json", "run/log/000000000000.json", "relight.json"} if place == 0 else set()
        assert names == packs | others | {STRIPE_FILE}


def test_listings_are_of_all_places(store: StripedStore) -> None:
    """A directory lists its entries of all places, without the stripe's own file."""
    assert sorted(entry.name for entry in store.list(DIR)) == sorted(
        ["root.json", *(key.rpartition("/")[2] for key in PACKS)]
    )
    assert sorted(store.list("")) == [("relight.json", False), ("run", True)]
    for call in (
        lambda: store.get(STRIPE_FILE, 999),
        lambda: store.write(STRIPE_FILE, 1),
        lambda: store.delete(STRIPE_FILE),
    ):
        with pytest.raises(UnsafeContent):
            call()


def test_a_directory_goes_when_it_is_empty_everywhere(store: StripedStore) -> None:
    """While one place has a file in the directory, it stays in all places."""
    for key in (*PACKS[1:], f"{DIR}/root.json"):
        store.delete(key)
    assert store.delete_dir(DIR) is False
    assert all((Path(root) / DIR).is_dir() for root in store._roots)
    store.delete(PACKS[0])
    assert store.delete_dir(DIR) is True
    assert not any((Path(root) / DIR).exists() for root in store._roots)


OPERATIONS: dict[str, Callable[[StripedStore], object]] = {
    "properties of a write": lambda store: store.write(f"{DIR}/{pack_file(1, 0)}", 9),
    "another write": lambda store: store.write(f"{DIR}/{pack_file(1, 1)}", 9),
    "a third": lambda store: store.write(f"{DIR}/{pack_file(1, 2)}", 9),
    "put_once": lambda store: store.put_once("run/log/000000000001.json", b"x"),
    "sync": lambda store: store.sync(DIR),
    "sync the top": lambda store: store.sync(""),
    "get": lambda store: store.get(f"{DIR}/root.json", 99),
    "get what is not there": lambda store: store.get("run/nothing", 99),
    "open": lambda store: [store.open(key) for key in PACKS[:3]],
    "open what is not there": lambda store: store.open("run/nothing"),
    "list": lambda store: list(store.list(DIR)),
    "list what is not there": lambda store: list(store.list("run/nothing")),
    "delete": lambda store: [store.delete(key) for key in PACKS],
    "delete what is not there": lambda store: store.delete("run/nothing"),
    "delete_dir": lambda store: store.delete_dir(DIR),
    "delete_dir of what is not there": lambda store: store.delete_dir("run/nothing"),
}


def files(store: StripedStore) -> list[str]:
    return sorted(str(path) for root in store._roots for path in Path(root).rglob("*"))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("how", ["not mounted", "an empty directory", "while it is used"])
def test_a_missing_place_is_reported_by_name(
    store: StripedStore, tmp_path: Path, operation: str, place: int, how: str
) -> None:
    """Every operation raises ``StoreUnavailable`` with the place.

    Nothing is created or deleted. Once the place is back, everything works as before.
    """
    before = files(store)
    root, away = Path(store._roots[place]), tmp_path / "away"
    used = store if how == "while it is used" else again(store)
    root.rename(away)
    if how == "an empty directory":
        root.mkdir()
    with pytest.raises(StoreUnavailable) as caught:
        OPERATIONS[operation](used)
    assert str(root) in str(caught.value)
    assert caught.value.kind == "store"
    assert root.exists() == (how == "an empty directory")
    if root.exists():
        root.rmdir()
    away.rename(root)
    assert files(store) == before
    OPERATIONS["list"](used)


ASKED: dict[str, Callable[[StripedStore], object]] = {
    "get": lambda store: [store.get(key, 99) for key in PACKS],
    "open": lambda store: [read_all(store, key) for key in PACKS],
    "list": lambda store: sorted(store.list(DIR)),
    "list the top": lambda store: sorted(store.list("")),
    "delete_dir": lambda store: store.delete_dir(DIR),
    "sync": lambda store: store.sync(DIR),
}


@pytest.mark.parametrize("operation", ASKED)
def test_a_drive_that_goes_away_in_the_middle_is_not_an_empty_one(
    store: StripedStore, tmp_path: Path, operation: str
) -> None:
    """If a drive vanishes between any two calls, the result is right, or names the missing place. It is never
    incomplete."""

    class Unmounting(Disk):
        left, mounted = -1, True

        def count(self) -> None:
            if self.left == 0 and self.mounted:
                self.mounted = False
                Path(store._roots[1]).rename(tmp_path / "away")
            self.left -= 1

        def lstat(self, path: str) -> os.stat_result:
            self.count()
            return super().lstat(path)

        def scan(self, path: str) -> Iterator[tuple[str, bool]]:
            self.count()
            return super().scan(path)

        def open_read(self, path: str) -> int:
            self.count()
            return super().open_read(path)

        def open_dir(self, path: str) -> int:
            self.count()
            return super().open_dir(path)

    right = ASKED[operation](again(store))
    refused = 0
    for nth in range(1000):
        disk = Unmounting()
        used = StripedStore(store._roots, disk=disk)
        used.list("run")
        disk.left = nth
        try:
            assert ASKED[operation](used) == right
        except StoreUnavailable as error:
            assert store._roots[1] in str(error)
            refused += 1
        if disk.mounted:
            break
        (tmp_path / "away").rename(store._roots[1])
    assert refused > 2


def test_places_are_known_by_their_files(store: StripedStore, tmp_path: Path) -> None:
    """Swapped places, one of another store, too few, too many, or one twice are refused.

    The error states what is wrong, and nothing is written.
    """
    first, second, third = store._roots
    other = StripedStore([tmp_path / "o0", tmp_path / "o1", tmp_path / "o2"])
    put(other, "relight.json", b"x")
    (tmp_path / "link").symlink_to(first)
    before = files(store)
    wrong = {
        "is number 2": [second, first, third],
        "of another store": [first, second, other._roots[2]],
        "has 3 places, and 2 are named": [first, second],
        "has 3 places, and 4 are named": [first, second, third, str(tmp_path / "new")],
        "another order": [first, str(tmp_path / "link"), third],
    }
    for message, places in wrong.items():
        for call in (
            lambda one: one.get("relight.json", 99),
            lambda one: list(one.list("")),
            lambda one: put(one, "run/new", b"x"),
        ):
            with pytest.raises(ConfigError, match=message):
                call(StripedStore(places))
    with pytest.raises(ConfigError, match="each named once"):
        StripedStore([first, second, first])
    with pytest.raises(ConfigError, match="two or more"):
        StripedStore([first])
    assert files(store) == before
    assert not (tmp_path / "new").exists()


def test_a_store_of_its_own_is_no_place_and_a_place_is_no_store(store: StripedStore, tmp_path: Path) -> None:
    """A store's directory is not accepted as a place of a stripe. A place of a stripe is not opened as a store."""
    put(LocalStore(tmp_path / "own"), "relight.json", b"x")
    for places in (["own", "new"], ["new", "own"]):
        with pytest.raises(ConfigError, match="a store of its own"):
            put(StripedStore([tmp_path / place for place in places]), "run/x", b"x")
        assert not (tmp_path / "new").exists()
    for root in store._roots:
        for url in (root, f"file://{root}"):
            with pytest.raises(ConfigError, match="one part of a striped store"):
                open_bytes(url)


def test_a_damaged_identity_is_neither_absent_nor_taken(store: StripedStore) -> None:
    """A flipped bit in a place's file: unavailable, by its name."""
    path = Path(store._roots[1]) / STRIPE_FILE
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreUnavailable, match="n1/stripe.json"):
        again(store).get("relight.json", 99)


def test_an_interrupted_creation_is_completed(tmp_path: Path) -> None:
    """After a kill at any call to the disk during creation, the next one completes it, and the places agree."""

    class Killed(BaseException):
        pass

    class Dying(Disk):
        left = 0

        def __getattribute__(self, name: str) -> object:
            attribute = super().__getattribute__(name)
            if name not in ("left", "__class__") and callable(attribute):
                self.left -= 1
                if self.left <= 0:  # nothing is tidied up
                    raise Killed
            return attribute

    ended = False
    for nth in range(1, 400):
        places = [tmp_path / f"{nth}-{place}" for place in range(3)]
        disk = Dying()
        disk.left = nth
        made = StripedStore(places, disk=disk)
        try:
            made.put_once("relight.json", b"mine")
            ended = True
        except Killed:
            pass
        next_one = StripedStore(places)
        names = {entry.name for entry in next_one.list("")}
        assert all(name == "relight.json" or name.startswith(".tmp-relight.json-") for name in names), names
        assert next_one.put_once("relight.json", b"mine") or next_one.get("relight.json", 9) == b"mine"
        assert [
            next_one._record(root, place).place for root, place in zip(next_one._roots, next_one._places, strict=True)
        ] == [0, 1, 2]  # type: ignore[union-attr]
        if ended:
            break
    assert ended
    assert nth > 60


def test_room_is_what_evenly_spread_packs_can_take(tmp_path: Path) -> None:
    """Room is N times that of the fullest place. Two places on one file system share its room."""

    class Rooms(Disk):
        rooms = {"n0": (1, 100), "n1": (2, 30), "n2": (2, 30)}

        def free_bytes(self, path: str) -> int:
            return self.rooms[os.path.basename(path)][1]

        def lstat(self, path: str) -> os.stat_result:
            status = super().lstat(path)
            if os.path.basename(path) not in self.rooms:
                return status
            return os.stat_result((*status[:2], self.rooms[os.path.basename(path)][0], *status[3:]))

    for name in Rooms.rooms:
        (tmp_path / name).mkdir()
    store = StripedStore([tmp_path / name for name in Rooms.rooms], disk=Rooms())
    assert store.free_bytes() == 45, "30 on the second file system, which takes two of each three packs"
    store = StripedStore([tmp_path / "n0", tmp_path / "n1"], disk=Rooms())
    assert store.free_bytes() == 60


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comma ends each directory.

    The path after the last one is below each of them. The store's own URL leads to it again.
    """
    assert places_in("stripe:/a,/b,/x/demo/") == (["/a", "/b"], "/x/demo")
    assert split_run("stripe:/a,/b,/demo") == ("stripe:/a,/b,", "demo")
    assert split_run("stripe:/a,/b,/x/demo") == ("stripe:/a,/b,/x", "demo")
    monkeypatch.chdir(tmp_path)
    store = open_bytes("stripe:a,b,/x")
    assert store.url == f"stripe:{tmp_path}/a/x,{tmp_path}/b/x,"
    assert open_bytes(store.url).url == store.url
    assert split_run(f"{store.url.rstrip('/')}/demo") == (store.url, "demo")
    assert absolute("stripe:a,b,/x/../demo/") == f"stripe:{tmp_path}/a,{tmp_path}/b,/demo"
    for wrong in (
        "stripe:/a,/b",
        "stripe:/a,/b/demo",
        "stripe:/a,/b,demo",
        "stripe:/a,",
        "stripe:",
        "stripe:,,",
        "stripe:/a,,/b,",
        "stripe:/a,/a,",
    ):
        with pytest.raises(ConfigError):
            open_bytes(wrong)
    for wrong in ("stripe:/a,/b,", "stripe:/a,/b,/", "stripe:/a,/b,/.."):
        with pytest.raises(ConfigError, match="no run"):
            split_run(wrong)


# -- several packs at once


@pytest.fixture
def small_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the least size of a pack to a few kilobytes."""
    monkeypatch.setattr(plan_module, "LANE_BYTES_MIN", 1 << 16)


def items_of(count: int, size: int) -> list[Item]:
    return [Item(f"t{n}", "uint8", (size,), "value", Bytes(random.Random(n).randbytes(size))) for n in range(count)]


def saved(store: ByteStore, items: list[Item]) -> str:
    attempt = Attempt.begin(store, "run", reason="test")
    return attempt.save(SaveRequest(SaveInfo(step=1), tree=encode_tree({}), items=items)).id


def test_a_rank_writes_a_pack_for_each_drive_and_at_once(tmp_path: Path, small_lanes: None) -> None:
    """The packs have about one size, one at each place, and all are open before the first is finished."""
    store = StripedStore([tmp_path / name for name in ("n0", "n1", "n2")])
    gate = threading.Barrier(3, timeout=20)

    class Meeting(CountingStore):
        def write(self, key: str, size: int):  # type: ignore[no-untyped-def]
            writer = super().write(key, size)
            if "pack-" in key:
                gate.wait()
            return writer

    saved(Meeting(store), items_of(30, 100_001))
    packs = [list(Path(root).rglob("*.safetensors")) for root in store._roots]
    assert [len(pack) for pack in packs] == [1, 1, 1]
    sizes = [pack[0].stat().st_size for pack in packs]
    assert max(sizes) - min(sizes) < 110_000
    assert (lanes_of_rank(store, 1), lanes_of_rank(store, 2), lanes_of_rank(store, 3), lanes_of_rank(store, 64)) == (
        3,
        2,
        1,
        1,
    )


def test_what_goes_wrong_with_one_pack_ends_all_and_is_what_is_raised(tmp_path: Path, small_lanes: None) -> None:
    """A drive that is full while the others are written to: that error, soon, and nothing of the save is left on any."""
    store = StripedStore([tmp_path / name for name in ("n0", "n1", "n2")])
    written = Counter[str]()

    class Full(CountingStore):
        def write(self, key: str, size: int):  # type: ignore[no-untyped-def]
            writer, plain = super().write(key, size), None
            if "pack-" in key:
                plain = writer.write_at

                def write_at(offset: int, data: memoryview) -> None:
                    if key.endswith("001.safetensors"):
                        assert begun.acquire(timeout=20) and begun.acquire(timeout=20)
                        threading.Timer(1.0, stopped.set).start()
                        raise NoSpace("full", where=key)
                    begun.release()
                    stopped.wait(20)
                    written[key] += 1
                    plain(offset, data)

                writer.write_at = write_at
            return writer

    begun, stopped = threading.Semaphore(0), threading.Event()
    with pytest.raises(NoSpace):
        saved(Full(store), items_of(30, 3_000_000))
    assert sorted(written.values()) == [1, 1], "what was being written is, and nothing more"
    assert [path for root in store._roots for path in Path(root).rglob("*.safetensors")] == []
