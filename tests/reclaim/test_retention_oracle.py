"""Retention against a brute-force reading of its own words, and plans against what executing them does."""

from __future__ import annotations

import math
import os
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proofs.invariants import saves
from relight.catalog.branches import set_tag
from relight.commit import Attempt
from relight.errors import CheckpointNotFound, ConfigError, StoreUnavailable
from relight.format.topics import ROLLED_BACK, RollbackNote
from relight.log import fold
from relight.policy import Candidate, Keep, decide_keep, keep
from relight.policy.keep import RULES
from relight.reclaim import execute, plan_prune
from relight.run_records.holds import hold, holds_of, release
from relight.store import MemoryStore, Reader

METRICS = st.sampled_from([0.0, 1.0, 1.5, -2.0, math.nan, math.inf, -math.inf])


EXAMPLES = int(os.environ.get("EXAMPLES", "600"))
"""``make oracle`` asks for more."""
YEAR_2026 = 1_767_225_600
TIMES = st.one_of(
    st.integers(-400, 400).map(lambda hours: YEAR_2026 + 1800 * hours), st.integers(0, 4 * YEAR_2026)
).map(float)
"""Mostly within some days, half an hour apart; some from clocks that are off by years."""


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    """Up to nine checkpoints: any steps, tags, metrics, needs and states of health."""
    made: list[Candidate] = []
    for seq in range(draw(st.integers(0, 9))):
        made.append(
            Candidate(
                f"c{seq}",
                seq,
                draw(st.integers(0, 12)),
                {} if draw(st.booleans()) else {"loss": draw(METRICS)},
                ("gold",) if draw(st.integers(0, 5)) == 0 else (),
                tuple(f"c{n}" for n in draw(st.sets(st.integers(0, 8), max_size=1)) if n > seq),
                draw(st.sampled_from([True, True, None, False])),
                "on hold" if draw(st.integers(0, 7)) == 0 else "",
                draw(st.integers(0, 50)),
                draw(st.none() | TIMES),
            )
        )
    return draw(st.permutations(made))


rules = st.builds(
    Keep,
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 3),
    st.sampled_from(["loss", None]),
    st.sampled_from(["min", "max"]),
    st.none() | st.integers(1, 5),
    *[
        st.none() | st.none() | rule
        for rule in (
            st.integers(1, 400).map(lambda hours: 1800.0 * hours),
            *[st.integers(1, 3)] * 4,
            st.integers(1, 120),
            st.integers(1, 8),
        )
    ],
)


def by_time(rule: Keep, sound: list[Candidate]) -> set[str]:
    """ "times are those of the records, none later than the next record's"."""
    clipped = {}
    for index, checkpoint in enumerate(sound):
        later = [other.time_s for other in sound[index:] if other.time_s is not None]
        clipped[checkpoint.id] = min(later) if checkpoint.time_s is not None else None
    known = [checkpoint for checkpoint in sound if clipped[checkpoint.id] is not None]
    stay = set()
    when = {checkpoint.id: datetime.fromtimestamp(clipped[checkpoint.id], UTC) for checkpoint in known}
    names = {
        "hourly": lambda checkpoint: when[checkpoint.id].strftime("%Y %j %H"), "daily": lambda checkpoint: when[checkpoint.id].strftime("%Y %j"),
        "weekly": lambda checkpoint: when[checkpoint.id].isocalendar()[:2], "monthly": lambda checkpoint: when[checkpoint.id].strftime("%Y %m"),
    }  # fmt: skip
    for name, bucket in names.items():
        if getattr(rule, name) is not None:
            newest = {bucket(checkpoint): checkpoint for checkpoint in known}  # the last of each
            stay |= {
                checkpoint.id
                for checkpoint in sorted(newest.values(), key=lambda checkpoint: -checkpoint.seq)[: getattr(rule, name)]
            }
            stay |= {checkpoint.id for checkpoint in sound if checkpoint not in known}
    if rule.within_s is not None:
        now = max((clipped[checkpoint.id] for checkpoint in known), default=0.0)
        stay |= {
            checkpoint.id
            for checkpoint in sound
            if checkpoint not in known or clipped[checkpoint.id] >= now - rule.within_s
        }
    return stay


