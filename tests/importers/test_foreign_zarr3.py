"""Reading zarr 3 arrays that tensorstore wrote: their elements, and the features that are refused."""

from __future__ import annotations

import json
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_state import GOLDEN

from relight.errors import CorruptCheckpoint, IncompatibleState, RelightError, UnsafeContent
from relight.importers import value_cache
from relight.importers.files import SLAB_BYTES, Files
from relight.importers.zarr3 import crc32c, read_zarr3

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ARRAYS = GOLDEN / "orb" / "zarr3"


def numbers(folder: Path, name: str) -> np.ndarray:
    """Return all elements of an array, read through its source in pieces that are not rows."""
    array = read_zarr3(Files(folder), name)
    source, room = array.source(), bytearray(280)
    assert (array.dtype, array.shape, source.length) == ("float32", (10, 7), 280)
    for start in range(0, 280, 36):
        source.fill(start, memoryview(room)[start : start + 36])
    return np.frombuffer(room, "<f4").reshape(10, 7)


@pytest.mark.parametrize("name", ["plain", "packed", "shards", "shards_first"])
def test_as_tensorstore_wrote_them(name: str) -> None:
    """Chunks in files or in shards are read, for each position of the index. Chunks at the edge exceed the array."""
    assert np.array_equal(numbers(ARRAYS, name), np.arange(70, dtype="f4").reshape(10, 7))


def test_the_checksum() -> None:
    """The checksum fits the examples of RFC 3720, and the usual one."""
    assert crc32c(bytes(32)) == 0x8A9136AA and crc32c(b"\xff" * 32) == 0x62A8AB43 and crc32c(b"123456789") == 0xE3069283


