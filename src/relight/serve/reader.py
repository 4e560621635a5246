"""Following stores: a thread each reads what is new in the logs, and puts what it amounts to where pages find it."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from relight.catalog.checked import damage
from relight.catalog.locate import locate
from relight.catalog.run import list_runs
from relight.errors import ConfigError, RelightError
from relight.format.records import CommitBody, RetireBody, SweepBody
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.log.identity import seconds_since_epoch
from relight.monitoring.incident_reader import Diary
from relight.reclaim.recall import due_of
from relight.serve.pages_words import span
from relight.serve.values import IncidentRow
from relight.supervise.goodput import Account
from relight.supervise.incidents import Incident

NOT_YET = "not read yet"
"""What is said of a store until it was tried once."""
POLL_S = 2.0
LATE_AFTER = 3.0
"""A run is late once its newest good checkpoint is so many times as old as they were apart, and a minute."""
IDLE_AFTER_S = 24 * 3600.0
GAPS_LOOKED_AT = 20


@dataclass(frozen=True)
class RunState:
    """A run as it was read last. ``series`` and ``trend`` are worked out here, so that no page has to."""

    name: str
    view: LogView
    history: History
    incidents: Sequence[IncidentRow] = ()
    accounts: Sequence[Account] = ()
    error: str = ""
    """What is wrong with its log, or why it could not be read."""
    unread: bool = False
    """Whether it could not be read; what else is here is of the last time that it could."""
    told: Sequence[Incident] = ()
    """The incidents as they were written down."""
    bytes: int = 0
    gap_s: float | None = None
    """How far saves are apart, as a rule."""
    good: Checkpoint | None = None
    """The newest that is not suspect and was not rolled back behind."""
    good_at: float | None = None
    series: dict[str, list[tuple[int, float | None]]] = field(default_factory=dict)
    trend: Sequence[tuple[float, int]] = ()
    """Times, and by how many bytes the run grew or shrank then."""
    due: Sequence[str] = ()

    def health(self, now: float) -> tuple[str, str]:
        """``good``, ``late``, ``failed`` or ``idle``, and why."""
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
            return "late", f"the last good checkpoint is {span(age)} old; they are {span(self.gap_s)} apart as a rule"
        return "good", ""


@dataclass(frozen=True)
class StoreState:
    """A store as it was read last."""

    runs: dict[str, RunState] = field(default_factory=dict)
    state: str = NOT_YET
    read_at: float | None = None
    free: int | None = None


class StoreFollower:
    """One store, followed by a thread of its own. ``now`` is all of it as it was read last: replaced as a whole, never changed."""

    def __init__(self, name: str, url: str, changed: Callable[[str, set[str]], None], poll_s: float = POLL_S) -> None:
        place = locate(url)
        if place.run is not None or place.which is not None:
            raise ConfigError("this is a run: relight serve follows whole stores", where=url, hint="name the directory above it")
        self.id, self.url, self.store = name, place.store.url, place.store
        self.now = StoreState()
        self._changed, self._poll_s = changed, poll_s
        self._logs: dict[str, tuple[Log, Diary]] = {}
        self._wake, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"relight-serve-{name}", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def poke(self) -> None:
        """Look now: something was done to the store."""
        self._wake.set()

    def close(self) -> None:
        """End; a read that is under way is waited for, but not for long."""
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
        """Read what is new. What the store refuses is said of it; what was read before stays."""
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
        for gone in before.runs.keys() - after.runs.keys():
            self._logs.pop(gone, None)
        if changed or after.state != before.state:
            self._changed(self.id, changed)

    def _run(self, name: str, before: RunState | None) -> RunState:
        """One run; the very same value if nothing has changed."""
        if name not in self._logs:
            self._logs[name] = Log(self.store, name), Diary(self.store, name)
        log, diary = self._logs[name]
        seen = diary.names
        try:
            view = log.read()
            told, accounts = diary.read(every=True)
        except (RelightError, OSError) as error:
            if before is not None and before.error == _words(error):
                return before
            empty = LogView(name, "", "", (), (), -1, "")
            known = before or RunState(name, empty, History())
            return replace(
                RunState(name, known.view, known.history, known.incidents, known.accounts, _words(error), unread=True),
                told=known.told, bytes=known.bytes,
            )  # fmt: skip
        if before is not None and not before.unread and before.view is view and seen == diary.names:
            return before
        return replace(made(name, view, [incident_row(self.id, name, one) for one in told], accounts), told=told)


def made(name: str, view: LogView, incidents: Sequence[IncidentRow] = (), accounts: Sequence[Account] = ()) -> RunState:
    """What a log amounts to, worked out once."""
    history = fold(view)
    known = damage(history)
    fine = [one for one in history.live if not one.body.suspect and one.id not in history.rolled_back_ids and one.id not in known]
    good = fine[-1] if fine else None
    times = [at for one in history.live[-GAPS_LOOKED_AT:] if (at := seconds_since_epoch(one.time)) is not None]
    gaps = [later - earlier for earlier, later in pairwise(times) if later > earlier]
    everything = sorted([*history.live, *history.retired.values()], key=lambda one: one.seq)
    series: dict[str, dict[int, float | None]] = {}
    for one in everything:
        for metric, value in one.body.metrics.items():
            number = float(value)
            series.setdefault(metric, {})[one.step] = number if number == number and abs(number) != float("inf") else None
    return RunState(
        name,
        view,
        history,
        incidents,
        accounts,
        "; ".join(f"record {fault.seq}: {fault.reason}" for fault in view.faults[:3]),
        bytes=sum(one.body.new_bytes for one in history.live),
        gap_s=statistics.median(gaps) if gaps else None,
        good=good,
        good_at=seconds_since_epoch(good.time) if good else None,
        series={name: sorted(points.items()) for name, points in series.items()},
        trend=trend_of(view),
        due=due_of(view, history),
    )


def trend_of(view: LogView) -> list[tuple[float, int]]:
    """By how many bytes the run grew with each commit, and shrank when bytes went."""
    grew: dict[str, int] = {}
    found: list[tuple[float, int]] = []
    for record in view.records:
        at = seconds_since_epoch(record.time)
        if at is None:
            continue
        if isinstance(record.body, CommitBody):
            grew.setdefault(record.body.id, record.body.new_bytes)
            found.append((at, record.body.new_bytes))
        elif isinstance(record.body, SweepBody) or (isinstance(record.body, RetireBody) and not record.body.undo_s):
            found.append((at, -sum(grew.pop(one, 0) for one in record.body.ids)))
    return found


def incident_row(store: str, run: str, one: Incident) -> IncidentRow:
    """An incident as pages show it."""
    after = one.after
    return IncidentRow(
        one.id,
        store,
        run,
        one.at,
        one.kind,
        one.why,
        one.rank,
        one.step if one.step >= 0 else None,
        one.action,
        one.reason,
        after.steps_lost if after is not None else None,
        after.seconds.get("all") if after is not None else None,
        [(str(clue.get("kind", "")), str(clue.get("what", "")), clue.get("weight", "")) for clue in one.clues],
        one.stacks,
        one.words,
        one.workers,
    )


def names_for(urls: Sequence[str]) -> list[str]:
    """A short name for each store, for addresses: the last part of its path, with a number if that is taken."""
    found: list[str] = []
    for url in urls:
        last = re.sub(r"[^A-Za-z0-9_-]+", "-", url.rstrip("/").rpartition("/")[2]).strip("-")[:40] or "store"
        number, name = 2, last
        while name in found:
            name, number = f"{last}-{number}", number + 1
        found.append(name)
    return found


def open_readers(urls: Sequence[str], changed: Callable[[str, set[str]], None], poll_s: float = POLL_S) -> list[StoreFollower]:
    """One for each store, not started yet."""
    if not urls:
        raise ConfigError("which store?", hint="relight serve runs")
    readers = [StoreFollower(name, url, changed, poll_s) for name, url in zip(names_for(urls), urls, strict=True)]
    if len({one.url for one in readers}) < len(readers):
        raise ConfigError("a store was named twice", hint="name each once")
    return readers


def _words(error: Exception) -> str:
    return f"{error.kind}: {error.what}" if isinstance(error, RelightError) else str(error)
