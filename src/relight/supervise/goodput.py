"""Accounts for a job's time, by cause. Pure: the input is observations and times, the output is seconds.

Time counts as training only for steps that were done for the first time. The time from a failure's onset until a step
beyond the furthest one is charged to that failure: stuck, down, starting, restoring, and steps done again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from relight.log.identity import seconds_since_epoch

TRAINING, AGAIN = "training", "again"
FIRST = ""
"""Value in place of a failure's kind, for time that no failure caused."""


class Account(msgspec.Struct, frozen=True, omit_defaults=True):
    """Account of one job, in seconds. ``lost`` is by kind of failure, then by phase."""

    job: str
    began: str
    seconds: float
    spent: dict[str, float]
    """Time that no failure caused: ``training``, ``starting``, ``restoring``, ``saving``, and phases that the script
    names."""
    lost: dict[str, dict[str, float]]
    failures: dict[str, int]
    steps: int
    """Steps completed for the first time."""
    again: int
    """Steps completed again."""

    @property
    def goodput(self) -> float:
        """Return the share of the time in which steps were done for the first time."""
        return self.spent.get(TRAINING, 0.0) / self.seconds if self.seconds else 0.0

    def rows(self) -> list[tuple[str, str, float]]:
        """Return (kind of failure, phase, seconds) for each phase with time: training first, then the largest first."""
        spent = [("", part, seconds) for part, seconds in self.spent.items()]
        lost = [(kind, part, seconds) for kind, parts in self.lost.items() for part, seconds in parts.items()]
        return sorted(
            (row for row in spent + lost if row[2] > 0), key=lambda row: (row[1] != TRAINING or bool(row[0]), -row[2])
        )


class Goodput:
    """The account of a running job. Call ``update`` at each poll, some times a second."""

    def __init__(self, now: float) -> None:
        self._began = self._last = now
        self._spent: dict[tuple[int, str], float] = defaultdict(float)
        self.causes = [FIRST]
        """The kind that ended each incarnation, by its number; at index 0 ``FIRST``."""
        self._cause = 0
        self.reached = -1
        """The furthest step that all ranks have completed, in any incarnation."""
        self._ended = self._steps = self._again = 0
        self._unfinished_s = 0.0
        """Seconds of training since the last completed step."""

    def update(self, now: float, phase: str, step: int = -1, ended: int = 0) -> None:
        """Charge the time since the last poll to ``phase``.

        All ranks have completed ``step``, and ``ended`` steps in this incarnation.
        """
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
        self._unfinished_s = 0.0 if new else self._unfinished_s + spent * (phase == TRAINING)
        self._ended = max(ended, self._ended)

    def failed(self, now: float, kind: str = FIRST) -> int:
        """End the incarnation, and return the end's number for ``set_kind``.

        The training since the last completed step is lost. ``kind``: ``FIRST`` if nodes join or leave.
        """
        part = AGAIN if self._cause else TRAINING
        self._spent[self._cause, part] -= self._unfinished_s
        self.causes.append(kind)
        self._cause, self._ended = len(self.causes) - 1, 0
        self._spent[self._cause, "stuck"] += self._unfinished_s + max(0.0, now - self._last)
        self._last, self._unfinished_s = max(self._last, now), 0.0
        return self._cause

    def set_kind(self, number: int, kind: str) -> None:
        """Set the kind of failure that ended the incarnation of that number, as known from another node."""
        self.causes[number] = kind

    def account(self, job: str, began: str) -> Account:
        """Return the account up to the last ``update``."""
        by_kind: dict[str, dict[str, float]] = {FIRST: {}}
        for (number, part), seconds in self._spent.items():
            into = by_kind.setdefault(self.causes[number], {})
            into[part] = into.get(part, 0.0) + seconds
        lost = {
            kind: {part: round(max(0.0, seconds), 3) for part, seconds in parts.items()}
            for kind, parts in by_kind.items()
        }
        failures = dict(Counter(kind for kind in self.causes if kind != FIRST))
        return Account(
            job, began, round(self._last - self._began, 3), lost.pop(FIRST), lost, failures, self._steps, self._again
        )


def once_each(accounts: Sequence[Account]) -> list[Account]:
    """Return one account for each job.

    Each node's supervisor writes one. Of accounts of the same time, keep the one with most steps.
    """
    kept: list[int] = []
    spans = [_span(account) for account in accounts]
    for index in sorted(range(len(accounts)), key=lambda index: (-accounts[index].steps, -accounts[index].seconds)):
        if not any(_are_one(spans[index], spans[earlier]) for earlier in kept):
            kept.append(index)
    return [accounts[index] for index in sorted(kept)]


def _span(account: Account) -> tuple[float, float] | None:
    began = seconds_since_epoch(account.began)
    return (began, began + account.seconds) if began is not None else None


def _are_one(span: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    """Return whether more than half of the shorter span is within the longer one: a run has one job at a time."""
    if span is None or other is None:
        return False
    shorter = min(span[1] - span[0], other[1] - other[0])
    return min(span[1], other[1]) - max(span[0], other[0]) > shorter / 2


def merged(accounts: list[Account]) -> Account:
    """Return the sum of the accounts of a run's jobs, in their order in time. At least one."""
    spent: dict[str, float] = defaultdict(float)
    lost: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    failures: dict[str, int] = defaultdict(int)
    for account in accounts:
        _add(spent, account.spent)
        _add(failures, account.failures)
        for kind, parts in account.lost.items():
            _add(lost[kind], parts)
    return Account(
        accounts[-1].job, accounts[0].began, sum(account.seconds for account in accounts), dict(spent),
        {kind: dict(parts) for kind, parts in lost.items()}, dict(failures), sum(account.steps for account in accounts),
        sum(account.again for account in accounts),
    )  # fmt: skip


def _add(into: dict[str, Any], addend: dict[str, Any]) -> None:
    for name, value in addend.items():
        into[name] += value
