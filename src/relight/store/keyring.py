"""A store's ring keys: the slots in ``.keys``, opened with the given keys. A new store gets its first slot here."""

from __future__ import annotations

import base64
import contextlib
import secrets
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from relight.errors import CheckpointNotFound, CorruptCheckpoint, StoreUnavailable, UnsafeContent, WrongKey
from relight.format.cipher import KEY_BYTES, Secret, ring_id
from relight.format.keyring import (
    KEYS_DIR,
    KeySlot,
    Revoked,
    decode_revoked,
    decode_slot,
    encode_revoked,
    encode_slot,
    is_revoked_file,
    parse_slot_file,
)
from relight.format.names import LOG_DIR, STORE_FILE, is_run_name
from relight.format.records import StoreRecord, decode_store, encode_store
from relight.format.strict import SEALED_BYTES_MAX
from relight.keys import Keychain, Provider
from relight.store.base import ByteStore

SLOTS_MAX = 10_000
_READS, _PAUSE_S = 6, 0.02
"""Number of reads while ``.keys`` has files but no readable slot, and the pause between two reads in seconds."""


class KeyRing(NamedTuple):
    """The opened ring keys of one store, by id, and the id of the newest of them."""

    store_id: str
    keys: dict[bytes, Secret]
    newest: bytes
    is_current: bool
    """Whether the store has no newer ring key, which the given keys do not open."""

    @property
    def key(self) -> Secret:
        """The ring key that encrypts new files."""
        return self.keys[self.newest]


def store_id_of(inner: ByteStore) -> str:
    """Return the store's id from ``relight.json``, or from its slots if that is gone. Raise ``CheckpointNotFound`` if it is not a store."""
    try:
        return decode_store(inner.get(STORE_FILE, SEALED_BYTES_MAX), f"{inner.url}/{STORE_FILE}").id
    except (CheckpointNotFound, CorruptCheckpoint, UnsafeContent):
        store_ids = {slot.store for slot in slots_in(inner)}
        if len(store_ids) == 1:
            return store_ids.pop()
        raise


def slots_in(inner: ByteStore) -> list[KeySlot]:
    """Return all readable slots, the oldest generation first. Damaged slots are left out: another slot may open the same ring key."""
    slots = []
    names = sorted(entry.name for entry in inner.list(KEYS_DIR) if parse_slot_file(entry.name) is not None)
    for name in names[:SLOTS_MAX]:
        where = f"{KEYS_DIR}/{name}"
        try:
            slots.append(decode_slot(inner.get(where, SEALED_BYTES_MAX), name, where))
        except (CheckpointNotFound, CorruptCheckpoint, UnsafeContent):
            continue
    return slots


def has_unreadable_slots(inner: ByteStore) -> bool:
    """Return whether a slot cannot be read. It may be of any ring key."""
    return sum(parse_slot_file(entry.name) is not None for entry in inner.list(KEYS_DIR)) > len(slots_in(inner))


def open_slot(slot: KeySlot, keychain: Keychain) -> Secret | None:
    """Return the ring key in a slot; None if no key opens it. Raise ``StoreUnavailable`` if a key service does not answer."""
    where = f"{KEYS_DIR}/{slot.file}"
    for provider in keychain.providers:
        if not provider.fits(slot.kind, slot.kek):
            continue
        try:
            key = provider.unwrap(slot.wrapped_bytes, dict(slot.told), slot.associated_data, where)
        except WrongKey:
            continue
        if len(key.reveal()) == KEY_BYTES and ring_id(key).hex() == slot.ring:
            return key
    return None


def require_encrypted(inner: ByteStore) -> str:
    """Return the store's id. Create an encrypted store if there is none. Raise ``WrongKey`` if there are runs, which are then plaintext."""
    for _ in range(3):
        try:
            return store_id_of(inner)
        except CheckpointNotFound:
            runs = [entry.name for entry in inner.list("") if entry.is_dir and is_run_name(entry.name)]
            if any(True for run in runs for _ in inner.list(f"{run}/{LOG_DIR}")):
                raise WrongKey(
                    "there are runs here which are not encrypted, and relight.json is gone", where=inner.url
                ) from None
            record = StoreRecord(id=secrets.token_hex(16), created=_now(), encrypted=True)
            if inner.put_once(STORE_FILE, encode_store(record)):
                return record.id
    raise StoreUnavailable("relight.json can neither be made nor read", where=inner.url)