def by_size_and_age(rule: Keep, sound: list[Candidate]) -> set[str]:
    """ "the newest that fit into budget, with what they need"; "always one that is at least that many steps before the
    newest"."""
    stay = set()
    if rule.budget is not None:
        for count in range(len(sound) + 1):
            newest = sound[len(sound) - count :]
            ids = {checkpoint.id for checkpoint in newest}
            if (
                sum(checkpoint.bytes for checkpoint in sound if checkpoint.id in ids or ids & set(checkpoint.needed_by))
                <= rule.budget
            ):
                stay |= {checkpoint.id for checkpoint in newest}
    if rule.lag_steps is not None and sound:
        old = [checkpoint for checkpoint in sound if checkpoint.step <= sound[-1].step - rule.lag_steps]
        stay |= {checkpoint.id for checkpoint in old[-1:]}
        next_ones = [
            checkpoint
            for checkpoint in sound
            if checkpoint.step > sound[-1].step - rule.lag_steps and (not old or checkpoint.seq > old[-1].seq)
        ]
        stay |= {checkpoint.id for checkpoint in next_ones[:1]}
    return stay


def by_milestones(rule: Keep, sound: list[Candidate]) -> set[str]:
    """ "the first one after it stays, up to one period late"; "the last one before it stays, less than a period early"."""
    stay: set[str] = set()
    for multiple in range(rule.every, 40, rule.every) if rule.every else ():
        after = [checkpoint.step + 1 for checkpoint in sound if multiple <= checkpoint.step + 1 < multiple + rule.every]
        before = [checkpoint.step + 1 for checkpoint in sound if multiple - rule.every < checkpoint.step + 1 < multiple]
        is_past = any(checkpoint.step + 1 >= multiple + rule.every for checkpoint in sound)
        steps = min(after) if after else max(before) if before and is_past else None
        stay |= {checkpoint.id for checkpoint in sound if checkpoint.step + 1 == steps}
    return stay


def oracle(rule: Keep, checkpoints: list[Candidate]) -> set[str]:
    """The ids that stay, one sentence of the documentation after the other."""
    if all(getattr(rule, name) is None for name in RULES):
        return {checkpoint.id for checkpoint in checkpoints}  # "No rule at all keeps everything."
    stay: set[str] = set()
    in_order = sorted(checkpoints, key=lambda checkpoint: checkpoint.seq)
    # "known to be damaged do not count towards last and best"
    sound = [checkpoint for checkpoint in in_order if checkpoint.verified is not False]
    for checkpoint in checkpoints:
        newer_sound = [other for other in sound if other.seq > checkpoint.seq]
        value = checkpoint.metrics.get("loss", math.nan)
        if rule.last is not None and checkpoint in sound and len(newer_sound) < rule.last:
            stay.add(checkpoint.id)
        ranked = any(math.isfinite(other.metrics.get("loss", math.nan)) for other in checkpoints)
        if rule.best is not None and checkpoint in sound and not ranked:
            stay.add(checkpoint.id)  # "While no checkpoint has the metric, the rule keeps all of them."
        if rule.best is not None and checkpoint in sound and math.isfinite(value):

            def beats(other: Candidate, value: float = value, seq: int = checkpoint.seq) -> bool:
                theirs = other.metrics.get("loss", math.nan)
                if not math.isfinite(theirs):
                    return False
                better = theirs < value if rule.mode == "min" else theirs > value
                return better or (theirs == value and other.seq > seq)

            if sum(beats(other) for other in sound) < rule.best:
                stay.add(checkpoint.id)
        if checkpoint.tags or checkpoint.held:
            stay.add(checkpoint.id)
    stay |= by_time(rule, sound) | by_size_and_age(rule, sound) | by_milestones(rule, sound)
    if in_order:
        stay.add(in_order[-1].id)
    verified = [checkpoint for checkpoint in in_order if checkpoint.verified]
    if verified:
        stay.add(verified[-1].id)
    while more := {checkpoint.id for checkpoint in checkpoints if set(checkpoint.needed_by) & stay} - stay:
        stay |= more
    if not any(checkpoint.verified and checkpoint.id in stay for checkpoint in checkpoints):
        return {checkpoint.id for checkpoint in checkpoints}
    return stay


@settings(max_examples=EXAMPLES, deadline=None)
@given(rule=rules, checkpoints=candidates())
def test_verdicts_are_those_of_the_documentation(rule: Keep, checkpoints: list[Candidate]) -> None:
    """The verdicts equal the documentation of ``keep`` and ``decide_keep``. Each has a reason, in the given order."""
    verdicts = decide_keep(rule, checkpoints)
    assert [verdict.id for verdict in verdicts] == [checkpoint.id for checkpoint in checkpoints]
    assert {verdict.id for verdict in verdicts if verdict.keep} == oracle(rule, checkpoints)
    assert all(verdict.reason for verdict in verdicts)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(rule=rules, checkpoints=candidates())
