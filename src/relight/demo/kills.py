"""When to kill: a plan made from the seed, and the aim that carries one of its kills out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from relight.demo.shape import DemoSize

TRIES = 3
"""How often a kill that is to fall inside a save is tried again, at the next save, when it came too late."""


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """Kill when ``step`` is done and ``moment`` (0 to 1) of what follows is over: of the next step, or of ``step``'s save."""

    step: int
    inside_save: bool
    moment: float
    tries: int = TRIES


def plan_kills(seed: int, shape: DemoSize) -> list[PlannedKill]:
    """One kill somewhere in each of as many equal stretches of the run as there are kills; the same for the same seed."""
    draw = random.Random(f"relight demo {seed}")
    inside = [index < shape.kills_saving for index in range(shape.kills)]
    draw.shuffle(inside)
    end = shape.steps * 0.9  # what is left leaves room to try again
    plan: list[PlannedKill] = []
    for index, inside_save in enumerate(inside):
        step = int(end * (index + draw.random()) / shape.kills)
        step = max(step, plan[-1].step + 2 if plan else 1)
        if inside_save:
            step = next_save(step, shape.save_every)
        plan.append(PlannedKill(step, inside_save, draw.random()))
    return plan


def next_save(step: int, save_every: int) -> int:
    """The first step from ``step`` on that is saved when it is done."""
    return step + -(step + 1) % save_every


class KillTarget(Protocol):
    """The run to be killed, as far as the aim looks at it."""

    @property
    def last(self) -> int | None:
        """The step this process finished last."""

    @property
    def step_s(self) -> float:
        """What a step takes."""

    @property
    def save_s(self) -> float:
        """What a save takes."""

    def saving(self) -> str | None:
        """The save that is being written: there, and not committed."""


class Aim:
    """Watches the run and says when the next kill of the plan is due."""

    def __init__(self, plan: Sequence[PlannedKill], save_every: int) -> None:
        self._plan = deque(plan)
        self._save_every = save_every
        self._fire_at: float | None = None

    def watching_a_save(self, target: KillTarget) -> bool:
        """Whether a save that is to be hit is near, so that no time must be lost between two looks."""
        last = target.last
        return bool(self._plan) and last is not None and self._plan[0].inside_save and last >= self._plan[0].step - 1

    def due(self, target: KillTarget, now: float) -> bool:
        """Whether to kill now."""
        last = target.last
        if not self._plan or last is None or last < self._plan[0].step:
            return False
        kill = self._plan[0]
        if kill.inside_save and target.saving() is None:
            self._fire_at = None
            return False
        if self._fire_at is None:
            self._fire_at = now + kill.moment * (0.6 * target.save_s if kill.inside_save else target.step_s)
        return now >= self._fire_at

    def fired(self, last: int, inside_save: bool) -> None:
        """The kill happened after step ``last`` was done. One that missed its save is tried again at a later one."""
        kill = self._plan.popleft()
        self._fire_at = None
        if kill.inside_save and not inside_save and kill.tries > 1:
            again = next_save(max(kill.step, last) + 1, self._save_every)
            self._plan.appendleft(replace(kill, step=again, moment=kill.moment / 2, tries=kill.tries - 1))
        if self._plan and self._plan[0].step <= last:  # each life gets some work done
            first = self._plan[0]
            self._plan[0] = replace(first, step=next_save(last + 1, self._save_every) if first.inside_save else last + 1)
