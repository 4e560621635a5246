"""Bounds on bytes a second: what a store's writers and readers keep, and what all processes of a node keep together."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from relight.comm.node_pace import NodePace
from relight.store import LocalStore, page_buffer, put
from relight.store.paced import PacedStore, paced

MB = 1_000_000


def name() -> str:
    """A purpose that no other test has."""
    return f"test {os.getpid()} {time.monotonic_ns()}"


def test_writers_of_one_purpose_share_a_bound(tmp_path: Path) -> None:
    """Two stores of two ranks write 2 MB each at 8 MB/s together: that takes as long as one rank's 4 MB."""
    purpose, data = name(), bytes(2 * MB)
    stores = [paced(LocalStore(str(tmp_path / str(rank))), purpose, 8 * MB, None) for rank in range(2)]
    threads = [threading.Thread(target=put, args=(store, "run/file", data)) for store in stores]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.38 < time.monotonic() - began < 10
    assert stores[1].get("run/file", 4 * MB) == data


def test_forked_processes_share_a_bound(tmp_path: Path) -> None:
    """A bound holds for processes that share nothing but the node."""
    purpose = name()
    began = time.monotonic()
    children = []
    for _ in range(2):
        pid = os.fork()
        if not pid:
            pace = NodePace(5 * MB, purpose)
            for _ in range(4):
                pace.spend(MB // 4)
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    assert time.monotonic() - began > 0.34


def test_a_bound_is_kept_without_a_private_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no file can be shared, each process keeps the bound by itself."""

    def refused() -> None:
        raise PermissionError("no directory")

    monkeypatch.setattr("relight.comm.node_pace.LocalDirectory", refused)
    pace, began = NodePace(10 * MB, name()), time.monotonic()
    for _ in range(4):
        pace.spend(MB)
    assert 0.28 < time.monotonic() - began < 10


def test_a_damaged_file_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time far in the future, as a damaged file or another boot leaves, is not waited for."""
    pace = NodePace(MB, name())
    assert pace._fd is not None
    os.pwrite(pace._fd, b"\xff" * 8, pace._at)
    began = time.monotonic()
    pace.spend(10)
    assert time.monotonic() - began < 10


def test_reads_are_bounded_whatever_the_way(tmp_path: Path) -> None:
    """A whole file, a range into memory and a read past the page cache each take the time that the bound asks for."""
    store = LocalStore(str(tmp_path))
    put(store, "run/file", bytes(MB))
    slow = paced(store, name(), None, 4 * MB)
    assert isinstance(slow, PacedStore)
    began = time.monotonic()
    slow.get("run/file", 2 * MB)
    reader = slow.open("run/file")
    reader.read_into(0, memoryview(bytearray(MB)))
    room = page_buffer(MB // 4096 * 4096 + 3 * 4096)
    if reader.fetch(0, MB, room) is None:
        reader.read_into(0, room[:MB])
    reader.close()
    assert time.monotonic() - began > 0.45


def test_one_read_of_a_large_range_takes_its_time(tmp_path: Path) -> None:
    """A range that is read at once takes the time that the bound asks for, also if no other read follows."""
    store = LocalStore(str(tmp_path))
    put(store, "run/file", bytes(MB))
    began = time.monotonic()
    paced(store, name(), None, 4 * MB).get("run/file", 2 * MB)
    assert time.monotonic() - began > 0.24


def test_small_files_and_unbounded_stores_are_left_alone(tmp_path: Path) -> None:
    """Records and roots are written at once. Without a bound the store is returned unchanged."""
    store = LocalStore(str(tmp_path))
    assert paced(store, name(), None, None) is store
    slow, began = paced(store, name(), 1000, None), time.monotonic()
    put(slow, "run/small", bytes(4000))
    assert slow.put_once("run/record", b"x") and time.monotonic() - began < 3.5
