"""Read files of ``torch.save``: the zip format, and the sequence of pickles before version 1.6."""

from __future__ import annotations

import struct
from typing import Any

from relight.errors import CorruptCheckpoint, IncompatibleState, UnsafeContent
from relight.format import DTYPES, Digest
from relight.importers.archive import PICKLE_BYTES_MAX, TABLE, Storage, StorageKind, TorchArchive
from relight.importers.files import Files, Handle, pread
from relight.importers.pickles import read_first
from relight.importers.tensors import FileRange, Home

_MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_BYTES = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."


def form_of(files: Files, name: str) -> str:
    """Return ``zip`` or ``row``, from the file's first bytes; empty for others."""
    if files.size(name) < 16:
        return ""
    with files.open(name) as handle:
        head = pread(handle, 0, 16, files.where(name))
    return "zip" if head[:4] == b"PK\3\4" else "row" if head.startswith(_MAGIC_BYTES) else ""


def read_torch(files: Files, name: str) -> Any:
    """Return the saved value, with a ``Spec`` for each tensor. Objects of unknown classes are ``UnpickledObject``;
    functions are refused."""
    form, where = form_of(files, name), files.where(name)
    if not form:
        raise IncompatibleState("not a file of torch.save", where=where)
    with files.open(name) as handle:
        if form == "row":
            return _read_row(files, name, handle, where)
        archive = TorchArchive(handle, FileRange(0, files.size(name)), where, Home(files, name))
        files.read[name] = Digest(archive.words()).digest()
        return archive.content(strangers=True)


def _read_row(files: Files, name: str, handle: Handle, where: str) -> Any:
    """Read the format before torch 1.6.

    Its parts: magic number, version, machine, object, storage keys, and for each storage its number of elements and bytes.
    """
    size = files.size(name)
    data = pread(handle, 0, min(size, PICKLE_BYTES_MAX), where)
    position = 0
    for expected in (_MAGIC, 1001, None):
        value, length = read_first(data[position:], TABLE, where)
        if expected is not None and value != expected:
            raise IncompatibleState("an old file of torch.save of another version", where=where)
        if expected is None and isinstance(value, dict) and value.get("little_endian") is False:
            raise IncompatibleState("saved on a machine of another byte order", where=where)
        position += length
    storages_by_key: dict[str, tuple[str, int]] = {}
    spans: dict[str, FileRange] = {}

    def storage(reference: Any) -> Storage:
        if not (
            isinstance(reference, tuple)
            and len(reference) == 6
            and reference[0] == "storage"
            and isinstance(reference[1], StorageKind)
            and isinstance(reference[2], str)
        ):
            raise UnsafeContent("a storage reference that is not in torch's form", where=where)
        _, kind, key, _, count, part = reference
        if part is not None or type(count) is not int or not 0 <= count < 2**62:
            raise IncompatibleState(
                "storages that are parts of others", where=where, hint="save it again with torch 1.6 or newer"
            )
        length = count * DTYPES[kind.dtype].itemsize
        if storages_by_key.setdefault(key, (kind.dtype, count)) != (kind.dtype, count) or length > size:
            raise UnsafeContent("a storage larger than the file, or with two different dtypes or sizes", where=where)
        return Storage(kind.dtype, spans.get(key, FileRange(0, length)), Home(files, name))

    begin = position
    _, length = read_first(data[begin:], TABLE, where, storage, strangers=True)
    position += length
    keys, length = read_first(data[position:], TABLE, where)
    position += length
    files.read[name] = Digest(data[:position]).digest()
    if not isinstance(keys, list) or set(map(str, keys)) != storages_by_key.keys() or len(keys) != len(storages_by_key):
        raise CorruptCheckpoint("its list of storages does not match its tensors", where=where)
    for key in keys:
        dtype, count = storages_by_key[key]
        if struct.unpack("<q", pread(handle, position, 8, where))[0] != count:
            raise CorruptCheckpoint(f"storage {key[:40]!r} has another length than its tensors need", where=where)
        spans[key] = FileRange(position + 8, count * DTYPES[dtype].itemsize)
        position += 8 + spans[key].length
    if position != size:
        raise CorruptCheckpoint(f"{size} bytes long, where {position} were saved", where=where)
    return read_first(data[begin:], TABLE, where, storage, strangers=True)[0]
