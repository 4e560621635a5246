"""The cache of a remote store: what it saves, that it hides no damage, and that no cache error fails a restore."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import relight
from relight.catalog.run import Run
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint
from relight.observe import subscribe
from relight.observe.events import Event
from relight.reader.verify import verify_checkpoint
from relight.store import ByteStore, LocalStore, block_locks, put
from relight.store.base import Reader
from relight.store.blocks import BLOCK_BYTES, TRAILER_BYTES, BlockCache, blocks_from_settings, name_of
from relight.store.cached import CachedStore, is_fixed
from relight.store.objects import ObjectStore
from relight.store.urls import open_bytes
from relight.testing.counting import CountingStore
from relight.testing.store_suite import StoreSuite, read_all

DIR = "run/0000000007-abcdefghij-e1"
PACK = f"{DIR}/pack-00000-000.safetensors"
DATA = random.Random(1).randbytes(3 * BLOCK_BYTES + 12345)


class TestCachedAll(StoreSuite):
    """The suite with every file cached on disk, and none in memory."""

    @pytest.fixture(autouse=True)
    def _everything(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("relight.store.cached.is_fixed", lambda key: True)
        self.caches = tmp_path_factory.mktemp("caches")

    def make(self, tmp_path: Path) -> ByteStore:
        return CachedStore(LocalStore(tmp_path), BlockCache(self.caches / tmp_path.name, 1 << 30))


class TestCachedS3(StoreSuite):
    @pytest.fixture(autouse=True)
    def _bucket(self, s3: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RELIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        self.url = s3

    def make(self, tmp_path: Path) -> ByteStore:
        store = open_bytes(f"{self.url}/some/prefix")
        assert isinstance(store, CachedStore)
        return store


@pytest.fixture
def emitted() -> Iterator[list[Event]]:
    """Yield the list of this test's events."""
    events: list[Event] = []
    undo = subscribe(events.append)
    yield events
    undo()


@pytest.fixture
def far(tmp_path: Path) -> CountingStore:
    """A store with one pack in it, which counts what is read of it."""
    store = CountingStore(LocalStore(tmp_path / "far"))
    put(store.inner, PACK, DATA)
    return store


def fresh(far: ByteStore, tmp_path: Path, limit: int = 1 << 30) -> CachedStore:
    """Return the store as another process opens it: nothing is in memory."""
    return CachedStore(far, BlockCache(tmp_path / "cache", limit))


def read(reader: Reader, offset: int, length: int) -> bytes:
    into = bytearray(length)
    reader.read_into(offset, memoryview(into))
    return bytes(into)


