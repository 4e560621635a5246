"""Encode and parse the header of a pack: a valid safetensors header, padded so that the data starts at a page boundary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from relight.errors import CorruptCheckpoint
from relight.format.dtypes import dtype_named
from relight.format.strict import shown

DATA_ALIGN = 4096
_METADATA = b'{"__metadata__":'
METADATA_BYTES_MAX = 64 << 10
HEADER_BYTES_MAX = 100_000_000
"""Limit of the safetensors library."""


def encode_header(tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: dict[str, str]) -> bytes:
    """Return the header of a pack with contiguous tensors ``(name, dtype, shape, bytes)`` in this order."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, dtype_name, shape, length in tensors:
        dtype = dtype_named(dtype_name)
        foreign, dims = dtype.safetensors, list(shape)
        if foreign is None:
            foreign, dims = "U8", [*dims, dtype.itemsize]
        entries[name] = {"dtype": foreign, "shape": dims, "data_offsets": [offset, offset + length]}
        offset += length
    body = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    padded = -(-(8 + len(body)) // DATA_ALIGN) * DATA_ALIGN
    return (padded - 8).to_bytes(8, "little") + body.ljust(padded - 8)


def header_bytes(prefix: bytes, where: str) -> int:
    """Return the length of the header from a pack's first 8 bytes."""
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or not 2 <= length <= HEADER_BYTES_MAX:
        raise CorruptCheckpoint("no safetensors header", where=where)
    return 8 + length


def parse_header(data: bytes, where: str) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return ``name → (safetensors dtype, shape, start, end)`` from a pack's header, with offsets relative to the data."""
    if header_bytes(data[:8], where) != len(data):
        raise CorruptCheckpoint("the header's length differs from the length that it states", where=where)
    try:
        entries = json.loads(data[8:].decode("utf-8"), object_pairs_hook=_once)
        return {name: _entry(entry) for name, entry in entries.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"not a safetensors header: {type(error).__name__}, {shown(error)}", where=where
        ) from None


def header_metadata(data: bytes) -> dict[str, str] | None:
    """Return the metadata at the start of a pack's header; None if Relight did not write it. Does not read the rest."""
    begin = data.find(_METADATA)
    if begin != 8:
        return None
    try:
        text = data[begin + len(_METADATA) : begin + len(_METADATA) + METADATA_BYTES_MAX].decode(
            "utf-8", errors="replace"
        )
        metadata, _ = json.JSONDecoder(object_pairs_hook=_once).raw_decode(text)
    except (ValueError, RecursionError):
        return None
    plain = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    return metadata if plain else None


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    start, end = entry["data_offsets"]
    if type(start) is not int or type(end) is not int:
        raise TypeError("an offset is not an integer")
    return str(entry["dtype"]), tuple(entry["shape"]), start, end


def _once(items: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(items)
    if len(result) != len(items):
        raise ValueError("duplicate name")
    return result
