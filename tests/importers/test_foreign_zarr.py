"""Reading zarr arrays and OCDBT by tensorstore: their elements, damage, and limits on what a damaged file may cost."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
from foreign_state import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

from relight.errors import CorruptCheckpoint, IncompatibleState, RelightError, UnsafeContent, extra_hint
from relight.importers import detect, import_checkpoint
from relight.importers.files import Files
from relight.importers.zarr import ZarrReader, kvstore_of
from relight.store import open_bytes
from relight.zarr_process import boxes_of

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ARRAYS = GOLDEN / "orb" / "zarr3"
ORDER = {"name": "bytes", "configuration": {"endian": "little"}}


def source_of(folder: Path, name: str, *, fill: bool = False, driver: str = "zarr3") -> Any:
    """Return the source of an array's elements."""
    store = kvstore_of(Files(folder), name)
    spec = {"driver": driver, "kvstore": store, "fill_missing_data_reads": fill, "recheck_cached_data": "open"}
    return ZarrReader().array(spec, str(folder / name)).source()


def numbers(folder: Path, name: str, **options: Any) -> np.ndarray:
    """Return all elements of an array, read through its source in pieces that are not rows."""
    source, buffer = source_of(folder, name, **options), bytearray(280)
    assert source.length == 280
    for start in range(0, 280, 36):
        source.fill(start, memoryview(buffer)[start : start + 36])
    return np.frombuffer(buffer, "<f4").reshape(10, 7)


@pytest.mark.parametrize("name", ["plain", "packed", "shards", "shards_first", "turned"])
def test_stored_arrays(name: str) -> None:
    """Chunks in files or in shards are read, transposed or not. Chunks at the edge exceed the array."""
    assert np.array_equal(numbers(ARRAYS, name), np.arange(70, dtype="f4").reshape(10, 7))


CODECS: dict[str, list[dict[str, Any]]] = {
    "gzip": [ORDER, {"name": "gzip", "configuration": {"level": 6}}],
    "blosc": [
        ORDER,
        {
            "name": "blosc",
            "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4, "blocksize": 0},
        },
    ],
    "crc32c": [ORDER, {"name": "crc32c"}],
    "big endian": [{"name": "bytes", "configuration": {"endian": "big"}}],
    "shards in shards": [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [6, 4],
                "codecs": [
                    {"name": "sharding_indexed", "configuration": {"chunk_shape": [2, 4], "codecs": [ORDER]}},
                ],
            },
        }
    ],
}


def write(folder: Path, driver: str, metadata: dict[str, Any], values: np.ndarray, **options: Any) -> None:
    """Write an array with tensorstore."""
    spec = {"driver": driver, "kvstore": f"file://{folder}/", "metadata": metadata, **options}
    tensorstore.open(spec, create=True).result()[...] = values


def write_zarr3(folder: Path, codecs: list[dict[str, Any]], chunk: tuple[int, int] = (6, 4), **options: Any) -> None:
    """Write the numbers 0 to 69 as an array of zarr 3."""
    metadata = {
        "shape": [10, 7],
        "data_type": "float32",
        "codecs": codecs,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
    }
    write(folder, "zarr3", metadata, np.arange(70, dtype="f4").reshape(10, 7), **options)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_other_codecs(name: str, tmp_path: Path) -> None:
    """Each codec of tensorstore is read."""
    write_zarr3(tmp_path / "one", CODECS[name], (12, 8) if "shards" in name else (6, 4))
    assert np.array_equal(numbers(tmp_path, "one"), np.arange(70, dtype="f4").reshape(10, 7))


@pytest.mark.parametrize(
    "compressor", [None, {"id": "zlib", "level": 1}, {"id": "blosc", "cname": "lz4"}, {"id": "bz2"}]
)
def test_codecs_of_zarr2(compressor: Any, tmp_path: Path) -> None:
    """Arrays of zarr 2 are read with each of its compressors, and in column-major order."""
    metadata = {"shape": [10, 7], "chunks": [4, 4], "dtype": "<f4", "compressor": compressor, "order": "F"}
    write(tmp_path / "one", "zarr", metadata, np.arange(70, dtype="f4").reshape(10, 7))
    assert np.array_equal(numbers(tmp_path, "one", driver="zarr"), np.arange(70, dtype="f4").reshape(10, 7))


