"""Retention: which checkpoints go, and the deleting of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from relight.catalog.checked import damage
from relight.catalog.find import metric_value
from relight.catalog.holds import holds_of
from relight.catalog.tiers import copying_to, drained_to, groups_in, newest_seq, pace_of, retired_among, tiers_of
from relight.catalog.verify import verify_checkpoint
from relight.errors import StoreUnavailable
from relight.format.records import UNDO_S_MAX, Body, RetireBody
from relight.log import Checkpoint, History, Log, LogView, fold, line_of, newest_good
from relight.log.identity import seconds_since_epoch
from relight.log.superseded import superseded
from relight.log.truncated import refuse_truncated
from relight.policy import Candidate, Keep, KeepVerdict, decide_keep
from relight.policy.adaptive import is_routine
from relight.policy.keep import with_recorded
from relight.policy.tiers import owed, safe_on
from relight.reclaim.needs import not_needed, oldest_together, unsure, users_of
from relight.reclaim.recall import due_of, sweep_recallable
from relight.reclaim.sweep import delete_checkpoints
from relight.store import ByteStore


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What stays and what goes, each with its reason. Printing it is the dry run.

    ``relies_on`` are those that stay and are known to verify: when all of them have gone meanwhile, the plan is void. ``due`` are those
    retired before whose time to be recalled is over: their bytes go.
    """

    run: str
    rules: Keep
    verdicts: list[KeepVerdict]
    bytes_freed: int
    relies_on: tuple[str, ...] = ()
    due: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    """Ids of those known not to verify."""

    @property
    def going(self) -> list[str]:
        """Ids that are to be retired, oldest first."""
        return [verdict.id for verdict in self.verdicts if not verdict.keep]

    @property
    def usual_share(self) -> int:
        """How many go at once where nobody looks: half of what there is, or two."""
        return max(2, len(self.verdicts) // 2)


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What was done. ``deleted`` and ``left`` name directories; those left could not be deleted yet, and the next sweep tries again. What
    was retired and may be recalled is in neither."""

    retired: list[str]
    deleted: list[str]
    left: list[str]


def plan_prune(
    store: ByteStore,
    run: str,
    rules: Keep,
    *,
    verified: Mapping[str, bool] | None = None,
    progress: Callable[[int], None] | None = None,
    log: Log | None = None,
) -> PrunePlan:
    """Decide what goes. If something would, checkpoints that stay are read, newest first, until one of them verifies.

    ``verified`` holds what is known already, by id, and is added to; pass the same one again to save the reading. ``log``: the run's, as
    the caller has it, so that only records it has not seen are read.
    """
    view = (log or Log(store, run)).read()
    history = fold(view)
    doubt, rules = unsure(view, history), with_recorded(rules, history.best_by)
    known = verified if isinstance(verified, dict) else dict(verified or {})
    while True:
        verdicts = decide_keep(rules, candidates_of(history, known, doubt))
        hopeful = decide_keep(rules, candidates_of(history, {**dict.fromkeys(_unknown(history, known), True), **known}, doubt))
        if all(verdict.keep for verdict in hopeful) or not all(verdict.keep for verdict in verdicts):
            break
        doubtful = next((one for one in reversed(history.live) if one.id not in known), None)
        if doubtful is None:
            break
        known[doubtful.id] = _is_sound(store, view, doubtful, progress)
    wrong = {one: False for one in damage(history) if one not in known}
    if wrong:  # what is known to be damaged counts for no rule: others stay in its place, and nothing goes that would stay otherwise
        careful = decide_keep(rules, candidates_of(history, {**known, **wrong}, doubt))
        verdicts = [other if other.keep else one for one, other in zip(verdicts, careful, strict=True)]
    going = {verdict.id for verdict in verdicts if not verdict.keep}
    freed = sum(one.body.new_bytes for one in history.live if one.id in going)
    sound = tuple(one.id for one in history.live if known.get(one.id) and one.id not in going)
    damaged = tuple(one.id for one in history.live if known.get(one.id) is False)
    return PrunePlan(run, rules, verdicts, freed, sound, tuple(due_of(view, history)), damaged)


def _is_sound(store: ByteStore, view: LogView, one: Checkpoint, progress: Callable[[int], None] | None) -> bool:
    """Whether it verifies. ``StoreUnavailable`` if the store does not answer: that is no damage, and nothing is removed for it."""
    findings = verify_checkpoint(store, view, one, progress=progress)
    silent = next((found for found in findings if found.is_silence), None)
    if silent is not None:
        raise StoreUnavailable(f"cannot tell whether checkpoint {one.id} is sound: {silent.detail}", where=silent.file)
    return not findings


def execute(
    plan: PrunePlan, store: ByteStore, *, epoch: int | None = None, log: Log | None = None, at_most: int | None = None
) -> PruneReport:
    """Retire, then delete: at once, or once it is due, if the rules give time to recall it. ``epoch`` is the attempt that prunes, None for
    a tool; a superseded attempt gets ``Fenced``. Without ``log``, ``CorruptCheckpoint`` if the newest records of the run's log were lost.
    ``at_most`` so many go at once, the oldest first: rules that were meant otherwise do not
    empty a run before somebody sees it.

    Between plan and RETIRE others may have tagged, put on hold, committed or retired: what a tag or a hold keeps by then stays. So do the
    newest, what the newest good one of that moment does not descend from, and everything if nothing is left of what the plan relies on
    (two plans might else retire what the other relied on). What another needs goes with that one or not at all, also if they are more than
    ``at_most``.
    """
    going = plan.going
    if not going and not plan.due:
        return PruneReport([], [], [])
    if log is None:
        log = Log(store, plan.run)
        refuse_truncated(store, log)
    retired: list[str] = []
    undo_s = min(plan.rules.undo_s or 0.0, UNDO_S_MAX)

    def decide(view: LogView) -> tuple[Body, int] | None:
        history = fold(view)
        holds = holds_of(history)
        if epoch is not None and history.epoch > epoch:
            raise superseded(history, epoch, plan.run)
        if plan.relies_on and not any(history.find(one) for one in plan.relies_on):
            return None
        holds |= dict.fromkeys(_kept_for_suspects(history, dict.fromkeys(plan.damaged, False)), "")
        free = [one.id for one in history.live[:-1] if one.id in going and one.id not in holds and not history.tags_of(one.id)]
        abandoned = set() if plan.rules.prune_abandoned else abandoned_in(history, dict.fromkeys(plan.damaged, False))
        together = not_needed(history, set(free) - unsure(view, history) - abandoned)
        still = oldest_together(history, [one for one in free if one in together], at_most)
        retired[:] = still
        return (RetireBody(ids=still, reason="retention", undo_s=undo_s), history.epoch) if still else None

    deleted: list[str] = []
    left: list[str] = []
    if going and log.append(decide) is not None and not undo_s:
        deleted, left = delete_checkpoints(store, plan.run, fold(log.read()), retired)
    also_deleted, also_left = sweep_recallable(store, plan.run, plan.due, epoch=epoch, log=log)
    return PruneReport(retired, [*deleted, *also_deleted], [*left, *also_left])


def prune_a_share(
    store: ByteStore,
    run: str,
    rules: Keep,
    *,
    verified: dict[str, bool],
    log: Log,
    epoch: int,
    progress: Callable[[int], None] | None = None,
) -> PruneReport:
    """What an attempt does behind each of its saves: plan, and remove the usual share. Raises as ``plan_prune`` and ``execute`` do, and
    what ``progress`` raises, which is told of each chunk that is read."""
    plan = plan_prune(store, run, rules, verified=verified, progress=progress, log=log)
    return execute(plan, store, epoch=epoch, log=log, at_most=plan.usual_share)


def candidates_of(history: History, known: Mapping[str, bool] | None = None, doubt: Collection[str] = ()) -> list[Candidate]:
    """The live ones as rules see them. ``known``: which were found to verify, or not. Held is what a further tier lacks; and what a record
    that cannot be read may keep: ``doubt``."""
    found = [_candidate(history, one, (known or {}).get(one.id)) for one in history.live]
    held = dict.fromkeys(doubt, "a later record of the log cannot be read, and may keep it")
    held |= {one: f"on hold: {why}" for one, why in holds_of(history).items()}
    elsewhere: dict[str, str] = {}
    abandoned = abandoned_in(history, known)
    held |= {one: "the newest one that is not suspect" for one in _kept_for_suspects(history, known or {}) if one not in held}
    lines = [replace(one, abandoned=one.id in abandoned) for one in found]
    tiers, drained = {tier.name: tier for tier in tiers_of(history)}, drained_to(history)
    for name, one in copying_to(history).items():
        if name in tiers:
            held.setdefault(one, f"being copied to {name}")
    tiers = {name: replace(tier, keep=with_recorded(tier.keep, history.best_by)) for name, tier in tiers.items()}
    for group in groups_in(history):
        lacks, has = Counter[str](), Counter[str]()
        for name in group.members:
            copied = drained.get(name, set())
            had = retired_among(history, copied) if tiers[name].keep.every else []
            lacks.update(owed(tiers[name].keep, lines, newest_seq(history, copied), pace_of(history, name, copied), had))
            has.update(safe_on(tiers[name], found, copied, had))
        for one, count in lacks.items():
            if len(group.members) - count < group.quorum:
                here = f"not on {group.name} yet" if len(group.members) == 1 else f"not on {group.quorum} of {', '.join(group.members)} yet"
                held.setdefault(one, here)
        for one, count in has.items():
            if count >= group.quorum:
                elsewhere.setdefault(one, group.name)
    return [replace(one, held=held.get(one.id, ""), elsewhere=elsewhere.get(one.id, ""), passed=bool(tiers)) for one in lines]


def abandoned_in(history: History, known: Mapping[str, bool] | None = None) -> set[str]:
    """Return the ids of live checkpoints that are no ancestors of the newest good one, without those that a roll-back has set aside.

    Suspect checkpoints that descend from the newest good one are of its line. ``known``: by id, whether a checkpoint was found to verify.
    """
    head = newest_good(history, known)
    if head is None:
        return set()
    line = line_of(history, head)
    newest = newest_good(history, known, suspect=True)
    if newest is not None and newest.id not in line:
        longer = line_of(history, newest)
        line |= longer if head.id in longer else set()
    return history.by_id.keys() - line - history.rolled_back_ids


def _kept_for_suspects(history: History, known: Mapping[str, bool]) -> set[str]:
    """Return the id of the newest good checkpoint if suspect ones are newer: no rule counts it, and a resume may need it."""
    head, newest = newest_good(history, known), newest_good(history, known, suspect=True)
    return {head.id} if head is not None and newest is not None and head.seq < newest.seq else set()


def _candidate(history: History, one: Checkpoint, verified: bool | None) -> Candidate:
    metrics = {name: metric_value(value) for name, value in one.body.metrics.items()}
    needed_by = users_of(history, one.id)
    time_s = seconds_since_epoch(one.time)
    return Candidate(
        one.id, one.seq, one.step, metrics, history.tags_of(one.id), needed_by, verified, "", one.body.new_bytes, time_s,
        routine=is_routine(one.body.reason), aside=one.id in history.rolled_back_ids,
    )  # fmt: skip


def _unknown(history: History, known: Mapping[str, bool]) -> list[str]:
    return [one.id for one in history.live if one.id not in known]
