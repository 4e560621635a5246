"""The read model of pages and the API: rows computed from what the store followers have read.

No method waits for a store for longer than ``GLANCE_S``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from relight.catalog.branches import PREFIX
from relight.catalog.find import Chosen, choose
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError
from relight.format.records import RetireBody
from relight.format.topics import TIERS
from relight.log import Checkpoint, History
from relight.log.identity import seconds_since_epoch
from relight.policy.tiers import decode_tiers
from relight.reader.merged_parts import whole_of
from relight.reader.opened import Opened, open_checkpoint
from relight.reader.storage_stats import stored_of
from relight.run_names import dir_of
from relight.run_records.holds import holds_of
from relight.run_records.verification import checked, damage, still_damaged
from relight.serve.curves import Curves, merged_series, newest_points
from relight.serve.event_feed import EventFeed
from relight.serve.index_rows import (
    bytes_of,
    checkpoint_row,
    full_at,
    log_rows,
    masked_incident,
    page_of,
    place_of,
    sequence_number,
    short_value,
    sorted_runs,
    tags_by_id,
    tensor_row,
)
from relight.serve.job_states import JobState, job_state
from relight.serve.jobs import Jobs, Progress
from relight.serve.pieces import piece_of, short_audit, thinned
from relight.serve.reader import NOT_YET, RunState, StoreFollower
from relight.serve.scope import ANONYMOUS, asker, everything, masked, reaches
from relight.serve.spread import statistics_of
from relight.serve.values import (
    AuditRow,
    CheckpointDetail,
    CheckpointRow,
    DiffDetail,
    DiffRow,
    FiringRow,
    GoodputPart,
    IncidentRow,
    LineageRow,
    ListPage,
    LogRow,
    PlanRow,
    RiskRow,
    RunDetail,
    RunRow,
    SaveRow,
    SeriesDetail,
    SettingsDetail,
    Statistics,
    StorageDetail,
    StoreRow,
    TensorRow,
    TierRow,
    TierUse,
    TokenRow,
    Working,
)
from relight.supervise.goodput import merged
from relight.units import size_text
from relight.versions.difference import ONLY_A, ONLY_B, SAME, diff
from relight.versions.stages import STAGES

GLANCE_S = 0.15
"""Seconds that a page waits for a checkpoint's metadata, which is read once."""
DIFF_GLANCE_S = 0.1
"""Seconds that a page waits for a comparison or a tensor's values."""
SAVES_MAX, FACTS_MAX, TREND_MAX = 50, 60, 2000
SERIES_KEPT_MAX = 32
"""Number of runs with merged metrics in memory."""
VALUES_MAX = 8 << 30
"""Largest tensor, in bytes, that is read for a page."""
STRANGERS_BYTES_MAX = 8 << 30
"""Largest size, in bytes, of two checkpoints together that are compared for a client without a token."""
_HEALTH = {"failed": 0, "late": 1, "good": 2, "idle": 3}
_STATES = {SAME: "same", ONLY_A: "removed", ONLY_B: "added"}
T = TypeVar("T")
S = TypeVar("S", RiskRow, FiringRow)


