"""Layout of output files: their size, and the offsets of their contents. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from relight.errors import ConfigError, IncompatibleState
from relight.export.selection import ExportEntry
from relight.format import DTYPES
from relight.format.pack import HEADER_BYTES_MAX

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"


class EntryOffset(NamedTuple):
    """Offset of an entry's bytes in a file. ``sums``: offsets of their CRC32, four bytes each."""

    entry: int
    offset: int
    sums: tuple[int, ...] = ()


class OutputFile(NamedTuple):
    """A file to write. ``fixed``: bytes that are known already, with their offsets. ``slots``: offsets of the entries."""

    name: str
    size: int
    fixed: tuple[tuple[int, bytes], ...]
    slots: tuple[EntryOffset, ...]


def safetensors_files(
    entries: Sequence[ExportEntry], tied: str, shard_bytes: int | None, name: str = MODEL
) -> list[OutputFile]:
    """Return the layout of one file, or of shards of at most ``shard_bytes`` with their index, as transformers has it.

    A larger tensor is a shard by itself.
    """
    indices = [index for index, entry in enumerate(entries) if tied == "each" or entry.alias is None]
    _check(entries, indices)
    aliases: dict[str, str] = (
        {} if tied == "each" else {entry.name: entry.alias for entry in entries if entry.alias is not None}
    )
    shards = _shards(entries, indices, shard_bytes)
    if shard_bytes is None or len(shards) == 1:
        return [_file_layout(entries, indices, name, aliases)]
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    files = [_file_layout(entries, shard, where, {}) for shard, where in zip(shards, names, strict=True)]
    where_of = {entries[index].name: where for shard, where in zip(shards, names, strict=True) for index in shard}
    metadata = {"total_size": sum(entries[index].length for index in indices), **({"tied": aliases} if aliases else {})}
    data = (json.dumps({"metadata": metadata, "weight_map": where_of}, indent=2, sort_keys=True) + "\n").encode()
    return [*files, OutputFile(INDEX, len(data), ((0, data),), ())]


def _check(entries: Sequence[ExportEntry], kept: Sequence[int]) -> None:
    for index in kept:
        entry = entries[index]
        if DTYPES[entry.dtype].safetensors is None:
            raise IncompatibleState(
                f"safetensors has no dtype {entry.dtype}",
                where=entry.name,
                hint="--to pt has; or leave it out: --only, or --dtype",
            )
        if entry.name == "__metadata__":
            raise ConfigError("safetensors reserves the name __metadata__", hint="--rename it")


def _shards(entries: Sequence[ExportEntry], kept: Sequence[int], shard_bytes: int | None) -> list[list[int]]:
    """Distribute entries over shards, in the order of the tree."""
    shards: list[list[int]] = [[]]
    filled = 0
    for index in kept:
        length = entries[index].length
        if shard_bytes is not None and shards[-1] and filled + length > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(index)
        filled += length
    return shards


def _file_layout(
    entries: Sequence[ExportEntry], indices: Sequence[int], name: str, aliases: Mapping[str, str]
) -> OutputFile:
    """Return the layout of one file: widest elements first, so that each tensor is aligned to its element size."""
    order = sorted(indices, key=lambda index: -DTYPES[entries[index].dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": {**aliases, "format": "pt"}}
    offsets, position = [], 0
    for index in order:
        entry = entries[index]
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype].safetensors, "shape": list(entry.shape), "data_offsets": [position, position + entry.length]
        }  # fmt: skip
        offsets.append(position)
        position += entry.length
    body = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    body = body.ljust(-(-(8 + len(body)) // 64) * 64 - 8)
    if len(body) > HEADER_BYTES_MAX:
        raise IncompatibleState(
            f"{len(indices)} names of {len(body)} bytes: more than a safetensors file may have", hint="--shard 5GB"
        )
    begin = 8 + len(body)
    slots = tuple(EntryOffset(index, begin + offset) for index, offset in zip(order, offsets, strict=True))
    return OutputFile(name, begin + position, ((0, len(body).to_bytes(8, "little") + body),), slots)