def test_something_that_verifies_always_stays(rule: Keep, checkpoints: list[Candidate]) -> None:
    """With any rules the newest checkpoint stays, and the newest that verifies."""
    kept = {verdict.id for verdict in decide_keep(rule, checkpoints) if verdict.keep}
    in_order = sorted(checkpoints, key=lambda checkpoint: checkpoint.seq)
    assert {checkpoint.id for checkpoint in in_order[-1:]} <= kept
    assert {newest.id for newest in [checkpoint for checkpoint in in_order if checkpoint.verified][-1:]} <= kept


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    last=st.integers(1, 4),
    best=st.none() | st.integers(1, 2),
)
def test_executing_a_plan_does_what_it_states(steps: list[int], last: int, best: int | None) -> None:
    """Execution does what the plan states: kept checkpoints are live, the others are retired and deleted.

    A second execution does nothing.
    """
    store = MemoryStore()
    attempt, ids, _ = saves(store, *steps)
    plan = plan_prune(store, "run", keep(last=last, best=best))
    report = execute(plan, store, epoch=attempt.epoch)
    history = attempt.history()
    assert [checkpoint.id for checkpoint in history.live] == [
        checkpoint_id for checkpoint_id in ids if checkpoint_id not in plan.going
    ]
    assert sorted(report.retired) == sorted(plan.going)
    assert len(report.deleted) == len(plan.going)
    assert {entry.name for entry in store.list("run")} - {"log"} == {checkpoint.body.dir for checkpoint in history.live}
    again = execute(plan, store, epoch=attempt.epoch)
    assert again == type(again)([], [], [])


def test_reading_is_only_done_when_something_would_go() -> None:
    """If a plan removes nothing, it reads no checkpoint. Otherwise it reads one that stays, and remembers the
    result."""
    store = MemoryStore()
    _, ids, _ = saves(store, 1, 2, 3)
    known: dict[str, bool] = {}
    assert plan_prune(store, "run", keep(last=3), verified=known).going == []
    assert known == {}
    assert plan_prune(store, "run", keep(last=2), verified=known).going == ids[:1]
    assert known == {ids[2]: True}


def test_a_tool_prunes_under_the_epoch_it_finds() -> None:
    """``prune`` without an attempt neither fences nor is fenced."""
    store = MemoryStore()
    attempt, ids, _ = saves(store, 1, 2)
    execute(plan_prune(store, "run", keep(last=1)), store)
    history = fold(attempt.view())
    assert [checkpoint.id for checkpoint in history.live] == ids[1:]
    assert history.epoch == attempt.epoch
    assert Attempt.begin(store, "run").epoch == attempt.epoch + 1


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(gaps=st.lists(st.integers(1, 9), min_size=3, max_size=60), lag=st.integers(1, 40))
def test_one_that_is_old_enough_is_always_there(gaps: list[int], lag: int) -> None:
    """Prune after every save with only ``last=1, lag_steps=n``: once a save is n steps old, one such save is always
    kept.

    It is not much older than needed, and at most three checkpoints stay.
    """
    live: list[Candidate] = []
    step = 0
    for seq, gap in enumerate(gaps):
        step += gap
        live.append(Candidate(f"c{seq}", seq, step, verified=True))
        kept = {verdict.id for verdict in decide_keep(keep(last=1, lag_steps=lag), live) if verdict.keep}
        live = [checkpoint for checkpoint in live if checkpoint.id in kept]
        assert len(live) <= 3
        if step - gaps[0] >= lag:
            old = [checkpoint for checkpoint in live if checkpoint.step <= step - lag]
            assert old
            assert step - old[-1].step < 2 * lag + 2 * max(gaps)


def test_a_hold_keeps_what_no_rule_does_until_it_is_released() -> None:
    """A hold counts even if it comes between a plan and its execution. The plan has its reason."""
    store = MemoryStore()
    attempt, ids, _ = saves(store, 1, 2, 3, 4)
    plan = plan_prune(store, "run", keep(last=1))
    hold(store, "run", ids[1], "incident 42")
    assert sorted(execute(plan, store).retired) == sorted([ids[0], ids[2]])
    verdicts = {verdict.id: verdict for verdict in plan_prune(store, "run", keep(last=1)).verdicts}
    assert verdicts[ids[1]].keep and "incident 42" in verdicts[ids[1]].reason
    assert holds_of(attempt.history()) == {ids[1]: "incident 42"}
    release(store, "run", ids[1])
    assert execute(plan_prune(store, "run", keep(last=1)), store).retired == [ids[1]]
    for call in (lambda: hold(store, "run", "0123456789", "x"), lambda: release(store, "run", ids[1])):
        with pytest.raises(CheckpointNotFound):
            call()
    with pytest.raises(ConfigError):
        hold(store, "run", ids[3], " ")


