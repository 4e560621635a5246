"""Reads the present state of runs, from their logs and from the events of their processes on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from relight.catalog.locate import Location, locate
from relight.catalog.run import list_runs
from relight.catalog.tiers import drained_bytes, drained_to, nearest_name, newest_seq, pace_of, tiers_of
from relight.errors import RelightError
from relight.log import Checkpoint, History, Log, fold
from relight.log.identity import seconds_since_epoch
from relight.monitoring.event_metrics import DurableSave, MetricSample, Tally
from relight.monitoring.files import EventFiles
from relight.monitoring.incident_reader import Diary, recent_failures
from relight.monitoring.outcomes import Outcomes, outcomes_of
from relight.observe.metrics import BY_NAME, METRICS
from relight.run_records.run_end import has_ended
from relight.run_records.verification import VerificationResult, checked, still_damaged
from relight.store import ByteStore
from relight.store.mirror_rebuild import mirrored_in
from relight.store.mirror_state import GOOD
from relight.store.urls import absolute, local_path, split_run
from relight.supervise.decide import ACTIONS
from relight.supervise.goodput import Account, merged
from relight.supervise.incidents import Incident, once_each

OVER_S = 86400.0
"""Seconds without a record or an event after which a run counts as over."""
RISK_S = 900.0
"""Seconds for which an alarm counts."""
ROLLED_BACK_WORDS = "rolled back: the run resumed from an earlier checkpoint"
SUSPECT_WORDS = "the saved values may be wrong, though no byte has changed since the save"
RUNS_MAX = 10_000
ROUNDS_MAX = 100
TIMES_SHOWN = 200


class SaveTimes(NamedTuple):
    """Durations of the saves of this machine's processes: medians and the latest, in seconds; None without a save."""

    blocked_s: float | None = None
    durable_s: float | None = None
    last_s: float | None = None
    saves: int = 0
    failed_in_a_row: int = 0
    last: tuple[DurableSave, ...] = ()
    """The latest ones, oldest first."""


class TierSeen(NamedTuple):
    """One tier of a run, as the nearest tier's log states it.

    ``lag_s``: for how long the tier lacks a checkpoint that is newer than its newest one, without the time for which ``lag=`` or
    ``relight.adaptive()`` holds scheduled saves back; 0 if it lacks none.
    """

    name: str
    url: str
    checkpoints: int
    newest_step: int | None
    lag: int
    lag_s: float
    used_bytes: int
    capacity_bytes: int | None
    """Bytes that the run may use there, if known.

    They are the tier's own limit, or the used bytes plus the disk's free bytes.
    """

    @property
    def full(self) -> float | None:
        """Return the used share of the capacity; None if the capacity is unknown."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else None


class RunSeen(NamedTuple):
    """One run at one poll. Times are seconds since the epoch; ages are in seconds, None without a checkpoint."""

    store: str
    run: str
    error: str = ""
    """Why its log could not be read; the other fields are those of the last poll, or empty."""
    checkpoints: int = 0
    step: int | None = None
    id: str | None = None
    committed_at: float | None = None
    age_s: float | None = None
    good_step: int | None = None
    good_id: str | None = None
    good_age_s: float | None = None
    """Age of the newest checkpoint that is not suspect, not rolled back, and not known to be damaged."""
    unprotected_s: float | None = None
    """That age; without a good checkpoint, seconds since the latest attempt took charge."""
    bad: tuple[tuple[str, str], ...] = ()
    """Live checkpoints that are not good, and why."""
    damaged: int = 0
    """Number of those that are suspect or known to be damaged."""
    active: bool = True
    """Whether the run probably continues: it has not ended normally, and had a record or an event within a day."""
    has_ended: bool = False
    """Whether it has ended normally."""
    began_at: float | None = None
    """When the run's latest attempt took charge."""
    logical_bytes: int = 0
    stored_bytes: int = 0
    new_bytes: int = 0
    attempts: int = 0
    saving: SaveTimes = SaveTimes()
    tiers: tuple[TierSeen, ...] = ()
    goodput: float | None = None
    account: Account | None = None
    incidents: tuple[Incident, ...] = ()
    """The latest ``TIMES_SHOWN`` incidents, oldest first."""
    recent_failures: int = 0
    """Failures within the last hour."""
    outcomes: Outcomes = Outcomes()
    risk: float = 0.0
    risk_why: str = ""
    retention_failed: int = 0
    """Times in a row that old checkpoints could not be removed, and why."""
    retention_why: str = ""
    drives: tuple[tuple[str, str], ...] | None = None
    """Drives of the run's mirrored store that are not whole, and why; None if the store is not mirrored."""
    last_event_at: float | None = None
    """When a process of this machine last emitted an event of it."""
    samples: tuple[MetricSample, ...] = ()
    """The samples of all metrics."""


