"""The stages of a save, from the step to the commit, as events: which process, from when to when."""

from __future__ import annotations

from typing import Any

from relight.observe.events import emit

PARTS = ("blocked", "snapshot", "held", "write", "wait", "parts", "commit", "drain")
"""The stages in their order. Readers of events derive ``drain`` from ``drain.done``."""


def record_span(span: str, checkpoint_id: str, step: int, start: float, end: float, **fields: Any) -> None:
    """Emit that the stage ``span``, one of ``PARTS``, took from ``start`` to ``end``, in seconds of this machine's
    monotonic clock.

    ``fields``: further fields, such as the ``rank`` if this process works for several ranks.
    """
    emit("save.span", span=span, id=checkpoint_id, step=step, start=round(start, 6), end=round(end, 6), **fields)
