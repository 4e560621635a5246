"""Who is waited for."""

from __future__ import annotations

import random

from relight.supervise.stragglers import IN_A_ROW, WINDOW_S, Straggler, Stragglers


def found(shares: list[list[float]], seconds: float = 1.0) -> list[Straggler]:
    """Ranks that work such shares of window after window, looked at each second."""
    watch, busy, now, seen = Stragglers(), dict.fromkeys(range(len(shares[0])), 0.0), 0.0, []
    watch.update(now, busy)
    for window in shares:
        for _ in range(int(WINDOW_S / seconds)):
            now += seconds
            busy = {rank: busy[rank] + seconds * share for rank, share in enumerate(window)}
            one = watch.update(now, busy)
            if one is not None:
                seen.append(one)
    return seen


def test_one_that_works_while_the_others_wait_is_told_once() -> None:
    """Of two and of many; not before it has done so three times in a row."""
    assert [one.rank for one in found([[0.9, 0.4]] * 10)] == [0]
    assert [one.rank for one in found([[0.5, 0.5, 0.95, 0.4]] * IN_A_ROW)] == [2]
    assert not found([[0.5, 0.5, 0.95, 0.4]] * (IN_A_ROW - 1))
    assert not found([[0.5, 0.95], [0.95, 0.5]] * 5)


def test_who_works_little_holds_nobody_up() -> None:
    """All of them wait, for a device or a disk: nothing is known."""
    assert not found([[0.05, 0.2]] * 10)


def test_noise_is_no_straggler() -> None:
    """An hour of ranks that work alike, each window a fifth more or less."""
    rng = random.Random(0)
    assert not found([[rng.uniform(0.6, 0.9) for _ in range(8)] for _ in range(360)])


def test_one_that_recovers_and_falls_back_is_told_again() -> None:
    """A processor that was throttled for a while."""
    slow, even = [[0.9, 0.4]] * 5, [[0.7, 0.7]] * 5
    assert [one.rank for one in found(slow + even + slow)] == [0, 0]


def test_another_life_begins_anew() -> None:
    """Other processes: what they have used is less than it was."""
    watch = Stragglers()
    watch.update(0.0, {0: 100.0, 1: 100.0})
    assert watch.update(20.0, {0: 0.0, 1: 0.0}) is None and watch.update(25.0, {0: 1.0}) is None