def block_paths(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*/*/[0-9]*"))


def test_a_file_is_read_from_afar_once(far: CountingStore, tmp_path: Path) -> None:
    """Data that was read once comes from the cache for later readers, for any range, without a request to the store."""
    assert read_all(fresh(far, tmp_path), PACK) == DATA
    assert far.bytes["read"] == len(DATA)
    far.asked.clear()
    later = fresh(far, tmp_path)
    reader = later.open(PACK)
    rng = random.Random(2)
    for _ in range(200):
        offset = rng.randrange(len(DATA))
        length = rng.choice((1, 100, 4096, 1 << 20, BLOCK_BYTES, len(DATA)))
        length = min(length, len(DATA) - offset)
        if (offset, length) not in reader._served:  # type: ignore[attr-defined]
            assert read(reader, offset, length) == DATA[offset : offset + length]
    reader.close()
    assert (far.bytes["read"], far.asked.total()) == (len(DATA), 0)
    assert later.counts.misses == 0
    assert later.counts.hit_bytes > len(DATA)


def test_a_range_brings_its_blocks_and_no_more(far: CountingStore, tmp_path: Path) -> None:
    """A ranged read brings whole blocks, those that it touches, each once."""
    reader = fresh(far, tmp_path).open(PACK)
    read(reader, BLOCK_BYTES + 5, 10)
    assert far.bytes["read"] == BLOCK_BYTES
    read(reader, 2 * BLOCK_BYTES - 5, 10)
    assert far.bytes["read"] == 2 * BLOCK_BYTES
    read(reader, len(DATA) - 1, 1)
    assert far.bytes["read"] == 2 * BLOCK_BYTES + len(DATA) % BLOCK_BYTES
    reader.close()


def test_only_what_never_changes_is_cached(tmp_path: Path) -> None:
    """Packs, parts and roots of checkpoints are cached. The log, the store's record and other files are not."""
    for name in ("root.json", "part-00003.msgpack", "pack-00000-012.safetensors"):
        assert is_fixed(f"{DIR}/{name}")
        assert not is_fixed(f"run/{name}")
        assert not is_fixed(name)
    for key in (
        "relight.json",
        "run/log/000000000001.json",
        f"{DIR}/draft.json",
        f"{DIR}/ready/0.a.b.c.d",
        f"{DIR}/mine.txt",
        "",
        DIR,
    ):
        assert not is_fixed(key)
    inner = LocalStore(tmp_path / "far")
    store = fresh(inner, tmp_path)
    for key in ("run/log/000000000001.json", f"{DIR}/draft.json"):
        put(inner, key, b"one")
        assert store.get(key, 9) == b"one"
        inner.delete(key)
        put(inner, key, b"two")
        assert store.get(key, 9) == b"two"
        assert read_all(store, key) == b"two"
    assert block_paths(tmp_path) == []


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def be_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of the first byte": lambda path: flip(path, 0),
    "a bit of the last byte": lambda path: flip(path, -TRAILER_BYTES - 1),
    "a bit of the trailer": lambda path: flip(path, -40),
    "a bit of the file's length": lambda path: flip(path, 16 - TRAILER_BYTES),
    "cut by one": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in the middle": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut to the trailer": lambda path: os.truncate(path, TRAILER_BYTES),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 4096),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": lambda path: path.unlink(),
    "a directory": be_a_directory,
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "another block of the file": lambda path: path.write_bytes(
        path.with_name("1" if path.name != "1" else "2").read_bytes()
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("number", [0, 2])
def test_a_damaged_entry_is_a_miss(far: CountingStore, tmp_path: Path, what: str, number: int) -> None:
    """If a cache entry is damaged in any way, readers get the file's bytes, and only that block is fetched again."""
    read_all(fresh(far, tmp_path), PACK)
    DAMAGE[what](block_paths(tmp_path)[number])
    far.bytes.clear()
    assert read_all(fresh(far, tmp_path), PACK) == DATA
    assert far.bytes["read"] == BLOCK_BYTES


def test_a_part_of_a_sound_block_is_not_taken_from_another_file(far: CountingStore, tmp_path: Path) -> None:
    """A verified file stays one file: another file at its place is verified again."""
    read_all(fresh(far, tmp_path), PACK)
    reader = fresh(far, tmp_path).open(PACK)
    assert read(reader, 0, 10) == DATA[:10]
    path = block_paths(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    other = path.with_name("other")
    other.write_bytes(data)
    other.rename(path)
    assert read(reader, 15, 10) == DATA[15:25]
    reader.close()


def test_a_range_read_twice_is_fetched_again(far: CountingStore, tmp_path: Path) -> None:
    """A second read of a range by one reader means that its bytes were bad: they are fetched again and replaced."""
    store = fresh(far, tmp_path)
    read_all(store, PACK)
    # damaged before it was cached
    store.blocks.keep(name_of(store.url, PACK), 1, len(DATA), memoryview(bytes(BLOCK_BYTES)))
    reader = fresh(far, tmp_path).open(PACK)
    assert read(reader, BLOCK_BYTES, 10) == bytes(10)
    assert read(reader, BLOCK_BYTES, 10) == DATA[BLOCK_BYTES : BLOCK_BYTES + 10]
    reader.close()
    far.bytes.clear()
    assert read_all(fresh(far, tmp_path), PACK) == DATA
    assert far.bytes["read"] == 0


def test_two_threads_bring_a_block_once(far: CountingStore, tmp_path: Path) -> None:
    """If threads want one block at once, through any readers, one of them fetches it."""

    class Slow(CountingStore):
        def open(self, key: str) -> Reader:
            reader = super().open(key)
            plain = reader.read_into
            reader.read_into = lambda offset, into: (time.sleep(0.05), plain(offset, into))[1]  # type: ignore[method-assign]
            return reader

    slow = Slow(far.inner)
    store = fresh(slow, tmp_path)
    gate = threading.Barrier(8)
    wrong: list[int] = []

    def work(me: int) -> None:
        reader = store.open(PACK)
        gate.wait()
        for number in range(4):
            offset = number * BLOCK_BYTES + me
            if read(reader, offset, 1000) != DATA[offset : offset + 1000]:
                wrong.append(me)
        reader.close()

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert slow.bytes["read"] == len(DATA)


def test_who_waits_for_a_fetch_that_fails_fetches_himself(far: CountingStore, tmp_path: Path) -> None:
    """The error of one thread's fetch is its own: another that waited for it tries by itself."""
    fails = [True]

    class Once(CountingStore):
        def open(self, key: str) -> Reader:
            reader = super().open(key)
            plain = reader.read_into

            def read_into(offset: int, into: memoryview) -> None:
                time.sleep(0.1)
                if fails and fails.pop():
                    raise CorruptCheckpoint("lost on its way")
                plain(offset, into)

            reader.read_into = read_into  # type: ignore[method-assign]
            return reader

    store = fresh(Once(far.inner), tmp_path)
    came: list[bool] = []

    def work() -> None:
        reader = store.open(PACK)
        try:
            came.append(read(reader, 0, 10) == DATA[:10])
        except CorruptCheckpoint:
            came.append(False)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(came) == [False, True, True]


def test_deleting_drops_what_is_cached(far: CountingStore, tmp_path: Path) -> None:
    """A file that is deleted through the wrapper takes its blocks along, and nothing that was opened before puts them back."""
    store = fresh(far, tmp_path)
    read_all(store, PACK)
    before = fresh(far, tmp_path).open(PACK)
    open_before = store.open(PACK)
    store.delete(PACK)
    assert block_paths(tmp_path) == []
    assert [path for path in (tmp_path / "cache").glob("*/*") if path.is_dir()] == []
    with pytest.raises(CheckpointNotFound):
        store.open(PACK)
    for reader in (before, open_before):
        with pytest.raises(CorruptCheckpoint):
            read(reader, 0, 10)
    other = DATA[::-1]
    put(store, PACK, other)
    assert read_all(store, PACK) == other


def test_a_file_opened_before_it_was_deleted_is_not_cached_under_its_name(far: CountingStore, tmp_path: Path) -> None:
    """Later reads of a deleted file are not stored under the name of its successor."""
    store = fresh(far, tmp_path)
    reader = store.open(PACK)
    store.delete(PACK)
    put(store, PACK, DATA[::-1])
    assert read(reader, 0, len(DATA)) == DATA
    reader.close()
    assert read_all(fresh(far, tmp_path), PACK) == DATA[::-1]


def test_a_file_of_another_length_is_not_mixed_with_what_is_cached(far: CountingStore, tmp_path: Path) -> None:
    """If a file is replaced without the cache's knowledge, its blocks raise one error that states so.

    The next read gets the new file.
    """
    reader = fresh(far, tmp_path).open(PACK)
    read(reader, 0, 10)
    reader.close()
    far.inner.delete(PACK)
    put(far.inner, PACK, DATA[:-1])
    reader = fresh(far, tmp_path).open(PACK)
    with pytest.raises(CorruptCheckpoint, match="when it was cached"):
        read(reader, BLOCK_BYTES, 10)
    assert read_all(fresh(far, tmp_path), PACK) == DATA[:-1]


def test_the_least_recently_asked_for_goes_first(tmp_path: Path) -> None:
    """The cache is always below its limit. A block that is read often stays."""
    inner = LocalStore(tmp_path / "far")
    for number in range(30):
        put(inner, f"{DIR}/pack-00000-{number:03d}.safetensors", DATA)
    limit = 12 * BLOCK_BYTES
    often = f"{DIR}/pack-00000-000.safetensors"
    far = CountingStore(inner)
    for number in range(30):
        store = fresh(far, tmp_path, limit)
        store.blocks.keep(name_of("else", str(number)), 0, 1, memoryview(b"x"))
        store.blocks._until_check = 0  # an unlucky draw may delay its first check by a block
        read_all(store, f"{DIR}/pack-00000-{number:03d}.safetensors")
        assert store.blocks.total_bytes() < limit
        read_all(store, often)
    assert store.blocks.total_bytes() > limit // 2
    assert far.bytes["read"] == 30 * len(DATA)


def test_strangers_files_stay(tmp_path: Path) -> None:
    """A directory that holds something else loses none of it."""
    folder = tmp_path / "cache"
    (folder / "ab" / ("c" * 64)).mkdir(parents=True)
    strange = [folder / "notes", folder / "ab" / "notes", folder / "ab" / ("c" * 64) / "notes"]
    for path in strange:
        path.write_bytes(bytes(100_000))
        os.utime(path, (0, 0))
    old = folder / "ab" / ("c" * 64) / ".tmp-0123"
    old.write_bytes(b"left by a process that was killed")
    os.utime(old, (0, 0))
    blocks = BlockCache(folder, 3 * BLOCK_BYTES)
    for number in range(20):
        blocks.keep(name_of("s", "k"), number, 1 << 30, memoryview(bytes(BLOCK_BYTES)))
    assert all(path.exists() for path in strange)
    assert not old.exists()
    assert blocks.total_bytes() < 3 * BLOCK_BYTES + TRAILER_BYTES


def test_the_limit_is_a_tenth_of_what_was_free_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a setting the limit is a tenth of the free space. The directory stores it, so that it stays equal."""

    def use() -> int:
        blocks = BlockCache(tmp_path / "cache")
        blocks.keep(name_of("s", "k"), 0, 1, memoryview(b"x"))
        return blocks._limit

    room = os.statvfs(tmp_path)
    assert 0.8 < use() / (room.f_bavail * room.f_frsize / 10) < 1.2
    (tmp_path / "cache" / "limit").write_text("123456789\n")
    assert use() == 123456789
    (tmp_path / "cache" / "limit").write_text("nonsense\n")
    assert 0.8 < use() / (room.f_bavail * room.f_frsize / 10) < 1.2, "an unreadable limit is written again"
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["full", "below a file"])
def test_a_disk_that_refuses_means_no_cache_and_one_word(
    far: CountingStore, tmp_path: Path, emitted: list[Event], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """On a full disk, or without a directory, everything is read from the store, only the requested bytes, and reported once."""
    folder = tmp_path / "cache"
    if how == "below a file":
        folder.write_bytes(b"")
        folder = folder / "below"
    else:
        plain = os.writev

        def writev(fd: int, buffers: list[memoryview]) -> int:
            return plain(fd, [memoryview(b"".join(buffers))[:1000]])

        monkeypatch.setattr(os, "writev", writev)
    blocks = BlockCache(folder)
    for _ in range(3):
        store = CachedStore(far, blocks)
        assert read_all(store, PACK) == DATA
        assert store.get(PACK, len(DATA)) == DATA
    assert [event.name for event in emitted if event.name == "cache.off"] == ["cache.off"]
    far.bytes.clear()
    reader = store.open(PACK)
    assert read(reader, 7, 5) == DATA[7:12]
    assert far.bytes["read"] == 5
    assert block_paths(tmp_path) == []


def test_threads_report_a_full_disk_once(tmp_path: Path, emitted: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads write when the disk refuses: one event."""
    gate = threading.Barrier(4, timeout=20)

    def writev(fd: int, buffers: list[memoryview]) -> int:
        gate.wait()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "writev", writev)
    blocks = BlockCache(tmp_path / "cache")
    threads = [
        threading.Thread(target=blocks.keep, args=(name_of("s", "k"), number, 4, memoryview(b"x")))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.name for event in emitted] == ["cache.off"]
    assert not blocks.takes_more
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [tmp_path / "cache" / "limit"]


