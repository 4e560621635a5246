"""The reason of a save: its kind decides, its text is for people."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal[
    "every",
    "best",
    "adaptive",
    "trigger",
    "signal",
    "requested",
    "preventive",
    "end",
    "exception",
    "user",
    "import",
    "average",
    "branch",
]

ENDING_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
"""Signals after which the job ends."""
TEXT_MAX = 200
"""Characters of an alarm that a checkpoint's reason keeps."""
_URGENT = frozenset({"signal", "requested", "preventive", "exception"})
_SIGNALS = ENDING_SIGNALS | {"SIGUSR1"}
_STARTS: dict[str, Kind] = {
    "asked for by ": "requested", "preventive: ": "preventive", "exception": "exception", "adaptive, ": "adaptive", "every ": "every",
    "best ": "best", "branched off ": "branch",
}  # fmt: skip
"""Starts of the texts in records of earlier versions."""


class SaveReason(msgspec.Struct, frozen=True):
    """Why a save was made.

    ``kind``: what requested it: a trigger (``every``, ``best``, ``adaptive``, or ``trigger`` for one of the user's own), a ``signal``,
    ``requested`` by a person or ``preventive`` by ``relight run``, the ``end`` of the run, an ``exception``, a call of the ``user``, or
    a command. ``text``: printable, for people; nothing reads it. ``by``: the signal's name or the exception's class; else empty.
    """

    kind: Kind
    text: str
    by: str = ""
    postponed: bool = False
    """Whether the save was due at an earlier step."""

    def __str__(self) -> str:
        return self.text

    @property
    def is_urgent(self) -> bool:
        """Whether a person or process waits for the save: then it is not postponed, and takes no longer than necessary."""
        return self.kind in _URGENT

    @property
    def is_routine(self) -> bool:
        """Whether only a schedule requested the save: ``relight.adaptive()`` or ``relight.every()``."""
        return self.kind in ("adaptive", "every")

    @property
    def is_final(self) -> bool:
        """Whether the process ends after the save."""
        return self.kind in ("end", "exception") or self.is_ending_signal

    @property
    def is_ending_signal(self) -> bool:
        """Whether a signal requested the save that ends the job."""
        return self.kind == "signal" and self.by in ENDING_SIGNALS

    def postponed_from(self, step: int) -> SaveReason:
        """Return this reason for a save at a later step than ``step``, at which it was due."""
        return msgspec.structs.replace(self, text=f"{self.text} (postponed from step {step})", postponed=True)


ASKED = SaveReason("user", "asked")
"""The reason of ``Checkpointer.save()`` without ``reason=``."""
END = SaveReason("end", "end")
"""The reason of the save in ``Checkpointer.close()``."""


def of_signal(name: str) -> SaveReason:
    """Return the reason of a save for the signal ``name``."""
    return SaveReason("signal", name, by=name)


def of_exception(error: BaseException) -> SaveReason:
    """Return the reason of the save before ``error`` ends the process."""
    name = type(error).__name__
    return SaveReason("exception", f"exception: {name}", by=name)


def requested_by(who: str) -> SaveReason:
    """Return the reason of a save that the person ``who`` requested."""
    return SaveReason("requested", f"asked for by {who}")


def preventive(why: str) -> SaveReason:
    """Return the reason of a save that ``relight run`` requests because of an alarm."""
    return SaveReason("preventive", f"preventive: {why}"[:TEXT_MAX])


def of_record(text: str, kind: str, by: str) -> SaveReason:
    """Return the reason in a record. Records of earlier versions, and of other kinds than this version knows, have a text only."""
    if kind in Kind.__args__:  # type: ignore[attr-defined] # typing has no better way to list them
        return SaveReason(kind, text, by)  # type: ignore[arg-type]
    if text in _SIGNALS:
        return of_signal(text)
    for start, mapped in _STARTS.items():
        if text.startswith(start):
            return SaveReason(mapped, text)
    return SaveReason(text, text) if text in ("end", "import") else SaveReason("user", text)  # type: ignore[arg-type]
