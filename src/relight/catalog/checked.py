"""What is known of a run's checkpoints by reading them: which were whole, which damaged, when, and by what they were read.

``verify``, ``scrub``, the dashboard, retention and the attempt after a restore record what they found as NOTEs in the run's log. ``ls``,
``show``, ``doctor``, ``ready``, ``top``, alerts, the dashboard and retention read them: damage that is known to one is known to all.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import NamedTuple

from relight.errors import RelightError
from relight.format.records import Body, NoteBody
from relight.format.signed import apart
from relight.log import History, Log, LogView, fold
from relight.log.listing import Folders
from relight.store import ByteStore
from relight.store.wrapper import guard_of

TOPIC = "checked"
"""Topic of these NOTEs. ``whole``: ids, apart by spaces; or ``damaged``: one id, and ``what``. ``by``: what read them, on which host."""
WHOLE_MAX = 300
"""Ids of one NOTE: the newest so many. About 3 kB."""
WHAT_MAX = 500
_RECORD_BYTES_MAX = 1 << 20


class VerificationResult(NamedTuple):
    """The newest finding about one checkpoint. ``damage``: the first thing that was wrong; empty if every byte was as committed."""

    damage: str
    by: str
    at: str

    def to_dict(self) -> dict[str, str]:
        """For ``--json``."""
        return {"what": self.damage, "by": self.by, "at": self.at} if self.damage else {"by": self.by, "at": self.at}


def checked(history: History) -> dict[str, VerificationResult]:
    """The newest finding about each checkpoint, by id; one that is in it nowhere was not read, as far as the log knows."""
    found: dict[str, VerificationResult] = {}
    for record in history.notes:
        body = record.body
        if not isinstance(body, NoteBody) or body.topic != TOPIC:
            continue
        by = str(body.data.get("by") or "")[:100]
        for one in str(body.data.get("whole") or "").split():
            found[one] = VerificationResult("", by, record.time)
        if damaged := body.data.get("damaged"):
            found[str(damaged)] = VerificationResult(
                str(body.data.get("what") or "its bytes are not what was committed")[:WHAT_MAX], by, record.time
            )
    return found


def damage(history: History) -> dict[str, VerificationResult]:
    """Of ``checked``, the live checkpoints that are known to be damaged."""
    return {one: found for one, found in checked(history).items() if found.damage and history.find(one) is not None}


def record_checked(store: ByteStore, run: str, found: Mapping[str, str], by: str) -> None:
    """Record findings, ``{id: what is wrong, or ""}``, in the run's log.

    Damage that is recorded already is not recorded again. Nothing is recorded where the store cannot be written, and nothing unsigned in
    a log whose records are signed. Cost: a record for each damaged checkpoint, and one for all others.
    """
    if not found:
        return
    with contextlib.suppress(RelightError):
        log = Log(store, run)
        view = log.read()
        guard = guard_of(store)
        if guard.signer is None and (guard.trust is not None or _is_signed(store, view)):
            return
        history, by = fold(view), f"{by} on {socket.gethostname()[:60]}"
        before = damage(history)
        live = [one.id for one in history.live if one.id in found]
        for one in live:
            what = found[one][:WHAT_MAX]
            if what and (one not in before or before[one].damage != what):
                _append(log, {"damaged": one, "what": what, "by": by})
        if whole := [one for one in live if not found[one]][-WHOLE_MAX:]:
            _append(log, {"whole": " ".join(whole), "by": by})


def _append(log: Log, data: dict[str, str]) -> None:
    def decide(view: LogView) -> tuple[Body, int]:
        return NoteBody(topic=TOPIC, data={**data}), fold(view).epoch

    log.append(decide)


def _is_signed(store: ByteStore, view: LogView) -> bool:
    """Whether the newest record is signed: an unsigned one after it would count for nothing where signers are trusted."""
    file = Folders(store, view.run).key(view.head)

    return apart(store.get(file, _RECORD_BYTES_MAX), file)[1] is not None