def open_ring(inner: ByteStore, keychain: Keychain, *, make: bool = False) -> KeyRing:
    """Return the store's key ring. ``make``: create store and ring if needed. Raise ``WrongKey`` if no given key opens the ring."""
    store_id = require_encrypted(inner) if make else store_id_of(inner)
    for left in reversed(range(_READS)):
        slots = slots_in(inner)
        present = [slot for slot in slots if slot.store == store_id]
        keys: dict[bytes, Secret] = {}
        newest: tuple[int, bytes] | None = None
        for slot in present:
            ring = bytes.fromhex(slot.ring)
            key = keys.get(ring)
            if key is None:
                key = open_slot(slot, keychain)
            if key is not None:
                keys[ring] = key
                newest = max(newest or (0, b""), (slot.generation, ring))
        if newest is not None:
            return KeyRing(store_id, keys, newest[1], newest[0] == max(slot.generation for slot in present))
        has_slots = bool(slots) or any(True for _ in inner.list(KEYS_DIR))
        if has_slots and not slots and left:  # another process is just creating the store
            time.sleep(_PAUSE_S)
            continue
        if has_slots:
            raise WrongKey(
                f"none of the keys at hand opens this store: {_named(keychain.providers)}",
                where=inner.url,
                hint=f"it is opened by {_labels(slots)}; a revoked key opens nothing any more",
            )
        if not make:
            raise WrongKey(
                "this store's slots are gone",
                where=f"{inner.url}/{KEYS_DIR}",
                hint="restore .keys from a copy of the store",
            )
        put_slot(inner, store_id, 1, Secret(secrets.token_bytes(KEY_BYTES)), keychain.providers[0])
    raise WrongKey("a slot for this key can neither be made nor read", where=f"{inner.url}/{KEYS_DIR}")


def put_slot(
    inner: ByteStore, store_id: str, generation: int, key: Secret, provider: Provider, label: str = ""
) -> KeySlot:
    """Create a durable slot of a ring key for one more key-encryption key, and return it. An existing slot is kept."""
    blank = KeySlot(
        store=store_id, generation=generation, ring=ring_id(key).hex(), kind=provider.kind, kek=provider.kek,
        label=label or provider.kind, created=_now(), wrapped="",
    )  # fmt: skip
    wrapped, wrapping = provider.wrap(key, blank.associated_data)
    slot = msgspec.structs.replace(blank, told=wrapping, wrapped=base64.b64encode(wrapped).decode())
    inner.put_once(f"{KEYS_DIR}/{slot.file}", encode_slot(slot))
    return slot


def revoked_in(inner: ByteStore) -> list[Revoked]:
    """Return the readable records of revoked keys."""
    revoked = []
    for name in sorted(entry.name for entry in inner.list(KEYS_DIR) if is_revoked_file(entry.name))[:SLOTS_MAX]:
        where = f"{KEYS_DIR}/{name}"
        with contextlib.suppress(CheckpointNotFound, CorruptCheckpoint, UnsafeContent):
            revoked.append(decode_revoked(inner.get(where, SEALED_BYTES_MAX), name, where))
    return revoked


def drop_slot(inner: ByteStore, slot: KeySlot) -> None:
    """Delete a slot permanently. A record of the revoked key stays."""
    gone = Revoked(
        store=slot.store,
        generation=slot.generation,
        ring=slot.ring,
        kek=slot.kek,
        label=slot.label,
        created=slot.created,
        revoked=_now(),
    )
    inner.put_once(f"{KEYS_DIR}/{gone.file}", encode_revoked(gone))
    inner.delete(f"{KEYS_DIR}/{slot.file}")
    with contextlib.suppress(CheckpointNotFound):
        inner.sync(KEYS_DIR)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _named(providers: Iterable[Provider]) -> str:
    return ", ".join(provider.spec for provider in providers)


def _labels(slots: list[KeySlot]) -> str:
    return ", ".join(sorted({f"{slot.label} ({slot.kek[:8]})" for slot in slots})) or "nothing that can be read"
