"""Handle of a save: its progress, outcome and timings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Literal, NamedTuple

from relight.commit import SaveReport
from relight.errors import ConfigError, RelightError, StoreUnavailable
from relight.observe import emit, record_span
from relight.observe.object_view import Facts, ObjectView
from relight.observe.progress_bar import progress_bar
from relight.save_reason import SaveReason
from relight.settings.amounts import seconds_of
from relight.settings.short_traceback import short_traceback
from relight.units import Duration, age_text, duration_text, percent_text, size_text

POLL_S = 0.2
"""Seconds between two readings of a save's progress for its bar."""


class Progress(NamedTuple):
    """Progress of a save: the shares of its bytes that are copied and written (0 to 1), and the estimated seconds
    left."""

    copied: float
    written: float
    eta_s: float | None
    """None while no bytes were written, so that there is no rate."""


class Save(ObjectView):
    """Handle of one save.

    A save passes four states: *requested* (this handle exists), *sealed* (its values are copied: training may change
    them, and the process may die), *done* (durable: committed, survives the machine), *drained* (stored on the last
    tier; with one store the same as durable). ``timings`` holds seconds; ``blocked`` is the time that the caller
    waited. ``bytes`` is the size of the packs, and once the save is durable, everything that it occupies in the store.

    If the agent could not make the save, it is already durable or failed when the caller gets the handle.
    """

    def __init__(self, step: int, why: SaveReason, error: RelightError | None = None) -> None:
        self.step = step
        self.why = why
        self.id: str | None = None
        self.error = error
        self.sealed = False
        self.done = False
        self.drained = False
        self.has_remote_tiers = False
        """Whether the run has further tiers."""
        self._asks_further: Callable[[], None] = lambda: None
        """Requests the copy to the further tiers ahead of its turn."""
        self.superseded = False
        """Whether a newer checkpoint was copied to the further tiers instead."""
        self.bytes = 0
        self.timings: dict[str, float] = {}
        self._changed = threading.Condition()
        self._read_progress: Callable[[], tuple[float, float]] | None = None
        self._sealed_s: float | None = None
        self._made_s = monotonic()

    @property
    def reason(self) -> str:
        """The reason as a text, as the checkpoint records it."""
        return self.why.text

    def _facts(self) -> Facts:
        stored = "drained" if self.drained and self.has_remote_tiers else "durable"
        state = stored if self.done else f"failed: {self.error.what}" if self.error else self._under_way()
        facts: list[tuple[str, object]] = [("id", self.id), ("state", state)]
        facts += [
            ("size", size_text(self.bytes) if self.bytes else ""),
            ("requested", age_text(monotonic() - self._made_s)),
        ]
        return Facts(f"step {self.step}", [*facts, ("reason", self.reason)])

    @property
    def line(self) -> str:
        """The save as a text: step, id, state or size, and age."""
        state = size_text(self.bytes) if self.done else self._under_way()
        return f"step {self.step} ({self.id}, {state}, {age_text(monotonic() - self._made_s)})"

    def __bool__(self) -> bool:
        return self.error is None

    def _under_way(self) -> str:
        copied, written, eta_s = self.progress
        if not self.sealed:
            return f"{percent_text(copied)} copied"
        return f"sealed, {percent_text(written)} written" + ("" if eta_s is None else f", {duration_text(eta_s)} left")

    @property
    def progress(self) -> Progress:
        """The current progress."""
        if self.done:
            return Progress(1.0, 1.0, 0.0)
        copied, written = self._read_progress() if self._read_progress is not None else (0.0, 0.0)
        copied = 1.0 if self.sealed else copied
        if self._sealed_s is None or not written:
            return Progress(copied, written, None)
        return Progress(copied, written, (monotonic() - self._sealed_s) * (1 - written) / written)

    @short_traceback
    def wait(self, timeout: Duration | None = None, until: Literal["sealed", "durable", "drained"] = "durable") -> Save:
        """Wait until the save is ``sealed``, ``durable`` or ``drained``; raise its error if it failed.

        Raise ``StoreUnavailable`` after ``timeout``. The save continues anyway.

        Args:
            timeout: The longest wait: ``"10m"``, a ``timedelta``, or seconds. None: no limit.
            until: ``"sealed"``: copied, so that training may change the values, and the process may die. ``"durable"``:
                committed. ``"drained"``: stored on the last tier; with one store the same as durable.
        """
        if until not in ("sealed", "durable", "drained"):
            raise ConfigError(f"until is 'sealed', 'durable' or 'drained', not {until!r}")
        if until == "drained" and not self.drained:
            self._asks_further()
        started = monotonic()
        if timeout is not None and not isinstance(timeout, (int, float)):
            timeout = seconds_of(timeout, "wait(timeout=…)")
        is_over = self._wait(timeout, until)
        if self.error is not None:
            raise self.error
        if is_over and not self._is(until):
            raise StoreUnavailable(
                "a newer save went to the further tiers instead", where=f"the save at step {self.step}", retryable=False
            )
        if not is_over:
            raise StoreUnavailable(
                f"the save is not {until} after {duration_text(monotonic() - started)}",
                where=f"the save at step {self.step}",
            )
        return self

    def _wait(self, timeout: float | None, until: str) -> bool:
        """Wait until the save ended or is ``until``. Return False after ``timeout`` seconds. Show a progress bar."""
        ends = None if timeout is None else monotonic() + timeout
        with progress_bar(f"saving step {self.step}", self.bytes) as meter:
            while True:
                left_s = None if ends is None else max(0.0, ends - monotonic())
                poll_s = min(POLL_S, POLL_S if left_s is None else left_s) if meter.draws else left_s
                with self._changed:
                    if self._changed.wait_for(
                        lambda: self.error is not None or self.superseded or self._is(until), poll_s
                    ):
                        return True
                if poll_s == left_s:
                    return False
                meter.at(self.bytes * (self.progress.copied if until == "sealed" else self.progress.written))

    def _is(self, what: str) -> bool:
        if what == "drained" and self.has_remote_tiers:
            return self.drained
        return self.done or (what == "sealed" and self.sealed)

    def mark_requested(self, started: float, now: float | None = None) -> None:
        """Emit ``save.requested``. ``started``: the request's time, of the performance counter. ``now``: when the
        caller continued, if known."""
        if now is not None:
            self.timings["blocked"] = now - started
            record_span("blocked", self.id or "", self.step, started, now)
        emit("save.requested", step=self.step, reason=self.reason, id=self.id)

    def mark_sealed(self, seconds: float) -> None:
        """Mark the save as sealed after a copy of ``seconds``; wake waiting threads and emit ``save.sealed``."""
        now = perf_counter()
        self.timings["copy"] = seconds
        self._notify(sealed=True)
        record_span("snapshot", self.id or "", self.step, now - seconds, now)
        emit("save.sealed", step=self.step, id=self.id, seconds=round(seconds, 6))

    def mark_written(self, report: SaveReport, seconds: float) -> None:
        """Mark the save as durable, by the report of this process; its training thread waited ``seconds``."""
        self.id, self.sealed, self.done = report.id, True, True
        self.bytes, self.timings = report.stored_bytes, {**report.timings_s, "blocked": seconds}
        self.mark_durable(f" in {duration_text(seconds)}", seconds)

    def mark_durable(self, how: str, waited_s: float = 0.0) -> None:
        """Emit ``save.durable``; ``how`` ends its message. ``waited_s``: seconds that the caller waited for the whole
        save."""
        if waited_s:
            now = perf_counter()
            record_span("blocked", self.id or "", self.step, now - waited_s, now)
        emit(
            "save.durable",
            f"step {self.step} saved as {self.id} ({size_text(self.bytes)}, {self.reason}){how}",
            step=self.step,
            id=self.id,
            reason=self.reason,
            bytes=self.bytes,
            seconds=round(monotonic() - self._made_s, 6),
            blocked_s=round(self.timings.get("blocked", 0.0), 6),
        )

    def _notify(self, **facts: object) -> None:
        """Set attributes, and wake the threads that wait for them."""
        if facts.get("sealed") and self._sealed_s is None:
            self._sealed_s = monotonic()
        with self._changed:
            for name, value in facts.items():
                setattr(self, name, value)
            self._changed.notify_all()
