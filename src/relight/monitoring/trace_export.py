"""Sends spans of saves, restores, tiers and incidents to an OpenTelemetry receiver while a job runs.

The thread runs in ``relight run`` or ``relight metrics --listen``, and reads the event files that the trainer, its agent
and the supervisor write anyway. So the trainer does nothing more, and OpenTelemetry is not imported there. The files
are the queue: they have size limits. If the receiver does not take spans, they are dropped and counted, and for half a
minute none are sent.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relight.comm import new_threads
from relight.errors import ConfigError, RelightError
from relight.monitoring.files import EventFiles, FileEvent
from relight.monitoring.otlp import exporter_for, incident_span, restore_span, send_spans, spans_of
from relight.monitoring.trace import trace_of
from relight.observe import emit, events_directory
from relight.settings.environment import environment, wants_traces
from relight.units import count_text

POLL_S = 2.0
SETTLE_S = 5.0
"""Seconds without an event after which a save that has ended is sent."""
OPEN_S = 600.0
"""Seconds without an event after which a save without an end is sent."""
RETRY_S = 30.0
"""Seconds without a try after spans were not taken."""
REPORT_S = 600.0
"""Seconds from one report of dropped spans to the next."""
CLOSE_S = 1.0
BATCH_SPANS = 512
OPEN_MAX, EVENTS_MAX, SENT_MAX, UNCLAIMED_MAX = 200, 2000, 1000, 10_000
"""Most saves that wait, events of each, ids of saves that were sent, and events of runs that may turn out to be this job's."""
_ENDS = ("save.durable", "save.failed")
_SAVES = ("save.span", "drain.done", *_ENDS)
_READ = frozenset((*_SAVES, "restore.done", "run.failure", "run.decision", "run.recovered"))
Run = tuple[str, str]


def start_traces(*, of_this_job: bool) -> TraceExport | None:
    """Start the thread if the variables of OpenTelemetry request traces. If they cannot be followed, an event gives the reason.

    ``of_this_job``: only runs that this process writes events of; otherwise all runs of this machine's event files.
    """
    try:
        if not wants_traces(environment()):
            return None
        if events_directory() is None:
            raise ConfigError("no events are stored", where="RELIGHT_EVENTS=0")
        return TraceExport(exporter_for(), of_process=os.getpid() if of_this_job else None)
    except RelightError as error:
        why = " ".join(filter(None, (error.what, error.where and f"[{error.where}]", error.hint and f"({error.hint})")))
        emit("traces.off", f"no traces are sent: {why}", why=why)
        return None


class _OpenSave:
    """Events of a save that was not sent yet."""

    def __init__(self) -> None:
        self.events: list[FileEvent] = []
        self.ended = False
        self.last = 0.0


