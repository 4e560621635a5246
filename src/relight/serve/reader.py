"""Store followers: one thread for each store reads new log records and publishes the state of all its runs for the index."""

from __future__ import annotations

import math
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from relight.catalog.locate import locate
from relight.catalog.run import list_runs
from relight.errors import ConfigError, RelightError
from relight.format.records import CommitBody, RetireBody, SweepBody
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.log.identity import seconds_since_epoch
from relight.monitoring.incident_reader import Diary
from relight.reclaim.recall import due_of
from relight.run_records.verification import damage
from relight.serve.curves import Curves
from relight.serve.run_facts import ScriptFacts, facts_of
from relight.serve.values import IncidentRow
from relight.supervise.goodput import Account
from relight.supervise.incidents import Incident
from relight.units import duration_text

NOT_YET = "not read yet"
"""State of a store before its first read."""
POLL_S = 2.0
LATE_AFTER = 3.0
"""A run is late if its newest good checkpoint is older than this many usual intervals between saves, plus a minute."""
IDLE_AFTER_S = 24 * 3600.0
GAPS_MAX = 20
"""Newest checkpoints from which to compute the usual interval between saves."""


@dataclass(frozen=True)
class RunState:
    """Last read state of a run. ``series`` and ``trend`` are computed once, so that pages need not."""

    name: str
    view: LogView
    history: History
    incidents: Sequence[IncidentRow] = ()
    accounts: Sequence[Account] = ()
    error: str = ""
    """Faults of its log, or the reason why the log could not be read."""
    unread: bool = False
    """Whether the last read failed. The other fields then are those of the last successful read."""
    recorded_incidents: Sequence[Incident] = ()
    """The incidents as recorded by the supervisor."""
    bytes: int = 0
    gap_s: float | None = None
    """Median seconds between saves."""
    good: Checkpoint | None = None
    """The newest checkpoint that is neither suspect, damaged nor rolled back."""
    good_at: float | None = None
    series: Curves = field(default_factory=lambda: Curves({}, {}))
    """Metrics and times of its checkpoints, by step."""
    trend: Sequence[tuple[float, int]] = ()
    """Unix times, and the bytes by which the run grew or shrank."""
    due: Sequence[str] = ()
    facts: ScriptFacts = field(default_factory=ScriptFacts)

    def health(self, now: float) -> tuple[str, str]:
        """Return ``good``, ``late``, ``failed`` or ``idle``, and the reason."""
        last = self.incidents[-1] if self.incidents else None
        newest = self.history.live[-1] if self.history.live else None
        if self.error:
            return "failed", self.error
        if last is not None and last.action == "stop" and (newest is None or str(last.at) >= newest.time):
            return "failed", f"stopped: {last.why}"
        if newest is None:
            return "idle", "no checkpoint yet"
        if self.good is None:
            return "failed", "none of its checkpoints is good"
        age = now - (self.good_at if self.good_at is not None else now)
        if age > IDLE_AFTER_S and (self.gap_s is None or age > 10 * self.gap_s):
            return "idle", "no checkpoint for a day"
        if self.gap_s is not None and age > LATE_AFTER * self.gap_s + 60:
            return (
                "late",
                f"the last good checkpoint is {duration_text(age)} old; they are usually {duration_text(self.gap_s)} apart",
            )
        return "good", ""


@dataclass(frozen=True)
class StoreState:
    """Last read state of a store."""

    runs: dict[str, RunState] = field(default_factory=dict)
    state: str = NOT_YET
    read_at: float | None = None
    free: int | None = None


class StoreFollower:
    """Follows one store in its own thread. ``now`` is the last read state: it is replaced as a whole, and never modified."""

    def __init__(self, name: str, url: str, changed: Callable[[str, set[str]], None], poll_s: float = POLL_S) -> None:
        place = locate(url)
        if place.run is not None or place.which is not None:
            raise ConfigError(
                "this is a run: relight serve follows whole stores", where=url, hint="name the directory above it"
            )
        self.id, self.url, self.store = name, place.store.url, place.store
        self.now = StoreState()
        self._changed, self._poll_s = changed, poll_s
        self._logs: dict[str, tuple[Log, Diary]] = {}
        self._wake, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"relight-serve-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def poke(self) -> None:
        """Read the store now, because an action changed it."""
        self._wake.set()

    def close(self) -> None:
        """Stop the thread. Wait at most 5 s for a read in progress."""
        self._ending.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _follow(self) -> None:
        while not self._ending.is_set():
            self.poll()
            self._wake.wait(self._poll_s)
            self._wake.clear()

    def poll(self) -> None:
        """Read what is new. If the store cannot be read, ``now`` gets the error and keeps the runs of the last read."""
        before = self.now
        try:
            names = list_runs(self.store)
            runs = {}
            for name in names:
                if self._ending.is_set():
                    return
                runs[name] = self._run(name, before.runs.get(name))
            after = StoreState(runs, "ok", time.time(), self.store.free_bytes())
        except (RelightError, OSError) as error:
            after = StoreState(before.runs, _words(error), before.read_at, before.free)
        changed = {name for name in {*after.runs, *before.runs} if after.runs.get(name) is not before.runs.get(name)}
        self.now = after
        for removed_run in before.runs.keys() - after.runs.keys():
            self._logs.pop(removed_run, None)
        if changed or after.state != before.state:
            self._changed(self.id, changed)

    def _run(self, name: str, before: RunState | None) -> RunState:
        """Return a run's state: ``before`` itself if nothing has changed."""
        if name not in self._logs:
            self._logs[name] = Log(self.store, name), Diary(self.store, name)
        log, diary = self._logs[name]
        seen = diary.names
        try:
            view = log.read()
            incidents, accounts = diary.read(every=True)
        except (RelightError, OSError) as error:
            if before is not None and before.error == _words(error):
                return before
            empty = LogView(name, "", "", (), (), -1, "")
            last_state = before or RunState(name, empty, History())
            return replace(
                RunState(
                    name,
                    last_state.view,
                    last_state.history,
                    last_state.incidents,
                    last_state.accounts,
                    _words(error),
                    unread=True,
                ),
                recorded_incidents=last_state.recorded_incidents,
                bytes=last_state.bytes,
            )
        if before is not None and not before.unread and before.view is view and seen == diary.names:
            return before
        state = made(name, view, [incident_row(self.id, name, incident) for incident in incidents], accounts)
        facts, newest = (
            before.facts if before is not None else ScriptFacts(),
            next(iter(state.history.live[::-1]), None),
        )
        if newest is not None and newest.epoch != facts.epoch:
            facts = facts_of(self.store, name, newest)
        return replace(state, recorded_incidents=incidents, facts=facts)