class KnownRun(NamedTuple):
    """A run that the caller has read already.

    ``error``: why it could not be read; without a run, why the store could not.
    """

    store: ByteStore
    run: str = ""
    history: History = History()
    incidents: Sequence[Incident] = ()
    accounts: Sequence[Account] = ()
    error: str = ""


class Watcher:
    """Polls runs repeatedly. Any thread may poll; polls run one after the other.

    ``urls``: stores or runs. ``events``: the directory of events, if it is not this user's own. ``reads`` returns the
    runs, if the caller reads their logs anyway. Without it they are read here.
    """

    def __init__(
        self, urls: Sequence[str], *, events: Path | None = None, reads: Callable[[], Iterable[KnownRun]] | None = None
    ) -> None:
        self.urls = tuple(urls)
        self._reads = reads
        self._files = EventFiles(events)
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._seen: dict[tuple[str, str], RunSeen] = {}
        self._logs: dict[tuple[str, str], tuple[Log, Diary]] = {}
        self._lock = threading.Lock()

    @property
    def why_no_events(self) -> str:
        """Return why no events are read; empty if they are."""
        return self._files.why

    def tally(self, store: str, run: str) -> Tally | None:
        """Return the accumulated events of a run; None without events."""
        return self._tallies.get((store, run))

    def poll(self, now: float) -> list[RunSeen]:
        """Return every run, sorted by store and name. A run that cannot be read has an ``error``; nothing is raised."""
        with self._lock:
            self._read_events()
            runs: dict[tuple[str, str], RunSeen] = {}
            for seen in self._read_by_others(now) if self._reads is not None else self._read_here(now):
                runs[seen.store, seen.run] = seen
            self._seen = runs
            self._logs = {key: readers for key, readers in self._logs.items() if key in runs}
            return [runs[key] for key in sorted(runs)]

    def _read_events(self) -> None:
        for _ in range(ROUNDS_MAX):
            batch = sorted(self._files.new(), key=lambda event: event.time_s)  # of several processes
            for event in batch:
                self._tallies.setdefault((event.head.store, event.head.run), Tally()).add(event)
            if not batch:
                break
        while len(self._tallies) > RUNS_MAX:
            del self._tallies[next(iter(self._tallies))]

    def _read_here(self, now: float) -> Iterator[RunSeen]:
        for url in self.urls:
            yield from self._below(url, now)

    def _read_by_others(self, now: float) -> Iterator[RunSeen]:
        for known in self._reads() if self._reads is not None else ():
            key = known.store.url, known.run
            if not known.run:
                yield from self._silent(known.store.url, known.error)
                continue
            tally = self._tallies.get(key, Tally())
            if known.error:
                yield _with_samples(self._seen.get(key, RunSeen(*key))._replace(error=known.error), tally)
                continue
            seen = seen_of(
                known.store, known.run, known.history, once_each(list(known.incidents)), known.accounts, tally, now
            )
            yield _with_samples(seen, tally)

    def _silent(self, url: str, error: str) -> Iterator[RunSeen]:
        """Yield the last state of the runs of a store that cannot be read."""
        known = [seen for seen in self._seen.values() if _is_below(seen, url)]
        for seen in known:
            yield _with_samples(seen._replace(error=error), self._tallies.get((seen.store, seen.run), Tally()))
        if not known:
            yield RunSeen(absolute(url), "", error=error)

    def _below(self, url: str, now: float) -> Iterator[RunSeen]:
        try:
            place = locate(url)
            names = list_runs(place.store)[:RUNS_MAX] if place.run is None else [place.run]
        except RelightError as error:
            yield from self._silent(url, str(error))
            return
        for name in names:
            yield self._one(place, name, now)

    def _one(self, place: Location, name: str, now: float) -> RunSeen:
        store = place.store
        key = store.url, name
        tally = self._tallies.get(key, Tally())
        try:
            log, diary = self._logs.setdefault(key, (Log(store, name), Diary(store, name)))
            history = fold(log.read())
            incidents, accounts = diary.read()
        except RelightError as error:
            seen = self._seen.get(key, RunSeen(*key))._replace(error=str(error))
            return _with_samples(seen, tally)
        return _with_samples(seen_of(store, name, history, incidents, accounts, tally, now), tally)


