"""Read a safetensors file: its header, checked against the file, and its tensors, unread."""

from __future__ import annotations

import math
import struct
from typing import Any

from relight.errors import CorruptCheckpoint, IncompatibleState, UnsafeContent
from relight.format import DTYPES, Digest
from relight.format.strict import from_json
from relight.importers.files import Files, pread
from relight.importers.tensors import FileRange, Home, Spec, row_major

HEADER_BYTES_MAX = 100_000_000
DTYPES_THERE = {dtype.safetensors: name for name, dtype in DTYPES.items() if dtype.safetensors is not None}


def is_safetensors(files: Files, name: str) -> bool:
    """Return whether the file begins like safetensors: a length, and a brace."""
    if files.size(name) < 10:
        return False
    with files.open(name) as handle:
        head = pread(handle, 0, 9, files.where(name))
    (length,) = struct.unpack_from("<Q", head)
    return bool(head[8:] == b"{" and 2 <= length <= files.size(name) - 8)


def read_safetensors(files: Files, name: str) -> tuple[dict[str, Spec], dict[str, str]]:
    """Return the tensors by name, in file order, and the metadata. Raise ``UnsafeContent`` for an inconsistent header."""
    where, size = files.where(name), files.size(name)
    with files.open(name) as handle:
        (length,) = struct.unpack("<Q", pread(handle, 0, 8, where))
        if length > HEADER_BYTES_MAX or length > size - 8:
            raise UnsafeContent(f"a header of {length} bytes in a file of {size}", where=where)
        data = pread(handle, 8, length, where)
    files.read[name] = Digest(data).digest()
    header = from_json(data.rstrip(b" "), where, max(length, 1 << 16) * 4)
    if not isinstance(header, dict):
        raise UnsafeContent("a header that is not a JSON object", where=where)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise UnsafeContent("metadata that is not text", where=where)
    home, begin = Home(files, name), 8 + length
    specs = sorted(
        ((_spec(key, entry, home, begin, where)) for key, entry in header.items()),
        key=lambda pair: (pair[1].span.offset, pair[1].span.length),
    )
    end = begin
    for key, spec in specs:
        if spec.span.offset != end:
            raise UnsafeContent(f"{key[:80]!r} overlaps another tensor, or follows a gap", where=where)
        end += spec.span.length
    if end != size:
        raise CorruptCheckpoint(f"{size} bytes long, but the header describes {end}", where=where)
    return dict(specs), metadata


def _spec(key: str, entry: Any, home: Home, begin: int, where: str) -> tuple[str, Spec]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise UnsafeContent(f"{key[:80]!r} has an invalid entry in the header", where=where)
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    for numbers in (shape, offsets):
        if (
            not isinstance(numbers, list)
            or len(numbers) > 64
            or any(type(number) is not int or not 0 <= number < 2**63 for number in numbers)
        ):
            raise UnsafeContent(f"{key[:80]!r} has an invalid shape or offset", where=where)
    if not isinstance(dtype, str) or dtype not in DTYPES_THERE:
        raise IncompatibleState(f"dtype {str(dtype)[:40]}, which Relight has no name for", where=f"{where}: {key[:80]}")
    name = DTYPES_THERE[dtype]
    length = math.prod(shape) * DTYPES[name].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != length:
        raise UnsafeContent(f"{key[:80]!r} has a length that does not match its shape", where=where)
    return key, Spec(name, tuple(shape), row_major(shape), 0, FileRange(begin + offsets[0], length), home)