def test_an_automatic_prune_removes_at_most_half() -> None:
    """A rule that was meant otherwise does not empty a run at once: the oldest half goes, then half of the rest."""
    store = MemoryStore()
    attempt, ids, _ = saves(store, *range(8))
    plan = plan_prune(store, "run", keep(last=1))
    assert execute(plan, store, at_most=plan.usual_share).retired == ids[:4]
    plan = plan_prune(store, "run", keep(last=1))
    assert execute(plan, store, at_most=plan.usual_share).retired == ids[4:6]
    assert [checkpoint.id for checkpoint in attempt.history().live] == ids[6:]


def test_a_store_that_does_not_answer_is_no_damage() -> None:
    """Retention raises, remembers nothing, and removes nothing."""

    class Silent(MemoryStore):
        silent = False

        def open(self, key: str) -> Reader:
            if self.silent and "pack" in key:
                raise StoreUnavailable("503", where=key)
            return super().open(key)

    store = Silent()
    saves(store, 1, 2, 3)
    store.silent, known = True, dict[str, bool]()
    with pytest.raises(StoreUnavailable):
        plan_prune(store, "run", keep(last=1), verified=known)
    assert known == {}


@pytest.mark.parametrize(
    "rules",
    [
        {"last": 0},
        {"daily": True},
        {"within": "soon"},
        {"within": -1},
        {"within": "7"},
        {"budget": "much"},
        {"budget": 0},
        {"lag_steps": 1.5},
        {"mode": "up"},
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, object]) -> None:
    """The error has the rule's name."""
    with pytest.raises(ConfigError):
        keep(**rules)  # type: ignore[arg-type]


def test_amounts_as_people_write_them() -> None:
    """Times and sizes may be given with units."""
    assert (
        keep(within="36h").within_s
        == keep(within=129600).within_s
        == keep(within=timedelta(hours=36)).within_s
        == 129600.0
    )
    assert keep(budget="1.5 TB").budget == 1_500_000_000_000
    assert keep(budget="2GiB").budget == 2 << 30


def test_checkpoints_after_a_rollback_target_count_for_no_rule() -> None:
    """Rules apply to the others as if rolled-back checkpoints did not exist. Without others they count, and tags
    protect."""
    store = MemoryStore()
    attempt, ids, _ = saves(store, 500, 900, 950, 1000)
    set_tag(attempt.place.log, "odd", ids[2])
    attempt.place.log.append(lambda view: (ROLLED_BACK.note(RollbackNote(before=501)), fold(view).epoch))
    later = saves(store, 550)[1]
    plan = plan_prune(store, "run", keep(last=3))
    assert sorted(plan.going) == sorted([ids[1], ids[3]])
    assert "returned to an earlier step" in next(verdict.reason for verdict in plan.verdicts if verdict.id == ids[1])
    assert sorted(execute(plan, store).retired) == sorted(plan.going)
    assert [checkpoint.id for checkpoint in attempt.history().live] == [ids[0], ids[2], *later]
    aside = [Candidate(f"c{seq}", seq, seq, verified=True, aside=True) for seq in range(4)]
    assert [verdict.keep for verdict in decide_keep(keep(last=2), aside)] == [False, False, True, True]


@pytest.mark.parametrize("undo", [None, 1e-9])
def test_what_a_record_that_cannot_be_read_may_keep_stays(undo: float | None) -> None:
    """The record may have been a tag, a hold, a branch or a recall.

    Newer checkpoints are pruned as usual, and the plan states the reason.
    """
    store = MemoryStore()
    attempt, ids, _ = saves(store, 1, 2)
    set_tag(attempt.place.log, "paper", ids[0])
    name = max(entry.name for entry in store.list("run/log"))
    data = bytearray(store.get(f"run/log/{name}", 1 << 20))
    data[len(data) // 2] ^= 1
    store.delete(f"run/log/{name}")
    store.put_once(f"run/log/{name}", bytes(data))
    later, more, _ = saves(store, 3, 4, 5)
    plan = plan_prune(store, "run", keep(last=1, undo_window=undo))
    assert plan.going == more[:2]
    assert all("cannot be read" in verdict.reason for verdict in plan.verdicts if verdict.id in ids)
    execute(plan, store)
    assert [checkpoint.id for checkpoint in later.history().live] == [*ids, more[2]]
