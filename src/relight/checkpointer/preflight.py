"""Before the first step: can this store be written, read back, deleted from, and does it have room?"""

from __future__ import annotations

import contextlib
import secrets

from relight.errors import CheckpointNotFound, CorruptCheckpoint, UnsafeContent
from relight.log import read_store
from relight.observe import emit
from relight.store import ByteStore, put

PROBE_BYTES = 8192


def probe(store: ByteStore, run: str) -> None:
    """Write, read back and delete a small file; the store's own error, with what to do about it, if that fails."""
    with contextlib.suppress(CheckpointNotFound, CorruptCheckpoint, UnsafeContent):
        read_store(store)  # nothing is put into a store that is encrypted, and was opened without its key
    prefix = f"{run}/.probe-{secrets.token_hex(6)}"
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


def check_room(store: ByteStore, state_bytes: int, checkpoints: int) -> str | None:
    """A warning, with numbers, if there is not room for two more checkpoints, or for all that the retention rules will keep."""
    free = store.free_bytes()
    if free is None or not state_bytes:
        return None
    fits = free // state_bytes
    if fits >= max(2, checkpoints):
        return None
    text = (
        f"{store.url} has {_gb(free)} free and a checkpoint of this state takes {_gb(state_bytes)}: room for {fits}, "
        f"while {max(2, checkpoints)} will be there at a time; make room or keep fewer (relight.keep(last=…))"
    )
    emit("preflight.warning", text, free_bytes=free, state_bytes=state_bytes)
    return text


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 10**7 else f"{size / 1e6:.2f} MB"
