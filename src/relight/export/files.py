"""A file that is to be written: how long it is, what lies where in it. Pure."""

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
    """Where in a file an entry's bytes begin. ``sums``: where their CRC32 is to stand, four bytes each."""

    entry: int
    offset: int
    sums: tuple[int, ...] = ()


class OutputFile(NamedTuple):
    """``fixed`` are bytes that are known already, by their offsets."""

    name: str
    size: int
    fixed: tuple[tuple[int, bytes], ...]
    slots: tuple[EntryOffset, ...]


def safetensors_files(entries: Sequence[ExportEntry], tied: str, shard_bytes: int | None, name: str = MODEL) -> list[OutputFile]:
    """One file, or several of at most ``shard_bytes`` where a tensor is not larger, and the index of them, as transformers writes it."""
    kept = [index for index, one in enumerate(entries) if tied == "each" or one.alias is None]
    _check(entries, kept)
    aliases: dict[str, str] = {} if tied == "each" else {one.name: one.alias for one in entries if one.alias is not None}
    shards = _shards(entries, kept, shard_bytes)
    if shard_bytes is None or len(shards) == 1:
        return [_one(entries, kept, name, aliases)]
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    files = [_one(entries, shard, where, {}) for shard, where in zip(shards, names, strict=True)]
    where_of = {entries[index].name: where for shard, where in zip(shards, names, strict=True) for index in shard}
    metadata = {"total_size": sum(entries[index].length for index in kept), **({"tied": aliases} if aliases else {})}
    data = (json.dumps({"metadata": metadata, "weight_map": where_of}, indent=2, sort_keys=True) + "\n").encode()
    return [*files, OutputFile(INDEX, len(data), ((0, data),), ())]


def _check(entries: Sequence[ExportEntry], kept: Sequence[int]) -> None:
    for index in kept:
        one = entries[index]
        if DTYPES[one.dtype].safetensors is None:
            raise IncompatibleState(
                f"safetensors has no dtype {one.dtype}", where=one.name, hint="--to pt has; or leave it out: --only, or --dtype"
            )
        if one.name == "__metadata__":
            raise ConfigError("safetensors keeps the name __metadata__ for itself", hint="--rename it")


def _shards(entries: Sequence[ExportEntry], kept: Sequence[int], shard_bytes: int | None) -> list[list[int]]:
    """In the order of the tree, as many as fit."""
    shards: list[list[int]] = [[]]
    held = 0
    for index in kept:
        length = entries[index].length
        if shard_bytes is not None and shards[-1] and held + length > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(index)
        held += length
    return shards


def _one(entries: Sequence[ExportEntry], held: Sequence[int], name: str, aliases: Mapping[str, str]) -> OutputFile:
    """The widest elements first, so that each tensor lies at a multiple of its own."""
    order = sorted(held, key=lambda index: -DTYPES[entries[index].dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": {**aliases, "format": "pt"}}
    offsets, at = [], 0
    for index in order:
        one = entries[index]
        header[one.name] = {
            "dtype": DTYPES[one.dtype].safetensors, "shape": list(one.shape), "data_offsets": [at, at + one.length]
        }  # fmt: skip
        offsets.append(at)
        at += one.length
    body = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    body = body.ljust(-(-(8 + len(body)) // 64) * 64 - 8)
    if len(body) > HEADER_BYTES_MAX:
        raise IncompatibleState(f"{len(held)} names of {len(body)} bytes: more than a safetensors file may have", hint="--shard 5GB")
    begin = 8 + len(body)
    slots = tuple(EntryOffset(index, begin + offset) for index, offset in zip(order, offsets, strict=True))
    return OutputFile(name, begin + at, ((0, len(body).to_bytes(8, "little") + body),), slots)
