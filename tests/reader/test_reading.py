"""How tensors are read: around or through the page cache, how often, and with which result after an error."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.descriptors import new_descriptors, new_threads, open_descriptors

from relight.catalog import Run, candidates
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import CorruptCheckpoint, StoreUnavailable
from relight.format import encode_tree
from relight.layout import Bytes, Item
from relight.reader import chunk_reader as read
from relight.reader import read_tensors
from relight.reader.chunk_reader import cpu_threads
from relight.reader.opened import Opened
from relight.store import Disk, LocalStore
from relight.testing.disks import CountingDisk, ShortDisk

SIZES = [3, 70_001, (9 << 20) + 5, 64, *[4099] * 300, 2 << 20, (5 << 20) + 1]


def tensors() -> list[bytes]:
    """Large ones, small ones, odd ones: 18 MB."""
    chance = random.Random(3)
    return [chance.randbytes(size) for size in SIZES]


class Made(NamedTuple):
    root: Path
    pack: Path
    values: list[bytes]

    def opened(self, disk: Disk | None = None) -> Opened:
        run = Run(LocalStore(self.root, disk=disk), "r")
        return run.open(candidates(run.history())[0])


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A checkpoint, nothing of it in the page cache."""
    values = tensors()
    items = [Item(f"t/{i}", "uint8", (len(value),), "param", Bytes(value)) for i, value in enumerate(values)]
    attempt = Attempt.begin(LocalStore(tmp_path), "r")
    attempt.save(SaveRequest(SaveInfo(step=1), items=items, tree=encode_tree({"t": []})))
    pack = next(tmp_path.glob("r/*/pack-*"))
    forget(pack)
    return Made(tmp_path, pack, values)


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cached(path: Path) -> int:
    """Pages of a file in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return sum(Disk().resident(fd, 0, path.stat().st_size))
    finally:
        os.close(fd)


def direct_io(path: Path) -> bool:
    """Whether the file system has it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.close(Disk().reopen_direct(fd))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def read_all(opened: Opened) -> list[bytes]:
    buffers = [bytearray(tensor.length) for tensor in opened.parts[0].tensors]
    read_tensors(opened, opened.parts[0], {index: Bytes(buffer) for index, buffer in enumerate(buffers)})
    by_name = {tensor.name: bytes(buffer) for tensor, buffer in zip(opened.parts[0].tensors, buffers, strict=True)}
    return [by_name[f"t/{i}"] for i in range(len(buffers))]


class KnowsStraight(Disk):
    """Knows which descriptors read past the page cache."""

    straight: set[int]

    def reopen_direct(self, fd: int) -> int:
        """Remembers which descriptor that is."""
        again = super().reopen_direct(fd)
        self.straight.add(again)
        return again


class Bytesize(KnowsStraight, CountingDisk):
    """Counts what is read of the pack, and past what."""

    def __init__(self) -> None:
        super().__init__()
        self.direct, self.through, self.straight = 0, 0, set()

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Counts."""
        got = super().preadv(fd, into, offset)
        if fd in self.straight:
            self.direct += got
        elif "pack-" in self._open.get(fd, ("", 0))[0]:
            self.through += got
        return got


def test_uncached_bytes_are_read_directly_and_once(made: Made) -> None:
    """A restore leaves the page cache to others. It reads the file once, except for pages that two reads share."""
    if not direct_io(made.pack):
        pytest.skip("no direct I/O on this file system")
    disk = Bytesize()
    assert read_all(made.opened(disk)) == made.values
    size = made.pack.stat().st_size
    assert disk.through == 0
    assert size - 200_000 < disk.direct < size + 2 * 4096 * (size / read.READ_BYTES * 2 + 4)
    assert cached(made.pack) == 0


def test_cached_bytes_are_read_from_the_cache(made: Made) -> None:
    """Bytes in the page cache are not read from the device."""
    made.pack.read_bytes()
    if cached(made.pack) < made.pack.stat().st_size // 4096:
        pytest.skip("the system did not cache it")
    disk = Bytesize()
    assert read_all(made.opened(disk)) == made.values
    assert disk.direct == 0
    assert disk.through <= made.pack.stat().st_size


def test_half_cached(made: Made) -> None:
    """Each run of chunks is taken from where it is."""
    with open(made.pack, "rb") as file:
        file.read(6 << 20)
    assert read_all(made.opened()) == made.values


@pytest.mark.parametrize("most", [1_000_003, 4096 * 7, 4096 * 7 + 1])
def test_short_direct_reads(made: Made, most: int) -> None:
    """Direct reads may give less than was asked for, in whole pages or not."""
    assert read_all(made.opened(ShortDisk(most))) == made.values


class Picky(KnowsStraight):
    """A device on which direct reads fail."""

    def __init__(self, code: int, after: int = 0) -> None:
        self._code, self._left, self.straight = code, after, set()

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Fails after a while."""
        if fd in self.straight:
            self._left -= 1
            if self._left < 0:
                raise OSError(self._code, os.strerror(self._code))
        return super().preadv(fd, into, offset)


