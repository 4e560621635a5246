"""Retention against a brute-force reading of its own words, and plans against what executing them does."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from relight.commit import Attempt
from relight.log import fold
from relight.policy import Candidate, Keep, decide_keep, keep
from relight.reclaim import execute, plan_prune
from relight.store import MemoryStore
from relight.testing.rules import saves

METRICS = st.sampled_from([0.0, 1.0, 1.5, -2.0, math.nan, math.inf, -math.inf])


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
            )
        )
    return draw(st.permutations(made))


rules = st.builds(
    Keep,
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 3),
    st.just("loss"),
    st.sampled_from(["min", "max"]),
    st.none() | st.integers(1, 5),
)


def oracle(rule: Keep, checkpoints: list[Candidate]) -> set[str]:
    """The ids that stay, one sentence of the documentation after the other."""
    if rule.last is None and rule.best is None and rule.every is None:
        return {one.id for one in checkpoints}  # "No rule at all keeps everything."
    stay: set[str] = set()
    in_order = sorted(checkpoints, key=lambda one: one.seq)
    sound = [one for one in in_order if one.verified is not False]  # "known to be damaged do not count towards last and best"
    for one in checkpoints:
        newer_sound = [other for other in sound if other.seq > one.seq]
        value = one.metrics.get("loss", math.nan)
        if rule.last is not None and one in sound and len(newer_sound) < rule.last:
            stay.add(one.id)
        if rule.best is not None and one in sound and math.isfinite(value):

            def beats(other: Candidate, value: float = value, seq: int = one.seq) -> bool:
                theirs = other.metrics.get("loss", math.nan)
                if not math.isfinite(theirs):
                    return False
                better = theirs < value if rule.mode == "min" else theirs > value
                return better or (theirs == value and other.seq > seq)

            if sum(beats(other) for other in sound) < rule.best:
                stay.add(one.id)
        if rule.every is not None and one.verified is not False and (one.step + 1) % rule.every == 0:
            stay.add(one.id)
        if one.tags:
            stay.add(one.id)
    if in_order:
        stay.add(in_order[-1].id)
    verified = [one for one in in_order if one.verified]
    if verified:
        stay.add(verified[-1].id)
    while more := {one.id for one in checkpoints if set(one.needed_by) & stay} - stay:
        stay |= more
    if not any(one.verified and one.id in stay for one in checkpoints):
        return {one.id for one in checkpoints}
    return stay


@settings(max_examples=600, deadline=None)
@given(rule=rules, checkpoints=candidates())
def test_verdicts_are_those_of_the_documentation(rule: Keep, checkpoints: list[Candidate]) -> None:
    """What stays is exactly what the sentences of ``keep`` and ``decide_keep`` say; each verdict has a reason, in the order given."""
    verdicts = decide_keep(rule, checkpoints)
    assert [one.id for one in verdicts] == [one.id for one in checkpoints]
    assert {one.id for one in verdicts if one.keep} == oracle(rule, checkpoints)
    assert all(one.reason for one in verdicts)


@settings(max_examples=300, deadline=None)
@given(rule=rules, checkpoints=candidates())
def test_something_that_verifies_always_stays(rule: Keep, checkpoints: list[Candidate]) -> None:
    """Whatever the rules: the newest stays, and if any verifies, the newest of those."""
    kept = {one.id for one in decide_keep(rule, checkpoints) if one.keep}
    in_order = sorted(checkpoints, key=lambda one: one.seq)
    assert {one.id for one in in_order[-1:]} <= kept
    assert {one.id for one in [one for one in in_order if one.verified][-1:]} <= kept


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.integers(0, 30), min_size=1, max_size=6), last=st.integers(1, 4), best=st.none() | st.integers(1, 2))
def test_executing_a_plan_does_what_it_says(steps: list[int], last: int, best: int | None) -> None:
    """What a plan says stays is live afterwards, what it says goes is retired and its directory gone, and the same plan again does nothing."""
    store = MemoryStore()
    attempt, ids, _ = saves(store, *steps)
    plan = plan_prune(store, "run", keep(last=last, best=best))
    report = execute(plan, store, epoch=attempt.epoch)
    history = attempt.history()
    assert [one.id for one in history.live] == [one for one in ids if one not in plan.going]
    assert sorted(report.retired) == sorted(plan.going)
    assert len(report.deleted) == len(plan.going)
    assert {entry.name for entry in store.list("run")} - {"log"} == {one.body.dir for one in history.live}
    again = execute(plan, store, epoch=attempt.epoch)
    assert again == type(again)([], [], [])


def test_reading_is_only_done_when_something_would_go() -> None:
    """A plan under which nothing goes reads no checkpoint; one under which something goes reads one that stays, and remembers it."""
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
    assert [one.id for one in history.live] == ids[1:]
    assert history.epoch == attempt.epoch
    assert Attempt.begin(store, "run").epoch == attempt.epoch + 1