def changed(tmp_path: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """Make a copy of an array with changed metadata, and return its folder."""
    shutil.copytree(ARRAYS / name, tmp_path / name)
    metadata = json.loads((tmp_path / name / "zarr.json").read_text())
    change(metadata)
    (tmp_path / name / "zarr.json").write_text(json.dumps(metadata))
    return tmp_path


def shard(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the shards' part of the metadata."""
    configuration: dict[str, Any] = metadata["codecs"][0]["configuration"]
    return configuration


REFUSED: dict[str, tuple[type[RelightError], str, Callable[[dict[str, Any]], object]]] = {
    "a group": (IncompatibleState, "other than an array", lambda metadata: metadata.update(node_type="group")),
    "a dtype": (IncompatibleState, "dtype", lambda metadata: metadata.update(data_type="r24")),
    "a codec": (IncompatibleState, "blosc", lambda metadata: shard(metadata)["codecs"].append({"name": "blosc"})),
    "byte order": (
        IncompatibleState,
        "byte order",
        lambda metadata: shard(metadata)["codecs"][0]["configuration"].update(endian="big"),
    ),
    "order of the index": (
        IncompatibleState,
        "byte order",
        lambda metadata: shard(metadata)["index_codecs"][0]["configuration"].update(endian="big"),
    ),
    "another index": (
        IncompatibleState,
        "index",
        lambda metadata: shard(metadata).update(index_codecs=[{"name": "gzip"}]),
    ),
    "shards in shards": (
        IncompatibleState,
        "shards in shards",
        lambda metadata: shard(metadata).update(codecs=json.loads(json.dumps(metadata["codecs"]))),
    ),
    "a grid": (IncompatibleState, "several shapes", lambda metadata: metadata["chunk_grid"].update(name="rectangular")),
    "names": (IncompatibleState, "names", lambda metadata: metadata["chunk_key_encoding"].update(name="hilbert")),
    "chunks that do not fill it": (UnsafeContent, "fill", lambda metadata: shard(metadata).update(chunk_shape=[4, 4])),
    "chunks of nothing": (UnsafeContent, "fill", lambda metadata: shard(metadata).update(chunk_shape=[0, 4])),
    "dimensions": (UnsafeContent, "dimensions", lambda metadata: metadata.update(shape=[10, 7, 1])),
    "a shape": (UnsafeContent, "shape", lambda metadata: metadata.update(shape=[-1, 7])),
    "many chunks": (UnsafeContent, "chunks", lambda metadata: metadata.update(shape=[2**40, 7])),
    "no codecs": (IncompatibleState, "none", lambda metadata: metadata.update(codecs=7)),
    "an invalid codec": (UnsafeContent, "not metadata of zarr 3", lambda metadata: metadata.update(codecs=[7])),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_unsupported_metadata_is_refused(what: str, tmp_path: Path) -> None:
    """An unsupported feature is refused by name, and absurd values before memory is allocated for them."""
    kind, words, change = REFUSED[what]
    with pytest.raises(kind, match=words):
        numbers(changed(tmp_path, "shards", change), "shards")


def test_a_transposed_one_is_refused() -> None:
    """A transposed array is refused, and the error names the codec."""
    with pytest.raises(IncompatibleState, match="transpose"):
        numbers(ARRAYS, "turned")


@pytest.mark.parametrize("name", ["plain", "packed", "shards"])
def test_damage_is_noticed_where_there_is_a_way_to(name: str, tmp_path: Path) -> None:
    """A missing or cut chunk file, and a flipped bit in an index, are detected."""
    shutil.copytree(ARRAYS, tmp_path / "a")
    file = tmp_path / "a" / name / "c" / "1" / "0"
    data = file.read_bytes()
    for wrong in (data[:-3], b"", data[:-1] + bytes([data[-1] ^ 1]) if name == "shards" else data[:-1]):
        file.write_bytes(wrong)
        with pytest.raises(CorruptCheckpoint):
            numbers(tmp_path / "a", name)
    file.unlink()
    with pytest.raises(CorruptCheckpoint, match="missing"):
        numbers(tmp_path / "a", name)


def test_a_chunk_that_was_never_written_is_reported(tmp_path: Path) -> None:
    """An index that lacks a chunk, or states a chunk beyond the file or of excessive size, is refused."""
    shutil.copytree(ARRAYS / "shards_first", tmp_path / "one")
    file = tmp_path / "one" / "c" / "0" / "0"
    data = bytearray(file.read_bytes())
    for wrong, words in (
        (b"\xff" * 16, "without one of its chunks"),
        (bytes(8) + b"\xff" * 6 + bytes(2), "without one of its chunks"),
    ):
        file.write_bytes(wrong + data[16:])
        with pytest.raises(CorruptCheckpoint, match=words):
            numbers(tmp_path, "one")
    file.write_bytes(bytes(8) + (200_000).to_bytes(8, "little") + data[16:] + bytes(300_000))
    with pytest.raises(UnsafeContent, match="at most"):
        numbers(tmp_path, "one")


def compressed(length: int, window_log: int = 20) -> bytes:
    """Return one zstd frame of that many zeros, made piece by piece."""
    coder = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: window_log})
    pieces = [coder.compress(bytes(1 << 20)) for _ in range(length >> 20)]
    return b"".join([*pieces, coder.compress(bytes(length % (1 << 20))), coder.flush()])


def large(tmp_path: Path, shape: list[int], chunk: list[int], coded: bytes) -> Path:
    """Return the folder of an array ``packed``. ``coded`` is its only chunk, of that shape."""
    folder = changed(
        tmp_path,
        "packed",
        lambda metadata: (
            metadata.update(shape=shape) or metadata["chunk_grid"]["configuration"].update(chunk_shape=chunk)
        ),
    )
    for path in (folder / "packed" / "c").rglob("*"):
        if path.is_file():
            path.unlink()
    (folder / "packed" / "c" / "0").mkdir(parents=True, exist_ok=True)
    (folder / "packed" / "c" / "0" / "0").write_bytes(coded)
    return folder


@pytest.mark.parametrize("rows", [1 << 14, (1 << 14) - 5])
def test_a_small_chunk_that_decodes_to_much_costs_little_memory(tmp_path: Path, rows: int) -> None:
    """A chunk of a few kB that decodes to 256 MiB is read within two slabs of memory, cut at the array's edge or not."""
    coded = compressed(1 << 28)
    assert len(coded) < 1 << 15
    source = read_zarr3(Files(large(tmp_path, [rows, 1 << 12], [1 << 14, 1 << 12], coded)), "packed").source()
    room = bytearray(1 << 16)
    tracemalloc.start()
    try:
        for start in (0, source.length // 2, source.length - len(room)):
            source.fill(start, memoryview(room))
            assert not any(room)
        assert tracemalloc.get_traced_memory()[1] < 2 * SLAB_BYTES
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded chunks and indexes of all arrays share one limit, also those of a subfolder."""
    monkeypatch.setattr(value_cache, "CACHE_BYTES", 3 << 20)
    folder = large(tmp_path, [1 << 10, 1 << 10], [1 << 10, 1 << 10], compressed(1 << 22))
    for number in range(16):
        shutil.copytree(folder / "packed", folder / "below" / f"a{number}")
    files = Files(folder)
    below = files.below("below")
    arrays = [read_zarr3(below, f"a{number}").source() for number in range(16)]
    tracemalloc.start()
    try:
        for source in arrays:
            source.fill(0, memoryview(bytearray(1 << 16)))
        assert tracemalloc.get_traced_memory()[0] < 2 * (1 << 22)
    finally:
        tracemalloc.stop()
    assert below.cache is files.cache and len(files.cache._values) == 1


def test_a_large_chunk_gives_the_elements_that_are_in_the_array(tmp_path: Path) -> None:
    """A chunk beyond a slab, decoded through a file, and cut at the array's edge, has the right elements in each stretch."""
    whole = np.arange(3000 * 2000, dtype="<f4").reshape(3000, 2000)
    folder = large(tmp_path, [2900, 1990], [3000, 2000], zstd.compress(whole.tobytes()))
    source = read_zarr3(Files(folder), "packed").source()
    room = bytearray(source.length)
    for start in range(0, source.length, 1_000_000):
        source.fill(start, memoryview(room)[start : start + 1_000_000])
    assert np.array_equal(np.frombuffer(room, "<f4").reshape(2900, 1990), whole[:2900, :1990])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("longer", "more than"), ("shorter", "instead of"), ("cut", "instead of"), ("window", "cannot be unpacked")],
)
def test_a_large_chunk_of_wrong_length_is_refused(tmp_path: Path, wrong: str, words: str) -> None:
    """A chunk with too many or too few bytes, a cut frame, or a window beyond the limit is refused."""
    size = 3000 * 2000 * 4
    coded = {
        "longer": lambda: compressed(size + 1),
        "shorter": lambda: compressed(size - 1),
        "cut": lambda: compressed(size)[:-8],
        "window": lambda: compressed(size, window_log=27),
    }[wrong]()
    source = read_zarr3(Files(large(tmp_path, [3000, 2000], [3000, 2000], coded)), "packed").source()
    with pytest.raises(CorruptCheckpoint, match=words):
        source.fill(0, memoryview(bytearray(400)))
