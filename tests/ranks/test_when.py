"""Several ranks save at the same step, whichever rank requested the save."""

from __future__ import annotations

import random
import signal

import pytest

import relight
from relight.checkpointer.signals import SignalHandlers
from relight.comm import ThreadGroup
from relight.observe import Event, counters, subscribe
from relight.policy import TriggerInput
from relight.policy.triggers import Trigger
from relight.ranks.several import SeveralRanks
from relight.save_reason import of_signal


class AskedAt(Trigger):
    """A trigger that is due at the given steps of the given ranks."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps

    def due(self, facts: TriggerInput) -> str | None:
        return "asked" if facts.step in self.steps else None


def facts(step: int) -> TriggerInput:
    return TriggerInput(step, float(step), None, 0.0)


def test_a_step_trigger_needs_no_exchange() -> None:
    """A step trigger saves at exactly its step on all ranks, without an exchange."""

    def rank(world: ThreadGroup) -> list[str | None]:
        ranks = SeveralRanks(world, (), 5.0)
        reasons = [ranks.agree_on_save(facts(step), relight.every(steps=3), None, False) for step in range(7)]
        return [reason and reason.text for reason in reasons]

    assert ThreadGroup.run(3, rank) == [[None, None, "every 3 steps", None, None, "every 3 steps", None]] * 3


@pytest.mark.parametrize("seed", range(5))
def test_what_one_rank_asks_for_is_done_by_all_at_the_next_step(seed: int) -> None:
    """For random steps on random ranks every rank saves one step later, and at no other step."""
    rng = random.Random(seed)
    asked = [{step for step in range(30) if rng.random() < 0.1} for _ in range(4)]

    def rank(world: ThreadGroup) -> list[int]:
        ranks = SeveralRanks(world, (), 5.0)
        return [step for step in range(31) if ranks.agree_on_save(facts(step), AskedAt(asked[world.rank]), None, False)]

    saves = ThreadGroup.run(4, rank)
    assert all(rank_saves == saves[0] for rank_saves in saves)
    wanted = sorted(set().union(*asked))
    saved = set(saves[0])
    assert all(step + 1 in saved or step in saved for step in wanted), (wanted, saves[0])
    assert all(step - 1 in wanted for step in saved), (wanted, saves[0])


def test_a_signal_to_one_rank_is_a_signal_to_all() -> None:
    """After SIGTERM to one rank all ranks save and end one step later. SIGUSR1 only saves."""

    def rank(world: ThreadGroup) -> list[tuple[str | None, bool]]:
        ranks, signals = SeveralRanks(world, (), 5.0), SignalHandlers(lambda name: None)
        results = []
        for step in range(6):
            if world.rank == 1 and step == 1:
                signals.adopt("SIGUSR1")
            if world.rank == 2 and step == 3:
                signals._ending = signal.SIGTERM
            reason = ranks.agree_on_save(facts(step), None, signals, False)
            results.append((reason, signals.ending))
            signals.saved()
        return results

    for number, results in enumerate(ThreadGroup.run(3, rank)):
        assert [reason and reason.by for reason, _ in results] == [None, None, "SIGUSR1", None, "SIGTERM", None], number
        assert [ending for _, ending in results][4:] == [True, True] and not results[2][1]


def test_a_rank_without_memory_puts_the_save_off_for_all() -> None:
    """While one rank has no memory, saves are postponed on all ranks. Then one save replaces all due ones."""
    before = counters["save.coalesced"]

    def rank(world: ThreadGroup) -> list[int]:
        ranks = SeveralRanks(world, (), 5.0)
        busy = [world.rank == 1 and 3 <= step < 9 for step in range(14)]
        return [
            step for step in range(14) if ranks.agree_on_save(facts(step), relight.every(steps=4), None, busy[step])
        ]

    assert ThreadGroup.run(2, rank) == [[3, 10, 11]] * 2
    assert counters["save.coalesced"] > before


def test_a_save_that_takes_the_last_memory_puts_the_next_one_off() -> None:
    """The save due one step later does not wait for memory: all ranks know by then that one of them has none."""
    events: list[Event] = []
    undo = subscribe(events.append)

    def rank(world: ThreadGroup) -> list[tuple[int, str]]:
        ranks, free_at, saves = SeveralRanks(world, (), 5.0), 0, []
        for step in range(8):
            free = 1 if world.rank == 0 or step >= free_at else 0
            reason = ranks.agree_on_save(
                facts(step), relight.every(steps=1), None, free == 0, free == 1 and world.rank == 1
            )
            if reason:
                assert free, "a save that would have to wait"
                free_at = step + 3
                saves.append((step, reason))
        return saves

    try:
        saves = ThreadGroup.run(2, rank)
    finally:
        undo()
    assert saves[0] == saves[1]
    assert [step for step, _ in saves[0]] == [0, 4]
    postponed = [event.fields["step"] for event in events if event.name == "save.coalesced"]
    assert sorted(postponed) == [1, 1, 5, 5], "one report for each rank and save"


def test_a_postponed_save_has_the_step_at_which_it_was_due() -> None:
    """The reason of a postponed save names the step at which it was due."""

    def rank(world: ThreadGroup) -> list[tuple[int, str]]:
        ranks, saves = SeveralRanks(world, (), 5.0), []
        for step in range(9):
            reason = ranks.agree_on_save(facts(step), relight.every(steps=4), None, world.rank == 1 and 2 <= step < 4)
            saves += [(step, reason.text)] if reason else []
        return saves

    assert ThreadGroup.run(2, rank) == [[(5, "every 4 steps (postponed from step 3)"), (7, "every 4 steps")]] * 2


@pytest.mark.parametrize("busy", [False, True])
def test_a_save_for_a_signal_that_is_tried_again_is_no_signal(busy: bool) -> None:
    """Only one rank remembers the failed save. All ranks act alike when it is tried again: none ends, all postpone."""

    def rank(world: ThreadGroup) -> list[tuple[bool, bool]]:
        ranks, due = SeveralRanks(world, (), 5.0), of_signal("SIGTERM") if world.rank == 0 else None
        reasons = [
            ranks.agree_on_save(
                facts(step), relight.every(steps=100), None, busy and step < 2, due=due if step < 2 else None
            )
            for step in range(4)
        ]
        return [(reason is not None, reason is not None and reason.is_ending_signal) for reason in reasons]

    first, second = ThreadGroup.run(2, rank)
    assert first == second
    assert [saves for saves, _ in first].index(True) == (3 if busy else 1), first
    assert not any(ends for _, ends in first)


def test_lost_ranks_stop_saves_and_not_training() -> None:
    """A missing rank is named once. The other ranks train on, and their later calls do not wait."""
    before = counters["ranks.late"]

    def rank(world: ThreadGroup) -> list[str | None]:
        ranks = SeveralRanks(world, (), 0.3)
        steps = range(2) if world.rank == 1 else range(6)
        return [ranks.agree_on_save(facts(step), relight.every(steps=4), None, False) for step in steps]

    saves = ThreadGroup.run(2, rank, timeout_s=0.3)
    assert saves[0] == [None] * 6
    assert counters["ranks.late"] == before + 1


def test_an_adaptive_schedule_of_rank_0_is_that_of_all_ranks() -> None:
    """Only rank 0 has an interval. All ranks save one step after it has elapsed, and at no other step."""

    def rank(world: ThreadGroup) -> list[int]:
        ranks, trigger = SeveralRanks(world, (), 5.0), relight.adaptive()
        saved, last_s = [], 0.0
        for step in range(20):
            interval_s = (4.0 if step < 10 else 2.0) if world.rank == 0 else None
            if ranks.agree_on_save(
                TriggerInput(step, float(step), None, last_s, interval_s=interval_s), trigger, None, False
            ):
                saved.append(step)
                last_s = float(step)
        return saved

    saves = ThreadGroup.run(3, rank)
    assert saves[0] == saves[1] == saves[2]
    assert saves[0] == [5, 10, 13, 16, 19]
