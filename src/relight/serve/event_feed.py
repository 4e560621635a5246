"""Events of processes on this machine, followed by a thread, and the alerts computed from them and from the stores.

Stores do not record how long a save's phases took, or that a machine is likely to fail. Events do, if the server runs on a machine that
trains. On another machine all of this is empty.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from relight.monitoring.alert_delivery import Ledger
from relight.monitoring.alert_state import decode_alarms, encode_alarms
from relight.monitoring.files import EventFiles, FileEvent
from relight.monitoring.loop import EVERY_S, AlertLoop
from relight.monitoring.notify import Alarms
from relight.monitoring.overview import KnownRun, RunSeen, Watcher
from relight.monitoring.rules import FIRING, KINDS, SEVERITIES, State, hint_of
from relight.monitoring.settings import Alerting
from relight.monitoring.trace import trace_of
from relight.serve.curves import METRICS_MAX, CurveStore
from relight.serve.followers_seen import ROLE as FOLLOWER
from relight.serve.followers_seen import FollowersSeen
from relight.serve.reader import NOT_YET, StoreFollower
from relight.serve.values import AlertRow, FiringRow, RiskRow, SpanRow
from relight.units import duration_text

SAVE_EVENTS = ("save.span", "drain.done")
STEPS = "steps.done"
SAVES_MAX, SAVE_EVENTS_MAX = 500, 2000
"""Maximum number of saves with kept events, in all runs together, and of events of each save."""
JOBS_MAX = 10_000
"""Runs with a kept time of their job's last event."""
COMMAND = "command"
"""Role of a command's process."""
POLL_S = 2.0
ROUNDS_MAX = 50
FIRST_S = 120.0
"""Seconds that alerts wait until all stores were read once. Before that, no alert begins or ends."""
SILENT_S = 300.0
"""Seconds since its last complete read after which a store counts as not answering."""