def test_a_chunk_that_was_left_out_has_the_fill_value(tmp_path: Path) -> None:
    """A chunk that equals the fill value may be left out, if the writer is known to do that. Otherwise it is missing."""
    write(
        tmp_path / "one",
        "zarr3",
        {"shape": [10, 7], "data_type": "float32", "codecs": [ORDER], "fill_value": 3.0},
        np.full((10, 7), 3.0, "f4"),
    )
    assert [path.name for path in (tmp_path / "one").rglob("*") if path.is_file()] == ["zarr.json"]
    assert np.array_equal(numbers(tmp_path, "one", fill=True), np.full((10, 7), 3.0, "f4"))
    with pytest.raises(CorruptCheckpoint, match="missing"):
        numbers(tmp_path, "one")


def orbax(folder: Path, *, complete: bool) -> Path:
    """Return a copy of an Orbax checkpoint that lacks one chunk, written by an Orbax that leaves out chunks or not."""
    shutil.copytree(GOLDEN / "orb" / "files3", folder)
    (folder / "params.dense.bias" / "c" / "0").unlink()
    metadata = json.loads((folder / "_METADATA").read_text())
    assert metadata["store_array_data_equal_to_fill_value"] is True
    if not complete:
        del metadata["store_array_data_equal_to_fill_value"]
        (folder / "_METADATA").write_text(json.dumps(metadata))
    return folder


def test_a_missing_chunk_of_orbax(tmp_path: Path) -> None:
    """Since November 2024, Orbax writes each chunk and records that: a missing one is damage. Before, it is zeros."""
    with pytest.raises(CorruptCheckpoint, match="missing"):
        import_checkpoint(detect(orbax(tmp_path / "new", complete=True)), open_bytes(str(tmp_path / "store")), "run")
    detected = detect(orbax(tmp_path / "old", complete=False))
    assert any("leaves out chunks of zeros" in note for note in detected.notes)
    bias = detected.content.components["params"].node["dense.bias"].source()
    buffer = bytearray(b"x" * bias.length)
    bias.fill(0, memoryview(buffer))
    assert not any(buffer)


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(0, 700), st.integers(0, 700))
def test_boxes(shape: list[int], first: int, last: int) -> None:
    """The boxes of a range of elements have these elements, in order."""
    size = math.prod(shape)
    first, last = sorted((min(first, size), min(last, size)))
    whole = np.arange(size).reshape(shape)
    if first < last:
        parts = [whole[box].reshape(-1) for box in boxes_of(tuple(shape), first, last)]
        assert np.concatenate(parts).tolist() == list(range(first, last))
        assert len(parts) <= 2 * max(1, len(shape))


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