def test_what_is_there_is_read_from_a_disk_that_takes_no_more(far: CountingStore, tmp_path: Path) -> None:
    """Full is not broken: what is cached is still taken."""
    read_all(fresh(far, tmp_path), PACK)
    store = fresh(far, tmp_path)
    store.blocks._full = True
    far.bytes.clear()
    assert read_all(store, PACK) == DATA
    assert far.bytes["read"] == 0


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``RELIGHT_CACHE`` applies to remote stores only. Invalid values are refused."""
    assert blocks_from_settings() is None
    assert isinstance(open_bytes("s3://bucket/x"), ObjectStore)
    monkeypatch.setenv("RELIGHT_CACHE", str(tmp_path / "cache"))
    for url in ("s3://bucket/x", "gs://bucket/x", "az://bucket/x", "https://host/x"):
        store = open_bytes(url)
        assert isinstance(store, CachedStore)
        assert store.url == url
        assert store.blocks is open_bytes("s3://other/y").blocks  # type: ignore[attr-defined]
    assert isinstance(open_bytes(tmp_path), LocalStore)
    assert open_bytes("memory://x").url == "memory://x"
    monkeypatch.setenv("RELIGHT_CACHE_BYTES", "1.5GB")
    assert blocks_from_settings()._given_limit == 1_500_000_000  # type: ignore[union-attr]
    monkeypatch.setenv("RELIGHT_CACHE_BYTES", "much")
    with pytest.raises(ConfigError, match="RELIGHT_CACHE_BYTES"):
        open_bytes("s3://bucket/x")
    monkeypatch.setenv("RELIGHT_CACHE", "s3://bucket")
    with pytest.raises(ConfigError, match="local disk"):
        open_bytes("s3://bucket/x")
    assert not (tmp_path / "cache").exists(), "nothing is made before something is cached"


def state(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    sizes = (3_000_000, 7, 2_500_000, 1_000_001, 100, 1_300_000)
    return {f"t{number}": torch.randn(size, generator=made) for number, size in enumerate(sizes)}


@pytest.fixture
def run(tmp_path: Path) -> CountingStore:
    relight.save(tmp_path / "far" / "run", state(1), step=1)
    return CountingStore(LocalStore(tmp_path / "far"))


def load(store: ByteStore, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    monkeypatch.setattr("relight.api.open_bytes", lambda url, **options: store)
    return relight.load("anything/run")


def same(found: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in state(1).items())


def test_a_second_restore_reads_only_the_log_from_afar(
    run: CountingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold restore fetches each byte once. A warm one fetches only the log and the store's record."""
    assert same(load(fresh(run, tmp_path), monkeypatch))
    stored = sum(path.stat().st_size for path in (tmp_path / "far").rglob("*") if path.is_file())
    assert stored * 0.99 < run.bytes["read"] < stored * 1.001
    run.bytes.clear()
    run.asked.clear()
    warm = fresh(run, tmp_path)
    assert same(load(warm, monkeypatch))
    assert run.bytes["read"] < 5000
    assert run.asked["open"] == 0
    assert warm.counts.misses == 0


