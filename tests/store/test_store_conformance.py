"""The shipped conformance suite, run by every store there is."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relight.store import ByteStore, Disk, LocalStore, MemoryStore, Properties, put
from relight.store.wrapper import StoreWrapper
from relight.testing.disks import ShortDisk, SimulatedDisk
from relight.testing.store_suite import StoreSuite


class TestLocal(StoreSuite):
    def make(self, tmp_path: Path) -> ByteStore:
        return LocalStore(tmp_path)


class TestLocalBuffered(StoreSuite):
    def make(self, tmp_path: Path) -> ByteStore:
        return LocalStore(tmp_path / "not" / "there" / "yet", direct=False)


class TestLocalInMemory(StoreSuite):
    """The suite on tmpfs, which differs in direct I/O and free space."""

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

    def test_lack_of_space_is_reported_before_anything_is_written(self, tmp_path: Path) -> None:
        """The simulated disk has room for everything."""


class TestMemory(StoreSuite):
    across_processes = False

    def make(self, tmp_path: Path) -> ByteStore:
        return MemoryStore()


class Claims(StoreWrapper):
    """A store that declares other properties than those of ``inner``."""

    def __init__(self, inner: ByteStore, **claims: Any) -> None:
        super().__init__(inner)
        self._claims = claims

    def properties(self) -> Properties:
        return replace(super().properties(), **self._claims)


@pytest.mark.parametrize(
    "claims",
    [
        {"encrypted": True},
        {"signed": True},
        {"remote": True},
        {"exclusive_create": False},
        {"shared": False},
        {"lanes": 0},
    ],
    ids=str,
)
def test_the_suite_refutes_a_false_property(tmp_path: Path, claims: dict[str, Any]) -> None:
    """For each property that a store declares wrongly, a test of the suite fails."""

    class Suite(StoreSuite):
        def make(self, tmp_path: Path) -> ByteStore:
            return Claims(LocalStore(tmp_path), **claims)

    suite = Suite()
    checks = (suite.test_properties_and_room, suite.test_what_wraps_a_store_does_what_it_declares)
    with pytest.raises(AssertionError):
        for number, check in enumerate(checks):
            check(tmp_path / f"{number}")


def test_a_directory_that_is_deleted_while_a_file_is_made_in_it(tmp_path: Path) -> None:
    """Another process may delete an empty directory just before a write into it: it is created again."""

    class Racing(Disk):
        deleted = 0

        def open_new(self, path: str, *, direct: bool = False) -> int:
            if self.deleted < 3:
                self.deleted += 1
                os.rmdir(os.path.dirname(path))
            return super().open_new(path, direct=direct)

    for make in (lambda store: put(store, "run/ready/a", b"1"), lambda store: store.put_once("run/ready/a", b"1")):
        disk = Racing()
        store = LocalStore(tmp_path / str(id(make)), disk=disk)
        make(store)
        assert disk.deleted == 3
        assert store.get("run/ready/a", 9) == b"1"
