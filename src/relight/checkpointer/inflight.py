"""Saves in the agent. Other threads record each outcome, and the training loop processes it at its next call."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import NamedTuple

from relight.agent import SaveOutcome
from relight.checkpointer.save_handle import Save
from relight.errors import RelightError, SaveFailed
from relight.observe import emit
from relight.save_reason import SaveReason
from relight.units import duration_text

PRIORITIES = ("low", "normal", "high")
"""Saves for signals and exceptions are always ``high``."""
At = tuple[int, int | None]
"""A step, and its last ended micro-batch; None if the step is over."""


class InflightSave(NamedTuple):
    """A save in the agent, with what the loop needs to know when it ends."""

    save: Save
    metrics: Mapping[str, float]
    at: At
    """The step that it saves."""
    before: At | None
    """The step of the save before it, which is the last one if this save fails."""
    tag: str | None = None
    priority: int = 1


class InflightSaves:
    """Saves in the agent of one Checkpointer, by number. True while the loop has not processed the outcome of all of
    them."""

    def __init__(self) -> None:
        self._begun: dict[int, InflightSave] = {}
        self._outcomes: deque[SaveOutcome] = deque()
        self._decided: set[int] = set()
        """Saves with a known outcome that the loop has not processed. Two threads may report one: the agent's answer,
        and its end."""
        self._deciding = threading.Lock()
        self._reported: set[int] = set()
        """Saves that were reported as not durable in time. Each is reported once, even if several waits follow."""

        self._priority = 1

    @contextlib.contextmanager
    def priority(self, name: str) -> Iterator[None]:
        """Set the priority of the saves that are started in this block."""
        self._priority = PRIORITIES.index(name)
        try:
            yield
        finally:
            self._priority = PRIORITIES.index("normal")

    def patient(self, reason: SaveReason) -> bool:
        """Return whether the save that is being started is not urgent, so that it may wait for free space and be
        compressed."""
        return self._rank(reason) < PRIORITIES.index("high")

    def yields_to(self, step: int, reason: SaveReason) -> Callable[[int], bool]:
        """Return a function that decides whether a waiting save gives its slot to the new save: it does if it is less
        urgent and has no tag.

        The waiting save then ends, with an error in its handle. The new save's parent is the save before it.
        """
        rank = self._rank(reason)

        def yields(number: int) -> bool:
            with self._deciding:
                begun = self._begun.get(number)
                if begun is None or number in self._decided or begun.tag is not None or begun.priority >= rank:
                    return False
                del self._begun[number]
            text = f"the save of step {begun.save.step} gave its slot to the more urgent one of step {step} ({reason})"
            begun.save._notify(
                error=SaveFailed(text, retryable=False, hint="a tag, or a higher priority, keeps a waiting save")
            )
            emit("save.coalesced", text, step=begun.save.step)
            return True

        return yields

    def _rank(self, reason: SaveReason) -> int:
        return PRIORITIES.index("high") if reason.is_urgent else self._priority

    def __bool__(self) -> bool:
        return bool(self._begun)

    @property
    def saves(self) -> list[Save]:
        """Their handles, oldest first."""
        return [begun.save for begun in self._begun.values()]

    def metrics(self) -> list[Mapping[str, float]]:
        """Return the metrics of the saves that have not failed."""
        return [begun.metrics for begun in self._begun.values() if begun.save.error is None]

    def lacks(self, at: tuple[int | None, int | None]) -> bool:
        """Return whether a save of that step was passed to the agent and is not known to be durable."""
        return any(begun.at == at and not begun.save.done for begun in self._begun.values())

    @property
    def newest_id(self) -> str | None:
        """The id of the newest save that the agent has: the parent of the next one."""
        return next((save.id for save in reversed(self.saves) if save.id and save.error is None), None)

    def add(self, number: int, begun: InflightSave) -> None:
        """Add a save, before it is passed to the agent."""
        self._begun[number] = begun._replace(priority=self._rank(begun.save.why))

    def drop(self, save: Save) -> None:
        """Remove a save that could not be passed to the agent."""
        self._begun = {number: begun for number, begun in self._begun.items() if begun.save is not save}

    def on_sealed(self, number: int, seconds: float) -> None:
        """Mark a save as sealed. Called in the thread that made the last copy."""
        begun = self._begun.get(number)
        if begun is not None:
            begun.save.mark_sealed(seconds)

    def on_done(self, done: SaveOutcome) -> None:
        """Record a save's outcome in its handle, and queue it for the loop's next call. Called in another thread."""
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
            save.mark_durable(f"; step() took {duration_text(save.timings.get('blocked', 0.0))} of it")
        else:
            save._notify(error=done.error)

    def over(self) -> Iterator[tuple[InflightSave, SaveOutcome]]:
        """Yield the saves that ended since the last call, with their outcomes. If the caller stops early, the next call
        yields the rest."""
        while self._outcomes:
            done = self._outcomes.popleft()
            self._reported.discard(done.report.number)
            begun = self._begun.pop(done.report.number, None)
            self._decided.discard(done.report.number)
            if begun is not None:
                yield begun, done

    def wait(self, seconds: float, writer: str = "") -> None:
        """Wait up to ``seconds`` until every save has ended. Report each save that is not durable by then, once.
        ``writer``: what the writer process does now, for that report."""
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
