"""Asking a job for a save, wherever it runs: a NOTE in the run's log asks, another says who has heard it, the save says whom it is for.

Nothing else leads from somebody at a terminal or a page to a job on another machine; the log does, and keeps who asked. Who hears is
``relight run``, which looks every few seconds. Of several the one whose NOTE is there first has the job save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from relight.catalog.run import Run
from relight.errors import ConfigError, StoreUnavailable
from relight.format import Record
from relight.format.records import Body, NoteBody
from relight.heartbeat import ASKED_FOR
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.store import ByteStore

ASKED_TOPIC, HEARD_TOPIC = "save asked", "save heard"
LOOK_S = 3.0
"""So often whoever watches over a job looks whether it was asked."""
OLD_S = 60.0
"""A request that is older is not obeyed: who made it does not wait for it any more."""
NOBODY_S = 20.0
"""If nobody has heard it by then, nobody will."""
WHO_MAX, WHY_MAX = 64, 200
_POLL_S = 0.5
_SIGNAL = "SIGUSR1"
"""The reason of a save whose rank was not told who it is for."""


class SaveAsked(NamedTuple):
    """A request: its number in the log, by whom, why, and when by the clock of who wrote it."""

    seq: int
    by: str
    why: str
    time: str

    @property
    def words(self) -> str:
        """Who it is for, as the save's reason has it."""
        return f"{self.by}: {self.why}" if self.why else self.by


class Answer(NamedTuple):
    """What became of a request so far."""

    heard: str = ""
    """On which machine; empty as long as nobody has heard it."""
    refused: str = ""
    """Why the job there cannot be asked; empty if it was."""
    saved: Checkpoint | None = None

    @property
    def over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return bool(self.refused) or self.saved is not None


def ask_for_save(run: Run, by: str, why: str = "") -> int:
    """Have the run's job save at the end of its step: the request's number. Cost: one record."""
    by, why = by or "somebody", " ".join(why.split())
    if len(by) > WHO_MAX or len(why) > WHY_MAX or not (by + why).isprintable():
        raise ConfigError(f"a name has at most {WHO_MAX} letters and a reason {WHY_MAX}, all of which can be printed")
    written = _note(run.store, run.name, lambda _: NoteBody(topic=ASKED_TOPIC, data={"by": by, **({"why": why} if why else {})}))
    assert written is not None
    return written.seq


def request_of(record: Record) -> SaveAsked | None:
    """The request that a record is; None if it is something else."""
    body = record.body
    if not isinstance(body, NoteBody) or body.topic != ASKED_TOPIC:
        return None
    by, why = (_words(body.data.get(name), most) for name, most in (("by", WHO_MAX), ("why", WHY_MAX)))
    return SaveAsked(record.seq, by or "somebody", why, record.time)


def acknowledge(store: ByteStore, run: str, asked: SaveAsked, by: str, refused: str = "") -> bool:
    """Say that it was heard, and so all that were made before it; whether nobody else had said so already. Cost: at most one record.

    After ``Uncertain`` it is to be said again: what turns out to be written counts.
    """
    why_not = {"refused": refused[:WHY_MAX]} if refused else {}
    body = NoteBody(topic=HEARD_TOPIC, data={"upto": asked.seq, "by": by[:WHO_MAX], **why_not})
    own: list[bool] = []

    def decide(view: LogView) -> NoteBody | None:
        counts = any(record.seq == asked.seq for record in view.records)
        known = _acknowledgement(fold(view), asked.seq)
        own[:] = [known is not None and known.body == body]
        return body if counts and known is None else None

    return _note(store, run, decide) is not None or own == [True]


def outcome_of(history: History, seq: int) -> Answer:
    """What became of the request of that number."""
    heard = _acknowledgement(history, seq)
    if heard is None or not isinstance(heard.body, NoteBody):
        return Answer()
    by, refused = (_words(heard.body.data.get(name), most) for name, most in (("by", WHO_MAX), ("refused", WHY_MAX)))
    behind = sorted((one for one in (*history.live, *history.retired.values()) if one.seq > heard.seq), key=lambda one: one.seq)
    saved = next((one for one in behind if one.body.reason.startswith(ASKED_FOR) or one.body.reason == _SIGNAL), None)
    return Answer(by or "a machine without a name", refused, saved)


def wait_for_answer(
    run: Run, seq: int, timeout_s: float, tell: Callable[[Answer], None] = lambda _: None, ending: threading.Event | None = None
) -> Answer:
    """Until it is there, is refused, nobody hears, or the time is over. ``tell`` is called with each answer that is another.

    A store that does not answer for a while is asked again. Cost: a listing twice a second.
    """
    ending, began, known = ending or threading.Event(), time.monotonic(), Answer()
    while not known.over:
        try:
            found = outcome_of(run.history(), seq)
        except StoreUnavailable as error:
            if not error.retryable:
                raise
            found = known
        if found != known:
            known = found
            tell(known)
        passed = time.monotonic() - began
        if passed > (timeout_s if known.heard else min(timeout_s, NOBODY_S)) or ending.wait(_POLL_S):
            break
    return known


def describe_outcome(answer: Answer, waited_s: float) -> str:
    """A sentence: what came of it, and if it is no save, what to do."""
    if answer.saved is not None:
        return f"saved: {answer.saved.id} (step {answer.saved.step}), {answer.saved.body.reason}"
    if answer.refused:
        return f"heard on {answer.heard}, and not done: {answer.refused}"
    if answer.heard:
        return f"heard on {answer.heard}, and no such save is there {waited_s:.0f} s later: it may still come; the job's output says more"
    return (
        f"nobody has heard it within {waited_s:.0f} s: no relight run watches over a job of this run, or it cannot read the store; "
        "without one, kill -USR1 of the training process, where it runs, has it save"
    )


def _acknowledgement(history: History, seq: int) -> Record | None:
    for record in history.notes:
        body = record.body
        if isinstance(body, NoteBody) and body.topic == HEARD_TOPIC and record.seq > seq:
            upto = body.data.get("upto")
            if type(upto) is int and upto >= seq:
                return record
    return None


def _note(store: ByteStore, run: str, decide: Callable[[LogView], NoteBody | None]) -> Record | None:
    def with_epoch(view: LogView) -> tuple[Body, int] | None:
        body = decide(view)
        return None if body is None else (body, fold(view).epoch)

    log = Log(store, run)
    log.read()
    return log.append(with_epoch)


def _words(value: object, most: int) -> str:
    return "".join(one for one in value[:most] if one.isprintable()) if isinstance(value, str) else ""
