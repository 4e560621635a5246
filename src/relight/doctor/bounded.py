"""Looking with a deadline: what hangs, or fails, is noted as unseen, and the rest is looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from relight.errors import RelightError

T = TypeVar("T")
QUICK = "left out by --quick"
"""The reason in ``unseen`` of a look that ``--quick`` skips."""
SECONDS = 10.0
"""For one look: a network file system that hangs keeps nobody longer."""


class BoundedProbe:
    """Answers by name, or why there is none."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self.unseen: dict[str, str] = {}

    def leave_out(self, *names: str) -> None:
        """Record that ``--quick`` skips these looks, so that no check of them counts as made."""
        self.unseen |= dict.fromkeys(names, QUICK)

    def at(self, name: str, look: Callable[[], T], otherwise: T, seconds: float | None = None) -> T:
        """What ``look`` gives; ``otherwise``, and a word in ``unseen``, if it fails or takes too long: its thread is left behind."""
        answers: list[T] = []
        errors: list[RelightError | OSError | ValueError] = []

        def run() -> None:
            try:
                answers.append(look())
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
            self.unseen[name] = f"no answer within {limit:.0f} s" if thread.is_alive() else "it ended without an answer"
        return otherwise
