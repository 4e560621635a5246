"""Retention: decide which checkpoints go, retire them and delete their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from relight.catalog.find import metric_value
from relight.catalog.tiers import copying_to, drained_to, groups_in, newest_seq, pace_of, retired_among, tiers_of
from relight.errors import StoreUnavailable
from relight.format.records import UNDO_S_MAX, Body, RetireBody
from relight.log import Checkpoint, History, Log, LogView, fold, line_of, newest_good
from relight.log.identity import seconds_since_epoch
from relight.log.superseded import superseded
from relight.log.truncated import refuse_truncated
from relight.policy import Candidate, Keep, KeepVerdict, decide_keep
from relight.policy.keep import lasting, with_recorded
from relight.policy.tiers import owed, safe_on, short_of
from relight.reader.verify import verify_checkpoint
from relight.reclaim.needs import not_needed, oldest_together, unsure, users
from relight.reclaim.recall import due_of, sweep_recallable
from relight.reclaim.sweep import delete_checkpoints
from relight.run_records.holds import holds_of
from relight.run_records.verification import damage
from relight.store import ByteStore


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """Verdict on each checkpoint, with its reason. Printing the plan is the dry run.

    ``relies_on``: checkpoints that stay and are known to be whole. If all of them are retired before the plan is executed, it is void.
    ``due``: checkpoints that were retired earlier and can no longer be recalled; their bytes are deleted.
    """

    run: str
    rules: Keep
    verdicts: list[KeepVerdict]
    bytes_freed: int
    relies_on: tuple[str, ...] = ()
    due: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    """Ids of the checkpoints known to be damaged."""
    elsewhere: tuple[str, ...] = ()
    """Ids of the checkpoints that were safe on a further tier when the plan was made."""

    @property
    def going(self) -> list[str]:
        """Ids to retire, oldest first."""
        return [verdict.id for verdict in self.verdicts if not verdict.keep]

    def sparing(self, ids: Collection[str], reason: str) -> PrunePlan:
        """Return the plan with these checkpoints staying, for that reason."""
        verdicts = [
            replace(verdict, keep=True, reason=reason) if not verdict.keep and verdict.id in ids else verdict
            for verdict in self.verdicts
        ]
        return replace(self, verdicts=verdicts)

    @property
    def usual_share(self) -> int:
        """Largest number of checkpoints to retire at once without a user's confirmation: half of them, or two if that is more."""
        return max(2, len(self.verdicts) // 2)


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Result of a prune: ids retired, directories deleted, and directories that could not be deleted (``left``).

    The next sweep tries ``left`` again. Retired checkpoints that are still recallable are in neither list of directories.
    """

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
    """Decide which checkpoints go. If any go, checkpoints that stay are read, newest first, until one of them verifies.

    ``verified``: known results by id. A dict is updated; pass the same dict again to save the reading. ``log``: the caller's log of the
    run, so that only new records are read.
    """
    view = (log or Log(store, run)).read()
    history = fold(view)
    doubt, rules = unsure(view, history), with_recorded(rules, history.best_by)
    known = verified if isinstance(verified, dict) else dict(verified or {})
    while True:
        candidates = candidates_of(history, known, doubt)
        verdicts = decide_keep(rules, candidates)
        hopeful = decide_keep(
            rules, candidates_of(history, {**dict.fromkeys(_unknown(history, known), True), **known}, doubt)
        )
        if all(verdict.keep for verdict in hopeful) or not all(verdict.keep for verdict in verdicts):
            break
        doubtful = next((checkpoint for checkpoint in reversed(history.live) if checkpoint.id not in known), None)
        if doubtful is None:
            break
        known[doubtful.id] = _is_sound(store, view, doubtful, progress)
    wrong = {checkpoint_id: False for checkpoint_id in damage(history) if checkpoint_id not in known}
    # a damaged checkpoint satisfies no rule: others stay in its place, and nothing goes that would stay otherwise
    if wrong:
        careful = decide_keep(rules, candidates_of(history, {**known, **wrong}, doubt))
        verdicts = [
            careful_verdict if careful_verdict.keep else verdict
            for verdict, careful_verdict in zip(verdicts, careful, strict=True)
        ]
    going = {verdict.id for verdict in verdicts if not verdict.keep}
    freed = sum(checkpoint.new_bytes for checkpoint in history.live if checkpoint.id in going)
    sound = tuple(
        checkpoint.id for checkpoint in history.live if known.get(checkpoint.id) and checkpoint.id not in going
    )
    damaged = tuple(checkpoint.id for checkpoint in history.live if known.get(checkpoint.id) is False)
    elsewhere = tuple(candidate.id for candidate in candidates if candidate.elsewhere)
    return PrunePlan(run, rules, verdicts, freed, sound, tuple(due_of(view, history)), damaged, elsewhere)


def _is_sound(store: ByteStore, view: LogView, checkpoint: Checkpoint, progress: Callable[[int], None] | None) -> bool:
    """Return whether a checkpoint verifies. Raise ``StoreUnavailable`` if the store does not answer: that is not damage."""
    findings = verify_checkpoint(store, view, checkpoint, progress=progress)
    silent = next((finding for finding in findings if finding.is_unknown), None)
    if silent is not None:
        raise StoreUnavailable(f"cannot verify checkpoint {checkpoint.id}: {silent.detail}", where=silent.file)
    return not findings


def execute(
    plan: PrunePlan, store: ByteStore, *, epoch: int | None = None, log: Log | None = None, at_most: int | None = None
) -> PruneReport:
    """Retire checkpoints, then delete their bytes: at once, or when due if the rules give time to recall them.

    ``epoch``: the epoch of the attempt that prunes, None for a tool; a superseded attempt gets ``Fenced``. Without ``log``, raise
    ``CorruptCheckpoint`` if the newest records of the run's log were lost. ``at_most``: largest number retired at once, oldest first, so
    that mistaken rules do not empty a run before a user notices.

    Other processes may have tagged, held, committed, evaluated or retired checkpoints since the plan. So these stay: what a tag or a hold
    keeps by then, the newest checkpoint, the best ones by the metrics of then, what a further tier lacks by then, what was safe on a
    further tier and is not any more, and ancestors that the newest good one does not have.
    Everything stays if all that the plan relies on is gone: otherwise two plans could each retire what the other relied on. A donor goes
    together with its users or not at all, even if they are more than ``at_most``.
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
        if epoch is not None and history.epoch > epoch:
            raise superseded(history, epoch, plan.run)
        if plan.relies_on and not any(history.find(checkpoint_id) for checkpoint_id in plan.relies_on):
            return None
        candidates = candidates_of(history, dict.fromkeys(plan.damaged, False), unsure(view, history))
        staying = _best_now(plan, history, candidates) | {each.id for each in candidates if each.held}
        staying |= set(plan.elsewhere) - {each.id for each in candidates if each.elsewhere}
        free = [
            checkpoint.id
            for checkpoint in history.live[:-1]
            if checkpoint.id in going and checkpoint.id not in staying and not history.tags_of(checkpoint.id)
        ]
        abandoned = set() if plan.rules.prune_abandoned else abandoned_in(history, dict.fromkeys(plan.damaged, False))
        together = not_needed(history, set(free) - abandoned)
        still = oldest_together(
            history, [checkpoint_id for checkpoint_id in free if checkpoint_id in together], at_most
        )
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
    """Plan, and remove the usual share. An attempt calls it after each of its saves.

    Raises as ``plan_prune`` and ``execute`` do, and what ``progress`` raises, which is called for each chunk that is read.
    """
    plan = plan_prune(store, run, rules, verified=verified, progress=progress, log=log)
    return execute(plan, store, epoch=epoch, log=log, at_most=plan.usual_share)


def candidates_of(
    history: History, known: Mapping[str, bool] | None = None, doubt: Collection[str] = ()
) -> list[Candidate]:
    """Return the live checkpoints as candidates for the rules. ``known``: by id, whether a checkpoint verified.

    Held are those that a further tier lacks, and those that an unreadable record may keep (``doubt``).
    """
    holds, by_donor = holds_of(history), users(history)
    candidates = [
        replace(
            _candidate(history, checkpoint, by_donor.get(checkpoint.id, []), (known or {}).get(checkpoint.id)),
            on_hold=checkpoint.id in holds,
        )
        for checkpoint in history.live
    ]
    reasons = dict.fromkeys(doubt, "a later record of the log cannot be read, and may keep it")
    reasons |= {checkpoint_id: f"on hold: {why}" for checkpoint_id, why in holds.items()}
    elsewhere: dict[str, str] = {}
    abandoned = abandoned_in(history, known)
    reasons |= {
        checkpoint_id: "the newest one that is not suspect"
        for checkpoint_id in _kept_for_suspects(history, known or {})
        if checkpoint_id not in reasons
    }
    lines = [replace(candidate, abandoned=candidate.id in abandoned) for candidate in candidates]
    tiers, drained = {tier.name: tier for tier in tiers_of(history)}, drained_to(history)
    for name, checkpoint_id in copying_to(history).items():
        if name in tiers:
            reasons.setdefault(checkpoint_id, f"being copied to {name}")
    tiers = {name: replace(tier, keep=with_recorded(tier.keep, history.best_by)) for name, tier in tiers.items()}
    for group in groups_in(history):
        lacks, has = dict[str, list[str]](), Counter[str]()
        for name in group.members:
            copied = drained.get(name, set())
            had = retired_among(history, copied) if tiers[name].keep.every else []
            lacks[name] = owed(
                tiers[name].keep, lines, newest_seq(history, copied), pace_of(history, name, copied), had
            )
            has.update(safe_on(tiers[name], candidates, copied, had))
        here = (
            f"not on {group.name} yet"
            if len(group.members) == 1
            else f"not on {group.quorum} of {', '.join(group.members)} yet"
        )
        for checkpoint_id in short_of(group, lacks):
            reasons.setdefault(checkpoint_id, here)
        for checkpoint_id, count in has.items():
            if count >= group.quorum:
                elsewhere.setdefault(checkpoint_id, group.name)
    return [
        replace(
            candidate, held=reasons.get(candidate.id, ""), elsewhere=elsewhere.get(candidate.id, ""), passed=bool(tiers)
        )
        for candidate in lines
    ]


def abandoned_in(history: History, known: Mapping[str, bool] | None = None) -> set[str]:
    """Return the ids of live checkpoints that are not ancestors of the newest good one, without rolled back ones.

    Suspect checkpoints that descend from the newest good one belong to its line. ``known``: by id, whether a checkpoint verified.
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


def _best_now(plan: PrunePlan, history: History, candidates: Sequence[Candidate]) -> set[str]:
    """Return the ids of the checkpoints that ``best`` keeps by the metrics that are recorded now."""
    if not plan.rules.best:
        return set()
    rules = with_recorded(replace(plan.rules, every=None), history.best_by)
    return lasting(
        rules,
        [
            candidate
            for candidate in candidates
            if candidate.verified is not False
            and not candidate.aside
            and (rules.prune_abandoned or not candidate.abandoned)
        ],
    )


def _candidate(history: History, checkpoint: Checkpoint, needed_by: list[str], verified: bool | None) -> Candidate:
    metrics = {name: metric_value(value) for name, value in checkpoint.metrics.items()}
    time_s = seconds_since_epoch(checkpoint.time)
    return Candidate(
        checkpoint.id, checkpoint.seq, checkpoint.body.steps_done - 1, metrics, history.tags_of(checkpoint.id), needed_by, verified, "",
        checkpoint.new_bytes, time_s, routine=checkpoint.body.save_reason.is_routine, aside=checkpoint.id in history.rolled_back_ids,
        label=checkpoint.step,
    )  # fmt: skip


def _unknown(history: History, known: Mapping[str, bool]) -> list[str]:
    return [checkpoint.id for checkpoint in history.live if checkpoint.id not in known]