def seen_of(
    store: ByteStore,
    run: str,
    history: History,
    incidents: Sequence[Incident],
    accounts: Sequence[Account],
    tally: Tally,
    now: float,
) -> RunSeen:
    """Return a run's state at ``now``, from its log, incidents, accounts and events."""
    live, checks = history.live, checked(history)
    newest = live[-1] if live else None
    met = still_damaged(tally.damaged, checks)
    bad = {checkpoint.id: why for checkpoint in live if (why := _why_bad(checkpoint, history, checks, met))}
    good = next((checkpoint for checkpoint in reversed(live) if checkpoint.id not in bad), None)
    account = merged(list(accounts)) if accounts else None
    risk_at, risk, risk_why = tally.risk
    begun = seconds_since_epoch(history.fences[-1].time) if history.fences else None
    damaged = sum(checkpoint.body.suspect or bool(_damage(checkpoint, checks, met)) for checkpoint in live)
    seen = RunSeen(
        store.url, run, checkpoints=len(live), began_at=begun, attempts=history.epoch, bad=tuple(bad.items())[-100:],
        damaged=damaged, saving=_saving(tally, newest), tiers=tuple(_tiers(store, history, now)),
        goodput=account.goodput if account is not None else None, account=account,
        incidents=tuple(incidents)[-TIMES_SHOWN:], recent_failures=recent_failures(incidents, now),
        outcomes=outcomes_of(incidents, history, begun, now),
        retention_failed=tally.blocked_prunes[0], retention_why=tally.blocked_prunes[2], last_event_at=tally.last_event_at or None,
        drives=_drives(store),
    )  # fmt: skip
    if now - risk_at < RISK_S:
        seen = seen._replace(risk=risk, risk_why=risk_why)
    if newest is not None:
        committed_at, body = seconds_since_epoch(newest.time), newest.body
        seen = seen._replace(
            step=newest.step,
            id=newest.id,
            committed_at=committed_at,
            age_s=_age(committed_at, now),
            logical_bytes=body.logical_bytes,
            stored_bytes=body.stored_bytes,
            new_bytes=body.new_bytes,
        )
    if good is not None:
        seen = seen._replace(good_step=good.step, good_id=good.id, good_age_s=_age(seconds_since_epoch(good.time), now))
    latest = max((time for time in (seen.committed_at, begun, seen.last_event_at) if time is not None), default=now)
    unprotected = seen.good_age_s if good is not None else _age(begun, now)
    ended = has_ended(history, tally.ended_at)
    return seen._replace(unprotected_s=unprotected, has_ended=ended, active=not ended and now - latest < OVER_S)


def _damage(checkpoint: Checkpoint, known: Mapping[str, VerificationResult], met: Mapping[str, str]) -> str:
    """Return a checkpoint's damage from the run's log, or from this machine's events; empty without damage."""
    verified = known.get(checkpoint.id)
    if verified is not None and verified.damage:
        return f"damaged: {verified.damage} (found by {verified.by})"
    return met.get(checkpoint.id, "")


def _why_bad(
    checkpoint: Checkpoint, history: History, known: Mapping[str, VerificationResult], met: Mapping[str, str]
) -> str:
    if checkpoint.body.suspect:
        return SUSPECT_WORDS
    if checkpoint.id in history.rolled_back_ids:
        return ROLLED_BACK_WORDS
    return _damage(checkpoint, known, met)


def _age(time_s: float | None, now: float) -> float | None:
    return None if time_s is None else max(0.0, now - time_s)