class EventFeed:
    """Events and alerts of the followed stores. ``changed`` is called with a store's URL and a run for each run with new events,
    ``alerted`` for each run for which an alert begins or ends; the run is empty for an alert of the whole store.
    """

    def __init__(
        self,
        readers: Sequence[StoreFollower],
        alerting: Alerting,
        changed: Callable[[str, str], None] = lambda store, run: None,
        *,
        alerted: Callable[[str, str], None] = lambda store, run: None,
        events: Path | None = None,
        poll_s: float = POLL_S,
        every_s: float = EVERY_S,
        kept: bytes = b"",
        keep: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """``kept``: the last value that the previous server passed to ``keep``: alert states and undelivered notifications."""
        self._files = EventFiles(events)
        self._readers, self._alerting = readers, alerting
        self._watcher = Watcher([reader.url for reader in readers], events=events, reads=self._reads)
        state, ledger = decode_alarms(kept, time.time())
        self._keep, self._kept_some = keep, bool(kept)
        self._alarms = Alarms(alerting, state, ledger, self._keeps)
        self._changed, self._alerted, self._poll_s, self._every_s = changed, alerted, poll_s, every_s
        self._save_events: OrderedDict[tuple[str, str, str], list[FileEvent]] = OrderedDict()
        self.curves = CurveStore()
        self.followers = FollowersSeen()
        self._job_events: OrderedDict[tuple[str, str], tuple[float | None, float | None]] = OrderedDict()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._alert_loop: AlertLoop | None = None
        self._listed: list[RunSeen] = []
        self._by_name: dict[tuple[str, str], RunSeen] = {}
        """The runs of ``_listed``, by store and run."""
        self._thread = threading.Thread(target=self._follow, name="relight-serve-events", daemon=True)

    def start(self) -> None:
        """Begin to follow events, and to send alerts."""
        self._thread.start()
        self._alert_loop = AlertLoop(self._watcher, self._alarms, every_s=self._every_s, stop=self._ending)

    def close(self) -> None:
        """Stop both threads. A thread that does not end within seconds is left running; it is a daemon."""
        self._ending.set()
        if self._alert_loop is not None:
            self._alert_loop.stop()
        if self._thread.is_alive():
            self._thread.join(5)

    def save(self, store: str, run: str, id_: str) -> tuple[float | None, list[SpanRow]]:
        """Return the seconds until a save was durable, and its phases by rank, in seconds from its start. None and [] without events."""
        with self._lock:
            events = list(self._save_events.get((store, run, id_), ()))
        trace = trace_of(store, run, id_, events) if events else None
        if trace is None:
            return None, []
        spans = [
            SpanRow(span.rank, span.part, span.start - trace.start, span.end - trace.start) for span in trace.spans
        ]
        return trace.durable_s if trace.committed else None, spans

    def damage(self, store: str, run: str) -> dict[str, str]:
        """Return the ids of damaged, suspect and rolled-back checkpoints, each with the reason."""
        seen = self._seen(store, run)
        return dict(seen.bad) if seen is not None else {}

    def over(self, store: str, run: str) -> str:
        """Return why the run is over: its process reported its end, or was silent for a day. Empty if it is not over."""
        seen = self._seen(store, run)
        if seen is None or seen.last_event_at is None or seen.active:
            return ""
        return "the run has ended" if seen.has_ended else "no event and no checkpoint for a day"

    def life(self, store: str, run: str) -> tuple[float | None, float | None]:
        """Return when the run's last attempt here reported its normal end, and when a process of its job emitted the last event."""
        return self._job_events.get((store, run), (None, None))

    def risk(self, store: str, run: str) -> float | None:
        """Return the failure risk of the run's last alarm while the alarm is valid, else 0. None if no process here reports on that run."""
        seen = self._seen(store, run)
        return seen.risk if seen is not None and seen.last_event_at is not None else None

    def risks(self) -> list[RiskRow]:
        """Return runs with a failure risk, highest first. ``store`` is the store's URL."""
        rows = [
            RiskRow(run.store, run.run, "", run.last_event_at, "", run.risk, run.risk_why)
            for run in self._runs()
            if run.risk > 0
        ]
        return sorted(rows, key=lambda row: -(row.risk or 0.0))

    def firing(self) -> list[FiringRow]:
        """Return alerts that fire now, critical ones first. ``store`` is the store's URL."""
        rows = [
            FiringRow(
                alert.kind,
                alert.severity,
                alert.store,
                alert.run,
                alert.reason,
                alert.fired_at or alert.since,
                hint_of(alert.kind, alert.store, alert.run),
            )
            for alert in self._alarms.alerts
            if alert.state == FIRING
        ]
        return sorted(rows, key=lambda row: (-SEVERITIES.index(row.severity), row.store, row.run))

    def alerts(self) -> list[AlertRow]:
        """Return the configured rules, and for which runs each fires now."""
        firing: dict[str, list[str]] = {}
        for alert in self._alarms.alerts:
            if alert.state == FIRING:
                for_s = max(0.0, time.time() - (alert.fired_at or alert.since))
                firing.setdefault(alert.kind, []).append(f"{alert.run}, for {duration_text(for_s)}: {alert.reason}")
        return [
            AlertRow(
                rule.kind,
                "; ".join([KINDS[rule.kind].summary, *firing.get(rule.kind, [])])[:500],
                rule.severity,
                rule.kind in firing,
            )
            for rule in self._alerting.rules
        ]

    # -- inside

    def _runs(self) -> list[RunSeen]:
        return self._alert_loop.seen if self._alert_loop is not None else []

    def _seen(self, store: str, run: str) -> RunSeen | None:
        runs = self._runs()
        if runs is not self._listed:  # each poll makes a new list
            self._listed, self._by_name = runs, {(row.store, row.run): row for row in runs}
        return self._by_name.get((store, run))

    def _keeps(self, state: State, ledger: Ledger, now: float) -> None:
        """Store alert states for the next server. Nothing is written while there is no alert, and no message to send."""
        has_alerts = bool(state or ledger.waiting or ledger.unsent)
        if has_alerts or self._kept_some:
            self._keep(encode_alarms(state, ledger, now))
            self._kept_some = has_alerts

    def _reads(self) -> Iterator[KnownRun]:
        """Yield the last read state of every run. Wait up to ``FIRST_S`` for the first read of each store, which lists its runs."""
        ends = time.monotonic() + FIRST_S
        while (
            any(reader.now.state == NOT_YET for reader in self._readers)
            and time.monotonic() < ends
            and not self._ending.wait(0.05)
        ):
            pass
        for reader in self._readers:
            now = reader.now
            silent_s = time.time() - (now.read_at or 0.0)
            if now.state != "ok":
                yield KnownRun(reader.store, error=now.state)
            elif silent_s > SILENT_S:
                yield KnownRun(reader.store, error=f"the store has not answered for {duration_text(silent_s)}")
            else:
                for state in now.runs.values():
                    yield KnownRun(
                        reader.store,
                        state.name,
                        state.history,
                        state.recorded_incidents,
                        state.accounts,
                        state.error if state.unread else "",
                    )

    def _follow(self) -> None:
        fired: set[tuple[str, str, str]] = set()
        while not self._ending.is_set():
            for store, run in sorted(self._read_new()):
                self._changed(store, run)
            firing = {(row.store, row.run, row.kind) for row in self.firing()}
            for store, run in {(store, run) for store, run, _ in firing ^ fired}:
                self._alerted(store, run)
            fired = firing
            self._ending.wait(self._poll_s)

    def _read_new(self) -> set[tuple[str, str]]:
        """Read new events and keep those of saves and steps. Return the store and run of each."""
        touched = set()
        for _ in range(ROUNDS_MAX):
            new = list(self._files.new())
            for event in new:
                self._note_life(event)
                if (followed := self.followers.note(event)) is not None:
                    touched.add(followed)
                    continue
                if event.name == STEPS and self._steps(event):
                    touched.add((event.head.store, event.head.run))
                    continue
                id_ = event.fields.get("id")
                if event.name not in SAVE_EVENTS or not isinstance(id_, str) or not 0 < len(id_) < 80:
                    continue
                key = event.head.store, event.head.run, id_
                with self._lock:
                    events = self._save_events.setdefault(key, [])
                    self._save_events.move_to_end(key)
                    if len(events) < SAVE_EVENTS_MAX:
                        events.append(event)
                    while len(self._save_events) > SAVES_MAX:
                        self._save_events.popitem(last=False)
                touched.add(key[:2])
            if not new:
                break
        return touched

    def _note_life(self, event: FileEvent) -> None:
        """Record that a process of a job exists, or has ended normally. Commands and followers that read the run are no part of the job."""
        if event.head.role in (COMMAND, FOLLOWER):
            return
        key = event.head.store, event.head.run
        ended_at, last_at = self._job_events.pop(key, (None, None))
        if event.name in ("attempt.started", "attempt.ended") and event.time_s >= (last_at or 0.0):
            ended_at = event.time_s if event.name == "attempt.ended" else None
        self._job_events[key] = ended_at, max(last_at or 0.0, event.time_s)
        while len(self._job_events) > JOBS_MAX:
            self._job_events.popitem(last=False)

    def _steps(self, event: FileEvent) -> bool:
        """Keep the metrics of an event about steps. Return whether it had any. Its fields are unchecked: they come from a file."""
        steps, ages, metrics = (event.fields.get(name) for name in ("steps", "ages", "metrics"))
        if not isinstance(steps, list) or not isinstance(metrics, dict):
            return False
        if not all(type(step) is int and 0 <= step < 1 << 53 for step in steps):
            return False
        if not isinstance(ages, list) or len(ages) != len(steps) or not all(_is_age(age) for age in ages):
            ages = [0.0] * len(steps)
        kept = {
            name: values
            for name, values in list(metrics.items())[:METRICS_MAX]
            if isinstance(values, list) and len(values) == len(steps) and len(name) <= 80
        }
        if kept:
            self.curves.add(event.head.store, event.head.run, steps, [event.time_s - age for age in ages], kept)
        return bool(kept)


def _is_age(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 86400