def grid(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the grid's part of the metadata."""
    configuration: dict[str, Any] = metadata["chunk_grid"]["configuration"]
    return configuration


REFUSED: dict[str, tuple[type[RelightError], str, Callable[[dict[str, Any]], object]]] = {
    "a group": (CorruptCheckpoint, "node_type", lambda metadata: metadata.update(node_type="group")),
    "an unknown dtype": (CorruptCheckpoint, "float99", lambda metadata: metadata.update(data_type="float99")),
    "a dtype without a name": (IncompatibleState, "dtype", lambda metadata: metadata.update(data_type="float8_e3m4")),
    "an unknown codec": (CorruptCheckpoint, "pizza", lambda metadata: shard(metadata)["codecs"].append({"name": "pizza"})),
    "a grid": (CorruptCheckpoint, "hexagonal", lambda metadata: metadata["chunk_grid"].update(name="hexagonal")),
    "names": (CorruptCheckpoint, "hilbert", lambda metadata: metadata["chunk_key_encoding"].update(name="hilbert")),
    "chunks that do not fill it": (CorruptCheckpoint, "divide", lambda metadata: shard(metadata).update(chunk_shape=[4, 4])),
    "chunks of nothing": (CorruptCheckpoint, "chunk_shape", lambda metadata: shard(metadata).update(chunk_shape=[0, 4])),
    "dimensions": (CorruptCheckpoint, "should have length 3", lambda metadata: metadata.update(shape=[10, 7, 1])),
    "a shape": (CorruptCheckpoint, "shape", lambda metadata: metadata.update(shape=[-1, 7])),
    "no codecs": (CorruptCheckpoint, "codecs", lambda metadata: metadata.update(codecs=7)),
    "an invalid codec": (CorruptCheckpoint, "codecs", lambda metadata: metadata.update(codecs=[7])),
    "huge chunks": (
        UnsafeContent,
        "gigabyte",
        lambda metadata: (grid(metadata).update(chunk_shape=[1 << 40, 4]), shard(metadata).update(chunk_shape=[1 << 40, 4])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_invalid_metadata_is_refused(what: str, tmp_path: Path) -> None:
    """Unknown and absurd metadata is refused by name, and before memory is allocated for it."""
    kind, words, change = REFUSED[what]
    with pytest.raises(kind, match=words):
        numbers(changed(tmp_path, "shards", change), "shards")


def test_an_array_that_is_larger_than_its_files_is_refused(tmp_path: Path) -> None:
    """A shape of terabytes without any stored chunk is not imported as zeros."""
    folder = orbax(tmp_path / "old", complete=False)
    metadata = json.loads((folder / "params.dense.bias" / "zarr.json").read_text())
    metadata["shape"] = [1 << 50]
    (folder / "params.dense.bias" / "zarr.json").write_text(json.dumps(metadata))
    with pytest.raises(UnsafeContent):
        detect(folder)


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
    """An index that lacks a chunk, or states a chunk beyond the file, is refused."""
    shutil.copytree(ARRAYS / "shards_first", tmp_path / "one")
    file = tmp_path / "one" / "c" / "0" / "0"
    data = bytearray(file.read_bytes())
    for wrong in (b"\xff" * 16, bytes(8) + b"\xff" * 6 + bytes(2), bytes(8) + (200_000).to_bytes(8, "little")):
        file.write_bytes(wrong + data[16:])
        with pytest.raises(CorruptCheckpoint):
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


def test_a_large_chunk_gives_the_elements_that_are_in_the_array(tmp_path: Path) -> None:
    """A chunk beyond a slab, cut at the array's edge, has the right elements in each piece. It is decoded once."""
    whole = np.arange(3000 * 2000, dtype="<f4").reshape(3000, 2000)
    folder = large(tmp_path, [2900, 1990], [3000, 2000], zstd.compress(whole.tobytes()))
    source = source_of(folder, "packed")
    buffer, begun = bytearray(source.length), time.monotonic()
    for start in range(0, source.length, 100_000):
        source.fill(start, memoryview(buffer)[start : start + 100_000])
    assert np.array_equal(np.frombuffer(buffer, "<f4").reshape(2900, 1990), whole[:2900, :1990])
    assert time.monotonic() - begun < 30, "decoding it for each piece takes a minute"


@pytest.mark.parametrize("wrong", ["longer", "much longer", "shorter", "cut"])
def test_a_chunk_of_wrong_length_is_refused(tmp_path: Path, wrong: str) -> None:
    """A chunk with too many or too few bytes, or a cut frame, is refused, soon even if it decodes to gigabytes."""
    size = 3000 * 2000 * 4
    coded = {
        "longer": lambda: compressed(size + 1),
        "much longer": lambda: compressed(1 << 32),
        "shorter": lambda: compressed(size - 1),
        "cut": lambda: compressed(size)[:-8],
    }[wrong]()
    source, begun = source_of(large(tmp_path, [3000, 2000], [3000, 2000], coded), "packed"), time.monotonic()
    with pytest.raises(CorruptCheckpoint):
        source.fill(0, memoryview(bytearray(400)))
    assert time.monotonic() - begun < 30


def test_a_file_that_needs_more_memory_than_allowed_is_refused(tmp_path: Path) -> None:
    """tensorstore ends its process when memory is exhausted; the import reports that, and can read other arrays."""
    shutil.copytree(ARRAYS, tmp_path / "a")
    os.truncate(tmp_path / "a" / "plain" / "c" / "0" / "0", 1 << 40)
    store, reader = kvstore_of(Files(tmp_path / "a"), "plain"), ZarrReader()
    source = reader.array({"driver": "zarr3", "kvstore": store}, "plain").source()
    with pytest.raises(UnsafeContent, match="tensorstore failed"):
        source.fill(0, memoryview(bytearray(4)))
    other = kvstore_of(Files(tmp_path / "a"), "packed")
    reader.array({"driver": "zarr3", "kvstore": other}, "packed").source().fill(0, memoryview(bytearray(280)))


def test_a_read_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """If tensorstore waits forever, here for a pipe, its process ends after the time limit."""
    shutil.copytree(ARRAYS / "plain", tmp_path / "a")
    reader = ZarrReader(request_s=2)
    source = reader.array({"driver": "zarr3", "kvstore": kvstore_of(Files(tmp_path / "a"), "")}, "plain").source()
    (tmp_path / "a" / "c" / "0" / "0").unlink()
    os.mkfifo(tmp_path / "a" / "c" / "0" / "0")
    with pytest.raises(UnsafeContent, match="2 s"):
        source.fill(0, memoryview(bytearray(4)))


def test_the_process_ends_with_its_reader() -> None:
    """The process ends when its reader is no longer used. If it is killed, the next request starts another."""
    reader = ZarrReader()
    source = reader.array({"driver": "zarr3", "kvstore": kvstore_of(Files(ARRAYS), "plain")}, "plain").source()
    process = reader._process
    assert process is not None and process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(UnsafeContent, match="tensorstore failed"):
        source.fill(0, memoryview(bytearray(4)))
    source.fill(0, memoryview(bytearray(4)))
    process = reader._process
    assert process is not None and process.poll() is None
    del reader, source
    gc.collect()
    assert process.poll() is not None


def test_detection_leaves_no_process() -> None:
    """A detected checkpoint that is not read has no process."""
    detected = detect(GOLDEN / "orb" / "files3")
    reader = detected.content.components["params"].node["dense.bias"].made_of._reader
    assert reader._process is None


def test_links_and_names_elsewhere_are_refused(tmp_path: Path) -> None:
    """A link to a chunk, and an array name that leads out of the folder, are refused."""
    shutil.copytree(GOLDEN / "orb" / "files3", tmp_path / "a" / "3")
    chunk = tmp_path / "a" / "3" / "params.dense.bias" / "c" / "0"
    chunk.rename(tmp_path / "elsewhere")
    chunk.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeContent, match="not followed"):
        detect(tmp_path / "a" / "3")
    chunk.unlink()
    (tmp_path / "elsewhere").rename(chunk)
    shutil.copytree(tmp_path / "a" / "3" / "half", tmp_path / "a" / "secret")
    metadata = json.loads((tmp_path / "a" / "3" / "_METADATA").read_text())
    metadata["tree_metadata"]["('half',)"]["key_metadata"] = [{"key": "../secret", "key_type": 2}]
    (tmp_path / "a" / "3" / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(CorruptCheckpoint, match="missing"):
        detect(tmp_path / "a" / "3")


def test_without_tensorstore_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """If tensorstore is not installed, the hint has the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(IncompatibleState, match="tensorstore") as error:
        detect(GOLDEN / "orb" / "files")
    assert error.value.hint == extra_hint("orbax")
