"""What pages and API ask: rows made of what the readers hold. Nothing here waits for a store for longer than a glance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from relight.catalog.branches import PREFIX
from relight.catalog.checked import VerificationResult, checked, damage
from relight.catalog.find import Chosen, choose
from relight.catalog.merged_parts import whole_of
from relight.catalog.opened import Opened, open_checkpoint
from relight.catalog.storage_stats import stored_of
from relight.errors import CheckpointNotFound, ConfigError, RelightError
from relight.format import DTYPES
from relight.log import Checkpoint, History
from relight.log.identity import seconds_since_epoch
from relight.policy.tiers import decode_tiers
from relight.run_names import dir_of
from relight.serve.event_feed import EventFeed
from relight.serve.jobs import Jobs, Progress
from relight.serve.pieces import short_audit, thinned
from relight.serve.reader import NOT_YET, RunState, StoreFollower
from relight.serve.scope import ANONYMOUS, asker, everything, masked, reaches
from relight.serve.spread import statistics_of
from relight.serve.values import (
    AuditRow,
    CheckpointDetail,
    CheckpointRow,
    DiffDetail,
    DiffRow,
    GoodputPart,
    IncidentRow,
    LineageRow,
    ListPage,
    PlanRow,
    RiskRow,
    RunDetail,
    RunRow,
    SaveRow,
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
from relight.versions.difference import ONLY_A, ONLY_B, SAME, diff
from relight.versions.stages import STAGES

GLANCE_S = 0.15
"""How long a page may wait for a checkpoint's metadata, which is read once."""
DIFF_GLANCE_S = 0.1
SAVES_MAX, FACTS_MAX, SERIES_MAX = 50, 60, 2000
VALUES_MAX = 8 << 30
"""Bytes of a tensor that is read for a page."""
STRANGERS_BYTES_MAX = 8 << 30
"""Bytes of two checkpoints that are compared for clients without a token."""
WEEK_S = 7 * 86400.0
_HEALTH = {"failed": 0, "late": 1, "good": 2, "idle": 3}
_STATES = {SAME: "same", ONLY_A: "removed", ONLY_B: "added"}
T = TypeVar("T")