def test_a_cache_filled_with_damage_costs_a_second_reading_and_no_restore(
    run: CountingStore, tmp_path: Path, emitted: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root, part and packs that were damaged before they were cached: found by their hashes, read once more from afar, whole from then on."""
    store = fresh(run, tmp_path)
    prefix = next(f"run/{entry.name}" for entry in store.list("run") if entry.name != "log")
    for entry in store.list(prefix):
        data = bytearray(store.get(f"{prefix}/{entry.name}", 1 << 30))
        for start in range(0, len(data), BLOCK_BYTES):
            data[start + len(data[start : start + BLOCK_BYTES]) // 2] ^= 1
            piece = memoryview(data)[start : start + BLOCK_BYTES]
            store.blocks.keep(name_of(store.url, f"{prefix}/{entry.name}"), start // BLOCK_BYTES, len(data), piece)
    assert same(load(fresh(run, tmp_path), monkeypatch))
    assert "read.retried" in {event.name for event in emitted}
    emitted.clear()
    assert same(load(fresh(run, tmp_path), monkeypatch))
    assert "read.retried" not in {event.name for event in emitted}


def test_verifying_reads_the_store_and_not_the_cache(
    run: CountingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A completely cached file hides no damage from a verification. A restore continues from the cache."""
    store = fresh(run, tmp_path)
    assert same(load(store, monkeypatch))
    pack = next((tmp_path / "far").rglob("*.safetensors"))
    flip(pack, 5_000_000)
    opened = Run(store, "run")
    view = opened.view()
    (checkpoint,) = opened.history().live
    assert [finding.kind for finding in verify_checkpoint(store, view, checkpoint)] == ["corrupt"]
    assert same(load(fresh(run, tmp_path), monkeypatch))


def test_readers_report_hits_and_misses(far: CountingStore, tmp_path: Path, emitted: list[Event]) -> None:
    """After each file there is an event with hits, misses and their bytes. The store has the sums."""
    store = fresh(far, tmp_path)
    for _ in range(2):
        reader = store.open(PACK)
        read(reader, 10, 100)
        reader.close()
    fields = [dict(event.fields) for event in emitted if event.name == "cache.read"]
    assert fields == [
        {"key": PACK, "hits": 0, "misses": 1, "hit_bytes": 0, "missed_bytes": BLOCK_BYTES},
        {"key": PACK, "hits": 1, "misses": 0, "hit_bytes": 100, "missed_bytes": 0},
    ]
    assert (store.counts.hits, store.counts.misses, store.counts.hit_bytes, store.counts.missed_bytes) == (
        1,
        1,
        100,
        BLOCK_BYTES,
    )


READING = """
import random, sys
from pathlib import Path
from relight.store import LocalStore
from relight.store.blocks import BLOCK_BYTES, BlockCache
from relight.store.cached import CachedStore
far, cache, limit, seed, rounds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
rng = random.Random(seed)
store = CachedStore(LocalStore(far), BlockCache(cache, limit))
print("begun", flush=True)
for _ in range(rounds):
    number = rng.randrange(6)
    key = f"run/0000000007-abcdefghij-e1/pack-00000-{number:03d}.safetensors"
    data = random.Random(number).randbytes(2 * BLOCK_BYTES + 1000 * number)
    reader = store.open(key)
    assert reader.size == len(data)
    for _ in range(3):
        offset = rng.randrange(len(data))
        into = bytearray(min(rng.choice((100, BLOCK_BYTES, len(data))), len(data) - offset))
        reader.read_into(offset, memoryview(into))
        assert into == data[offset : offset + len(into)], (number, offset, len(into))
    reader.close()
print("read", flush=True)
"""


def test_processes_share_a_cache_that_is_too_small_and_are_killed(tmp_path: Path) -> None:
    """Processes that fill, evict and read one cache at once, some killed at any moment: no read is wrong, and it stays below its limit."""
    inner = LocalStore(tmp_path / "far")
    for number in range(6):
        put(
            inner,
            f"{DIR}/pack-00000-{number:03d}.safetensors",
            random.Random(number).randbytes(2 * BLOCK_BYTES + 1000 * number),
        )
    limit = 14 * BLOCK_BYTES
    rng = random.Random(3)

    def start(seed: int, rounds: int) -> subprocess.Popen[str]:
        words = [
            sys.executable,
            "-c",
            READING,
            str(tmp_path / "far"),
            str(tmp_path / "cache"),
            str(limit),
            str(seed),
            str(rounds),
        ]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    stays = start(0, 60)
    for life in range(6):
        child = start(life + 1, 10_000)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.random() * 0.4)
        child.send_signal(signal.SIGKILL)
        errors = child.communicate()[1]
        assert child.returncode == -signal.SIGKILL, errors
    out, errors = stays.communicate(timeout=60)
    assert stays.returncode == 0, errors
    assert out.split() == ["begun", "read"]
    assert BlockCache(tmp_path / "cache", limit).total_bytes() < limit
    left = fresh(inner, tmp_path, limit)
    for number in range(6):
        assert read_all(left, f"{DIR}/pack-00000-{number:03d}.safetensors") == random.Random(number).randbytes(
            2 * BLOCK_BYTES + 1000 * number
        )


