"""Verification results in a run's log: which checkpoints were whole or damaged, when, and which tool read them.

``verify``, ``scrub``, the dashboard, retention and the attempt after a restore record their results as NOTEs in the run's log. ``ls``,
``show``, ``doctor``, ``ready``, ``top``, alerts, the dashboard and retention read them. So all tools know of the same damage.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import NamedTuple

from relight.errors import RelightError
from relight.format.records import Body
from relight.format.signed import apart
from relight.format.topics import VERIFIED, VerificationNote
from relight.log import History, Log, LogView, fold
from relight.log.identity import seconds_since_epoch
from relight.log.listing import Folders
from relight.store import ByteStore
from relight.store.wrapper import guard_of

WHOLE_MAX = 300
"""Largest number of ids in one NOTE; the newest are kept. About 3 kB."""
WHAT_MAX = 500
_RECORD_BYTES_MAX = 1 << 20


class VerificationResult(NamedTuple):
    """Newest verification result of one checkpoint. ``damage``: the first damage; empty if every byte was as committed."""

    damage: str
    by: str
    at: str

    def to_dict(self) -> dict[str, str]:
        """Return the fields for ``--json``."""
        return {"what": self.damage, "by": self.by, "at": self.at} if self.damage else {"by": self.by, "at": self.at}


def checked(history: History) -> dict[str, VerificationResult]:
    """Return the newest result of each checkpoint, by id. A checkpoint without a recorded result is absent."""
    results: dict[str, VerificationResult] = {}
    for record, note in VERIFIED.among(history.notes):
        by = note.by[:100]
        for checkpoint_id in (note.whole or "").split():
            results[checkpoint_id] = VerificationResult("", by, record.time)
        if note.damaged:
            what = (note.what or "its bytes are not what was committed")[:WHAT_MAX]
            results[note.damaged] = VerificationResult(what, by, record.time)
    return results


def damage(history: History) -> dict[str, VerificationResult]:
    """Return those of ``checked`` that are live and damaged."""
    return {
        checkpoint_id: result
        for checkpoint_id, result in checked(history).items()
        if result.damage and history.find(checkpoint_id) is not None
    }


def still_damaged(met: Mapping[str, tuple[str, float]], results: Mapping[str, VerificationResult]) -> dict[str, str]:
    """Return the damage of ``met``, ``{id: (damage, time)}``, of the checkpoints that were not found whole after that time."""
    return {
        checkpoint_id: what
        for checkpoint_id, (what, time_s) in met.items()
        if (result := results.get(checkpoint_id)) is None
        or result.damage
        or (seconds_since_epoch(result.at) or 0.0) <= time_s
    }


def record_checked(store: ByteStore, run: str, results: Mapping[str, str], by: str) -> None:
    """Record results, ``{id: damage, or ""}``, in the run's log.

    Damage that is recorded already is not recorded again. If the store cannot be written, or the log's records are signed and this process
    has no signer, nothing is recorded. Cost: a record for each damaged checkpoint, and one record for all others.
    """
    if not results:
        return
    with contextlib.suppress(RelightError):
        log = Log(store, run)
        view = log.read()
        guard = guard_of(store)
        if guard.signer is None and (guard.trust is not None or _is_signed(store, view)):
            return
        history, by = fold(view), f"{by} on {socket.gethostname()[:60]}"
        before = damage(history)
        live = [checkpoint.id for checkpoint in history.live if checkpoint.id in results]
        for checkpoint_id in live:
            damage_text = results[checkpoint_id][:WHAT_MAX]
            if damage_text and (checkpoint_id not in before or before[checkpoint_id].damage != damage_text):
                _append(log, VerificationNote(damaged=checkpoint_id, what=damage_text, by=by))
        if whole := [checkpoint_id for checkpoint_id in live if not results[checkpoint_id]][-WHOLE_MAX:]:
            _append(log, VerificationNote(whole=" ".join(whole), by=by))


def _append(log: Log, note: VerificationNote) -> None:
    def decide(view: LogView) -> tuple[Body, int]:
        return VERIFIED.note(note), fold(view).epoch

    log.append(decide)


def _is_signed(store: ByteStore, view: LogView) -> bool:
    """Return whether the newest record is signed. Readers that trust signers would ignore an unsigned record after it."""
    file = Folders(store, view.run).key(view.head)

    return apart(store.get(file, _RECORD_BYTES_MAX), file)[1] is not None
