"""File format of named arrays.

Order: magic (8 bytes), BLAKE3 of the rest (32 bytes), length of the head (4 bytes), head (JSON), arrays. The head has a
version, metadata, and each array's type and shape. The arrays are concatenated, as in memory. All numbers are
little-endian. A reader checks the sizes before it allocates memory, and the hash before it uses anything else.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint
from relight.store.disk import Disk
from relight.store.durable import Replacement, translate
from relight.units import size_text

Arrays = dict[str, np.ndarray[Any, Any]]
VERSION = 1
FILE_BYTES_MAX = 256 << 20
_HEAD_BYTES_MAX = 4 << 20
_TYPES = {"<f4": 4, "<f8": 8, "<i4": 4}
_HASH_AT, _LENGTH_AT, _HEAD_AT = 8, 40, 44


def write_arrays(
    path: Path, magic: bytes, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Write a file atomically and durably; it replaces an existing one."""
    assert len(magic) == 8
    parts, listed = [], {}
    for name, array in arrays.items():
        kind = array.dtype.newbyteorder("<").str
        assert kind in _TYPES, kind
        parts.append(np.ascontiguousarray(array, dtype=kind).tobytes())
        listed[name] = {"type": kind, "shape": list(array.shape)}
    body = b"".join(parts)
    head = json.dumps(
        {"version": VERSION, "told": dict(metadata), "arrays": listed}, separators=(",", ":"), allow_nan=False
    ).encode()
    follows = len(head).to_bytes(4, "little") + head + body
    data = magic + blake3.blake3(follows).digest() + follows
    if len(data) > FILE_BYTES_MAX or len(head) > _HEAD_BYTES_MAX:
        raise ConfigError(
            f"the file has {size_text(len(data))}, at most {size_text(FILE_BYTES_MAX)} are allowed", where=str(path)
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise translate(error, "making a directory", str(path.parent)) from error
    file = Replacement(Disk(), os.path.abspath(path), len(data), direct=False)
    try:
        file.write_at(0, memoryview(data))
        file.finish()
    except BaseException:
        file.abort()
        raise


def read_arrays(path: Path, magic: bytes, what: str) -> tuple[dict[str, Any], Arrays]:
    """Return the metadata and the arrays of a file.

    ``what``: the kind of file, for errors. Raise ``CorruptCheckpoint`` if the file is damaged.
    """
    try:
        if not path.is_file():
            raise CheckpointNotFound(f"there is no {what}", where=str(path))
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise translate(error, "reading", str(path)) from error
    try:
        return _decode(data, magic)
    except _Damaged as damaged:
        raise CorruptCheckpoint(f"it is not an intact {what}: {damaged}", where=str(path)) from None


class _Damaged(Exception):
    pass


def _decode(data: bytes, magic: bytes) -> tuple[dict[str, Any], Arrays]:
    if len(data) > FILE_BYTES_MAX:
        raise _Damaged(f"more than {size_text(FILE_BYTES_MAX)}")
    if data[:8] != magic:
        raise _Damaged(f"it does not begin with {magic.decode()}")
    if blake3.blake3(memoryview(data)[_LENGTH_AT:]).digest() != data[_HASH_AT:_LENGTH_AT]:
        raise _Damaged("its bytes differ from those that were written")
    length = int.from_bytes(data[_LENGTH_AT:_HEAD_AT], "little")
    if length > min(_HEAD_BYTES_MAX, len(data) - _HEAD_AT):
        raise _Damaged("its head is cut off")
    try:
        head = json.loads(data[_HEAD_AT : _HEAD_AT + length])
        version, metadata, listed = head["version"], head["told"], head["arrays"]
        sizes = {name: (str(entry["type"]), tuple(map(int, entry["shape"]))) for name, entry in listed.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise _Damaged("its head is invalid") from None
    if version != VERSION:
        raise _Damaged(f"its version is {version!r}; this Relight reads version {VERSION}")
    body = memoryview(data)[_HEAD_AT + length :]
    arrays, offset = {}, 0
    for name, (kind, shape) in sizes.items():
        if kind not in _TYPES or len(shape) > 4 or any(not 0 <= size <= FILE_BYTES_MAX for size in shape):
            raise _Damaged(f"array {name[:40]!r} has an unknown type or shape")
        count = math.prod(shape)
        if offset + count * _TYPES[kind] > len(body):
            raise _Damaged(f"array {name[:40]!r} is cut off")
        arrays[name] = np.frombuffer(body, kind, count, offset).reshape(shape)
        offset += count * _TYPES[kind]
    if offset != len(body) or not isinstance(metadata, dict):
        raise _Damaged("it has bytes after its arrays")
    return metadata, arrays
