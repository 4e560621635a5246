"""A simulated run's further tier gets the saves that the product's levels choose: the same function decides."""

from __future__ import annotations

import itertools

from fleet_made import fleet

from relight.cost_model import ScheduleDecision
from relight.policy import adaptive, keep, tier
from relight.simulator.policies import Policy
from relight.simulator.saves import CheckpointInventory

DECIDED = ScheduleDecision(10.0, 1, "", {"rate_per_h": 0.1, "durable_s": 5.0, "restart_s": 60.0})


def copied(schedule: str, decision: ScheduleDecision | None, saves: int = 40) -> list[int]:
    """Return the steps of the saves that a far tier gets. There is a save every ten seconds, and a copy takes 45 s."""
    scenario = fleet()
    far = tier("/far/run", bytes_per_second=scenario.save.bytes / 45, keep=keep(last=100))
    shelf = CheckpointInventory(scenario, Policy("one", "", schedule, adaptive=adaptive(), tiers=(far,)))
    arrived, under_way = [], []
    for step in range(saves):
        now = 10.0 * step
        for ends, tier_index, made in list(under_way):
            if ends <= now:
                under_way.remove((ends, tier_index, made))
                shelf.arrived(tier_index, made, ends)
                arrived.append(made.step)
        shelf.commit(shelf.new(step, now, now, wrong=False), now)
        shelf.pace(decision)
        under_way += [(now + takes_s, tier_index, made) for tier_index, made, takes_s in shelf.to_copy()]
    return arrived


def test_a_further_tier_s_interval_is_the_one_that_was_decided() -> None:
    """With fifty seconds to a copy each fifth save is copied. Without a decision, the next save is copied
    once the copy before it has arrived."""
    steps = copied("adaptive", DECIDED)
    assert len(steps) >= 5
    assert {later - earlier for earlier, later in itertools.pairwise(steps)} == {5}
    assert copied("every", None)[:3] == [0, 5, 10]
    seldom = ScheduleDecision(10.0, 1, "", {**DECIDED.numbers, "durable_s": 130.0})
    assert {later - earlier for earlier, later in itertools.pairwise(copied("adaptive", seldom, 100))} == {18}