class Index:
    """Queries on all followed stores. Objects outside the caller's scope are absent from every answer (``scope``).

    ``audited`` and ``tokens`` return the rows of the audit log and of the token file.
    """

    def __init__(
        self,
        readers: Sequence[StoreFollower],
        jobs: Jobs,
        *,
        tokens: Callable[[], Sequence[TokenRow]] = lambda: (),
        audited: Callable[[], Sequence[AuditRow]] = lambda: (),
        around: EventFeed | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._readers = {follower.id: follower for follower in readers}
        self.jobs = jobs
        self._tokens, self._audited, self._around, self._clock = tokens, audited, around, clock
        self.verified: dict[tuple[str, str, str], float] = {}
        """When this server last verified every byte of a checkpoint successfully, by store, run and checkpoint id."""
        self.damaged: dict[tuple[str, str, str], tuple[str, float]] = {}
        """Damage that this server met when it read checkpoints for pages, and when, with the same keys."""
        self._series: dict[tuple[str, str], tuple[RunState, int, dict[str, SeriesDetail]]] = {}

    def reader(self, store: str) -> StoreFollower:
        """Return the follower of a store. Raise ``CheckpointNotFound`` if no such store is followed, or the caller may not see it."""
        follower = self._readers.get(store)
        if follower is None or not reaches(store):
            raise CheckpointNotFound(f"no store {store[:80]!r} here")
        return follower

    def state(self, store: str, run: str) -> RunState:
        """Return the last read state of a run. Raise ``CheckpointNotFound`` if there is none, or the caller may not see it."""
        state = (
            self._readers[store].now.runs.get(dir_of(run)) if store in self._readers and reaches(store, run) else None
        )
        if state is None:
            raise CheckpointNotFound(f"no run {run[:80]!r} in store {store[:80]!r}")
        return state

    def hidden_branches(self, store: str, run: str) -> list[str]:
        """Return the branch tags of a run that name runs outside the asker's scope, longest first."""
        names = [name for name in self.state(store, run).history.tags if name.startswith(PREFIX)]
        return sorted((name for name in names if not reaches(store, name.removeprefix(PREFIX))), key=len, reverse=True)

    def find(self, store: str, run: str, which: str) -> Checkpoint:
        """Return the checkpoint that ``choose`` selects."""
        return self.choose(store, run, which).checkpoint

    def choose(self, store: str, run: str, which: str) -> Chosen:
        """Return the checkpoint that ``which`` means, as on the command line."""
        history = self.state(store, run).history
        # whether a hidden run exists must not show in which tags there are
        if hidden := set(self.hidden_branches(store, run)):
            history = replace(
                history, tags={name: target for name, target in history.tags.items() if name not in hidden}
            )
        return choose(history, which)

    def stores(self) -> list[StoreRow]:
        """Return a row for each followed store."""
        rows = []
        for follower in self._readers.values():
            if reaches(follower.id):
                runs = [state for name, state in follower.now.runs.items() if reaches(follower.id, name)]
                rows.append(
                    StoreRow(
                        follower.id,
                        follower.url,
                        len(runs),
                        sum(state.bytes for state in runs),
                        _state_of(follower),
                        follower.now.read_at,
                    )
                )
        return rows

    def note_verified(self, store: str, run: str, checkpoint_id: str) -> None:
        """Record that this server has just verified every byte of a checkpoint successfully."""
        self.verified[store, run, checkpoint_id] = self._clock()
        self.damaged.pop((store, run, checkpoint_id), None)

    def runs(self, after: str | None, limit: int, find: str = "", state: str = "", sort: str = "") -> ListPage[RunRow]:
        """Return runs of all stores: failed ones first, then late, good and idle ones; or by ``sort``, a key of ``sort_key``.

        ``find``: a part of the run's name, its store or its host. ``state``: only jobs in this state.
        """
        now, part = self._clock(), find.lower()
        visible = [
            (store, name, known)
            for store, name, known in self._visible_runs()
            if not part or part in name.lower() or part in known.facts.host.lower() or part in store.lower()
        ]
        if state or sort:
            rows = [self._row(store, known, now) for store, _, known in visible]
            rows = sorted_runs([row for row in rows if not state or row.state == state], sort)
            piece, more = piece_of(rows, after, limit)
            return ListPage(piece, more, len(rows))
        ranked = sorted((_HEALTH[self._health(store, known, now)[0]], store, name) for store, name, known in visible)
        keys = [f"{rank}/{store}/{name}" for rank, store, name in ranked]
        picked, more = page_of(ranked, keys, after, limit)
        return ListPage(
            [self._row(store, self.state(store, name), now) for _, store, name in picked], more, len(ranked)
        )

    def run(self, store: str, run: str) -> RunDetail:
        """Return everything that the page of a run shows."""
        state = self.state(store, run)
        history = state.history
        account = merged(list(state.accounts)) if state.accounts else None
        parts = (
            [GoodputPart(part, cause, seconds) for cause, part, seconds in account.rows()]
            if account is not None
            else []
        )
        tags = [
            (name, checkpoint.step)
            for name, target in sorted(history.tags.items())
            if not name.startswith(PREFIX) and (checkpoint := history.find(target))
        ]
        branches = [name.removeprefix(PREFIX) for name in sorted(history.tags) if name.startswith(PREFIX)]
        saves = [self._save(store, run, checkpoint) for checkpoint in history.live[: -SAVES_MAX - 1 : -1]]
        return RunDetail(
            self._row(store, state, self._clock()),
            {name: list(zip(series.steps, series.values)) for name, series in self.series(store, run).items()},
            saves,
            [masked_incident(incident) for incident in reversed(state.incidents)],
            parts,
            [pair for pair in tags if pair[0] not in STAGES],
            [branch for branch in branches if reaches(store, branch)],
            [pair for pair in tags if pair[0] in STAGES],
            self._around.followers.rows(self._readers[store].store.url, state.name) if self._around is not None else (),
        )

    def series(self, store: str, run: str) -> dict[str, SeriesDetail]:
        """Return metrics: those recorded in checkpoints, and between them those in events of processes on this machine."""
        state = self.state(store, run)
        url = self._readers[store].store.url
        version = self._around.curves.version(url, state.name) if self._around is not None else 0
        key = store, state.name
        kept = self._series.get(key)
        if kept is None or kept[0] is not state or kept[1] != version:
            reported = self._around.curves.points(url, state.name) if self._around is not None else Curves({}, {})
            kept = state, version, merged_series(state.series, reported)
            self._series.pop(key, None)
            self._series[key] = kept
            while len(self._series) > SERIES_KEPT_MAX:
                self._series.pop(next(iter(self._series)), None)
        return kept[2]

    def checkpoints(self, store: str, run: str, after: str | None, limit: int) -> ListPage[CheckpointRow]:
        """Return checkpoints of a run, newest first."""
        history = self.state(store, run).history
        newest_first = history.live[::-1]
        picked, more = page_of(
            newest_first,
            [f"{checkpoint.seq:012d}" for checkpoint in newest_first],
            after,
            limit,
            reverse=True,
            known=sequence_number,
        )
        return ListPage(self._listed(store, run, picked, history), more, len(newest_first))

    def checkpoint(self, store: str, run: str, which: str) -> CheckpointDetail:
        """Return one checkpoint. Its tensors are missing while a job reads its metadata for longer than ``GLANCE_S``."""
        state, chosen = self.state(store, run), self.choose(store, run, which)
        checkpoint = chosen.checkpoint
        reading: tuple[list[TensorRow], list[tuple[str, Any]]] = [], [("tensors", "being read: try again in a moment")]
        try:
            tensors, facts = self._metadata(store, state, checkpoint) or reading
        except CorruptCheckpoint as error:
            tensors, facts = [], [("tensors", f"cannot be read: {masked(str(error))}")]
        home = checkpoint.body.home or state.name
        facts = [
            (name, value if name != "directory" or reaches(store, home) else checkpoint.body.dir)
            for name, value in facts
        ]
        facts = [("chosen", chosen.explanation), *facts] if chosen.explanation else facts
        row = self._listed(store, run, [checkpoint], state.history)[0]
        verification = checked(state.history).get(checkpoint.id)
        recorded_at = (
            seconds_since_epoch(verification.at) if verification is not None and not verification.damage else None
        )
        verified = max(
            (
                moment
                for moment in (recorded_at, self.verified.get((store, state.name, checkpoint.id)))
                if moment is not None
            ),
            default=None,
        )
        return CheckpointDetail(
            row,
            tensors,
            self._tiers(store, state, checkpoint),
            checkpoint.metrics,
            facts,
            verified,
            holds_of(state.history).get(checkpoint.id, ""),
            largest_first=True,
        )

    def values(self, store: str, run: str, which: str, path: str) -> Statistics | Working:
        """Return statistics of one tensor's values, or the progress of the job that reads them. Every byte is verified.

        The result is cached. Raise ``ConfigError`` for a tensor of more than ``VALUES_MAX`` bytes.
        """
        state, checkpoint = self.state(store, run), self.find(store, run, which)
        metadata = self._metadata(store, state, checkpoint)
        if metadata is None:
            return Working(0.0, "the checkpoint is being read")
        total = next((tensor.bytes for tensor in metadata[0] if tensor.path == path), 0)
        if not total:
            raise CheckpointNotFound(f"no tensor {path[:80]!r} with bytes in checkpoint {checkpoint.id}")
        if total > VALUES_MAX:
            message = f"{path[:80]!r} has {size_text(total)}, more than is read for a page"
            raise ConfigError(message, hint="at a terminal: relight show RUN@WHICH --stats")
        key = f"values {store}/{run}@{checkpoint.id} {path}"
        job = self.jobs.ask(
            key, 2 * total, lambda advance: statistics_of(self._open(store, state, checkpoint), path, advance)
        )
        with self._noting_damage(store, state, checkpoint):
            return job.result_within(DIFF_GLANCE_S) or Working(job.done, "its values are being read")

    def diff(self, a: str, b: str) -> DiffDetail | Working:
        """Compare two checkpoints, named as ``[STORE/]RUN@WHICH``. Return the difference, or the progress of the job that reads tensors.

        Tensors with equal hashes are not read.
        """
        sides = [self._checkpoint_of_spec(a), self._checkpoint_of_spec(b)]
        total = sum(checkpoint.body.logical_bytes for _, _, checkpoint in sides)
        if asker().startswith(ANONYMOUS) and total > STRANGERS_BYTES_MAX:
            message = f"these checkpoints hold {size_text(total)}, more than is compared for clients without a token"
            raise ConfigError(message, hint="log in, or at a terminal: relight diff")
        key = "diff " + " ".join(f"{store}/{state.name}@{checkpoint.id}" for store, state, checkpoint in sides)
        job = self.jobs.ask(
            key, total, lambda advance: self._diff(sides, advance), rows=lambda detail: len(detail.tensors)
        )
        rows = self.sides(a, b)
        try:
            difference = job.result_within(DIFF_GLANCE_S)
        except CorruptCheckpoint as error:
            for store, state, checkpoint in sides:
                if error.where.startswith(f"{checkpoint.directory_in(state.name)}/"):
                    self.damaged[store, state.name, checkpoint.id] = error.what, self._clock()
            raise
        # another caller may have started this job and named the checkpoints differently
        return (
            replace(difference, a=a, b=b, a_row=rows[0], b_row=rows[1])
            if difference is not None
            else Working(job.done, "tensors that differ are being read")
        )

    def sides(self, a: str, b: str) -> list[CheckpointRow]:
        """Return the rows of the two checkpoints of a comparison."""
        sides = [self._checkpoint_of_spec(a), self._checkpoint_of_spec(b)]
        return [self._listed(store, state.name, [checkpoint], state.history)[0] for store, state, checkpoint in sides]

    def lineage(self, store: str) -> list[LineageRow]:
        """Return the runs of a store, parents before their branches."""
        states = {name: state for name, state in self.reader(store).now.runs.items() if reaches(store, name)}
        rows = {}
        for name, state in states.items():
            first = next(
                (
                    checkpoint
                    for checkpoint in sorted(
                        [*state.history.live, *state.history.retired.values()], key=lambda checkpoint: checkpoint.seq
                    )
                ),
                None,
            )
            parent = first.body.home if first is not None and first.body.home in states else ""
            tags = [
                (checkpoint.step, tag)
                for tag, target in sorted(state.history.tags.items())
                if not tag.startswith(PREFIX) and (checkpoint := state.history.find(target))
            ]
            own_steps = [checkpoint.step for checkpoint in state.history.live if not checkpoint.body.home]
            rows[name] = LineageRow(
                name, own_steps, parent or None, first.step if first is not None and parent else None, tags
            )
        order: list[LineageRow] = []
        placed: set[str] = set()
        waiting = sorted(rows)
        while waiting:
            ready = [name for name in waiting if rows[name].parent is None or rows[name].parent in placed] or waiting
            order += [rows[name] for name in ready]
            placed.update(ready)
            waiting = [name for name in waiting if name not in placed]
        return order

    def storage(self, store: str) -> StorageDetail:
        """Return a store's size over time, when it will be full at last week's rate, and which retired checkpoints can be undeleted."""
        reader = self.reader(store)
        states = [state for name, state in reader.now.runs.items() if reaches(store, name)]
        size_then, trend = 0, []
        for moment, grew in sorted(point for state in states for point in state.trend):
            size_then += grew
            trend.append((moment, float(size_then)))
        free = reader.now.free if everything() else None
        used = float(sum(state.bytes for state in states))
        tiers = [TierUse(reader.url, used, used + free if free is not None else None, free)]
        retired = [
            (state, checkpoint_id, record)
            for state in states
            for checkpoint_id, record in state.history.recallable.items()
        ]
        retention = [
            PlanRow(
                state.name,
                checkpoint_id,
                state.history.retired[checkpoint_id].step,
                "delete" if checkpoint_id in state.due else "retired",
                record.body.reason if isinstance(record.body, RetireBody) else "",
                state.history.retired[checkpoint_id].new_bytes,
            )
            for state, checkpoint_id, record in retired
        ]
        return StorageDetail(
            tiers,
            [(moment, size) for moment, size in thinned(trend, TREND_MAX)],
            full_at(trend, free, self._clock()),
            retention,
        )

    def incidents(self, after: str | None, limit: int) -> ListPage[IncidentRow]:
        """Return incidents of all runs, newest first."""
        rows = sorted(
            (row for _, _, state in self._visible_runs() for row in state.incidents),
            key=lambda row: (row.id, row.store, row.run),
            reverse=True,
        )
        picked, more = page_of(rows, [f"{row.id}/{row.store}/{row.run}" for row in rows], after, limit, reverse=True)
        return ListPage([masked_incident(row) for row in picked], more, len(rows))

    def incident(self, store: str, run: str, which: str) -> IncidentRow:
        """Return one incident with its evidence."""
        incident = next((row for row in self.state(store, run).incidents if row.id == which), None)
        if incident is None:
            raise CheckpointNotFound(f"no incident {which[:80]!r} of run {run[:80]!r}")
        return masked_incident(incident)

    def risk(self) -> list[RiskRow]:
        """Return runs on machines that are likely to fail. Stores have no such records: only events of processes on this machine do."""
        return self._of_events(self._around.risks()) if self._around is not None else []

    def firing(self) -> list[FiringRow]:
        """Return alerts that fire now, critical ones first."""
        rows = self._of_events(self._around.firing()) if self._around is not None else []
        return [replace(row, why=masked(row.why)) for row in rows]

    def _of_events(self, rows: Sequence[S]) -> list[S]:
        """Return rows with store names in place of URLs: those of followed stores that the caller may see."""
        ids = {follower.store.url: follower.id for follower in self._readers.values()}
        named = [replace(row, store=ids[row.store]) for row in rows if row.store in ids]
        return [row for row in named if (reaches(row.store, row.run) if row.run else everything())]

    def log(self, store: str, run: str, after: str | None, limit: int) -> ListPage[LogRow]:
        """Return records of a run's log, newest first."""
        rows = log_rows((state := self.state(store, run)).view, state.history)
        keys = [f"{row.seq:012d}" for row in rows]
        picked, more = page_of(rows, keys, after, limit, reverse=True, known=sequence_number)
        return ListPage(picked, more, len(rows))

    def audit(self, after: str | None, limit: int) -> ListPage[AuditRow]:
        """Return audit entries, newest first. A caller with a scope gets only entries of its runs, without token ids and fields."""
        rows = list(self._audited())
        if not everything():  # an entry's fields may name other runs
            rows = [replace(row, token="", fields={}) for row in rows if reaches(*place_of(row.on))]
        rows.sort(key=lambda row: -row.seq)
        picked, more = page_of(
            rows, [f"{row.seq:012d}" for row in rows], after, limit, reverse=True, known=sequence_number
        )
        return ListPage([short_audit(row) for row in picked], more, len(rows))

    def settings(self) -> SettingsDetail:
        """Return tokens without their secrets, alert rules, and the retention rules of further tiers that runs recorded."""
        policies = []
        for store, name, state in self._visible_runs():
            for _, recorded in TIERS.among(state.history.notes[::-1]):
                try:
                    tiers = decode_tiers(recorded)
                except RelightError:
                    tiers = ()
                if tiers:
                    policies += [(f"{store}/{name}, {tier.name}", str(tier.keep)) for tier in tiers]
                    break
        alerts = self._around.alerts() if self._around is not None and everything() else []
        return SettingsDetail(list(self._tokens()) if everything() else [], alerts, policies)

    def _visible_runs(self) -> list[tuple[str, str, RunState]]:
        return [
            (follower.id, name, state)
            for follower in self._readers.values()
            for name, state in follower.now.runs.items()
            if reaches(follower.id, name)
        ]

    def _health(self, store: str, state: RunState, now: float) -> tuple[str, str]:
        """Return a run's health and the reason. If the run's process reported its end, the run is idle, not late."""
        health, why = state.health(now)
        if (
            health == "late"
            and self._around is not None
            and (ended := self._around.over(self._readers[store].store.url, state.name))
        ):
            return "idle", ended
        return health, why

    def _listed(self, store: str, run: str, chosen: Sequence[Checkpoint], history: History) -> list[CheckpointRow]:
        """Return rows of checkpoints, from their store's records and from events of processes on this machine."""
        tags, set_aside = tags_by_id(store, history.tags), history.rolled_back_ids
        damaged = damage(history)
        rows = [
            checkpoint_row(checkpoint, tags.get(checkpoint.id, ()), set_aside, damaged.get(checkpoint.id))
            for checkpoint in chosen
        ]
        met = {id_: seen for (*place, id_), seen in self.damaged.items() if place == [store, dir_of(run)]}
        url, bad = self._readers[store].store.url, still_damaged(met, checked(history))
        bad |= self._around.damage(url, run) if self._around is not None else {}
        for number, row in enumerate(rows):
            if row.good and row.id in bad:
                rows[number] = replace(row, good=False, why=f"damaged: {masked(bad[row.id])}", state="damaged")
        if self._around is None:
            return rows
        return [replace(row, seconds=self._around.save(url, run, row.id)[0]) for row in rows]

    def _row(self, store: str, state: RunState, now: float) -> RunRow:
        live = state.history.live
        health, why = self._health(store, state, now)
        last = state.incidents[-1] if state.incidents else None
        job, newest = self._job(store, state, now), newest_points(state.series)
        if self._around is not None:
            _, reported = self._around.curves.newest(self._readers[store].store.url, state.name)
            newest |= {name: point for name, point in reported.items() if point[0] > newest.get(name, (-1, 0.0))[0]}
        return RunRow(
            store,
            state.name,
            live[-1].id if live else None,
            live[-1].step if live else None,
            max(0.0, now - state.good_at) if state.good_at is not None else None,
            bool(live) and state.good is live[-1],
            health,
            masked(why),
            merged(list(state.accounts)).goodput if state.accounts else None,
            self._around.risk(self._readers[store].store.url, state.name) if self._around is not None else None,
            len(live),
            state.bytes,
            f"{last.kind}: {masked(last.why)}"[:200] if last is not None else None,
            job.word,
            masked(job.why),
            max([live[-1].step] * bool(live) + [step for step, _ in newest.values()], default=None),
            job.began_at,
            job.last_at - job.began_at if job.last_at is not None and job.began_at is not None else None,
            state.facts.host,
            {name: value for name, (_, value) in sorted(newest.items())},
            state.facts.config,
        )

    def job(self, store: str, run: str) -> JobState:
        """Return the state of a run's job."""
        return self._job(store, self.state(store, run), self._clock())

    def _job(self, store: str, state: RunState, now: float) -> JobState:
        url = self._readers[store].store.url
        if self._around is None:
            return job_state(state, None, None, None, now)
        return job_state(
            state, *self._around.life(url, state.name), self._around.curves.newest(url, state.name)[0], now
        )

    def _save(self, store: str, run: str, checkpoint: Checkpoint) -> SaveRow:
        url = self._readers[store].store.url
        seconds, spans = self._around.save(url, run, checkpoint.id) if self._around is not None else (None, [])
        return SaveRow(checkpoint.id, checkpoint.step, checkpoint.time, seconds, checkpoint.body.new_bytes, spans)

    def _tiers(self, store: str, state: RunState, checkpoint: Checkpoint) -> list[TierRow]:
        """Return this store, and every other followed store that has a copy of the checkpoint."""
        rows = [TierRow(self._readers[store].url, True, checkpoint.body.stored_bytes)]
        for follower in self._readers.values():
            if follower.id != store and reaches(follower.id):
                for name, candidate in follower.now.runs.items():
                    if reaches(follower.id, name) and any(
                        copy.original_id == checkpoint.original_id for copy in candidate.history.live
                    ):
                        rows.append(TierRow(follower.url, True, None))
                        break
        return rows

    def _metadata(
        self, store: str, state: RunState, checkpoint: Checkpoint
    ) -> tuple[list[TensorRow], list[tuple[str, Any]]] | None:
        """Return a checkpoint's tensors and facts, or None while a job reads them. The result is cached."""
        key = f"open {store}/{state.name}@{checkpoint.id}"
        job = self.jobs.ask(
            key, 0, lambda _: self._opened(store, state, checkpoint), quick=True, rows=lambda contents: len(contents[0])
        )
        with self._noting_damage(store, state, checkpoint):
            return job.result_within(GLANCE_S)

    @contextmanager
    def _noting_damage(self, store: str, state: RunState, checkpoint: Checkpoint) -> Iterator[None]:
        """Record an error that shows that the checkpoint is damaged, so that every page shows it as damaged."""
        try:
            yield
        except CorruptCheckpoint as error:
            self.damaged[store, state.name, checkpoint.id] = error.what, self._clock()
            raise

    def _opened(
        self, store: str, state: RunState, checkpoint: Checkpoint
    ) -> tuple[list[TensorRow], list[tuple[str, Any]]]:
        opened = self._open(store, state, checkpoint)
        storage = stored_of(opened)
        rows = [tensor_row(tensor, *storage.get(tensor.name, (None, 1.0))) for tensor in whole_of(opened).tensors]
        # once: a page of 100,000 tensors costs no more than one of 200
        rows.sort(key=lambda row: (-row.bytes, row.path))
        root = opened.root
        facts: list[tuple[str, Any]] = [
            ("reason", root.reason),
            ("created", root.created),
            ("world", root.world),
            ("exact", root.exact),
            ("attempt", checkpoint.epoch),
            ("parents", ", ".join(root.parents)),
            ("requires", ", ".join(checkpoint.requires)),
            ("directory", checkpoint.directory_in(state.name)),
            ("new bytes", checkpoint.new_bytes),
            ("lossy", checkpoint.body.lossy),
        ]
        facts += [(f"metric {name}", value) for name, value in checkpoint.metrics.items()]
        facts += [(f"metadata {name}", value) for name, value in root.user.items()]
        facts += [(f"environment {name}", value) for name, value in root.environment.items() if name != "argv"]
        return rows, [(name, str(value)[:500]) for name, value in facts if value not in ("", None)][:FACTS_MAX]

    def _open(self, store: str, state: RunState, checkpoint: Checkpoint) -> Opened:
        return open_checkpoint(
            self._readers[store].store, state.name, checkpoint, store_id=state.view.store_id, run_id=state.view.run_id
        )

    def _checkpoint_of_spec(self, spec: str) -> tuple[str, RunState, Checkpoint]:
        run, separator, which = spec.rpartition("@")
        if not separator or not run or not which:
            raise ConfigError(f"{spec[:80]!r} names no checkpoint", hint="[STORE/]RUN@WHICH, such as demo@latest")
        store, slash, name = run.partition("/")
        if not slash:
            holders = [holder for holder, run_directory, _ in self._visible_runs() if run_directory == dir_of(run)]
            if len(holders) > 1:
                raise ConfigError(
                    f"{len(holders)} stores have a run {run[:80]!r}",
                    hint=", ".join(f"{holder}/{run}@{which}" for holder in holders)[:300],
                )
            store, name = (holders[0] if holders else ""), run
        return store, self.state(store, name), self.find(store, name, which)

    def _diff(self, sides: Sequence[tuple[str, RunState, Checkpoint]], advance: Progress) -> DiffDetail:
        left, right = (self._open(*side) for side in sides)
        result = diff(left, right, progress=advance)
        rows = []
        for item in result.tensors:
            difference, of = item.apart, item.a or item.b
            changed = (
                difference.changed / difference.elements if difference is not None and difference.elements else None
            )
            size = bytes_of(of.shape, of.dtype) if of is not None else 0
            rows.append(
                DiffRow(
                    item.name,
                    _STATES.get(item.state, "changed"),
                    changed,
                    difference.largest if difference is not None else None,
                    size,
                )
            )
        values = [
            (item.path, item.a if item.in_a else None, item.b if item.in_b else None)
            for item in [*result.values, *result.facts]
        ]
        return DiffDetail(
            "",
            "",
            tensors=rows,
            values=[
                (path, short_value(left_value), short_value(right_value)) for path, left_value, right_value in values
            ],
        )


def _state_of(reader: StoreFollower) -> str:
    """Return ``ok`` or the error of the last read of a store.

    A caller with a scope gets only the error's kind, because the message may name any run.
    """
    state = reader.now.state
    return state if everything() or state in ("ok", NOT_YET) else state.partition(":")[0]