def test_a_device_that_wants_another_alignment(made: Made) -> None:
    """EINVAL from a direct read: through the cache, then."""
    assert read_all(made.opened(Picky(errno.EINVAL))) == made.values


class NoDirect(Disk):
    """A file system without direct I/O, a system without /proc or mincore."""

    def reopen_direct(self, fd: int) -> int:
        """Refuses."""
        raise OSError(errno.EINVAL, "no direct I/O")


class NoMincore(Disk):
    """A system without ``mincore(2)``, which reports what is cached."""

    def resident(self, fd: int, offset: int, length: int) -> bytes:
        """Refuses."""
        raise OSError(errno.ENOSYS, "no mincore")


@pytest.mark.parametrize("disk", [NoDirect(), NoMincore()], ids=["no direct I/O", "no mincore"])
def test_systems_without_optional_calls(made: Made, disk: Disk) -> None:
    """Without optional system calls a read may be slower, and is correct."""
    assert read_all(made.opened(disk)) == made.values


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_error_in_the_middle_ends_the_reading(made: Made, after: int) -> None:
    """EIO at the n-th read is reported as such, and no thread or descriptor leaks."""
    if not direct_io(made.pack):
        pytest.skip("no direct I/O on this file system")
    threads, descriptors = threading.enumerate(), open_descriptors()
    opened = made.opened(Picky(errno.EIO, after))
    with pytest.raises(StoreUnavailable, match="EIO"):
        read_all(opened)
    assert not new_threads(threads, "relight-")
    assert not new_descriptors(descriptors)


@pytest.mark.parametrize("place", [0.02, 0.3, 0.5, 0.9, 0.9999])
def test_damage_in_the_middle_is_named_and_ends_the_reading(made: Made, place: float) -> None:
    """For one flipped bit anywhere, the chunk and its tensors are reported, and no thread leaks."""
    threads = threading.enumerate()
    offset = int(made.pack.stat().st_size * place)
    with open(made.pack, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    forget(made.pack)
    with pytest.raises(CorruptCheckpoint, match="is not what was committed; it holds t/"):
        read_all(made.opened())
    assert not new_threads(threads, "relight-")


def test_only_what_is_asked_for_is_read(made: Made) -> None:
    """To read one tensor of many, only its chunks are read."""
    disk = Bytesize()
    opened = made.opened(disk)
    part = opened.parts[0]
    index = next(i for i, tensor in enumerate(part.tensors) if tensor.length == 2 << 20)
    buffer = bytearray(2 << 20)
    read_tensors(opened, part, {index: Bytes(buffer)})
    assert bytes(buffer) in made.values
    assert disk.direct + disk.through <= (2 << 20) + 4 * 4096


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"),
    [
        (1, None, 2),
        (2, None, 2),
        (16, None, 8),
        (64, "8", 4),
        (64, "1", 8),
        (12, "2", 3),
        (8, "x", 4),
        (8, "0", 4),
        (8, "-3", 4),
    ],
)
def test_threads_follow_the_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: str | None, threads: int
) -> None:
    """Half of a rank's share, from two to eight. A launcher's odd number counts as none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cpu_threads() == threads
