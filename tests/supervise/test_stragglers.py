"""Detection of the rank that the others wait for."""

from __future__ import annotations

import random

from relight.supervise.stragglers import SLOWEST_WINDOWS, WINDOW_S, Straggler, Stragglers


def stragglers_of(shares: list[list[float]], seconds: float = 1.0) -> list[Straggler]:
    """Return the stragglers among ranks with these shares of work in each window, polled every ``seconds``."""
    watch, busy, now, seen = Stragglers(), dict.fromkeys(range(len(shares[0])), 0.0), 0.0, []
    watch.update(now, busy)
    for window in shares:
        for _ in range(int(WINDOW_S / seconds)):
            now += seconds
            busy = {rank: busy[rank] + seconds * share for rank, share in enumerate(window)}
            straggler = watch.update(now, busy)
            if straggler is not None:
                seen.append(straggler)
    return seen


def test_a_rank_that_works_while_the_others_wait_is_reported_once() -> None:
    """This is true of two ranks and of many, and not before three windows in a row."""
    assert [straggler.rank for straggler in stragglers_of([[0.9, 0.4]] * 10)] == [0]
    assert [straggler.rank for straggler in stragglers_of([[0.5, 0.5, 0.95, 0.4]] * SLOWEST_WINDOWS)] == [2]
    assert not stragglers_of([[0.5, 0.5, 0.95, 0.4]] * (SLOWEST_WINDOWS - 1))
    assert not stragglers_of([[0.5, 0.95], [0.95, 0.5]] * 5)


def test_a_rank_that_works_little_holds_no_rank_up() -> None:
    """All ranks wait for a device or a disk, so nothing is known."""
    assert not stragglers_of([[0.05, 0.2]] * 10)


def test_noise_is_no_straggler() -> None:
    """An hour of ranks that work alike, each window a fifth more or less."""
    rng = random.Random(0)
    assert not stragglers_of([[rng.uniform(0.6, 0.9) for _ in range(8)] for _ in range(360)])


def test_a_rank_that_recovers_and_falls_back_is_reported_again() -> None:
    """A processor is throttled, recovers, and is throttled again."""
    slow, even = [[0.9, 0.4]] * 5, [[0.7, 0.7]] * 5
    assert [straggler.rank for straggler in stragglers_of(slow + even + slow)] == [0, 0]


def test_another_incarnation_starts_from_scratch() -> None:
    """Other processes have used less processor time than the earlier ones."""
    watch = Stragglers()
    watch.update(0.0, {0: 100.0, 1: 100.0})
    assert watch.update(20.0, {0: 0.0, 1: 0.0}) is None and watch.update(25.0, {0: 1.0}) is None