AT_ONCE = """
import sys, time
from relight.store import LocalStore
from relight.store.cached import CachedStore
from relight.store.blocks import BlockCache
from relight.testing.counting import CountingStore

far, cache, key = sys.argv[1:]


class Slow(CountingStore):
    def get(self, key, limit):
        time.sleep(0.3)
        return super().get(key, limit)

    def open(self, key):
        reader = super().open(key)
        plain = reader.read_into
        reader.read_into = lambda offset, into: (time.sleep(0.3), plain(offset, into))[1]
        return reader


slow = Slow(LocalStore(far))
store = CachedStore(slow, BlockCache(cache))
print("ready", flush=True)
sys.stdin.readline()
reader = store.open(key)
into = bytearray(reader.size)
reader.read_into(0, memoryview(into))
reader.close()
whole = store.get(key.rpartition("/")[0] + "/part-00000.msgpack", 1 << 30)
print(sum(slow.bytes.values()), into == store.get(key, 1 << 30), len(whole), flush=True)
"""


def test_processes_that_start_at_once_fetch_a_block_once(tmp_path: Path) -> None:
    """Four processes with one cache read a file and a part at the same moment: together they fetch each byte once."""
    inner = LocalStore(tmp_path / "far")
    put(inner, PACK, DATA)
    put(inner, f"{DIR}/part-00000.msgpack", b"p" * 1000)
    words = [sys.executable, "-c", AT_ONCE, str(tmp_path / "far"), str(tmp_path / "cache"), PACK]
    processes = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = []
    for process in processes:
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        fetched, same, length = out.split()
        assert (same, length) == ("True", "1000")
        answers.append(int(fetched))
    assert sum(answers) == len(DATA) + 1000, answers


