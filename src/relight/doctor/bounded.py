"""Run probes with a deadline: a probe that hangs or fails is recorded as unseen, and the others continue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from relight.errors import RelightError
from relight.units import duration_text

T = TypeVar("T")
QUICK = "left out by --quick"
"""Reason in ``unseen`` of a probe that ``--quick`` skips."""
SECONDS = 10.0
"""Seconds for one probe, so that a hanging network file system does not block longer."""


class BoundedProbe:
    """Runs probes, and records by name why a probe has no result."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self.unseen: dict[str, str] = {}

    def leave_out(self, *names: str) -> None:
        """Record that ``--quick`` skips these probes, so that no check of them counts as made."""
        self.unseen |= dict.fromkeys(names, QUICK)

    def at(self, name: str, probe: Callable[[], T], otherwise: T, seconds: float | None = None) -> T:
        """Return the result of ``probe``. If it fails or takes too long, record that in ``unseen`` and return ``otherwise``.

        A hanging probe's thread is abandoned.
        """
        answers: list[T] = []
        errors: list[RelightError | OSError | ValueError] = []

        def run() -> None:
            try:
                answers.append(probe())
            except (RelightError, OSError, ValueError) as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=f"relight-doctor-{name}", daemon=True)
        thread.start()
        limit = self._seconds if seconds is None else seconds
        thread.join(limit)
        if answers:
            return answers[0]
        if errors:
            self.unseen[name] = errors[0].what if isinstance(errors[0], RelightError) else str(errors[0])
        else:
            self.unseen[name] = (
                f"no answer within {duration_text(limit)}" if thread.is_alive() else "it ended without an answer"
            )
        return otherwise
