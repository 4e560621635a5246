"""Request a save from a job on any machine: one NOTE in the run's log requests it, another acknowledges it, the save's reason names it.

The log is the only connection from a user at a terminal or page to a job on another machine, and it keeps the requester's name.
``relight run`` polls the log every few seconds. If several do, the first one with an acknowledging NOTE makes its job save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from relight.errors import ConfigError, StoreUnavailable
from relight.format import Record
from relight.format.records import Body, NoteBody
from relight.format.topics import SAVE_ACKNOWLEDGED, SAVE_REQUEST, SaveAcknowledgedNote, SaveRequestNote
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.save_reason import SaveReason
from relight.store import ByteStore
from relight.units import duration_text

REQUEST_POLL_S = 3.0
"""Seconds between a supervisor's polls for requests."""
OLD_S = 60.0
"""Age in seconds from which a request is ignored: its requester no longer waits."""
UNACKNOWLEDGED_S = 20.0
"""Seconds after which a request without acknowledgement is taken as lost."""
WHO_MAX, WHY_MAX = 64, 200
_POLL_S = 0.5


class SaveAsked(NamedTuple):
    """A request: its number in the log, requester, reason, and time by the requester's clock."""

    seq: int
    by: str
    why: str
    time: str

    @property
    def words(self) -> str:
        """Requester and reason, as the save's reason contains them."""
        return f"{self.by}: {self.why}" if self.why else self.by


class Answer(NamedTuple):
    """State of a request."""

    acknowledged_by: str = ""
    """Machine that acknowledged it; empty until then."""
    refused: str = ""
    """Why the job there cannot be asked to save; empty if it can."""
    saved: Checkpoint | None = None

    @property
    def over(self) -> bool:
        """Return whether the request was refused or its save exists."""
        return bool(self.refused) or self.saved is not None


def ask_for_save(store: ByteStore, run: str, by: str, why: str = "") -> int:
    """Request a save at the end of the job's step. Return the request's number. Cost: one record."""
    by, why = by or "somebody", " ".join(why.split())
    if len(by) > WHO_MAX or len(why) > WHY_MAX or not (by + why).isprintable():
        raise ConfigError(f"a name has at most {WHO_MAX} letters and a reason {WHY_MAX}, all printable")
    written = _note(store, run, lambda _: SAVE_REQUEST.note(SaveRequestNote(by=by, why=why or None)))
    assert written is not None
    return written.seq


def request_of(record: Record) -> SaveAsked | None:
    """Return the request in a record; None if the record is something else."""
    note = SAVE_REQUEST.read(record.body)
    if note is None:
        return None
    by, why = _printable(note.by, WHO_MAX), _printable(note.why or "", WHY_MAX)
    return SaveAsked(record.seq, by or "somebody", why, record.time)


def acknowledge(store: ByteStore, run: str, request: SaveAsked, by: str, refused: str = "") -> bool:
    """Acknowledge a request and all before it. Return True if no other supervisor had acknowledged it. Cost: at most one record.

    After ``Uncertain``, call it again: a NOTE that was written after all then counts.
    """
    note = SaveAcknowledgedNote(upto=request.seq, by=by[:WHO_MAX], refused=refused[:WHY_MAX] or None)
    acknowledged: list[bool] = []

    def decide(view: LogView) -> NoteBody | None:
        counts = any(record.seq == request.seq for record in view.records)
        acknowledgement = _acknowledgement(fold(view), request.seq)
        acknowledged[:] = [acknowledgement is not None and acknowledgement[1] == note]
        return SAVE_ACKNOWLEDGED.note(note) if counts and acknowledgement is None else None

    return _note(store, run, decide) is not None or acknowledged == [True]


def outcome_of(history: History, seq: int) -> Answer:
    """Return the state of the request with number ``seq``."""
    acknowledgement = _acknowledgement(history, seq)
    if acknowledgement is None:
        return Answer()
    record, note = acknowledgement
    by, refused = _printable(note.by, WHO_MAX), _printable(note.refused or "", WHY_MAX)
    later = sorted(
        (checkpoint for checkpoint in (*history.live, *history.retired.values()) if checkpoint.seq > record.seq),
        key=lambda checkpoint: checkpoint.seq,
    )
    saved = next((checkpoint for checkpoint in later if _is_requested(checkpoint.body.save_reason)), None)
    return Answer(by or "a machine without a name", refused, saved)


def _is_requested(reason: SaveReason) -> bool:
    """Return whether a request caused the save. A rank that did not know the requester recorded the signal."""
    return reason.kind == "requested" or (reason.kind == "signal" and not reason.is_ending_signal)


def wait_for_answer(
    store: ByteStore,
    run: str,
    seq: int,
    timeout_s: float,
    on_change: Callable[[Answer], None] = lambda _: None,
    ending: threading.Event | None = None,
) -> Answer:
    """Wait until the save exists, is refused, no supervisor acknowledges it, or ``timeout_s`` is over. Return the last state.

    ``on_change`` is called with each changed state. If the store does not answer for a while, it is polled again.
    Cost: two listings a second.
    """
    ending, began, last_answer, log = ending or threading.Event(), time.monotonic(), Answer(), Log(store, run)
    while not last_answer.over:
        try:
            answer = outcome_of(fold(log.read()), seq)
        except StoreUnavailable as error:
            if not error.retryable:
                raise
            answer = last_answer
        if answer != last_answer:
            last_answer = answer
            on_change(last_answer)
        passed = time.monotonic() - began
        if passed > (timeout_s if last_answer.acknowledged_by else min(timeout_s, UNACKNOWLEDGED_S)) or ending.wait(
            _POLL_S
        ):
            break
    return last_answer


def describe_outcome(answer: Answer, waited_s: float) -> str:
    """Return a sentence on a request's outcome, and if there is no save, what to do."""
    if answer.saved is not None:
        return f"saved: {answer.saved.id} (step {answer.saved.step}), {answer.saved.body.reason}"
    if answer.refused:
        return f"acknowledged on {answer.acknowledged_by}, but refused: {answer.refused}"
    if answer.acknowledged_by:
        late = f"not saved within {duration_text(waited_s)}"
        return f"acknowledged on {answer.acknowledged_by}, but {late}: it may still come; see the job's output"
    return (
        f"not acknowledged within {duration_text(waited_s)}: no relight run supervises a job of this run, or it cannot read the store; "
        "without relight run, send SIGUSR1 to the training process on its machine (kill -USR1 PID)"
    )


def _acknowledgement(history: History, seq: int) -> tuple[Record, SaveAcknowledgedNote] | None:
    for record, note in SAVE_ACKNOWLEDGED.among(history.notes):
        if record.seq > seq and note.upto >= seq:
            return record, note
    return None


def _note(store: ByteStore, run: str, decide: Callable[[LogView], NoteBody | None]) -> Record | None:
    def with_epoch(view: LogView) -> tuple[Body, int] | None:
        body = decide(view)
        return None if body is None else (body, fold(view).epoch)

    log = Log(store, run)
    log.read()
    return log.append(with_epoch)


def _printable(text: str, most: int) -> str:
    return "".join(character for character in text[:most] if character.isprintable())