class Index:
    """All stores. What whoever is asking may not see is not there (``scope``). ``audited`` and ``tokens`` give what is kept elsewhere."""

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
        self._readers = {one.id: one for one in readers}
        self.jobs = jobs
        self._tokens, self._audited, self._around, self._clock = tokens, audited, around, clock
        self.verified: dict[tuple[str, str, str], float] = {}
        """When checkpoints were verified to the byte by this server, and found to be as committed."""

    def reader(self, store: str) -> StoreFollower:
        """The one that follows a store."""
        found = self._readers.get(store)
        if found is None or not reaches(store):
            raise CheckpointNotFound(f"no store {store[:80]!r} here")
        return found

    def state(self, store: str, run: str) -> RunState:
        """A run as it was read last."""
        found = self._readers[store].now.runs.get(dir_of(run)) if store in self._readers and reaches(store, run) else None
        if found is None:
            raise CheckpointNotFound(f"no run {run[:80]!r} in store {store[:80]!r}")
        return found

    def hidden_branches(self, store: str, run: str) -> list[str]:
        """Return the branch tags of a run that name runs outside the asker's scope, longest first."""
        names = [name for name in self.state(store, run).history.tags if name.startswith(PREFIX)]
        return sorted((name for name in names if not reaches(store, name.removeprefix(PREFIX))), key=len, reverse=True)

    def find(self, store: str, run: str, which: str) -> Checkpoint:
        """Return the checkpoint of ``choose``."""
        return self.choose(store, run, which).checkpoint

    def choose(self, store: str, run: str, which: str) -> Chosen:
        """Return a checkpoint by id, step, tag, ``latest``, ``best`` or ``best:METRIC``; ``step=N`` for N."""
        history = self.state(store, run).history
        if hidden := set(self.hidden_branches(store, run)):  # whether a hidden run exists must not show in which tags there are
            history = replace(history, tags={name: one for name, one in history.tags.items() if name not in hidden})
        return choose(history, which.removeprefix("step="))

    def stores(self) -> list[StoreRow]:
        """All that are followed."""
        rows = []
        for one in self._readers.values():
            if reaches(one.id):
                runs = [state for name, state in one.now.runs.items() if reaches(one.id, name)]
                rows.append(StoreRow(one.id, one.url, len(runs), sum(state.bytes for state in runs), _state_of(one), one.now.read_at))
        return rows

    def runs(self, after: str | None, limit: int) -> ListPage[RunRow]:
        """Of all stores, those first that need somebody."""
        now = self._clock()
        ranked = sorted((_HEALTH[self._health(store, state, now)[0]], store, name) for store, name, state in self._all())
        keys = [f"{rank}/{store}/{name}" for rank, store, name in ranked]
        picked, more = _page(ranked, keys, after, limit)
        rows = [self._row(store, self.state(store, name), now) for _, store, name in picked]
        return ListPage(rows, more, len(ranked))

    def run(self, store: str, run: str) -> RunDetail:
        """One run."""
        state = self.state(store, run)
        history = state.history
        account = merged(list(state.accounts)) if state.accounts else None
        parts = [GoodputPart(part, cause, seconds) for cause, part, seconds in account.rows()] if account is not None else []
        tags = [
            (name, one.step)
            for name, target in sorted(history.tags.items())
            if not name.startswith(PREFIX) and (one := history.find(target))
        ]
        branches = [name.removeprefix(PREFIX) for name in sorted(history.tags) if name.startswith(PREFIX)]
        saves = [self._save(store, run, one) for one in history.live[: -SAVES_MAX - 1 : -1]]
        return RunDetail(
            self._row(store, state, self._clock()),
            {name: thinned(points, SERIES_MAX) for name, points in self._series(store, state).items()},
            saves,
            [_masked_incident(one) for one in reversed(state.incidents)],
            parts,
            [pair for pair in tags if pair[0] not in STAGES],
            [branch for branch in branches if reaches(store, branch)],
            [pair for pair in tags if pair[0] in STAGES],
        )

    def checkpoints(self, store: str, run: str, after: str | None, limit: int) -> ListPage[CheckpointRow]:
        """Of a run, the newest first."""
        history = self.state(store, run).history
        newest_first = history.live[::-1]
        picked, more = _page(newest_first, [f"{one.seq:012d}" for one in newest_first], after, limit, reverse=True, known=_seq)
        return ListPage(self._listed(store, run, picked, history), more, len(newest_first))

    def checkpoint(self, store: str, run: str, which: str) -> CheckpointDetail:
        """One. Its tensors come when its metadata has been read, which is once, and for a small one at once."""
        state, chosen = self.state(store, run), self.choose(store, run, which)
        one = chosen.checkpoint
        tensors, facts = self._metadata(store, state, one) or ((), [("tensors", "being read: look again in a moment")])
        home = one.body.home or state.name
        facts = [(name, value if name != "directory" or reaches(store, home) else one.body.dir) for name, value in facts]
        facts = [("chosen", chosen.explanation), *facts] if chosen.explanation else facts
        row = self._listed(store, run, [one], state.history)[0]
        known = checked(state.history).get(one.id)
        noted = seconds_since_epoch(known.at) if known is not None and not known.damage else None
        verified = max((at for at in (noted, self.verified.get((store, state.name, one.id))) if at is not None), default=None)
        return CheckpointDetail(row, tensors, self._tiers(store, state, one), one.body.metrics, facts, verified, largest_first=True)

    def values(self, store: str, run: str, which: str, path: str) -> Statistics | Working:
        """Of one tensor of a checkpoint, from its bytes, which are verified on the way: read once, by a job, when somebody asks.

        ``ConfigError`` for one that is too long to be read for a page."""
        state, one = self.state(store, run), self.find(store, run, which)
        metadata = self._metadata(store, state, one)
        if metadata is None:
            return Working(0.0, "the checkpoint is being read")
        total = next((tensor.bytes for tensor in metadata[0] if tensor.path == path), 0)
        if not total:
            raise CheckpointNotFound(f"no tensor {path[:80]!r} with bytes in checkpoint {one.id}")
        if total > VALUES_MAX:
            said = f"{path[:80]!r} has {total / 1e9:.0f} GB, more than is read for a page"
            raise ConfigError(said, hint="at a terminal: relight show RUN@WHICH --stats")
        key = f"values {store}/{run}@{one.id} {path}"
        job = self.jobs.ask(key, 2 * total, lambda advance: statistics_of(self._open(store, state, one), path, advance))
        return job.result_within(DIFF_GLANCE_S) or Working(job.done, "its values are being read")

    def diff(self, a: str, b: str) -> DiffDetail | Working:
        """Two checkpoints as ``[STORE/]RUN@WHICH``. Tensors whose hashes are the same are not read; the others are, by a job."""
        sides = [self._named(a), self._named(b)]
        total = sum(one.body.logical_bytes for _, _, one in sides)
        if asker().startswith(ANONYMOUS) and total > STRANGERS_BYTES_MAX:
            said = f"these checkpoints hold {total / 1e9:.0f} GB, more than is compared for clients without a token"
            raise ConfigError(said, hint="log in, or at a terminal: relight diff")
        key = "diff " + " ".join(f"{store}/{state.name}@{one.id}" for store, state, one in sides)
        job = self.jobs.ask(key, total, lambda advance: self._diff(sides, advance), rows=lambda found: len(found.tensors))
        found = job.result_within(DIFF_GLANCE_S)
        # the job may be another asker's, and so would be the words that name the two
        return replace(found, a=a, b=b) if found is not None else Working(job.done, "tensors that differ are being read")

    def lineage(self, store: str) -> list[LineageRow]:
        """The runs of a store, parents before their branches."""
        states = {name: state for name, state in self.reader(store).now.runs.items() if reaches(store, name)}
        rows = {}
        for name, state in states.items():
            first = next((one for one in sorted([*state.history.live, *state.history.retired.values()], key=lambda one: one.seq)), None)
            parent = first.body.home if first is not None and first.body.home in states else ""
            tags = [
                (one.step, tag)
                for tag, target in sorted(state.history.tags.items())
                if not tag.startswith(PREFIX) and (one := state.history.find(target))
            ]
            own = [one.step for one in state.history.live if not one.body.home]
            rows[name] = LineageRow(name, own, parent or None, first.step if first is not None and parent else None, tags)
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
        """What a store holds, how that grew, when it is full at the pace of the last week, and what is let go next."""
        reader = self.reader(store)
        states = [state for name, state in reader.now.runs.items() if reaches(store, name)]
        held, trend = 0, []
        for at, grew in sorted(point for state in states for point in state.trend):
            held += grew
            trend.append((at, float(held)))
        free = reader.now.free if everything() else None
        used = float(sum(state.bytes for state in states))
        tiers = [TierUse(reader.url, used, used + free if free is not None else None, free)]
        going = [(state, one, record) for state in states for one, record in state.history.recallable.items()]
        retention = [
            PlanRow(
                state.name,
                one,
                state.history.retired[one].step,
                "delete" if one in state.due else "retired",
                getattr(record.body, "reason", ""),
                state.history.retired[one].body.new_bytes,
            )
            for state, one, record in going
        ]
        return StorageDetail(tiers, [(at, size) for at, size in thinned(trend, SERIES_MAX)], full_at(trend, free, self._clock()), retention)

    def incidents(self, after: str | None, limit: int) -> ListPage[IncidentRow]:
        """Of all runs, the newest first."""
        found = sorted(
            (one for _, _, state in self._all() for one in state.incidents), key=lambda one: (one.id, one.store, one.run), reverse=True
        )
        picked, more = _page(found, [f"{one.id}/{one.store}/{one.run}" for one in found], after, limit, reverse=True)
        return ListPage([_masked_incident(one) for one in picked], more, len(found))

    def incident(self, store: str, run: str, which: str) -> IncidentRow:
        """One, whole."""
        found = next((one for one in self.state(store, run).incidents if one.id == which), None)
        if found is None:
            raise CheckpointNotFound(f"no incident {which[:80]!r} of run {run[:80]!r}")
        return _masked_incident(found)

    def risk(self) -> list[RiskRow]:
        """Runs whose machine looks like failing, as processes of this machine tell: stores do not say."""
        ids = {one.store.url: one.id for one in self._readers.values()}
        found = [replace(one, store=ids[one.store]) for one in self._around.risks() if one.store in ids] if self._around is not None else []
        return [one for one in found if reaches(one.store, one.run)]

    def audit(self, after: str | None, limit: int) -> ListPage[AuditRow]:
        """Who did what, the newest first; all of it only for those who may see everything."""
        rows = list(self._audited())
        if not everything():  # an entry's fields may name other runs
            rows = [replace(one, token="", fields={}) for one in rows if reaches(*_place_of(one.on))]
        rows.sort(key=lambda one: -one.seq)
        picked, more = _page(rows, [f"{one.seq:012d}" for one in rows], after, limit, reverse=True, known=_seq)
        return ListPage([short_audit(one) for one in picked], more, len(rows))

    def settings(self) -> SettingsDetail:
        """Tokens without their secrets, and what further tiers keep as runs have said."""
        policies = []
        for store, name, state in self._all():
            for note in state.history.notes[::-1]:
                try:
                    tiers = decode_tiers(getattr(note.body, "data", {})) if getattr(note.body, "topic", "") == "tiers" else ()
                except RelightError:
                    tiers = ()
                if tiers:
                    policies += [(f"{store}/{name}, {tier.name}", str(tier.keep)) for tier in tiers]
                    break
        alerts = self._around.alerts() if self._around is not None and everything() else []
        return SettingsDetail(list(self._tokens()) if everything() else [], alerts, policies)

    def _all(self) -> list[tuple[str, str, RunState]]:
        return [(one.id, name, state) for one in self._readers.values() for name, state in one.now.runs.items() if reaches(one.id, name)]

    def _health(self, store: str, state: RunState, now: float) -> tuple[str, str]:
        """As the store has it; but a run whose process has told that it came to its end is not late."""
        health, why = state.health(now)
        if health == "late" and self._around is not None and self._around.over(self._readers[store].store.url, state.name):
            return "idle", "it has come to its end"
        return health, why

    def _listed(self, store: str, run: str, chosen: Sequence[Checkpoint], history: History) -> list[CheckpointRow]:
        """Checkpoints in a list: what their store says, and what processes of this machine have told of them."""
        tags, set_aside = _tags_by_id(store, history.tags), history.rolled_back_ids
        known = damage(history)
        rows = [_checkpoint_row(one, tags.get(one.id, ()), set_aside, known.get(one.id)) for one in chosen]
        if self._around is None:
            return rows
        url = self._readers[store].store.url
        bad = self._around.damage(url, run)
        whys = [row.why or masked(bad.get(row.id, "")) for row in rows]
        return [replace(row, seconds=self._around.save(url, run, row.id)[0], good=not why, why=why) for row, why in zip(rows, whys)]

    def _row(self, store: str, state: RunState, now: float) -> RunRow:
        live = state.history.live
        health, why = self._health(store, state, now)
        last = state.incidents[-1] if state.incidents else None
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
        )

    def _series(self, store: str, state: RunState) -> dict[str, list[tuple[int, float | None]]]:
        """What checkpoints say, and between them what processes of this machine have told of steps."""
        told = self._around.curves(self._readers[store].store.url, state.name) if self._around is not None else {}
        both = {name: {**told.get(name, {}), **dict(state.series.get(name, ()))} for name in {*told, *state.series}}
        return {name: sorted(points.items()) for name, points in both.items()}

    def _save(self, store: str, run: str, one: Checkpoint) -> SaveRow:
        url = self._readers[store].store.url
        seconds, spans = self._around.save(url, run, one.id) if self._around is not None else (None, [])
        return SaveRow(one.id, one.step, one.time, seconds, one.body.new_bytes, spans)

    def _tiers(self, store: str, state: RunState, one: Checkpoint) -> list[TierRow]:
        """This store, and any other followed one that has the very same checkpoint."""
        found = [TierRow(self._readers[store].url, True, one.body.stored_bytes)]
        for other in self._readers.values():
            if other.id != store and reaches(other.id):
                for name, there in other.now.runs.items():
                    if reaches(other.id, name) and any(here.original_id == one.original_id for here in there.history.live):
                        found.append(TierRow(other.url, True, None))
                        break
        return found

    def _metadata(self, store: str, state: RunState, one: Checkpoint) -> tuple[list[TensorRow], list[tuple[str, Any]]] | None:
        """Of a checkpoint: read once, and for a small one at once; None as long as it is being read."""
        key = f"open {store}/{state.name}@{one.id}"
        job = self.jobs.ask(key, 0, lambda _: self._opened(store, state, one), quick=True, rows=lambda found: len(found[0]))
        return job.result_within(GLANCE_S)

    def _opened(self, store: str, state: RunState, one: Checkpoint) -> tuple[list[TensorRow], list[tuple[str, Any]]]:
        opened = self._open(store, state, one)
        ways = stored_of(opened)
        rows = [_tensor_row(tensor, *ways.get(tensor.name, (None, 1.0))) for tensor in whole_of(opened).tensors]
        rows.sort(key=lambda row: (-row.bytes, row.path))  # once: a page of 100,000 tensors costs no more than one of 200
        root = opened.root
        facts: list[tuple[str, Any]] = [
            ("reason", root.reason),
            ("created", root.created),
            ("world", root.world),
            ("exact", root.exact),
            ("attempt", one.epoch),
            ("parents", ", ".join(root.parents)),
            ("requires", ", ".join(one.requires)),
            ("directory", one.lies_in(state.name)),
            ("new bytes", one.body.new_bytes),
            ("lossy", one.body.lossy),
        ]
        facts += [(f"metric {name}", value) for name, value in root.metrics.items()]
        facts += [(f"metadata {name}", value) for name, value in root.user.items()]
        facts += [(f"environment {name}", value) for name, value in root.environment.items() if name != "argv"]
        return rows, [(name, str(value)[:500]) for name, value in facts if value not in ("", None)][:FACTS_MAX]

    def _open(self, store: str, state: RunState, one: Checkpoint) -> Opened:
        return open_checkpoint(self._readers[store].store, state.name, one, store_id=state.view.store_id, run_id=state.view.run_id)

    def _named(self, spec: str) -> tuple[str, RunState, Checkpoint]:
        run, at, which = spec.rpartition("@")
        if not at or not run or not which:
            raise ConfigError(f"{spec[:80]!r} names no checkpoint", hint="[STORE/]RUN@WHICH, such as demo@latest")
        store, slash, name = run.partition("/")
        if not slash:
            holders = [one for one, known, _ in self._all() if known == dir_of(run)]
            if len(holders) > 1:
                raise ConfigError(
                    f"{len(holders)} stores have a run {run[:80]!r}", hint=", ".join(f"{one}/{run}@{which}" for one in holders)[:300]
                )
            store, name = (holders[0] if holders else ""), run
        return store, self.state(store, name), self.find(store, name, which)

    def _diff(self, sides: Sequence[tuple[str, RunState, Checkpoint]], advance: Progress) -> DiffDetail:
        left, right = (self._open(*side) for side in sides)
        found = diff(left, right, progress=advance)
        rows = []
        for one in found.tensors:
            apart, of = one.apart, one.a or one.b
            changed = apart.changed / apart.elements if apart is not None and apart.elements else None
            size = _bytes_of(of.shape, of.dtype) if of is not None else 0
            rows.append(DiffRow(one.name, _STATES.get(one.state, "changed"), changed, apart.largest if apart is not None else None, size))
        values = [(one.path, one.a if one.in_a else None, one.b if one.in_b else None) for one in [*found.values, *found.facts]]
        return DiffDetail("", "", rows, [(path, _short(one), _short(other)) for path, one, other in values])


