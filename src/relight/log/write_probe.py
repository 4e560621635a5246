"""Check that a store can be written, read back and deleted from, before it is used."""

from __future__ import annotations

import contextlib
import secrets

from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, UnsafeContent
from relight.log.identity import read_store
from relight.log.nested import refuse_run_as_store, refuse_store_as_run
from relight.store import ByteStore, put

PROBE_BYTES = 8192
PROBE_NAME = ".probe-"
"""Prefix of the probe file's directory. A process that is killed during the probe leaves it."""


def probe(store: ByteStore, run: str) -> None:
    """Write, read back and delete a small file. Raise the store's own error, with a hint, if that fails."""
    refuse_store_as_run(store, run)
    try:
        read_store(store)  # do not write into an encrypted store that was opened without its key
    except CheckpointNotFound:
        refuse_run_as_store(store)
    except (CorruptCheckpoint, UnsafeContent):
        pass
    prefix = f"{run}/{PROBE_NAME}{secrets.token_hex(6)}"
    key, data = f"{prefix}/probe", secrets.token_bytes(PROBE_BYTES)
    try:
        put(store, key, data)
        if store.get(key, PROBE_BYTES) != data:
            raise CorruptCheckpoint(
                "the store gives back other bytes than were written",
                where=key,
                hint="do not train on this disk: check it",
            )
    except BaseException:
        # the first error has the cause: a store that refuses a write refuses the deletion, too
        with contextlib.suppress(RelightError):
            _remove(store, key, prefix)
        raise
    _remove(store, key, prefix)


def _remove(store: ByteStore, key: str, prefix: str) -> None:
    store.delete(key)
    store.delete_dir(prefix)
