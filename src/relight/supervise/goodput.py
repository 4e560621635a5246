"""Where a job's time went, by cause. Pure: what is seen and when in, seconds out.

Time counts as training only for steps that nobody had done before. What a failure costs, from its onset until there is a step that had not
been reached before it, is that failure's: stuck, down, starting, restoring, and steps done again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from relight.log.identity import seconds_since_epoch

TRAINING, AGAIN = "training", "again"
FIRST = ""
"""In place of a failure's kind: what there was without one."""


class Account(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one job. Seconds; ``lost`` by kind of failure, and of that by what was done meanwhile."""

    job: str
    began: str
    seconds: float
    spent: dict[str, float]
    """Without failures: ``training``, ``starting``, ``restoring``, ``saving``, and phases that the script names."""
    lost: dict[str, dict[str, float]]
    failures: dict[str, int]
    steps: int
    """Ended for the first time."""
    again: int
    """Ended once more."""

    @property
    def goodput(self) -> float:
        """The share of the time in which steps were done that nobody had done before."""
        return self.spent.get(TRAINING, 0.0) / self.seconds if self.seconds else 0.0

    def rows(self) -> list[tuple[str, str, float]]:
        """Cause, part, seconds: the largest first, training before all."""
        spent = [("", part, seconds) for part, seconds in self.spent.items()]
        lost = [(kind, part, seconds) for kind, parts in self.lost.items() for part, seconds in parts.items()]
        return sorted((row for row in spent + lost if row[2] > 0), key=lambda row: (row[1] != TRAINING or bool(row[0]), -row[2]))


class Goodput:
    """Kept by looking, some times a second."""

    def __init__(self, now: float) -> None:
        self._began = self._last = now
        self._spent: dict[tuple[int, str], float] = defaultdict(float)
        self._causes = [FIRST]
        """Of each life's end the kind, by its number; before them what is nobody's fault."""
        self._cause = 0
        self.reached = -1
        """The furthest step that all ranks have ended, in any life."""
        self._ended = self._steps = self._again = 0
        self._behind = 0.0
        """How much of the time in training was spent behind the last step's end."""

    def update(self, now: float, phase: str, step: int = -1, ended: int = 0) -> None:
        """The job was in ``phase`` since the last look; all ranks have ended ``step``, and so many steps in this life."""
        spent, self._last = max(0.0, now - self._last), now
        new = max(0, ended - self._ended)
        if new:
            fresh = min(new, max(0, step - self.reached))
            self._steps += fresh
            self._again += new - fresh
            if step > self.reached:
                self._cause, self.reached = 0, step
        part = AGAIN if phase == TRAINING and self._cause else phase
        self._spent[self._cause, part] += spent
        self._behind = 0.0 if new else self._behind + spent * (phase == TRAINING)
        self._ended = max(ended, self._ended)

    def failed(self, now: float, kind: str = FIRST) -> int:
        """The life is over. What was begun behind the last step's end is lost. ``kind``: ``FIRST`` if it was ended as others come or go. A
        number, for ``told``."""
        part = AGAIN if self._cause else TRAINING
        self._spent[self._cause, part] -= self._behind
        self._causes.append(kind)
        self._cause, self._ended = len(self._causes) - 1, 0
        self._spent[self._cause, "stuck"] += self._behind + max(0.0, now - self._last)
        self._last, self._behind = max(self._last, now), 0.0
        return self._cause

    def set_kind(self, number: int, kind: str) -> None:
        """What ended that life was ``kind``: somebody else knows it."""
        self._causes[number] = kind

    def account(self, job: str, began: str) -> Account:
        """As it is now."""
        found: dict[str, dict[str, float]] = {FIRST: {}}
        for (number, part), seconds in self._spent.items():
            into = found.setdefault(self._causes[number], {})
            into[part] = into.get(part, 0.0) + seconds
        told = {kind: {part: round(max(0.0, seconds), 3) for part, seconds in parts.items()} for kind, parts in found.items()}
        failures = dict(Counter(kind for kind in self._causes if kind != FIRST))
        return Account(job, began, round(self._last - self._began, 3), told.pop(FIRST), told, failures, self._steps, self._again)


def once_each(accounts: Sequence[Account]) -> list[Account]:
    """Without those that other supervisors of the same job have kept, one a node: of what ran at the same time, who saw most steps end."""
    found: list[int] = []
    spans = [_span(one) for one in accounts]
    for at in sorted(range(len(accounts)), key=lambda at: (-accounts[at].steps, -accounts[at].seconds)):
        if not any(_are_one(spans[at], spans[other]) for other in found):
            found.append(at)
    return [accounts[at] for at in sorted(found)]


def _span(one: Account) -> tuple[float, float] | None:
    began = seconds_since_epoch(one.began)
    return (began, began + one.seconds) if began is not None else None


def _are_one(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    """Whether half of the shorter, or more, lies within the longer: a run has one job at a time."""
    if one is None or other is None:
        return False
    shorter = min(one[1] - one[0], other[1] - other[0])
    return min(one[1], other[1]) - max(one[0], other[0]) > shorter / 2


def merged(accounts: list[Account]) -> Account:
    """Of several jobs of one run, one behind the other. There is at least one."""
    spent: dict[str, float] = defaultdict(float)
    lost: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    failures: dict[str, int] = defaultdict(int)
    for one in accounts:
        _add(spent, one.spent)
        _add(failures, one.failures)
        for kind, parts in one.lost.items():
            _add(lost[kind], parts)
    return Account(
        accounts[-1].job, accounts[0].began, sum(one.seconds for one in accounts), dict(spent),
        {kind: dict(parts) for kind, parts in lost.items()}, dict(failures), sum(one.steps for one in accounts),
        sum(one.again for one in accounts),
    )  # fmt: skip


def _add(into: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        into[name] += value
