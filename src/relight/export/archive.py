"""The layout of a zip file of ``torch.save``, with uncompressed entries, computed before its tensors are read. Pure.

Each storage begins at a multiple of 64, so that it can be mapped. Its CRC32 is written into two headers when it is known.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

ALIGN = 64
_LOCAL, _CENTRAL = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_END, _END64, _LOCATOR = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_FULL = 0xFFFFFFFF
_DATE = 0x21
"""The first of January 1980."""


class ZipRecord(NamedTuple):
    """An entry: its bytes, or their number if they are not known yet."""

    name: str
    data: bytes | int


class ReservedBytes(NamedTuple):
    """Offset of bytes that are not known yet, and the two offsets of their CRC32."""

    offset: int
    sums: tuple[int, int]


class ZipLayout(NamedTuple):
    """Offsets count from the archive's first byte; ``rooms`` belong to the entries without bytes, in order."""

    size: int
    fixed: tuple[tuple[int, bytes], ...]
    rooms: tuple[ReservedBytes, ...]


def torch_archive(name: str, value: bytes, storages: Sequence[int]) -> ZipLayout:
    """Return the layout of an archive for ``torch.load``.

    ``value``: the pickle. ``storages``: the lengths in bytes of the storages ``0``, ``1`` …
    """
    records = [
        ZipRecord("data.pkl", value),
        ZipRecord(".format_version", b"1"),
        ZipRecord(".storage_alignment", str(ALIGN).encode()),
    ]
    records += [
        ZipRecord("byteorder", b"little"),
        *(ZipRecord(f"data/{key}", length) for key, length in enumerate(storages)),
    ]
    records += [ZipRecord("version", b"3\n")]
    return archive([ZipRecord(f"{name}/{record.name}", record.data) for record in records])


def archive(records: Sequence[ZipRecord]) -> ZipLayout:
    """Return the layout of a zip file: the entries, one after the other, then the central directory."""
    fixed: list[tuple[int, bytes]] = []
    rooms: list[list[int]] = []
    central: list[tuple[bytes, int | None]] = []
    offset = 0
    for record in records:
        length = record.data if isinstance(record.data, int) else len(record.data)
        value = 0 if isinstance(record.data, int) else zlib.crc32(record.data)
        head = _local(record.name.encode(), length, value, offset)
        fixed.append((offset, head))
        begin = offset + len(head)
        number = None
        if isinstance(record.data, int):
            number = len(rooms)
            rooms.append([begin, offset + 14])
        else:
            fixed.append((begin, record.data))
        central.append((_directory_entry(record.name.encode(), length, value, offset), number))
        offset = begin + length
    start = offset
    for entry, number in central:
        fixed.append((offset, entry))
        if number is not None:
            rooms[number].append(offset + 16)
        offset += len(entry)
    end = _end(len(records), start, offset - start)
    fixed.append((offset, end))
    return ZipLayout(
        offset + len(end),
        tuple(fixed),
        tuple(ReservedBytes(begin, (local, central_)) for begin, local, central_ in rooms),
    )


def _local(name: bytes, length: int, value: int, offset: int) -> bytes:
    """Return a local header, padded so that the data after it are aligned."""
    large = length >= _FULL
    extra = struct.pack("<2H2Q", 1, 16, length, length) if large else b""
    begin = offset + _LOCAL.size + len(name) + len(extra) + 4
    padding = -begin % ALIGN
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    size = _FULL if large else length
    return (
        _LOCAL.pack(b"PK\3\4", 45 if large else 20, 0, 0, 0, _DATE, value, size, size, len(name), len(extra))
        + name
        + extra
    )


def _directory_entry(name: bytes, length: int, value: int, offset: int) -> bytes:
    large, far = length >= _FULL, offset >= _FULL
    wide = [*((length, length) if large else ()), *((offset,) if far else ())]
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, version = _FULL if large else length, 45 if wide else 20
    head = _CENTRAL.pack(
        b"PK\1\2",
        version,
        version,
        0,
        0,
        0,
        _DATE,
        value,
        size,
        size,
        len(name),
        len(extra),
        0,
        0,
        0,
        0,
        _FULL if far else offset,
    )
    return head + name + extra


def _end(count: int, start: int, length: int) -> bytes:
    end = _END.pack(b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), min(length, _FULL), min(start, _FULL), 0)
    if count < 0xFFFF and start < _FULL and length < _FULL:
        return end
    wide = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, length, start)
    return wide + _LOCATOR.pack(b"PK\6\7", 0, start + length, 1) + end
