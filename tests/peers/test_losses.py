"""Agents in processes of their own, killed: what they had is read back from the others, to the bit."""

from __future__ import annotations

import contextlib
from itertools import combinations

import pytest
from neighbours import Nursery, lost_is_read_back

MB = 1_000_000
PAIRS = list(combinations(range(6), 2))
SHORT_PAIRS = [(0, 1), (1, 4), (2, 5)]


def check(
    nursery: Nursery, sizes: list[list[int]], data: int, parity: int, victims: tuple[int, ...], tls: bool = False
) -> None:
    """Protect, kill, read."""
    with contextlib.closing(nursery.town(sizes, data, parity, tls=tls)) as town:
        town.protect("c1", 1)
        lost_is_read_back(town, "c1", victims)


@pytest.mark.parametrize("victims", PAIRS, ids=str)
def test_any_two_of_six_may_be_lost(nursery: Nursery, victims: tuple[int, int]) -> None:
    """Data 4, parity 2 on six agents: for each pair that is killed, every byte of theirs comes from the other four."""
    check(nursery, [[MB]] * 6, 4, 2, victims)


@pytest.mark.slow
@pytest.mark.parametrize("victims", PAIRS, ids=str)
def test_any_two_of_six_with_64_mb_each_may_be_lost(nursery: Nursery, victims: tuple[int, int]) -> None:
    """With 64 MB each, any two may be lost, and no process takes more than 1.5 times its own part in addition."""
    with contextlib.closing(nursery.town([[64 * MB]] * 6, 4, 2)) as town:
        before = town.all("memory")
        town.protect("c1", 1)
        for start, now in zip(before, town.all("memory")):
            assert now["held"] <= 0.5 * 64 * MB + MB
            took = now["RssAnon"] + now["RssShmem"] - start["RssAnon"] - start["RssShmem"]
            assert took <= 1.5 * 64 * MB + 48 * MB, now
        lost_is_read_back(town, "c1", victims)


@pytest.mark.parametrize(
    ("agents", "data", "parity", "victims"),
    [(6, 4, 2, (3,)), (2, 1, 1, (0,)), (3, 1, 1, (1,)), (3, 1, 2, (0, 2)), (4, 1, 2, (1, 2)), (4, 3, 1, (2,)), (7, 4, 2, (0, 4)), (7, 4, 2, (5, 6)),
     (7, 3, 4, (0, 1, 3, 6)), (5, 2, 3, (0, 2, 3))],
    ids=str,
)  # fmt: skip
def test_every_coding(nursery: Nursery, agents: int, data: int, parity: int, victims: tuple[int, ...]) -> None:
    """Copies, XOR, parity of two to four rows, longer rings: as many as there are rows may be lost."""
    check(nursery, [[3 * MB + 12345 * number] for number in range(agents)], data, parity, victims)


@pytest.mark.slow
@pytest.mark.parametrize(("agents", "data", "parity"), [(7, 4, 2), (4, 1, 2), (6, 3, 3), (5, 1, 4), (8, 4, 4)], ids=str)
def test_every_coding_and_every_loss(nursery: Nursery, agents: int, data: int, parity: int) -> None:
    """For every choice of victims the lost parts are read back."""
    for victims in combinations(range(agents), parity):
        check(nursery, [[MB + 12345 * number] for number in range(agents)], data, parity, victims)


def test_parts_of_different_lengths_and_lanes(nursery: Nursery, tls: bool) -> None:
    """Nodes with three ranks, one, none, and parts from nothing to some MB: the two with most of it may be lost."""
    sizes = [[3 * MB, 10, 700_001], [5 * MB], [], [0, 4096, 2 * MB], [1], [131_072 * 4, 131_073]]
    check(nursery, sizes, 4, 2, (0, 1), tls)
    check(nursery, sizes, 4, 2, (3, 5), tls)


def test_a_third_loss_is_reported_and_never_made_up(nursery: Nursery) -> None:
    """With three of six gone and two rows of parity, the lost parts are unavailable, the others are served."""
    with contextlib.closing(nursery.town([[MB]] * 6, 4, 2)) as town:
        town.protect("c1", 1)
        for victim in (0, 2, 4):
            town.agents[victim].kill()
        with contextlib.closing(town.remote()) as remote:
            assert [remote.has("c1", rank) is not None for rank in range(6)] == [False, True] * 3
            assert remote.reader("c1", 0, 0) is None
            assert remote.reader("c1", 1, 0) is not None


def test_the_next_checkpoint_takes_the_place_of_the_one_before(nursery: Nursery) -> None:
    """After each of several saves the newest is protected, the one before it is not held any more, and memory does not grow."""
    with contextlib.closing(nursery.town([[2 * MB]] * 6, 4, 2)) as town:
        for seq in range(1, 5):
            town.protect(f"c{seq}", seq)
            assert [memory["held"] for memory in town.all("memory")] == [2 * 4 * 131_072] * 6
        with contextlib.closing(town.remote()) as remote:
            assert remote.has("c4", 2) is not None and remote.has("c3", 2) is None
        lost_is_read_back(town, "c4", (1, 2))


def test_a_killed_agent_that_comes_back_is_protected_again(nursery: Nursery, tls: bool) -> None:
    """A new process in the place of a killed one joins with a new address: all are protected by the new ring, and another pair may go."""
    with contextlib.closing(nursery.town([[MB]] * 6, 4, 2, tls=tls)) as town:
        town.protect("c1", 1)
        town.agents[3].kill()
        new = nursery.agent(town.token, tls=tls)
        new.sizes = town.agents[3].sizes
        new.call("fill", "c1", 1, new.sizes)
        new.call("offer")
        town.agents[3].close()
        town.agents[3] = new
        town.join()
        assert all(town.all("wait", 60))
        lost_is_read_back(town, "c1", (0, 5))