def _saving(tally: Tally, newest: Checkpoint | None) -> SaveTimes:
    saves = list(tally.saves)
    failed, failed_at = tally.failed_since
    committed_at = seconds_since_epoch(newest.time) if newest is not None else None
    if committed_at is not None and committed_at > failed_at:
        failed = 0  # the job saves on another machine, and its events are there
    if not saves:
        return SaveTimes(failed_in_a_row=failed)
    return SaveTimes(
        _median([save.blocked_s for save in saves]),
        _median([save.seconds for save in saves]),
        saves[-1].seconds,
        len(saves),
        failed,
        tuple(saves[-TIMES_SHOWN:]),
    )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _tiers(store: ByteStore, history: History, now: float) -> Iterator[TierSeen]:
    """Yield the nearest tier from its own log, and the further ones as that log states them."""
    live = history.live
    url, room = store.url, _room(store.url)
    used = sum(checkpoint.new_bytes for checkpoint in live)
    capacity = None if room is None else used + room
    yield TierSeen(nearest_name(history), url, len(live), live[-1].step if live else None, 0, 0.0, used, capacity)
    drained = drained_to(history)
    for tier in tiers_of(history):
        ids = drained.get(tier.name, set())
        present = [checkpoint for checkpoint in live if checkpoint.id in ids]
        newest = newest_seq(history, ids)
        missing = [checkpoint for checkpoint in live if checkpoint.seq > newest]
        since, pace = seconds_since_epoch(missing[0].time) if missing else None, pace_of(history, tier.name, ids)
        is_scheduled = all(checkpoint.body.save_reason.is_routine for checkpoint in missing)
        if since is not None and pace.last_s is not None and is_scheduled:
            since = max(since, pace.last_s + pace.least_s)  # until then the tier is meant to lack them
        sizes = drained_bytes(history, tier.name)
        used = sum(sizes.get(checkpoint.id, checkpoint.body.alone_bytes) for checkpoint in present)
        room = _room(split_run(tier.url)[0])
        capacity = tier.keep.capacity or (None if room is None else used + room)
        yield TierSeen(
            tier.name,
            tier.url,
            len(present),
            present[-1].step if present else None,
            len(missing),
            _age(since, now) or 0.0,
            used,
            capacity,
        )


def _drives(store: ByteStore) -> tuple[tuple[str, str], ...] | None:
    """Return the drives that are not good, each with the reason; None if the store is not mirrored, or they are unknown."""
    mirrored = mirrored_in(store)
    if mirrored is None:
        return None
    try:
        statuses = mirrored.statuses()
    except RelightError:
        return None
    return tuple((drive.path, f"{drive.status}: {drive.why}") for drive in statuses if drive.status != GOOD)


def _room(url: str) -> int | None:
    """Return the free bytes of a local disk; None if the URL is not a local directory."""
    path = local_path(url)
    if path is None:
        return None
    try:
        status = os.statvfs(path)
    except (OSError, ValueError):
        return None
    return status.f_bavail * status.f_frsize


def _with_samples(seen: RunSeen, tally: Tally) -> RunSeen:
    return seen._replace(samples=(*_gauges(seen), *tally.samples(), *_levels(tally)))


