"""Identity of a store: its file ``relight.json``, which is created once."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from relight.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptCheckpoint,
    RelightError,
    StoreUnavailable,
    UnsafeContent,
    WrongKey,
)
from relight.format import StoreRecord, decode_record, decode_store, encode_store
from relight.format.keyring import KEYS_DIR
from relight.format.names import ROOT_FILE, RUN_ID, STORE_FILE, is_run_name, parse_dir
from relight.format.strict import ROOT_BYTES_MAX, SEALED_BYTES_MAX, from_json
from relight.keys.chain import SETTING
from relight.log.listing import Folders
from relight.log.nested import refuse_run_as_store
from relight.store import ByteStore

ENTRIES_MAX = 10_000
"""Most directory entries that are read in search of a lost store's id: the directory may hold unrelated data."""


def now_text() -> str:
    """Return the current time for people: RFC 3339, UTC, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since_epoch(text: str) -> float | None:
    """Return a record's time as seconds since the Unix epoch; None if the text is not a time."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def read_store(store: ByteStore) -> StoreRecord:
    """Return the store's record. Raise ``CheckpointNotFound`` if this is not a store, ``CorruptCheckpoint`` if the record is damaged."""
    try:
        data = store.get(STORE_FILE, SEALED_BYTES_MAX)
    except CheckpointNotFound as error:
        raise CheckpointNotFound(
            "no Relight store here", where=store.url, hint="a store has a file relight.json at its top; check the path"
        ) from error
    record = decode_store(data, f"{store.url}/{STORE_FILE}")
    if record.encrypted and not store.properties().encrypted:
        raise WrongKey(
            "this store is encrypted",
            where=store.url,
            hint=f"name its key: {SETTING}=file:PATH, or encrypt= of a Checkpointer",
        )
    if store.properties().encrypted and not record.encrypted:
        raise WrongKey(
            "this store is not encrypted, and a key was given",
            where=store.url,
            hint="relight keys rekey STORE encrypts what is there; or save to another store",
        )
    return record


def require_store(store: ByteStore) -> StoreRecord:
    """Return the store's record. Create it if this is not a store yet."""
    for _ in range(3):
        try:
            return read_store(store)
        except CheckpointNotFound:
            if not store.properties().encrypted and any(True for _ in store.list(KEYS_DIR)):
                hint = f"{SETTING}=file:PATH, or encrypt="
                raise WrongKey(
                    "this store is encrypted, and its relight.json is gone", where=store.url, hint=hint
                ) from None
            refuse_run_as_store(store)
            record = StoreRecord(
                id=_recorded_id(store) or secrets.token_hex(16),
                created=now_text(),
                encrypted=store.properties().encrypted,
            )
            if store.put_once(STORE_FILE, encode_store(record)):
                return record
    raise StoreUnavailable("relight.json can neither be made nor read", where=store.url)


def _recorded_id(store: ByteStore) -> str:
    """Return the id of a store that lost its relight.json, from a run's records, or else from a checkpoint's root; empty if unknown.

    Under a new id, all existing records would be invalid.
    """
    runs = sorted(entry.name for entry in store.list("") if entry.is_dir and is_run_name(entry.name))
    return _id_of_records(store, runs) or _id_of_roots(store, runs)


def _id_of_records(store: ByteStore, runs: list[str]) -> str:
    for run in runs:
        try:
            folders = Folders(store, run)
            numbers = sorted(folders.all().flat)
        except RelightError as error:
            if error.retryable:  # an unavailable store must not count as a store without records
                raise
            continue
        for seq in numbers:
            key = folders.key(seq)
            try:
                return decode_record(store.get(key, SEALED_BYTES_MAX), seq, key).store
            except RelightError as error:
                if error.retryable:
                    raise
    return ""


def _id_of_roots(store: ByteStore, runs: list[str]) -> str:
    for run in runs:
        try:
            for name in checkpoint_dirs(store, run, ENTRIES_MAX):
                root = peek_root(store, f"{run}/{name}")
                if root is not None:
                    return str(root["store"])
        except RelightError as error:
            if error.retryable:
                raise
    return ""


def checkpoint_dirs(store: ByteStore, run: str, at_most: int | None = None) -> list[str]:
    """Return the names of the run's checkpoint directories, in the order of their steps; none if there is no such run.

    ``at_most``: directory entries to read; None for all. Cost: one listing.
    """
    return sorted(
        entry.name for entry in islice(store.list(run), at_most) if entry.is_dir and parse_dir(entry.name) is not None
    )


def peek_root(store: ByteStore, prefix: str) -> dict[str, Any] | None:
    """Return ``store``, ``run``, ``id`` and ``parents`` of the root in a checkpoint directory; None if there is no well-formed root.

    The root is not verified: no record names its hash. Raise ``StoreUnavailable`` if the store does not answer.
    """
    try:
        value = from_json(store.get(f"{prefix}/{ROOT_FILE}", ROOT_BYTES_MAX), prefix, ROOT_BYTES_MAX)
    except (CheckpointNotFound, CorruptCheckpoint, UnsafeContent):
        return None
    if not isinstance(value, dict) or value.get("relight") != "root":
        return None
    fields = {name: value.get(name) for name in ("store", "run", "id", "parents")}
    ids_ok = isinstance(fields["id"], str) and all(RUN_ID.match(str(fields[name])) for name in ("store", "run"))
    parents = fields["parents"] if isinstance(fields["parents"], list) else []
    return {**fields, "parents": [parent for parent in parents if isinstance(parent, str)]} if ids_ok else None


def check_recordable(store: ByteStore) -> None:
    """Raise ``ConfigError`` if a record of this process would have no effect for processes with the same ``RELIGHT_TRUST``."""
    if not store.properties().trusts_itself:
        raise ConfigError(
            "recording failed: records of this process have no signature of a trusted signer",
            where=store.url,
            hint="set RELIGHT_SIGN to a key that RELIGHT_TRUST names",
        )