class TraceExport:
    """The thread, and the spans that wait. Only the thread uses what is not read-only."""

    def __init__(
        self,
        exporter: Any,
        *,
        of_process: int | None = None,
        events: Path | None = None,
        poll_s: float = POLL_S,
        settle_s: float = SETTLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``exporter``: OpenTelemetry's. ``of_process``: the id of the process that writes events of the runs to send."""
        self._exporter, self._pid, self._poll_s, self._settle_s, self._clock = (
            exporter,
            of_process,
            poll_s,
            settle_s,
            clock,
        )
        self._began = time.time()
        self._files = EventFiles(events, changed_since=self._began - 1.0)  # a file's time is some milliseconds old
        self._runs: set[Run] = set()
        self._unclaimed: deque[FileEvent] = deque(maxlen=UNCLAIMED_MAX)
        self._saves: OrderedDict[tuple[str, str, str], _OpenSave] = OrderedDict()
        self._sent_saves: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._failures: OrderedDict[tuple[str, str, str], tuple[FileEvent, str]] = OrderedDict()
        """Incidents without a recovery, each with the action that was decided."""
        self._spans: list[Any] = []
        self.sent = self.dropped = 0
        """Spans that the receiver took, and spans that were dropped."""
        self._unreported = 0
        self._reported_at = self._paused_until = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="relight-traces", daemon=True)
        new_threads.start(self._thread)

    def close(self) -> None:
        """Send what is known, and end the thread. Waits at most 1 s, and hardly at all for a receiver that does not answer."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(0.1 if self._paused_until > self._clock() else CLOSE_S)
        self._exporter.shutdown()  # ends a try that waits

    # -- in the thread

    def _work(self) -> None:
        while True:
            ends = self._stop.wait(self._poll_s)
            self._read()
            self._finish(everything=ends)
            self._send()
            if ends:
                return

    def _read(self) -> None:
        new = [event for event in self._files.new() if event.time_s >= self._began]
        if self._pid is not None:
            own = self._files.runs_of(self._pid)
            if own - self._runs:
                self._runs |= own
                new = [*self._unclaimed, *new]
                self._unclaimed.clear()
            self._unclaimed.extend(
                event for event in new if event.name in _READ and (event.head.store, event.head.run) not in self._runs
            )
            new = [event for event in new if (event.head.store, event.head.run) in self._runs]
        for event in new:
            if event.name in _READ:
                self._take(event)

    def _take(self, event: FileEvent) -> None:
        run = event.head.store, event.head.run
        if event.name in _SAVES:
            id_ = event.fields.get("id")
            if isinstance(id_, str) and 0 < len(id_) < 80:
                self._take_save(event, (*run, id_))
        elif event.name == "restore.done":
            span = restore_span(event)
            self._spans += [] if span is None else [span]
        elif event.name == "run.failure":
            self._failures[(*run, str(event.fields.get("incident")))] = event, ""
            if len(self._failures) > OPEN_MAX:
                self._spans.append(incident_span(*self._failures.popitem(last=False)[1], None))
        elif event.name == "run.decision":
            key = next((key for key in reversed(self._failures) if key[:2] == run), None)
            if key is not None:
                self._failures[key] = self._failures[key][0], str(event.fields.get("action", ""))
        else:
            failure = self._failures.pop((*run, str(event.fields.get("incident"))), None)
            if failure is not None:
                self._spans.append(incident_span(*failure, event))

    def _take_save(self, event: FileEvent, key: tuple[str, str, str]) -> None:
        save = self._saves.setdefault(key, _OpenSave())
        save.last = self._clock()
        save.ended |= event.name in _ENDS or event.fields.get("span") == "commit" or key in self._sent_saves
        if event.name not in _ENDS and len(save.events) < EVENTS_MAX:
            save.events.append(event)
        if len(self._saves) > OPEN_MAX:
            self._finish_save(next(iter(self._saves)))

    def _finish(self, *, everything: bool) -> None:
        now = self._clock()
        for key, save in list(self._saves.items()):
            if everything or now - save.last >= (self._settle_s if save.ended else OPEN_S):
                self._finish_save(key)
        if everything:
            self._spans += [incident_span(failure, action, None) for failure, action in self._failures.values()]

    def _finish_save(self, key: tuple[str, str, str]) -> None:
        """Make a save's spans. The node of rank 0 makes the root; later spans of a save that was sent are sent alone."""
        save = self._saves.pop(key)
        trace = trace_of(*key, save.events)
        if trace is not None:
            root = key not in self._sent_saves and any(span.rank == 0 and span.part != "drain" for span in trace.spans)
            self._spans += spans_of(trace, root=root)
        self._sent_saves[key] = None
        while len(self._sent_saves) > SENT_MAX:
            self._sent_saves.popitem(last=False)

    def _send(self) -> None:
        spans, self._spans = self._spans, []
        while spans:
            if self._clock() < self._paused_until or not self._is_taken(spans[:BATCH_SPANS]):
                self._drop(len(spans))
                return
            self.sent += len(spans[:BATCH_SPANS])
            spans = spans[BATCH_SPANS:]

    def _is_taken(self, spans: Sequence[Any]) -> bool:
        is_taken = send_spans(self._exporter, spans)
        if not is_taken:
            self._paused_until = self._clock() + RETRY_S
        return is_taken

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._unreported += count
        if self._clock() - self._reported_at >= REPORT_S or self._stop.is_set():
            text = f"the receiver of traces did not take {count_text(self._unreported, 'span')}: they are dropped"
            emit("traces.lost", text, count=self._unreported)
            self._unreported, self._reported_at = 0, self._clock()
