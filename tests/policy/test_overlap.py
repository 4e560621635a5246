"""Which way of copying is chosen, over simulated training."""

from __future__ import annotations

import random

import pytest

from relight.policy.overlap import Overlap


def train(
    overlap: Overlap, cost: dict[bool, tuple[float, float]], saves: int, seed: int = 0, noise: float = 0.1
) -> list[bool]:
    """``cost[way]``: seconds blocked, and seconds by which the next step is longer. Steps of 50 ms, ten between two saves."""
    chance = random.Random(seed)
    chosen = []
    for _ in range(saves):
        for _ in range(10):
            overlap.interval(0.05 * (1 + noise * chance.random()), quiet=True)
        way = overlap.choose()
        chosen.append(way)
        blocked, longer = cost[way]
        overlap.began(way, blocked)
        overlap.interval((0.05 + longer) * (1 + noise * chance.random()), quiet=False)
    return chosen


@pytest.mark.parametrize("seed", range(10))
def test_where_copying_during_training_is_free_it_stays(seed: int) -> None:
    """Try waiting for the copy a few times, then rarely."""
    chosen = train(Overlap(), {True: (0.002, 0.003), False: (0.03, 0.0)}, 200, seed)
    assert sum(not way for way in chosen) <= 9
    assert chosen[:7] == [True] * 7


@pytest.mark.parametrize("seed", range(10))
def test_where_it_slows_the_steps_more_than_waiting_costs_it_waits(seed: int) -> None:
    """Stop copying during training within about 25 saves, and try it rarely afterwards."""
    chosen = train(Overlap(), {True: (0.002, 0.1), False: (0.03, 0.0)}, 200, seed)
    assert sum(chosen[30:]) <= 6


@pytest.mark.parametrize("seed", range(5))
def test_it_turns_back_when_things_have_changed(seed: int) -> None:
    """Copy during training again after another process has freed the second core."""
    overlap = Overlap()
    train(overlap, {True: (0.002, 0.1), False: (0.03, 0.0)}, 60, seed)
    assert not overlap.prefers
    train(overlap, {True: (0.002, 0.0), False: (0.03, 0.0)}, 200, seed)
    assert overlap.prefers


def test_with_a_tie_it_is_copied_during_training() -> None:
    """Prefer copying during training, because its cost does not grow with the state."""
    overlap = Overlap()
    train(overlap, {True: (0.002, 0.03), False: (0.03, 0.0)}, 100, noise=0.0)
    assert overlap.prefers


def test_nothing_is_learned_without_quiet_steps() -> None:
    """Learn nothing from steps of unknown length."""
    overlap = Overlap()
    for _ in range(50):
        overlap.began(overlap.choose(), 5.0)
        overlap.interval(1.0, quiet=False)
    assert overlap.prefers
