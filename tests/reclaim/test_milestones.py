"""``keep(every=N)``: each multiple of N steps keeps a checkpoint, also where the save of exactly that step was postponed."""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from proofs.invariants import saves
from relight.policy import Candidate, decide_keep, keep
from relight.policy.tiers import Tier, owed, safe_on
from relight.reclaim import plan_prune
from relight.store import MemoryStore

EXAMPLES = int(os.environ.get("EXAMPLES", "300"))


def candidates(*steps: int) -> list[Candidate]:
    """One verified checkpoint at the end of each of ``steps``, in this order."""
    return [Candidate(f"c{seq}", seq, step, verified=True) for seq, step in enumerate(steps)]


def pruned(steps: list[int], every: int) -> tuple[list[Candidate], list[list[int]]]:
    """Save at ``steps`` and prune after each save: what is left, and the numbers of steps done that were live after each pruning."""
    live: list[Candidate] = []
    live_then: list[list[int]] = []
    for checkpoint in candidates(*steps):
        live.append(checkpoint)
        kept = {verdict.id for verdict in decide_keep(keep(last=1, every=every), live) if verdict.keep}
        live = [checkpoint for checkpoint in live if checkpoint.id in kept]
        live_then.append([checkpoint.step + 1 for checkpoint in live])
    return live, live_then


def test_a_milestone_with_a_postponed_save_keeps_the_next_checkpoint() -> None:
    """With a save one step late, the late checkpoint stays for the multiple, and its reason names both."""
    verdicts = decide_keep(keep(last=1, every=400), candidates(398, 400, 799, 801, 1000))
    assert [verdict.step for verdict in verdicts if verdict.keep] == [400, 799, 1000]
    assert [verdict.reason for verdict in verdicts if verdict.keep] == [
        "every 400 steps: after 401 steps in place of 400",
        "every 400 steps",
        "newest, newest verified, last 1: number 1",
    ]


def test_a_period_without_any_checkpoint_keeps_the_last_one_before_it() -> None:
    """If nothing was saved from a multiple to the next one, the last checkpoint before it stays, once the run is past the period."""
    verdicts = decide_keep(keep(last=1, every=400), candidates(100, 398, 801, 802))
    assert {verdict.step: verdict.reason for verdict in verdicts if verdict.keep} == {
        398: "every 400 steps: after 399 steps in place of 400",
        801: "every 400 steps: after 802 steps in place of 800",
        802: "newest, newest verified, last 1: number 1",
    }
    assert [
        verdict.step for verdict in decide_keep(keep(last=1, every=400), candidates(100, 398, 700)) if verdict.keep
    ] == [700]


@settings(max_examples=EXAMPLES, deadline=None)
@given(gaps=st.lists(st.integers(1, 9), min_size=1, max_size=60), every=st.integers(1, 12))
def test_pruning_after_each_save_keeps_what_one_pruning_at_the_end_keeps(gaps: list[int], every: int) -> None:
    """If steps only grow, each period keeps the same checkpoint from its first pruning on."""
    steps = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    live, _ = pruned(steps, every)
    at_once = [verdict.step for verdict in decide_keep(keep(last=1, every=every), candidates(*steps)) if verdict.keep]
    assert [checkpoint.step for checkpoint in live] == at_once
    for multiple in range(every, steps[-1] + 2, every):
        near = [step + 1 for step in steps if multiple <= step + 1 < multiple + every]
        if near:
            assert min(near) in [checkpoint.step + 1 for checkpoint in live]


@settings(max_examples=EXAMPLES, deadline=None)
@given(steps=st.lists(st.integers(0, 40), min_size=1, max_size=40), every=st.integers(1, 12))
def test_a_period_never_loses_its_checkpoint(steps: list[int], every: int) -> None:
    """If steps go back, a period with a checkpoint at or after its multiple still keeps one, and never a later one."""
    _, live_then = pruned(steps, every)
    nearest: dict[int, int] = {}
    for done, live in zip(steps, live_then, strict=True):
        if period := (done + 1) // every:
            nearest[period] = min(done + 1, nearest.get(period, done + 1))
        for period, first in nearest.items():
            assert first in live, (period, live)


def test_damage_passes_the_milestone_on() -> None:
    """A damaged checkpoint stands for no multiple: the next one of the period does."""
    first, second, newest = candidates(399, 450, 500)
    kept = {
        v.step: v.reason
        for v in decide_keep(keep(last=1, every=400), [replace(first, verified=False), second, newest])
        if v.keep
    }
    assert kept[450] == "every 400 steps: after 451 steps in place of 400" and 399 not in kept


def test_a_tier_gets_the_checkpoint_in_place_of_a_milestone() -> None:
    """What a tier with ``every=`` lacks includes the late checkpoint, once; later ones of the period are only copied as the newest."""
    rules = keep(last=1, every=400)
    first, second, third = candidates(400, 401, 402)
    assert owed(rules, [first, second, third], -1) == [first.id, third.id]
    assert owed(rules, [second, third], first.seq, had=[first]) == [third.id]
    assert owed(rules, [second, third], first.seq) == [second.id, third.id]  # the same if nothing is known of the first


def test_what_a_tier_had_decides_what_it_still_has() -> None:
    """A copy that the tier retires, since it has an earlier one of the period, does not count as safe there."""
    first, second, third = candidates(400, 401, 402)
    tier = Tier("s3://b/r", keep(last=1, every=400), name="cold")
    copied = {first.id, second.id, third.id}
    assert safe_on(tier, [first, second, third], copied) == {first.id, third.id}
    assert safe_on(tier, [second, third], copied, [first]) == {third.id}


def test_a_plan_of_a_real_run_names_the_substitute() -> None:
    """The plan that ``relight prune --dry-run`` prints keeps the late checkpoint and gives the reason."""
    store = MemoryStore()
    _, ids, _ = saves(store, 2, 4, 7, 9)
    plan = plan_prune(store, "run", keep(last=1, every=4))
    assert plan.going == [ids[0]]
    assert {verdict.id: verdict.reason for verdict in plan.verdicts}[
        ids[1]
    ] == "every 4 steps: after 5 steps in place of 4"
