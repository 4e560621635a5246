"""The guarantees of every ``ByteStore``, as tests: subclass, make a store, run pytest.

::

    class TestMine(StoreSuite):
        def make(self, tmp_path):
            return MyStore(tmp_path)

Each test's docstring is the guarantee. A test gets a new, empty store.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relight.comm.children import safe_spawn
from relight.comm.new_threads import ThreadPool
from relight.errors import CheckpointNotFound, CorruptCheckpoint, NoSpace, RelightError, StoreUnavailable, UnsafeContent
from relight.format.names import LOG_DIR, record_file
from relight.store import PAGE, ByteStore, page_buffer, put
from relight.store.base import (
    Entry,
    Reader,
    Rewrites,
    Writer,
    invalidate_cache,
    rewrites,
    without_cache,
    write_whole,
)
from relight.store.wrapper import unwrap
from relight.testing.traced_writes import traced_marks

BAD_KEYS = ("", "..", ".", "../x", "a/../../x", "a/..", "/etc/passwd", "a//b", "a/", "a/./b", "a\0b")
LARGE = (1 << 20) + 12345
"""Above the size from which a store may use direct I/O, and not a multiple of a page or sector."""


def refuses(kind: type[RelightError] | tuple[type[RelightError], ...], call: Callable[[], object]) -> RelightError:
    """Return the error that ``call`` raises.

    Raise ``AssertionError`` if it raises none, or one that is not of ``kind``.
    """
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"gave {result!r} instead of refusing")


def read_all(store: ByteStore, key: str) -> bytes:
    """Return the contents of a file, read through a reader."""
    reader = store.open(key)
    try:
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
        return bytes(data)
    finally:
        reader.close()


def write_all(store: ByteStore, key: str, data: bytes, step: int = 1 << 19) -> None:
    """Write a whole file through a writer: in pieces with the writer's alignment, last piece first."""
    writer = store.write(key, len(data))
    padded = mmap.mmap(-1, max(-(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE))
    padded[: len(data)] = data
    for start in reversed(range(0, len(data), step)):
        stop = min(start + step, len(data))
        stop = min(-(-stop // writer.align) * writer.align, len(padded)) if stop == len(data) else stop
        writer.write_at(start, memoryview(padded)[start:stop])
    writer.finish()


def _create_all(store: ByteStore, rounds: int, me: int, gate: Any, queue: Any) -> None:
    """Create the same names as the other processes, at the same moment.

    Put the result of each creation into the ``queue``.
    """
    won = []
    try:
        for round_ in range(rounds):
            gate.wait(60)
            won.append(store.put_once(f"log/{round_}", b"%d" % me))
    finally:
        queue.put((me, won + [False] * (rounds - len(won))))


def _read_directory(store: ByteStore, prefix: str, queue: Any) -> None:
    """Put the files directly below ``prefix`` into the ``queue``, and the properties of the store."""
    names = [entry.name for entry in store.list(prefix)]
    queue.put(({name: store.get(f"{prefix}/{name}", 99) for name in names}, store.properties()))


def write_in_each_way(store: ByteStore, mark: Callable[[str], None]) -> None:
    """Create, write and replace files. Call ``mark`` when the store has acknowledged each."""
    assert store.put_once("run/log/created", b"1" * 5000)
    mark("put_once")
    for size in (5000, LARGE):
        write_all(store, f"run/dir/{size}", os.urandom(size))
        mark("finish")
        if store.properties().needs_sync:
            store.sync("run/dir")
            mark("sync")
    if isinstance(unwrap(store), Rewrites):
        write_whole(rewrites(store).rewrite("run/log/created", 5000), b"2" * 5000)
        mark("rewrite")


class StoreSuite:
    """Subclass it as ``TestSomething`` and define ``make``."""

    across_processes = True
    """Whether another process reaches the same files through the store, which then can be pickled."""

    own: frozenset[str] = frozenset()
    """Names at the store's top that the store itself uses."""

    def make(self, tmp_path: Path) -> ByteStore:
        """Return a new, empty store. ``tmp_path``: an empty directory that it may use."""
        raise NotImplementedError

    def top(self, store: ByteStore) -> list[Entry]:
        """Return the entries at the store's top, without its ``own``."""
        return sorted(entry for entry in store.list("") if entry.name not in self.own)

    def test_put_once_creates_what_get_gives(self, tmp_path: Path) -> None:
        """What ``put_once`` created is read back whole, through ``get`` and through a reader."""
        store = self.make(tmp_path)
        for key, data in (("a.json", b"one"), ("run/log/000.json", b"x" * 100_000), ("run/empty", b"")):
            assert store.put_once(key, data) is True
            assert store.get(key, 1 << 20) == data
            assert read_all(store, key) == data

    def test_put_once_never_replaces(self, tmp_path: Path) -> None:
        """The second ``put_once`` of a name returns False and changes nothing, whatever its bytes."""
        store = self.make(tmp_path)
        assert store.put_once("a/b", b"first")
        assert store.put_once("a/b", b"second, and longer") is False
        assert store.put_once("a/b", b"first") is False
        assert store.get("a/b", 99) == b"first"
        assert [entry.name for entry in store.list("a")] == ["b"], "nothing is left of the losers"

    def test_put_once_has_one_winner_among_threads(self, tmp_path: Path) -> None:
        """Of any number of threads that create a name at the same moment, exactly one gets True, and the file has its bytes."""
        store = self.make(tmp_path)
        for round_ in range(20):
            won: list[int] = []
            gate = threading.Barrier(6)

            def race(me: int, won: list[int] = won, gate: threading.Barrier = gate, key: str = f"log/{round_}") -> None:
                gate.wait()
                if store.put_once(key, b"%d" % me * (me + 1)):
                    won.append(me)

            threads = [threading.Thread(target=race, args=(me,)) for me in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(won) == 1
            assert store.get(f"log/{round_}", 99) == b"%d" % won[0] * (won[0] + 1)
        assert len(list(store.list("log"))) == 20

    def test_put_once_has_one_winner_among_processes(self, tmp_path: Path) -> None:
        """Of any number of processes that create a name at the same moment, exactly one gets True."""
        if not self.across_processes:
            return
        store = self.make(tmp_path)
        rounds, processes = 25, 4
        fresh = multiprocessing.get_context("spawn")  # the libraries of some stores do not survive a fork
        with safe_spawn():
            gate, results = fresh.Barrier(processes), fresh.SimpleQueue()
            children = [
                fresh.Process(target=_create_all, args=(store, rounds, me, gate, results), daemon=True)
                for me in range(processes)
            ]
            for child in children:
                child.start()
        wins = dict(results.get() for _ in children)
        for child in children:
            child.join()
        for round_ in range(rounds):
            won = [me for me in range(processes) if wins[me][round_]]
            assert len(won) == 1, f"round {round_}: {len(won)} winners"
            assert store.get(f"log/{round_}", 9) == b"%d" % won[0]

    def test_writer_writes_by_offset(self, tmp_path: Path) -> None:
        """A writer takes its pieces in any order, and the file has exactly the size that was announced."""
        store = self.make(tmp_path)
        for size in (1, 4095, 4096, 4097, 100_000, LARGE):
            data = os.urandom(size)
            write_all(store, f"dir/{size}", data)
            assert read_all(store, f"dir/{size}") == data

    def test_writer_of_nothing(self, tmp_path: Path) -> None:
        """A file of no bytes is a file."""
        store = self.make(tmp_path)
        put(store, "dir/empty", b"")
        assert store.get("dir/empty", 0) == b""

    def test_write_never_replaces(self, tmp_path: Path) -> None:
        """``write`` of an existing name fails and does not change the file."""
        store = self.make(tmp_path)
        put(store, "dir/file", b"first")
        refuses(StoreUnavailable, lambda: store.write("dir/file", 9))
        refuses(StoreUnavailable, lambda: put(store, "dir/file", b"second"))
        assert store.get("dir/file", 99) == b"first"

    def test_abort_leaves_nothing(self, tmp_path: Path) -> None:
        """An aborted writer's file is gone, its name is free, and aborting again does nothing."""
        store = self.make(tmp_path)
        for size in (10, LARGE):
            writer: Writer = store.write("dir/file", size)
            writer.abort()
            writer.abort()
            assert list(store.list("dir")) == []
        put(store, "dir/file", b"again")
        assert store.get("dir/file", 99) == b"again"

    def test_abort_after_finish_deletes_a_new_file(self, tmp_path: Path) -> None:
        """``abort`` after ``finish`` deletes the file and frees its name, once: the caller was interrupted, or got an error although there
        is a file."""
        store = self.make(tmp_path)
        for size in (10, LARGE):
            writer = store.write("dir/file", size)
            padded = page_buffer(-(-size // writer.align) * writer.align)
            writer.write_at(0, padded)
            writer.finish()
            assert [entry.name for entry in store.list("dir")] == ["file"]
            writer.abort()
            assert list(store.list("dir")) == [], "abort after finish left the new file"
            refuses(CheckpointNotFound, lambda: store.get("dir/file", LARGE))
        put(store, "dir/file", b"again")
        writer.abort()
        assert store.get("dir/file", 99) == b"again", "a second abort deleted another file of that name"

    def test_what_is_acknowledged_is_durable(self, tmp_path: Path) -> None:
        """When ``put_once`` and ``rewrite`` return, file and name are durable. After ``finish`` the bytes are, after ``sync`` the names.

        It is checked for a store that declares durable files below ``tmp_path``. Needs strace, which records the system calls.
        """
        store = self.make(tmp_path / "files")
        properties = store.properties()
        if not (self.across_processes and properties.durable) or properties.remote:
            return
        (tmp_path / "files").mkdir(exist_ok=True)
        for operation, bytes_of, names in traced_marks(store, write_in_each_way, tmp_path / "files"):
            assert not bytes_of, f"{operation}: not fsynced after the last write: {bytes_of}"
            if operation != "finish" or not properties.needs_sync:
                assert not names, f"{operation}: new names in directories that were not fsynced: {names}"

    def test_what_was_put_can_be_settled(self, tmp_path: Path) -> None:
        """``sync`` accepts the top, a directory, and a directory of directories."""
        store = self.make(tmp_path)
        put(store, "a/b/file", b"x")
        for prefix in ("a/b", "a", ""):
            store.sync(prefix)
        assert store.get("a/b/file", 9) == b"x"

    def test_get_is_bounded(self, tmp_path: Path) -> None:
        """``get`` refuses a file longer than its limit, and takes one exactly as long."""
        store = self.make(tmp_path)
        put(store, "file", b"12345")
        assert store.get("file", 5) == b"12345"
        refuses(UnsafeContent, lambda: store.get("file", 4))

    def test_absent_files_are_not_found(self, tmp_path: Path) -> None:
        """Reading an absent file raises ``CheckpointNotFound``, also in a store that does not exist yet."""
        store = self.make(tmp_path)
        refuses(CheckpointNotFound, lambda: store.get("nothing", 9))
        refuses(CheckpointNotFound, lambda: store.open("run/nothing"))
        put(store, "run/file", b"x")
        refuses(CheckpointNotFound, lambda: store.get("run/other", 9))
        refuses(CheckpointNotFound, lambda: store.open("other/file"))

    def test_reading_past_the_end_is_corruption(self, tmp_path: Path) -> None:
        """A read past the end of the file raises ``CorruptCheckpoint``. It never pads."""
        store = self.make(tmp_path)
        put(store, "file", b"12345")
        reader: Reader = store.open("file")
        try:
            assert reader.size == 5
            middle = bytearray(3)
            reader.read_into(1, memoryview(middle))
            assert bytes(middle) == b"234"
            refuses(CorruptCheckpoint, lambda: reader.read_into(3, memoryview(bytearray(3))))
            refuses(CorruptCheckpoint, lambda: reader.read_into(99, memoryview(bytearray(1))))
        finally:
            reader.close()

    def test_fetch_gives_the_same_bytes_or_leaves_it_to_read_into(self, tmp_path: Path) -> None:
        """``fetch`` returns the written bytes at any offset, or None.

        Past the end it raises ``CorruptCheckpoint`` or returns None.
        """
        store = self.make(tmp_path)
        data = random.Random(7).randbytes((2 << 20) + 12345)
        write_all(store, "file", data)
        reader: Reader = store.open("file")
        try:
            buffer = page_buffer(len(data) + 2 * PAGE)
            for offset, length in (
                (0, len(data)),
                (0, 1),
                (1, 4095),
                (4095, 2),
                (4096, 8192),
                (100_001, 1 << 20),
                (len(data) - 1, 1),
            ):
                fetched = reader.fetch(offset, length, buffer[: length + 2 * PAGE])
                if fetched is not None and bytes(fetched) != data[offset : offset + length]:
                    raise AssertionError(f"{length} bytes from {offset} are not the written ones")
            for offset, length in ((len(data) - 1, 2), (1 << 40, 1)):
                try:
                    fetched = reader.fetch(offset, length, buffer[: length + 2 * PAGE])
                except CorruptCheckpoint:
                    continue
                if fetched is not None:
                    raise AssertionError(f"gave {len(fetched)} bytes from {offset}, past the end")
        finally:
            reader.close()

    def test_reader_survives_delete(self, tmp_path: Path) -> None:
        """An open file can be read to its end after its name is gone, and after another file got the name."""
        store = self.make(tmp_path)
        put(store, "dir/file", b"first")
        reader = store.open("dir/file")
        try:
            store.delete("dir/file")
            put(store, "dir/file", b"other")
            data = bytearray(5)
            reader.read_into(0, memoryview(data))
            assert bytes(data) == b"first"
        finally:
            reader.close()

    def test_list_gives_names_directly_below(self, tmp_path: Path) -> None:
        """``list`` yields each name directly below the prefix once, with whether it is a directory.

        An absent prefix has none.
        """
        store = self.make(tmp_path)
        assert self.top(store) == []
        assert list(store.list("run")) == []
        for key in ("top", "run/a", "run/b", "run/log/0", "run/log/1", "running/x"):
            put(store, key, b"x")
        assert self.top(store) == [("run", True), ("running", True), ("top", False)]
        assert sorted(store.list("run")) == [("a", False), ("b", False), ("log", True)]
        assert sorted(entry.name for entry in store.list("run/log")) == ["0", "1"]
        assert list(store.list("ru")) == [], "a prefix is a directory, not the beginning of a name"

    def test_delete_is_idempotent(self, tmp_path: Path) -> None:
        """Deleting an absent name succeeds. Deleting removes exactly the one name."""
        store = self.make(tmp_path)
        store.delete("nothing/at/all")
        put(store, "dir/a", b"a")
        put(store, "dir/ab", b"ab")
        store.delete("dir/a")
        store.delete("dir/a")
        assert [entry.name for entry in store.list("dir")] == ["ab"]

    def test_delete_dir_spares_what_is_not_empty(self, tmp_path: Path) -> None:
        """``delete_dir`` removes an empty directory, returns False for one that is not empty, and never removes a file."""
        store = self.make(tmp_path)
        put(store, "dir/file", b"x")
        assert store.delete_dir("dir") is False
        assert store.get("dir/file", 9) == b"x"
        store.delete("dir/file")
        assert store.delete_dir("dir") is True
        assert store.delete_dir("dir") is True
        assert self.top(store) == []

    def test_no_key_leaves_the_store(self, tmp_path: Path) -> None:
        """Every operation that would make or read a file refuses keys that are empty, climb, start at the root, or
        hold a zero byte."""
        store = self.make(tmp_path / "store")
        put(store, "a/b", b"x")
        for key in BAD_KEYS:
            for call in (
                lambda key=key: store.put_once(key, b"evil"),
                lambda key=key: store.write(key, 4),
                lambda key=key: store.get(key, 1 << 20),
                lambda key=key: store.open(key),
            ):
                refuses((UnsafeContent, CheckpointNotFound) if not key else UnsafeContent, call)
            if key:
                refuses(UnsafeContent, lambda key=key: store.delete(key))
                refuses(UnsafeContent, lambda key=key: list(store.list(key)))
                refuses(UnsafeContent, lambda key=key: store.delete_dir(key))
                with contextlib.suppress(UnsafeContent):  # a store that needs no sync refuses nothing here
                    store.sync(key)
        assert {entry.name for entry in self.top(store)} == {"a"}
        assert [path.name for path in tmp_path.iterdir() if path.name != "store"] == [], "something was made outside"

    def test_many_writers_at_once(self, tmp_path: Path) -> None:
        """Files being written at the same time, from several threads each, do not mix."""
        store = self.make(tmp_path)
        datas = {f"dir/{n}": os.urandom(200_000) for n in range(4)}
        threads = [threading.Thread(target=write_all, args=(store, key, data, 65536)) for key, data in datas.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {key: read_all(store, key) for key in datas} == datas

    def test_properties_and_room(self, tmp_path: Path) -> None:
        """A store reports its guarantees and its free bytes (None if unknown), also before it exists."""
        store = self.make(tmp_path)
        properties = store.properties()
        assert store.verify_exclusive_create() is properties.exclusive_create
        assert properties.parallel_reads >= 1 and properties.lanes >= 1
        assert properties.shared or not (self.across_processes or properties.remote)
        for _ in range(2):
            assert store.properties() == properties
            free_bytes = store.free_bytes()
            assert free_bytes is None or free_bytes > 0
            put(store, f"file{_}", b"x")
        assert store.url and not (properties.remote and os.path.exists(store.url))

    def test_a_shared_store_shows_its_files_to_other_processes(self, tmp_path: Path) -> None:
        """Another process lists and reads what this one has created: at once, or after ``sync`` if names need it."""
        store = self.make(tmp_path)
        if not self.across_processes:
            return
        assert store.put_once("dir/created", b"1")
        put(store, "dir/written", b"2")
        if store.properties().needs_sync:
            store.sync("dir")
        fresh = multiprocessing.get_context("spawn")
        with safe_spawn():
            results = fresh.SimpleQueue()
            child = fresh.Process(target=_read_directory, args=(store, "dir", results), daemon=True)
            child.start()
        child.join()
        assert child.exitcode == 0, "the process that reads has failed"
        assert results.get() == ({"created": b"1", "written": b"2"}, store.properties())

    def test_lanes_are_written_and_ranges_read_in_parallel(self, tmp_path: Path) -> None:
        """The store takes as many writers and readers at once as it declares."""
        store, data = self.make(tmp_path), os.urandom(LARGE)
        with ThreadPool(store.properties().lanes, "suite") as pool:
            list(pool.map(lambda lane: write_all(store, f"dir/{lane}", data), range(store.properties().lanes)))
        reader, at_once = store.open("dir/0"), store.properties().parallel_reads
        step = -(-len(data) // at_once)

        def read(start: int) -> bytes:
            into = bytearray(min(step, len(data) - start))
            reader.read_into(start, memoryview(into))
            return bytes(into)

        try:
            with ThreadPool(at_once, "suite") as pool:
                assert b"".join(pool.map(read, range(0, len(data), step))) == data
        finally:
            reader.close()

    def test_what_wraps_a_store_does_what_it_declares(self, tmp_path: Path) -> None:
        """A wrapper that declares encryption stores no plaintext; one that declares signatures refuses unsigned records."""
        store = self.make(tmp_path)
        inner, properties = unwrap(store), store.properties()
        if inner is store:
            return
        data = os.urandom(5000)
        put(store, "run/file", data)
        assert (data not in read_all(inner, "run/file")) is properties.encrypted
        record = f"run/{LOG_DIR}/{record_file(0)}"
        if properties.signed:
            assert inner.put_once(record, b"{}")
            refuses(CorruptCheckpoint, lambda: store.get(record, 99))

    def test_rewrite_replaces_a_file_as_a_whole(self, tmp_path: Path) -> None:
        """If files can be replaced, the old file is there until ``finish``, and then the new one. ``abort`` deletes neither."""
        store = self.make(tmp_path)
        if not isinstance(unwrap(store), Rewrites):
            refuses(StoreUnavailable, lambda: rewrites(store).rewrite("dir/file", 4))
            return
        put(store, "dir/file", b"old")
        writer = rewrites(store).rewrite("dir/file", 4)
        writer.abort()
        assert store.get("dir/file", 9) == b"old"
        writer = rewrites(store).rewrite("dir/file", 4)
        write_whole(writer, b"same")
        assert store.get("dir/file", 9) == b"same"
        writer.abort()  # after finish: the caller was interrupted
        assert [entry.name for entry in store.list("dir")] == ["file"], "abort after finish deleted the replaced file"
        assert store.get("dir/file", 9) == b"same"
        assert [entry.name for entry in store.list("dir")] == ["file"]

    def test_a_cache_has_no_other_files(self, tmp_path: Path) -> None:
        """Without its local cache, and after an invalidation, a store has the same files."""
        store, data = self.make(tmp_path), os.urandom(5000)
        put(store, "dir/file", data)
        assert store.get("dir/file", 5000) == data
        bare = without_cache(store)
        assert (bare.get("dir/file", 5000), bare.properties(), bare.url) == (data, store.properties(), store.url)
        invalidate_cache(store, "dir/file", 10, 20)
        assert store.get("dir/file", 5000) == data

    def test_lack_of_space_is_reported_before_anything_is_written(self, tmp_path: Path) -> None:
        """A writer for a file larger than any disk raises ``NoSpace`` (or ``StoreUnavailable``) at once, and leaves no name."""
        store = self.make(tmp_path)
        if store.free_bytes() is None:
            return
        # Above the largest size of a file. Slightly more than the free bytes would fill the disk for other processes
        # first.
        refuses((NoSpace, StoreUnavailable), lambda: store.write("dir/huge", 1 << 52))
        assert list(store.list("dir")) == []
