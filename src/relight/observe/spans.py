"""The parts of a save's way, from the step to the commit, as events: who did what, from when to when."""

from __future__ import annotations

from typing import Any

from relight.observe.events import emit

PARTS = ("blocked", "snapshot", "held", "write", "wait", "parts", "commit", "drain")
"""In the order of the way; ``drain`` is made of ``drain.done`` by who reads."""


def record_span(span: str, checkpoint_id: str, step: int, start: float, end: float, **fields: Any) -> None:
    """That ``span``, one of ``PARTS``, took from ``start`` to ``end``: seconds of this machine's monotonic clock. ``fields``: what else
    there is to say, such as the ``rank``, where this process works for several."""
    emit("save.span", span=span, id=checkpoint_id, step=step, start=round(start, 6), end=round(end, 6), **fields)