def made(name: str, view: LogView, incidents: Sequence[IncidentRow] = (), accounts: Sequence[Account] = ()) -> RunState:
    """Return the state of a run, computed from its log, incidents and goodput accounts."""
    history = fold(view)
    damaged = damage(history)
    fine = [
        checkpoint
        for checkpoint in history.live
        if not checkpoint.body.suspect and checkpoint.id not in history.rolled_back_ids and checkpoint.id not in damaged
    ]
    good = fine[-1] if fine else None
    times = [
        moment
        for checkpoint in history.live[-GAPS_MAX:]
        if (moment := seconds_since_epoch(checkpoint.time)) is not None
    ]
    gaps = [later - earlier for earlier, later in pairwise(times) if later > earlier]
    everything = sorted([*history.live, *history.retired.values()], key=lambda checkpoint: checkpoint.seq)
    series = Curves({}, {})
    for checkpoint in everything:
        if (moment := seconds_since_epoch(checkpoint.time)) is not None:
            series.times[checkpoint.step] = moment
        for metric, value in checkpoint.metrics.items():
            number = float(value)
            series.values.setdefault(metric, {})[checkpoint.step] = number if math.isfinite(number) else None
    return RunState(
        name,
        view,
        history,
        incidents,
        accounts,
        "; ".join(f"record {fault.seq}: {fault.reason}" for fault in view.faults[:3]),
        bytes=sum(checkpoint.new_bytes for checkpoint in history.live),
        gap_s=statistics.median(gaps) if gaps else None,
        good=good,
        good_at=seconds_since_epoch(good.time) if good else None,
        series=series,
        trend=trend_of(view),
        due=due_of(view, history),
    )


def trend_of(view: LogView) -> list[tuple[float, int]]:
    """Return the Unix time and size change in bytes of each commit and each deletion."""
    grew: dict[str, int] = {}
    points: list[tuple[float, int]] = []
    for record in view.records:
        moment = seconds_since_epoch(record.time)
        if moment is None:
            continue
        if isinstance(record.body, CommitBody):
            grew.setdefault(record.body.id, record.body.new_bytes)
            points.append((moment, record.body.new_bytes))
        elif isinstance(record.body, SweepBody) or (isinstance(record.body, RetireBody) and not record.body.undo_s):
            points.append((moment, -sum(grew.pop(checkpoint_id, 0) for checkpoint_id in record.body.ids)))
    return points


def incident_row(store: str, run: str, incident: Incident) -> IncidentRow:
    """Return an incident as a row for pages."""
    after = incident.after
    return IncidentRow(
        incident.id,
        store,
        run,
        incident.at,
        incident.kind,
        incident.why,
        incident.rank,
        incident.step if incident.step >= 0 else None,
        incident.action,
        incident.reason,
        after.steps_lost if after is not None else None,
        after.seconds.get("all") if after is not None else None,
        [(str(clue.get("kind", "")), str(clue.get("what", "")), clue.get("weight", "")) for clue in incident.clues],
        incident.stacks,
        incident.words,
        incident.workers,
        incident.host,
    )


def names_for(urls: Sequence[str]) -> list[str]:
    """Return a short name of each store, for addresses: the last part of its path, with a number if an earlier store has that name."""
    names: list[str] = []
    for url in urls:
        last = re.sub(r"[^A-Za-z0-9_-]+", "-", url.rstrip("/").rpartition("/")[2]).strip("-")[:40] or "store"
        number, name = 2, last
        while name in names:
            name, number = f"{last}-{number}", number + 1
        names.append(name)
    return names


def open_readers(
    urls: Sequence[str], changed: Callable[[str, set[str]], None], poll_s: float = POLL_S
) -> list[StoreFollower]:
    """Return a follower for each store, not started yet. Raise ``ConfigError`` without stores, or for a store named twice."""
    if not urls:
        raise ConfigError("no store was named", hint="name one: relight serve runs")
    readers = [StoreFollower(name, url, changed, poll_s) for name, url in zip(names_for(urls), urls, strict=True)]
    if len({reader.url for reader in readers}) < len(readers):
        raise ConfigError("a store was named twice", hint="name each once")
    return readers


def _words(error: Exception) -> str:
    return f"{error.kind}: {error.what}" if isinstance(error, RelightError) else str(error)
