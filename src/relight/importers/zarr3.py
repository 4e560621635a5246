"""Read arrays of zarr 3, uncompressed or zstd. Chunks are files, or are in shards: files of several chunks and an index.

For any other codec the error names it. (zarr-specs.readthedocs.io, version 3.0, and its ``sharding_indexed``)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from relight.errors import CorruptCheckpoint, IncompatibleState, UnsafeContent
from relight.format import DTYPES
from relight.importers.chunked import CODED_MORE, boxes_of, chunked_array, elements_of, numbers_of
from relight.importers.files import Files, pieces_of, pread
from relight.importers.tensors import AssembledTensor
from relight.layout import Box

if TYPE_CHECKING:
    from relight.importers.chunked import Elements

INNER_MAX = 1 << 16
"""Chunks in one shard, at most."""
_NOWHERE = 2**64 - 1
"""Index entry of a chunk that was not written."""


class Codecs(NamedTuple):
    """The codec of a chunk, and the chunk shape inside shards: ``inner`` is None for chunks that are files."""

    zstd: bool
    inner: tuple[int, ...] | None = None
    index_first: bool = False
    index_crc: bool = False


def read_zarr3(files: Files, home: str) -> AssembledTensor:
    """Return the array in the folder ``home``.

    ``IncompatibleState`` names what is not supported. A missing chunk is damage, as Orbax writes all of them.
    """
    where = files.where(home)
    metadata = files.json(f"{home}/zarr.json")
    if not isinstance(metadata, dict) or metadata.get("zarr_format") != 3 or metadata.get("node_type") != "array":
        raise IncompatibleState("something other than an array of zarr 3", where=where)
    dtype = metadata.get("data_type")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise IncompatibleState(f"dtype {str(dtype)[:40]}, which Relight has no name for", where=where)
    grid, grid_options = _named(metadata.get("chunk_grid"), where)
    if grid != "regular" or metadata.get("storage_transformers"):
        raise IncompatibleState("chunks of several shapes, or with a storage transformer", where=where)
    shape, outer = numbers_of(metadata.get("shape"), where), numbers_of(grid_options.get("chunk_shape"), where)
    codecs = _codecs(metadata.get("codecs"), dtype, where)
    inner = outer if codecs.inner is None else codecs.inner
    if (
        len(shape) != len(outer)
        or len(inner) != len(outer)
        or any(not b or a % b for a, b in zip(outer, inner, strict=True))
    ):
        raise UnsafeContent("chunks of another number of dimensions, or that do not fill their shards", where=where)
    name_of = _names(metadata.get("chunk_key_encoding"), where)
    size = math.prod(inner) * DTYPES[dtype].itemsize
    shards = _Shards(files, outer, inner, codecs)

    def read(box: Box) -> Elements:
        file = f"{home}/{name_of(tuple(start // extent for start, extent in zip(box.start, outer, strict=True)))}"
        pieces = (
            files.pieces(file, size + CODED_MORE)
            if codecs.inner is None
            else shards.chunk(file, box, size + CODED_MORE)
        )
        return elements_of(pieces, codecs.zstd, inner, box, dtype, files.where(file))

    for box in boxes_of(shape, outer, "uint8", where):
        files.size(f"{home}/{name_of(tuple(start // extent for start, extent in zip(box.start, outer, strict=True)))}")
    return chunked_array(dtype, shape, inner, read, where, files.cache)


class _Shards:
    """Reads chunks from shards."""

    def __init__(self, files: Files, outer: tuple[int, ...], inner: tuple[int, ...], codecs: Codecs) -> None:
        self._files, self._outer, self._inner, self._codecs = files, outer, inner, codecs
        self._counts = tuple(a // b for a, b in zip(outer, inner, strict=True))
        if math.prod(self._counts) > INNER_MAX:
            raise UnsafeContent(f"{math.prod(self._counts)} chunks in a shard", where=files.path)

    def chunk(self, file: str, box: Box, limit: int) -> Iterator[bytes]:
        """Yield the encoded bytes of the chunk at ``box``."""
        index: bytes = self._files.cache.get(("index", self._files.where(file)), lambda: self._read(file), len)
        number = 0
        for start, whole, extent, count in zip(box.start, self._outer, self._inner, self._counts, strict=True):
            number = number * count + start % whole // extent
        offset, length = struct.unpack_from("<2Q", index, 16 * number)
        where = self._files.where(file)
        if offset == _NOWHERE or offset + length > self._files.size(file):
            raise CorruptCheckpoint("a shard without one of its chunks", where=where)
        if length > limit:
            raise UnsafeContent(f"{length} bytes, but at most {limit} are read", where=where)
        with self._files.open(file) as handle:
            yield from pieces_of(handle, offset, length, where)

    def _read(self, file: str) -> bytes:
        count, size, where = 2 * math.prod(self._counts), self._files.size(file), self._files.where(file)
        length = 8 * count + (4 if self._codecs.index_crc else 0)
        if length > size:
            raise CorruptCheckpoint("a shard shorter than its index", where=where)
        with self._files.open(file) as handle:
            data = pread(handle, 0 if self._codecs.index_first else size - length, length, where)
        if self._codecs.index_crc and crc32c(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
            raise CorruptCheckpoint("the checksum of a shard's index is wrong", where=where)
        return data[: 8 * count]


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli, RFC 3720). Slow: only for indexes, which are short."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return tuple(table)


def _codecs(metadata: Any, dtype: str, where: str) -> Codecs:
    """Return the codecs of a chunk. Raise ``IncompatibleState`` for a codec that Relight does not read."""
    names = [_named(codec, where) for codec in metadata] if isinstance(metadata, list) and len(metadata) < 10 else []
    if len(names) == 1 and names[0][0] == "sharding_indexed":
        first_name = names[0][1]
        inside = _codecs(first_name.get("codecs"), dtype, where)
        index = (
            [_named(codec, where) for codec in first_name["index_codecs"]]
            if isinstance(first_name.get("index_codecs"), list)
            else []
        )
        index_location = first_name.get("index_location", "end")
        checked = [name for name, _ in index] == ["bytes", "crc32c"]
        if (
            inside.inner is not None
            or index_location not in ("start", "end")
            or not (checked or [name for name, _ in index] == ["bytes"])
        ):
            raise IncompatibleState("shards in shards, or with an index of another kind", where=where)
        _check_order(index[0][1], 8, where)
        return Codecs(inside.zstd, numbers_of(first_name.get("chunk_shape"), where), index_location == "start", checked)
    if [name for name, _ in names] not in (["bytes"], ["bytes", "zstd"]):
        listed = ", ".join(name[:40] for name, _ in names) or "none"
        raise IncompatibleState(f"chunks with codecs {listed}: only bytes and zstd are supported", where=where)
    _check_order(names[0][1], DTYPES[dtype].itemsize, where)
    return Codecs(len(names) == 2)


def _check_order(given: dict[str, Any], itemsize: int, where: str) -> None:
    if given.get("endian", "little" if itemsize == 1 else None) != "little":
        raise IncompatibleState("numbers of another byte order", where=where)


def _names(metadata: Any, where: str) -> Any:
    """Return a function from a chunk's numbers to its name."""
    kind, configuration = _named(metadata, where)
    separator = configuration.get("separator", "/" if kind == "default" else ".")
    if kind not in ("default", "v2") or separator not in (".", "/"):
        raise IncompatibleState("chunk names of an unknown form", where=where)
    if kind == "v2":
        return lambda numbers: separator.join(map(str, numbers)) or "0"
    return lambda numbers: separator.join(("c", *map(str, numbers)))


def _named(extension: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the configuration of an extension point of zarr 3."""
    if isinstance(extension, str):
        return extension, {}
    configuration = extension.get("configuration", {}) if isinstance(extension, dict) else None
    if (
        not isinstance(extension, dict)
        or not isinstance(extension.get("name"), str)
        or not isinstance(configuration, dict)
    ):
        raise UnsafeContent("not metadata of zarr 3", where=where)
    return extension["name"], configuration
