"""Slots of a store's key ring. Each has one ring key, wrapped by one key-encryption key. Pure.

Each slot is a file ``.keys/<generation>-<id of the key-encryption key>.json``. So a key is added by writing a file, and removed by deleting
a file, and no data is encrypted again. A slot's fields are bound to its wrapped key as associated data. A slot is sealed like a record.
"""

from __future__ import annotations

import base64
import re
from typing import Any, Literal

import msgspec

from relight.errors import UnsafeContent
from relight.format import names
from relight.format.records import VERSION, check_version
from relight.format.strict import convert, seal, to_json, unseal

KEYS_DIR = ".keys"
WRAPPED_BYTES_MAX = 8 << 10
GENERATION_MAX = 999_999
_SLOT = re.compile(r"([0-9]{6})-([0-9a-f]{16})\.json\Z")
_GONE = re.compile(r"[0-9]{6}-[0-9a-f]{16}-[0-9a-f]{8}\.revoked\.json\Z")
_TIME = re.compile(r"[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9]Z\Z")
_RING = re.compile(r"[0-9a-f]{32}\Z")
_SHORT_TEXT_MAX = 500


class Revoked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Record of a key-encryption key that lost its slot. It documents what this key could open."""

    relight: Literal["revoked"] = "revoked"
    version: int = VERSION
    store: str
    generation: int
    ring: str
    kek: str
    label: str
    created: str
    """Time of the slot's creation."""
    revoked: str

    @property
    def file(self) -> str:
        """Name of its file in ``.keys``."""
        return f"{self.generation:06d}-{self.kek}-{self.ring[:8]}.revoked.json"


class KeySlot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wrapped ring key. ``kind``: kind of the key-encryption key. ``told``: parameters that unwrapping needs in addition to that key."""

    relight: Literal["slot"] = "slot"
    version: int = VERSION
    store: str
    generation: int
    ring: str
    """The ring key's id, 32 hexadecimal digits."""
    kind: str
    kek: str
    """The key-encryption key's id, 16 hexadecimal digits."""
    label: str
    """Name for people."""
    created: str
    told: dict[str, str | int] = {}
    wrapped: str

    @property
    def file(self) -> str:
        """Name of its file in ``.keys``."""
        return slot_file(self.generation, self.kek)

    @property
    def associated_data(self) -> bytes:
        """Associated data of the wrapping: identity of slot and ring key."""
        return b"relight ring key\0" + f"{self.store}\0{self.generation}\0{self.ring}".encode()

    @property
    def wrapped_bytes(self) -> bytes:
        """``wrapped``, as bytes."""
        return base64.b64decode(self.wrapped)


def slot_file(generation: int, kek: str) -> str:
    """Return the name of a slot's file."""
    return f"{generation:06d}-{kek}.json"


def parse_slot_file(name: str) -> tuple[int, str] | None:
    """Return generation and key id in a slot's file name; None for other names."""
    match = _SLOT.match(name)
    return (int(match[1]), match[2]) if match else None


def encode_slot(slot: KeySlot) -> bytes:
    """Return the bytes of a slot's file."""
    return seal(to_json(msgspec.to_builtins(slot)))


def encode_revoked(revoked: Revoked) -> bytes:
    """Return the bytes of a revoked key's record."""
    return seal(to_json(msgspec.to_builtins(revoked)))


def is_revoked_file(name: str) -> bool:
    """Return whether ``name`` is the file of a revoked key's record."""
    return _GONE.match(name) is not None


def decode_revoked(data: bytes, name: str, where: str) -> Revoked:
    """Decode the record of a revoked key from ``data``, the content of file ``name``."""
    value: Any = unseal(data, where)
    check_version(value, "revoked", where)
    revoked = convert(value, Revoked, where)
    if revoked.file != name or not _RING.match(revoked.ring):
        raise UnsafeContent("the record belongs to another key or generation", where=where)
    return revoked


def decode_slot(data: bytes, name: str, where: str) -> KeySlot:
    """Decode the slot in ``data``, the content of file ``name``."""
    value: Any = unseal(data, where)
    check_version(value, "slot", where)
    slot = convert(value, KeySlot, where)
    if slot.file != name or not names.RUN_ID.match(slot.store) or not _RING.match(slot.ring):
        raise UnsafeContent("the slot belongs to another key, generation or store", where=where)
    if not _TIME.match(slot.created):
        raise UnsafeContent("the slot has a malformed time", where=where)
    texts = [slot.kind, slot.label, slot.created, *slot.told, *(str(value) for value in slot.told.values())]
    if any(len(text) > _SHORT_TEXT_MAX for text in texts) or not 0 < slot.generation <= GENERATION_MAX:
        raise UnsafeContent("the slot has a field that is too long, or a generation out of range", where=where)
    try:
        length = len(base64.b64decode(slot.wrapped, validate=True))
    except ValueError:
        length = 0
    if not 0 < length <= WRAPPED_BYTES_MAX:
        raise UnsafeContent("the slot has no valid wrapped key", where=where)
    return slot
