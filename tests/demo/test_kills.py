"""The plan of the kills, and the aim that carries it out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from relight.demo.kills import TRIES, Aim, PlannedKill, next_save, plan_kills
from relight.demo.shape import FULL, QUICK, DemoSize


@dataclass
class Scene:
    """A run as the aim sees it."""

    last: int | None = None
    step_s: float = 1.0
    save_s: float = 0.1
    save: str | None = None

    def saving(self) -> str | None:
        """The save being written."""
        return self.save


@pytest.mark.parametrize("shape", [FULL, QUICK], ids=["full", "quick"])
@pytest.mark.parametrize("seed", range(50))
def test_enough_kills_for_every_seed(shape: DemoSize, seed: int) -> None:
    """Any seed gives at least five kills at increasing steps before the end. At least two are inside a save."""
    plan = plan_kills(seed, shape)
    assert len(plan) >= 5
    assert sum(kill.inside_save for kill in plan) >= 2
    steps = [kill.step for kill in plan]
    assert steps == sorted(set(steps))
    assert steps[-1] < shape.steps - 1
    assert all((kill.step + 1) % shape.save_every == 0 for kill in plan if kill.inside_save)
    assert all(0 <= kill.moment < 1 for kill in plan)


def test_plan_is_a_function_of_the_seed() -> None:
    """Equal seeds give equal plans, and different seeds different ones."""
    assert plan_kills(3, FULL) == plan_kills(3, FULL)
    assert len({tuple(plan_kills(seed, FULL)) for seed in range(20)}) == 20


def test_next_save() -> None:
    """A save follows each step with a number, plus one, that is a multiple of the interval."""
    assert [next_save(step, 5) for step in (0, 3, 4, 5)] == [4, 4, 4, 9]


def test_kills_between_steps_after_the_moment() -> None:
    """A kill outside saves comes when its step is done and its share of the next one is over, and not while the process starts."""
    aim = Aim([PlannedKill(3, False, 0.5)], 5)
    assert not aim.due(Scene(last=None), 0.0)
    assert not aim.due(Scene(last=2), 0.0)
    assert not aim.due(Scene(last=3), 10.0)
    assert not aim.due(Scene(last=3), 10.4)
    assert aim.due(Scene(last=3), 10.5)


def test_kills_inside_a_save_only_while_there_is_one() -> None:
    """A kill inside a save waits for a save in progress. A save that ends before the planned moment is skipped."""
    aim = Aim([PlannedKill(4, True, 0.5)], 5)
    assert aim.watching_a_save(Scene(last=3))
    assert not aim.due(Scene(last=4), 1.0)
    assert not aim.due(Scene(last=4, save="a"), 2.0)
    assert not aim.due(Scene(last=5), 2.1)
    assert not aim.due(Scene(last=9, save="b"), 3.0)
    assert aim.due(Scene(last=9, save="b"), 3.04)


def test_a_miss_is_tried_again_at_a_later_save() -> None:
    """A kill that came after the commit is tried again, as often as is allowed, and never twice at one step."""
    aim = Aim([PlannedKill(4, True, 0.0)], 5)
    for turn in range(TRIES):
        step = 4 + 5 * turn
        assert not aim.due(Scene(last=step - 1, save="x"), 1.0)
        assert aim.due(Scene(last=step, save="x"), 1.0)
        aim.fired(step, inside_save=False)
    assert not aim.due(Scene(last=100, save="x"), 1.0)


def test_a_kill_for_a_past_step_is_postponed() -> None:
    """If an attempt took longer than planned, the next kill waits until steps are done."""
    aim = Aim([PlannedKill(4, True, 0.0), PlannedKill(6, False, 0.0)], 5)
    aim.fired(9, inside_save=True)
    assert not aim.due(Scene(last=9), 1.0)
    assert aim.due(Scene(last=10), 1.0)
