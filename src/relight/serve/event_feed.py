"""What processes of this machine tell of runs, and what alerts make of it, by threads of its own; what logs say the readers know already.

Stores do not say how a save went, or that a machine looks like failing; events do, where the server is on a machine that trains. Elsewhere
all of this is empty.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from relight.monitoring.alert_delivery import Ledger
from relight.monitoring.alert_state import decode_alarms, encode_alarms
from relight.monitoring.files import EventFiles, Heard
from relight.monitoring.loop import EVERY_S, AlertLoop
from relight.monitoring.notify import Alarms
from relight.monitoring.overview import KnownRun, RunSeen, Watcher
from relight.monitoring.rules import FIRING, KINDS, State, spell
from relight.monitoring.settings import Alerting
from relight.monitoring.trace import trace_of
from relight.serve.reader import NOT_YET, StoreFollower
from relight.serve.values import AlertRow, RiskRow, SpanRow

TELLS = ("save.span", "drain.done")
STEPS = "steps.done"
CURVES_MAX, METRICS_MAX, POINTS_MAX = 200, 12, 4000
"""Runs of which what was told of steps is kept, metrics of each, and points of each: of more, every other one is let go."""
SAVES_MAX, TOLD_MAX = 500, 2000
"""Saves of which what was told is kept, of all runs together, and how much of each."""
POLL_S = 2.0
ROUNDS_MAX = 50
FIRST_S = 120.0
"""How long alerts wait for the first look at all stores: until then none of them is taken to be over, or to be new."""
SILENT_S = 300.0
"""A store whose reader has not come to an end for so long does not answer."""


class EventFeed:
    """Of the stores that these readers follow. ``changed`` is called with a store's URL and a run when a save of it was told of."""

    def __init__(
        self, readers: Sequence[StoreFollower], alerting: Alerting, changed: Callable[[str, str], None] = lambda store, run: None, *,
        events: Path | None = None, poll_s: float = POLL_S, every_s: float = EVERY_S,
        kept: bytes = b"", keep: Callable[[bytes], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """``kept``: what ``keep`` was given last by the server before this one, of alerts and what was told of them."""
        self._files = EventFiles(events)
        self._readers, self._alerting = readers, alerting
        self._watcher = Watcher([one.url for one in readers], events=events, reads=self._reads)
        state, ledger = decode_alarms(kept, time.time())
        self._keep, self._kept_some = keep, bool(kept)
        self._alarms = Alarms(alerting, state, ledger, self._keeps)
        self._changed, self._poll_s, self._every_s = changed, poll_s, every_s
        self._told: OrderedDict[tuple[str, str, str], list[Heard]] = OrderedDict()
        self._curves: OrderedDict[tuple[str, str], dict[str, dict[int, float | None]]] = OrderedDict()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._looking: AlertLoop | None = None
        self._thread = threading.Thread(target=self._follow, name="relight-serve-events", daemon=True)

    def start(self) -> None:
        """Begin to follow, and to tell alerts."""
        self._thread.start()
        self._looking = AlertLoop(self._watcher, self._alarms, every_s=self._every_s, stop=self._ending)

    def close(self) -> None:
        """End; what hangs is left to itself."""
        self._ending.set()
        if self._looking is not None:
            self._looking.stop()
        if self._thread.is_alive():
            self._thread.join(5)

    def save(self, store: str, run: str, id_: str) -> tuple[float | None, list[SpanRow]]:
        """How long a save took until it was durable, and its parts by rank, from its begin on; None and nothing if nobody told of it."""
        with self._lock:
            told = list(self._told.get((store, run, id_), ()))
        trace = trace_of(store, run, id_, told) if told else None
        if trace is None:
            return None, []
        spans = [SpanRow(one.rank, one.part, one.start - trace.start, one.end - trace.start) for one in trace.spans]
        return trace.durable_s if trace.committed else None, spans

    def curves(self, store: str, run: str) -> dict[str, dict[int, float | None]]:
        """What was told of steps: a value a step, by metric; some of them, not all."""
        with self._lock:
            return {name: dict(points) for name, points in self._curves.get((store, run), {}).items()}

    def damage(self, store: str, run: str) -> dict[str, str]:
        """Checkpoints that were told to be damaged, or are not good for another reason, and why."""
        seen = self._seen(store, run)
        return dict(seen.bad) if seen is not None else {}

    def over(self, store: str, run: str) -> bool:
        """Whether the run's process has told that it came to its end."""
        seen = self._seen(store, run)
        return seen is not None and seen.heard_at is not None and not seen.active

    def risk(self, store: str, run: str) -> float | None:
        """The last alarm's, while it counts; None if no process here tells of that run."""
        seen = self._seen(store, run)
        return seen.risk if seen is not None and seen.heard_at is not None else None

    def risks(self) -> list[RiskRow]:
        """Of all runs, the highest first; ``store`` is its URL."""
        found = [RiskRow(one.store, one.run, "", one.heard_at, "", one.risk, one.risk_why) for one in self._runs() if one.risk > 0]
        return sorted(found, key=lambda row: -(row.risk or 0.0))

    def alerts(self) -> list[AlertRow]:
        """The rules, as they are set, and which hold now and for what."""
        firing: dict[str, list[str]] = {}
        for one in self._alarms.alerts:
            if one.state == FIRING:
                for_s = max(0.0, time.time() - (one.fired_at or one.since))
                firing.setdefault(one.kind, []).append(f"{one.run}, for {spell(for_s)}: {one.reason}")
        return [
            AlertRow(rule.kind, "; ".join([KINDS[rule.kind].says, *firing.get(rule.kind, [])])[:500], rule.severity, rule.kind in firing)
            for rule in self._alerting.rules
        ]

    # -- inside

    def _runs(self) -> list[RunSeen]:
        return self._looking.seen if self._looking is not None else []

    def _seen(self, store: str, run: str) -> RunSeen | None:
        return next((one for one in self._runs() if (one.store, one.run) == (store, run)), None)

    def _keeps(self, state: State, ledger: Ledger, now: float) -> None:
        """For the next server. As long as nothing is the matter, nothing is written."""
        some = bool(state or ledger.waiting)
        if some or self._kept_some:
            self._keep(encode_alarms(state, ledger, now))
            self._kept_some = some

    def _reads(self) -> Iterator[KnownRun]:
        """What the readers have read last, once each has: before that nobody knows which runs there are."""
        ends = time.monotonic() + FIRST_S
        while any(one.now.state == NOT_YET for one in self._readers) and time.monotonic() < ends and not self._ending.wait(0.05):
            pass
        for reader in self._readers:
            now = reader.now
            silent_s = time.time() - (now.read_at or 0.0)
            if now.state != "ok":
                yield KnownRun(reader.store, error=now.state)
            elif silent_s > SILENT_S:
                yield KnownRun(reader.store, error=f"the store has not answered for {spell(silent_s)}")
            else:
                for one in now.runs.values():
                    yield KnownRun(reader.store, one.name, one.history, one.told, one.accounts, one.error if one.unread else "")

    def _follow(self) -> None:
        while not self._ending.is_set():
            for store, run in sorted(self._read_new()):
                self._changed(store, run)
            self._ending.wait(self._poll_s)

    def _read_new(self) -> set[tuple[str, str]]:
        """What is new, kept by save; the runs that it is of."""
        touched = set()
        for _ in range(ROUNDS_MAX):
            new = list(self._files.new())
            for one in new:
                if one.name == STEPS and self._steps(one):
                    touched.add((one.head.store, one.head.run))
                    continue
                id_ = one.fields.get("id")
                if one.name not in TELLS or not isinstance(id_, str) or not 0 < len(id_) < 80:
                    continue
                key = one.head.store, one.head.run, id_
                with self._lock:
                    kept = self._told.setdefault(key, [])
                    self._told.move_to_end(key)
                    if len(kept) < TOLD_MAX:
                        kept.append(one)
                    while len(self._told) > SAVES_MAX:
                        self._told.popitem(last=False)
                touched.add(key[:2])
            if not new:
                break
        return touched

    def _steps(self, one: Heard) -> bool:
        """Keep what an event tells of steps; whether there was anything. It may say anything: it is a file's."""
        steps, metrics = one.fields.get("steps"), one.fields.get("metrics")
        if not isinstance(steps, list) or not isinstance(metrics, dict):
            return False
        if not all(type(step) is int and 0 <= step < 1 << 53 for step in steps):
            return False
        kept: dict[str, dict[int, float | None]] = {}
        for name, values in list(metrics.items())[:METRICS_MAX]:
            if isinstance(values, list) and len(values) == len(steps) and len(name) <= 80:
                kept[name] = {step: _finite(value) for step, value in zip(steps, values, strict=True)}
        if not kept:
            return False
        key = one.head.store, one.head.run
        with self._lock:
            known = self._curves.setdefault(key, {})
            self._curves.move_to_end(key)
            while len(self._curves) > CURVES_MAX:
                self._curves.popitem(last=False)
            for name, points in kept.items():
                if name not in known and len(known) >= METRICS_MAX:
                    continue
                held = known.setdefault(name, {})
                held.update(points)
                if len(held) > POINTS_MAX:
                    known[name] = dict(sorted(held.items())[::2])
        return True


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None  # NaN is not less; an int may be longer