def full_at(trend: Sequence[tuple[float, float]], free: int | None, now: float) -> float | None:
    """When the free bytes are gone at the pace of the last week; None if it does not grow, or nobody knows what is free."""
    recent = [point for point in trend if point[0] >= now - WEEK_S]
    if free is None or len(recent) < 2:
        return None
    span, grew = recent[-1][0] - recent[0][0], recent[-1][1] - recent[0][1]
    return now + free * span / grew if span > 0 and grew > 0 else None


def _page(
    rows: Sequence[T], keys: Sequence[str], after: str | None, limit: int, *, reverse: bool = False, known: Callable[[str], str] = str
) -> tuple[list[T], str | None]:
    """The rows behind a key, which need not be there any more; ``keys`` are in order."""
    start = 0
    if after:
        start = sum((key >= known(after)) if reverse else (key <= known(after)) for key in keys)
    picked = list(rows[start : start + limit])
    return picked, keys[start + limit - 1] if start + limit < len(rows) and picked else None


def _seq(text: str) -> str:
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise ConfigError(f"{text[:40]!r} is no place in this list", hint="take what the piece before said under next")
    return text.zfill(12)


def _checkpoint_row(one: Checkpoint, tags: Sequence[str], set_aside: set[str], known: VerificationResult | None) -> CheckpointRow:
    why = "suspect: its loss was odd" if one.body.suspect else "rolled back: training went on from before it" if one.id in set_aside else ""
    if known is not None:
        why = f"damaged: {masked(known.damage)} (found by {known.by})"
    return CheckpointRow(one.id, one.step, one.time, one.body.stored_bytes, None, not why, tags, why)


