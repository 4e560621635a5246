"""The shipped conformance suite, run by every store there is."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.store import ByteStore, LocalStore, MemoryStore
from relight.testing.disks import ShortDisk, SimulatedDisk
from relight.testing.store_suite import StoreSuite


class TestLocal(StoreSuite):
    def make(self, tmp_path: Path) -> ByteStore:
        return LocalStore(tmp_path)


class TestLocalBuffered(StoreSuite):
    def make(self, tmp_path: Path) -> ByteStore:
        return LocalStore(tmp_path / "not" / "there" / "yet", direct=False)


class TestLocalInMemory(StoreSuite):
    """On tmpfs, which behaves differently about direct I/O and room."""

    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        if not os.path.isdir("/dev/shm"):
            pytest.skip("no tmpfs here")
        path = tempfile.mkdtemp(dir="/dev/shm")
        yield Path(path)
        shutil.rmtree(path)

    def make(self, tmp_path: Path) -> ByteStore:
        return LocalStore(tmp_path / "store")


class TestLocalShort(StoreSuite):
    """Reads and writes that do a little at a time."""

    def make(self, tmp_path: Path) -> ByteStore:
        return LocalStore(tmp_path, disk=ShortDisk(997), direct=False)


class TestSimulated(StoreSuite):
    across_processes = False

    def make(self, tmp_path: Path) -> ByteStore:
        return LocalStore("/store", disk=SimulatedDisk())

    def test_no_room_is_said_before_anything_is_written(self, tmp_path: Path) -> None:
        """The simulated disk has room for everything."""


class TestMemory(StoreSuite):
    across_processes = False

    def make(self, tmp_path: Path) -> ByteStore:
        return MemoryStore()
