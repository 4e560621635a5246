"""Which store this is: ``relight.json``, made once."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from relight.errors import CheckpointNotFound, RelightError, StoreUnavailable, WrongKey
from relight.format import StoreRecord, decode_record, decode_store, encode_store
from relight.format.keyring import KEYS_DIR
from relight.format.names import LOG_DIR, STORE_FILE, is_run_name, parse_record_file, record_file
from relight.format.strict import SEALED_BYTES_MAX
from relight.keys.chain import SETTING
from relight.store import ByteStore
from relight.store.base import encrypts


def now_text() -> str:
    """The time, for people: RFC 3339, UTC, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since_epoch(text: str) -> float | None:
    """A record's time as a number; None if it is no time."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def read_store(store: ByteStore) -> StoreRecord:
    """Which store this is; ``CheckpointNotFound`` if it is none, ``CorruptCheckpoint`` if its record is damaged."""
    try:
        data = store.get(STORE_FILE, SEALED_BYTES_MAX)
    except CheckpointNotFound as error:
        raise CheckpointNotFound(
            "no Relight store here", where=store.url, hint="a store has a file relight.json at its top; check the path"
        ) from error
    record = decode_store(data, f"{store.url}/{STORE_FILE}")
    if record.encrypted and not encrypts(store):
        raise WrongKey(
            "this store is encrypted", where=store.url, hint=f"say where its key is: {SETTING}=file:PATH, or encrypt= of a Checkpointer"
        )
    if encrypts(store) and not record.encrypted:
        raise WrongKey(
            "this store is not encrypted, and a key was given",
            where=store.url, hint="relight rekey STORE encrypts what is there; or save to another store",
        )  # fmt: skip
    return record


def require_store(store: ByteStore) -> StoreRecord:
    """Which store this is; made now if it is none yet."""
    for _ in range(3):
        try:
            return read_store(store)
        except CheckpointNotFound:
            if not encrypts(store) and any(True for _ in store.list(KEYS_DIR)):
                hint = f"{SETTING}=file:PATH, or encrypt="
                raise WrongKey("this store is encrypted, and its relight.json is gone", where=store.url, hint=hint) from None
            record = StoreRecord(id=_recorded_id(store) or secrets.token_hex(16), created=now_text(), encrypted=encrypts(store))
            if store.put_once(STORE_FILE, encode_store(record)):
                return record
    raise StoreUnavailable("relight.json can neither be made nor read", where=store.url)


def _recorded_id(store: ByteStore) -> str:
    """The id that a run's records say, of a store that lost its relight.json: under a new one they would all count for nothing."""
    for run in sorted(entry.name for entry in store.list("") if entry.is_dir and is_run_name(entry.name)):
        try:
            numbers = sorted(seq for entry in store.list(f"{run}/{LOG_DIR}") if (seq := parse_record_file(entry.name)) is not None)
        except RelightError as error:
            if error.retryable:  # not found is one thing, not answered another
                raise
            continue
        for seq in numbers:
            key = f"{run}/{LOG_DIR}/{record_file(seq)}"
            try:
                return decode_record(store.get(key, SEALED_BYTES_MAX), seq, key).store
            except RelightError as error:
                if error.retryable:
                    raise
    return ""