def _gauges(seen: RunSeen) -> Iterator[MetricSample]:
    """Yield the metrics that come from the run's log, without unknown ones."""
    values: dict[str, float | None] = {
        "relight_store_up": 0.0 if seen.error else 1.0,
        "relight_checkpoints": seen.checkpoints,
        "relight_checkpoint_step": seen.step,
        "relight_checkpoint_age_seconds": seen.age_s,
        "relight_checkpoint_good_age_seconds": seen.unprotected_s,
        "relight_checkpoints_damaged": seen.damaged,
        "relight_run_active": seen.active,
        "relight_retention_failed": seen.retention_failed,
        "relight_mirror_drives_degraded": len(seen.drives) if seen.drives is not None else None,
        "relight_save_last_seconds": seen.saving.last_s,
        "relight_saves_failed_in_a_row": seen.saving.failed_in_a_row,
        "relight_attempts": seen.attempts,
        "relight_goodput_ratio": seen.goodput,
        "relight_risk_ratio": seen.risk,
        "relight_recent_failures": seen.recent_failures,
        "relight_job_given_up": bool(seen.outcomes.given_up),
        "relight_nodes_excluded": len(seen.outcomes.excluded),
        "relight_recent_roll_backs": seen.outcomes.roll_backs,
        "relight_recent_hardware_failures": seen.outcomes.hardware,
        "relight_last_decision_time_seconds": seen.outcomes.decided_at,
        "relight_steps_total": seen.account.steps if seen.account is not None else None,
    }
    if seen.step is not None:
        values |= {
            "relight_checkpoint_logical_bytes": seen.logical_bytes,
            "relight_checkpoint_stored_bytes": seen.stored_bytes,
            "relight_checkpoint_new_bytes": seen.new_bytes,
            "relight_checkpoint_saved_ratio": seen.logical_bytes / seen.new_bytes if seen.new_bytes else None,
        }
    for name, value in values.items():
        if value is not None:
            yield MetricSample(BY_NAME[name], (), float(value))
    for tier in seen.tiers:
        of_tier: dict[str, float | None] = {
            "relight_tier_checkpoints": tier.checkpoints,
            "relight_tier_lag_checkpoints": tier.lag,
            "relight_tier_lag_seconds": tier.lag_s,
            "relight_tier_used_bytes": tier.used_bytes,
            "relight_tier_capacity_bytes": tier.capacity_bytes,
            "relight_tier_full_ratio": tier.full,
        }
        for name, value in of_tier.items():
            if value is not None:
                yield MetricSample(BY_NAME[name], (tier.name,), float(value))
    outcomes = recoveries_of(seen.incidents)
    for outcome, count in outcomes.items():
        yield MetricSample(BY_NAME["relight_recoveries"], (outcome,), float(count))
    tried = sum(outcomes.values()) - outcomes["left"]
    if tried:
        yield MetricSample(BY_NAME["relight_recovery_success_ratio"], (), outcomes["recovered"] / tried)
    if seen.outcomes.decision:
        for action in ACTIONS:
            yield MetricSample(BY_NAME["relight_last_decision"], (action,), float(action == seen.outcomes.decision))
    yield from _of_account(seen.account)


def recoveries_of(incidents: Sequence[Incident]) -> dict[str, int]:
    """Count failures by what followed. ``incidents``: oldest first.

    A job that was asked to end did not fail. The newest failure does not count while its recovery is open.
    """
    counts = dict.fromkeys(("recovered", "failed again", "stopped", "left"), 0)
    fates = {"stop": "stopped", "exclude_node": "left"}
    for number, incident in enumerate(incidents):
        if incident.action == "end":
            continue
        if incident.action in fates:
            counts[fates[incident.action]] += 1
        elif incident.after is not None:
            counts["recovered"] += 1
        elif number + 1 < len(incidents):
            counts["failed again"] += 1
    return counts


def _of_account(account: Account | None) -> Iterator[MetricSample]:
    if account is None:
        return
    parts: dict[str, float] = {}
    for cause, part, seconds in account.rows():
        name = f"lost: {cause}" if cause else part
        parts[name] = parts.get(name, 0.0) + seconds
    for part, seconds in parts.items():
        yield MetricSample(BY_NAME["relight_job_seconds_total"], (part[:64],), seconds)
    for kind, count in account.failures.items():
        yield MetricSample(BY_NAME["relight_failures_total"], (kind[:64],), float(count))


def _levels(tally: Tally) -> Iterator[MetricSample]:
    for level, count in sorted(tally.levels.items()):
        yield MetricSample(BY_NAME["relight_events_total"], (level,), float(count))


def _is_below(seen: RunSeen, url: str) -> bool:
    where = f"{seen.store.rstrip('/')}/{seen.run}"
    path = absolute(url).rstrip("/")
    return where == path or seen.store.rstrip("/") == path


MADE_HERE = frozenset(metric.name for metric in METRICS if metric.made is None)
"""Metrics that come from the run's log, not from events."""

_watchers: dict[tuple[str, ...], Watcher] = {}
"""Watchers by their stores: all requests of a dashboard share what was read."""
_guard = threading.Lock()


def poll_runs(store_urls: Sequence[str], now: float) -> list[RunSeen]:
    """Return every run of these stores at ``now``. A second poll of the same stores reads only what is new."""
    key = tuple(store_urls)
    with _guard:
        if key not in _watchers and len(_watchers) >= 16:
            del _watchers[next(iter(_watchers))]
        watcher = _watchers.setdefault(key, Watcher(key))
    return watcher.poll(now)
