"""Placement of stripes: every loss that a ring promises to survive is survived, for any roster."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.errors import ConfigError
from relight.peers import Peer, PeerRing, rings
from relight.peers.rings import FailureGroup


def roster(racks: list[str], hosts: list[str] | None = None) -> list[Peer]:
    return [
        Peer(f"a{number:03}", f"h{number}" if hosts is None else hosts[number], rack, f"10.0.0.{number}:1", (number,))
        for number, rack in enumerate(racks)
    ]


def decodable(ring: PeerRing, lost: set[str]) -> bool:
    """Return whether each stripe has as many surviving pieces as data members, or has lost none of its data members."""
    for stripe in range(len(ring.peers)):
        members = [ring.member(stripe, number).id for number in range(ring.data)]
        holders = [ring.holder(stripe, row).id for row in range(ring.parity)]
        assert len({*members, *holders}) == ring.data + ring.parity
        if set(members) & lost and sum(id_ not in lost for id_ in members + holders) < ring.data:
            return False
    return True


@given(st.integers(2, 16), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_as_many_losses_as_rows_are_survived(n: int, k: int, m: int, racks: int) -> None:
    """For any n, k, m: every choice of m agents of a ring may be lost.

    ``survives`` is right about these and larger losses.
    """
    for ring in rings(roster([f"r{number % racks}" for number in range(n)]), k, m).rings:
        ids = [peer.id for peer in ring.peers]
        for count in (ring.parity, ring.parity + 1):
            for lost in list(combinations(ids, count))[:300]:
                survived = decodable(ring, set(lost))
                assert survived or count > ring.parity
                assert ring.survives(lambda peer, lost=lost: peer.id in lost) == survived


@given(st.integers(2, 40), st.integers(1, 6), st.integers(1, 3), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_all_agents_give_and_take_the_same(n: int, k: int, m: int, racks: int) -> None:
    """Each agent is on one ring, a member of k stripes with segments 0 to k − 1, and holds one piece of each row."""
    result = rings(roster([f"r{number % racks}" for number in range(n)]), k, m)
    assert sorted(peer.id for ring in result.rings for peer in ring.peers) == [f"a{number:03}" for number in range(n)]
    lengths = [len(ring.peers) for ring in result.rings]
    assert max(lengths) - min(lengths) <= 1
    for ring in result.rings:
        assert len(ring.peers) >= ring.data + ring.parity
        holds, given = Counter(), Counter()
        for stripe in range(len(ring.peers)):
            holds.update((ring.holder(stripe, row).id, row) for row in range(ring.parity))
            given.update((ring.member(stripe, number).id, number) for number in range(ring.data))
        for position, peer in enumerate(ring.peers):
            assert all(holds[peer.id, row] == 1 for row in range(ring.parity))
            assert all(given[peer.id, number] == 1 for number in range(ring.data))
            for number in range(ring.data):
                assert ring.member(ring.stripe_of(position, number), number) is peer
        assert result.ring_of(ring.peers[0].id) is ring
    assert bool(result.short) == (n < k + m)


@given(st.lists(st.sampled_from("ABC"), min_size=6, max_size=30), st.randoms())
@settings(max_examples=40, deadline=None)
def test_the_order_of_the_roster_does_not_matter(racks: list[str], random: object) -> None:
    """All agents compute the same rings for any order of the roster. Another address gives another ring."""
    peers = roster(racks)
    shuffled = list(peers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = rings(peers, 4, 2), rings(shuffled, 4, 2)
    assert first == second
    assert [ring.fingerprint() for ring in first.rings] == [ring.fingerprint() for ring in second.rings]
    moved = rings([peers[0]._replace(address="10.9.9.9:1"), *peers[1:]], 4, 2)
    assert {ring.fingerprint() for ring in moved.rings} != {ring.fingerprint() for ring in first.rings}


@given(st.lists(st.sampled_from("AABCD"), min_size=6, max_size=40), st.sampled_from([(4, 2), (1, 1), (3, 1), (2, 2)]))
@settings(max_examples=60, deadline=None)
def test_racks_are_spread_evenly_and_shared_ones_are_reported(racks: list[str], numbers: tuple[int, int]) -> None:
    """Agents of a rack are spread evenly over rings.

    Each failure group with several agents is reported, with the result of its loss.
    """
    result = rings(roster(racks), *numbers)
    for ring in result.rings:
        by_rack = Counter(peer.rack for peer in ring.peers)
        for rack, count in by_rack.items():
            assert count <= -(-racks.count(rack) // len(result.rings))
            group = FailureGroup(
                "rack",
                rack,
                count,
                len(ring.peers),
                decodable(ring, {peer.id for peer in ring.peers if peer.rack == rack}),
            )
            assert (group in result.shared) == (count > 1)


def test_neighbours_are_of_different_racks_where_that_can_be() -> None:
    """If no rack has more than half of a ring, no two neighbours share a rack. Hosts are kept apart likewise."""
    for racks in ("AABC", "AABBCC", "AAABBB", "AAABBC", "AABBC", "ABABABABAB"):
        (ring,) = rings(roster(list(racks)), len(racks) - 1, 1).rings
        assert all(peer.rack != ring.peers[number - 1].rack for number, peer in enumerate(ring.peers)), racks
    (ring,) = rings(roster(["", "", "", ""], ["x", "x", "y", "y"]), 3, 1).rings
    assert all(peer.host != ring.peers[number - 1].host for number, peer in enumerate(ring.peers))


def test_places_are_kept_apart_on_longer_rings() -> None:
    """With copies on seven agents no neighbours share a rack, so a rack may be lost.

    The messages state which losses are survived.
    """
    result = rings(roster(list("AABBCCD")), 1, 1)
    assert all(rack.survived for rack in result.shared)
    result = rings(roster(list("AAABBC")), 4, 2)
    assert [str(rack) for rack in result.shared] == [
        "3 of 6 in rack A: its loss is not survived",
        "2 of 6 in rack B: its loss is survived",
    ]


def test_two_hundred_agents_are_placed_quickly() -> None:
    """A large roster, with racks of unequal size and two agents a host, is placed in seconds, with racks spread as far
    as possible."""
    racks = [f"r{number % 13 if number % 3 else 0}" for number in range(600)]
    result = rings(roster(racks, [f"h{number // 2}" for number in range(600)]), 4, 2)
    assert len(result.rings) == 100


@pytest.mark.parametrize(
    ("n", "data", "parity", "got"),
    [(1, 4, 2, None), (2, 4, 2, (1, 1)), (3, 4, 2, (2, 1)), (5, 4, 2, (4, 1)), (5, 2, 3, (2, 3)), (2, 1, 2, (1, 1))],
)
def test_too_few_agents_get_what_costs_no_more(n: int, data: int, parity: int, got: tuple[int, int] | None) -> None:
    """Too few agents get fewer rows at the same cost of memory.

    If even one row costs more, they get one, with a message.
    """
    result = rings(roster([""] * n), data, parity)
    if got is None:
        assert result.rings == () and "alone" in result.short
        return
    (ring,) = result.rings
    assert (ring.data, ring.parity) == got
    assert bool(result.short) == (n < data + parity)
    assert ("times the data's memory" in result.short) == (got[1] * data > parity * got[0])


def test_numbers_that_cannot_be_are_refused() -> None:
    """Numbers out of range and duplicate agents are refused."""
    peers = roster(["", ""])
    for data, parity in ((0, 1), (33, 1), (4, 0), (4, 5)):
        with pytest.raises(ConfigError):
            rings(peers, data, parity)
    with pytest.raises(ConfigError, match="twice"):
        rings([*peers, peers[0]], 1, 1)
    assert rings([], 4, 2).rings == ()
