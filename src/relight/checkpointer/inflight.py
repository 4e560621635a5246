"""Saves that the agent has: what became of each is told by other threads, and heard by the loop at its next call."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import NamedTuple

from relight.agent import SaveOutcome
from relight.checkpointer.save_handle import Save
from relight.checkpointer.signals import is_urgent
from relight.errors import RelightError, SaveFailed
from relight.observe import emit

PRIORITIES = ("low", "normal", "high")
"""The urgent ones of signals and exceptions are high."""
At = tuple[int, int | None]
"""A step, and the micro-batch that ended last of it; None if the step is over."""


class InflightSave(NamedTuple):
    """A save that the agent has: what is to be known when it is done."""

    save: Save
    metrics: Mapping[str, float]
    at: At
    """What it is a save of."""
    before: At | None
    """What was saved before it, if this one fails."""
    tag: str | None = None
    priority: int = 1


class InflightSaves:
    """Those of one Checkpointer, by their numbers. True as long as there are any of which the loop has not heard."""

    def __init__(self) -> None:
        self._begun: dict[int, InflightSave] = {}
        self._outcomes: deque[SaveOutcome] = deque()
        self._decided: set[int] = set()
        """Saves whose outcome is known, and not collected yet. Two threads may bring one: by the agent's answer, and by its end."""
        self._deciding = threading.Lock()
        self._reported: set[int] = set()
        """Saves that were reported as not durable in time: once each, however many waits follow."""

        self._priority = 1

    @contextlib.contextmanager
    def priority(self, name: str) -> Iterator[None]:
        """The priority of the saves that are begun in this block."""
        self._priority = PRIORITIES.index(name)
        try:
            yield
        finally:
            self._priority = PRIORITIES.index("normal")

    def patient(self, reason: str) -> bool:
        """Return whether the save that is being begun may be held back for room, and coded: it is not urgent."""
        return self._rank(reason) < PRIORITIES.index("high")

    def yields_to(self, step: int, reason: str) -> Callable[[int], bool]:
        """Return what decides whether a waiting save gives its slot to the one that is being begun: a less urgent one without a tag does.

        It is then over, and its handle has the error. The new save continues from the save before it.
        """
        rank = self._rank(reason)

        def yields(number: int) -> bool:
            with self._deciding:
                begun = self._begun.get(number)
                if begun is None or number in self._decided or begun.tag is not None or begun.priority >= rank:
                    return False
                del self._begun[number]
            text = f"the save of step {begun.save.step} gave its slot to the more urgent one of step {step} ({reason})"
            begun.save._notify(error=SaveFailed(text, retryable=False, hint="a tag, or a higher priority, keeps a waiting save"))
            emit("save.coalesced", text, step=begun.save.step)
            return True

        return yields

    def _rank(self, reason: str) -> int:
        return PRIORITIES.index("high") if is_urgent(reason) or reason.startswith("exception") else self._priority

    def __bool__(self) -> bool:
        return bool(self._begun)

    @property
    def saves(self) -> list[Save]:
        """Their handles, the oldest first."""
        return [begun.save for begun in self._begun.values()]

    @property
    def newest_id(self) -> str | None:
        """The id of the newest save that the agent has: the parent of the next one."""
        return next((save.id for save in reversed(self.saves) if save.id and save.error is None), None)

    def add(self, number: int, begun: InflightSave) -> None:
        """The agent is about to have it."""
        self._begun[number] = begun._replace(priority=self._rank(begun.save.reason))

    def drop(self, save: Save) -> None:
        """The agent does not have it after all."""
        self._begun = {number: begun for number, begun in self._begun.items() if begun.save is not save}

    def on_sealed(self, number: int, seconds: float) -> None:
        """In whichever thread copied last."""
        begun = self._begun.get(number)
        if begun is not None:
            begun.save.mark_sealed(seconds)

    def on_done(self, done: SaveOutcome) -> None:
        """In another thread: tell the handle; the loop hears of it at its next call."""
        with self._deciding:
            begun = self._begun.get(done.report.number)
            if begun is None or done.report.number in self._decided:
                return
            self._decided.add(done.report.number)
            self._outcomes.append(done)
        save, report = begun.save, done.report
        if done.error is None:
            save.timings.update(report.timings)
            save._notify(bytes=report.stored_bytes, sealed=True, done=True)
            save.mark_durable(f"; step() took {save.timings.get('blocked', 0.0):.3f} s of it")
        else:
            save._notify(error=done.error)

    def over(self) -> Iterator[tuple[InflightSave, SaveOutcome]]:
        """What has become of saves since the last call, one after the other: whoever stops in between hears of the rest the next time."""
        while self._outcomes:
            done = self._outcomes.popleft()
            self._reported.discard(done.report.number)
            begun = self._begun.pop(done.report.number, None)
            self._decided.discard(done.report.number)
            if begun is not None:
                yield begun, done

    def wait(self, seconds: float, writer: str = "") -> None:
        """Wait until nothing is being written, ``seconds`` at most. Report each save that is not durable by then, once; ``writer``: what
        the process that writes it does."""
        ends = monotonic() + seconds
        for number, begun in list(self._begun.items()):
            save = begun.save
            try:
                save.wait(max(0.0, ends - monotonic()))
            except RelightError as error:
                if save.error is None and number not in self._reported:
                    self._reported.add(number)
                    text = f"the save at step {save.step}: {error}"
                    emit("save.failed", f"{text}; {writer}" if writer else text, step=save.step, kind=error.kind)