def _masked_incident(one: IncidentRow) -> IncidentRow:
    return replace(one, why=masked(one.why), reason=masked(one.reason), words=masked(one.words))


def _tags_by_id(store: str, tags: dict[str, str]) -> dict[str, list[str]]:
    """The tags on each checkpoint, without those that name runs which the asker may not know of."""
    found: dict[str, list[str]] = {}
    for name, target in sorted(tags.items()):
        if not name.startswith(PREFIX) or reaches(store, name.removeprefix(PREFIX)):
            found.setdefault(target, []).append(name)
    return found


def _tensor_row(tensor: Any, codec: str | None, ratio: float) -> TensorRow:
    return TensorRow(tensor.name, tensor.shape, tensor.dtype, _bytes_of(tensor.shape, tensor.dtype), codec, ratio)


def _bytes_of(shape: Sequence[int], dtype: str) -> int:
    size: int = DTYPES[dtype].itemsize
    for one in shape:
        size *= one
    return size


def _state_of(reader: StoreFollower) -> str:
    """What the last look at a store amounted to. An error's words may name any run, so a token with a scope gets its kind alone."""
    state = reader.now.state
    return state if everything() or state in ("ok", NOT_YET) else state.partition(":")[0]


def _place_of(on: str) -> tuple[str, str]:
    store, _, rest = on.partition("/")
    return store, rest.partition("@")[0]


def _short(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float | bool) else str(value)[:200]