def test_a_block_of_a_stopped_or_killed_process_is_fetched_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a killed process is free at once. A process that is stopped is waited for, but not for ever."""
    script = (
        "import sys, time\nfrom relight.store.block_locks import block_lock\n"
        "with block_lock(sys.argv[1], 'n/0'):\n    print('locked', flush=True)\n    time.sleep(600)"
    )
    (tmp_path / "cache").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "cache")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
    holder.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(block_locks, "WAIT_S", 0.3)
    for block, waits in (("n/0", True), ("n/1", False)):
        began = time.monotonic()
        with BlockCache(tmp_path / "cache").fetching("n", int(block[2:])) as is_mine:
            assert is_mine and (time.monotonic() - began >= 0.3) == waits
    monkeypatch.setattr(block_locks, "WAIT_S", 60.0)
    holder.kill()
    holder.communicate()
    began = time.monotonic()
    with BlockCache(tmp_path / "cache").fetching("n", 0) as is_mine:
        assert is_mine and time.monotonic() - began < 30


def test_a_forked_child_does_not_keep_a_block_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DataLoader's worker that was forked during a fetch inherits the lock. It must end with the fetch."""
    monkeypatch.setattr(block_locks, "WAIT_S", 5.0)
    cache = BlockCache(tmp_path / "cache")
    with cache.fetching("n", 0) as is_mine:
        assert is_mine
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        began = time.monotonic()
        with BlockCache(tmp_path / "cache").fetching("n", 0):
            assert time.monotonic() - began < 2.5
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
