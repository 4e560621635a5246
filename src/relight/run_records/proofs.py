"""Store the results of ``relight verify`` and ``relight drill --prove`` with the run: one small file each, in ``<run>/proofs/``.

Only ``relight doctor --ready`` reads them, with their age. The newest 32 are kept.
"""

from __future__ import annotations

import contextlib
import time
from uuid import uuid4

import msgspec

from relight.decode import from_json_bytes
from relight.errors import RelightError
from relight.log.identity import now_text, seconds_since_epoch
from relight.store import ByteStore

DIRECTORY = "proofs"
KEPT = 32
CHECKPOINTS_MAX = 1000
"""Largest number of checkpoints in one result; the newest are kept."""
_BYTES_MAX = 1 << 20
VERIFIED, PROVED = "verify", "prove"


class Verified(msgspec.Struct, frozen=True):
    """A completely read checkpoint. ``damage``: the first damage; empty if there was none."""

    id: str
    step: int
    damage: str = ""


class Proof(msgspec.Struct, frozen=True):
    """Result of one ``relight verify`` or ``relight drill --prove``."""

    kind: str
    """``verify`` or ``prove``."""
    ok: bool
    summary: str
    at: str = ""
    checkpoints: tuple[Verified, ...] = ()

    @property
    def time_s(self) -> float | None:
        """Time in seconds since the epoch; None if ``at`` is invalid."""
        return seconds_since_epoch(self.at)


def remember_proof(store: ByteStore, run: str, proof: Proof) -> None:
    """Write a result, and remove the oldest beyond ``KEPT``. Raises the store's errors if writing or listing fails."""
    when_s = (proof.time_s if proof.at else None) or time.time()
    proof = msgspec.structs.replace(proof, at=proof.at or now_text(), checkpoints=proof.checkpoints[-CHECKPOINTS_MAX:])
    name = f"{int(when_s * 1000):013d}-{proof.kind}-{uuid4().hex[:8]}.json"  # in order, also within a second
    store.put_once(f"{run}/{DIRECTORY}/{name}", msgspec.json.format(msgspec.json.encode(proof), indent=1))
    for old in _names(store, run)[:-KEPT]:
        with contextlib.suppress(RelightError):
            store.delete(f"{run}/{DIRECTORY}/{old}")


def proofs_of(store: ByteStore, run: str) -> list[Proof]:
    """Return a run's results, oldest first. Unreadable files are skipped."""
    proofs = []
    for name in _names(store, run)[-2 * KEPT :]:
        with contextlib.suppress(RelightError, msgspec.MsgspecError):
            proofs.append(from_json_bytes(store.get(f"{run}/{DIRECTORY}/{name}", _BYTES_MAX), Proof))
    return proofs


def _names(store: ByteStore, run: str) -> list[str]:
    return sorted(
        entry.name for entry in store.list(f"{run}/{DIRECTORY}") if not entry.is_dir and entry.name.endswith(".json")
    )
