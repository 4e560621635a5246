"""Before a store is relied on: can it be written, read back, deleted from?"""

from __future__ import annotations

import secrets

from relight.errors import CheckpointNotFound, CorruptCheckpoint, UnsafeContent
from relight.log.identity import read_store
from relight.log.nested import refuse_run_as_store, refuse_store_as_run
from relight.store import ByteStore, put

PROBE_BYTES = 8192
PROBE_NAME = ".probe-"
"""What the directory of the small file begins with: whoever is killed in between leaves it."""


def probe(store: ByteStore, run: str) -> None:
    """Write, read back and delete a small file; the store's own error, with what to do about it, if that fails."""
    refuse_store_as_run(store, run)
    try:
        read_store(store)  # nothing is put into a store that is encrypted, and was opened without its key
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
                "the store gives back other bytes than were written", where=key, hint="do not train on this disk: check it"
            )
    finally:
        store.delete(key)
        store.delete_dir(prefix)
