"""When to kill: a plan computed from the seed, and ``Aim``, which times each of its kills."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from relight.demo.shape import DemoSize

TRIES = 3
"""Attempts at a kill inside a save: one that comes too late is repeated at the next save."""


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """A kill after ``step``, when the fraction ``moment`` (0 to 1) of the next step, or of the save of ``step``, has passed."""

    step: int
    inside_save: bool
    moment: float
    tries: int = TRIES


def plan_kills(seed: int, shape: DemoSize) -> list[PlannedKill]:
    """Divide the run into as many equal parts as there are kills, and draw one kill in each. The seed decides the plan."""
    draw = random.Random(f"relight demo {seed}")
    inside = [index < shape.kills_saving for index in range(shape.kills)]
    draw.shuffle(inside)
    end = shape.steps * 0.9  # the rest leaves steps to repeat failed attempts
    plan: list[PlannedKill] = []
    for index, inside_save in enumerate(inside):
        step = int(end * (index + draw.random()) / shape.kills)
        step = max(step, plan[-1].step + 2 if plan else 1)
        if inside_save:
            step = next_save(step, shape.save_every)
        plan.append(PlannedKill(step, inside_save, draw.random()))
    return plan


def next_save(step: int, save_every: int) -> int:
    """Return the first step, from ``step`` on, after which a save is due."""
    return step + -(step + 1) % save_every


class KillTarget(Protocol):
    """The part of a run's interface that ``Aim`` uses."""

    @property
    def last(self) -> int | None:
        """Last step that this process finished."""

    @property
    def step_s(self) -> float:
        """Seconds that a step takes."""

    @property
    def save_s(self) -> float:
        """Seconds that a save takes."""

    def saving(self) -> str | None:
        """Return the directory of the save that is being written: it exists and is not committed."""


class Aim:
    """Watches the run and decides when the next kill of the plan is due."""

    def __init__(self, plan: Sequence[PlannedKill], save_every: int) -> None:
        self._plan = deque(plan)
        self._save_every = save_every
        self._fire_at: float | None = None

    def watching_a_save(self, target: KillTarget) -> bool:
        """Return whether a kill inside a save is near, so that the run must be polled without pauses."""
        last = target.last
        return bool(self._plan) and last is not None and self._plan[0].inside_save and last >= self._plan[0].step - 1

    def due(self, target: KillTarget, now: float) -> bool:
        """Return whether to kill now."""
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
        """Note a kill after step ``last``. A kill that missed its save is repeated at a later save."""
        kill = self._plan.popleft()
        self._fire_at = None
        if kill.inside_save and not inside_save and kill.tries > 1:
            next_step = next_save(max(kill.step, last) + 1, self._save_every)
            self._plan.appendleft(replace(kill, step=next_step, moment=kill.moment / 2, tries=kill.tries - 1))
        if self._plan and self._plan[0].step <= last:  # each process must finish at least one step
            first = self._plan[0]
            self._plan[0] = replace(
                first, step=next_save(last + 1, self._save_every) if first.inside_save else last + 1
            )
