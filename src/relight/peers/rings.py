"""Places agents on rings, and stripes on the rings. Pure: every agent computes the same result from the roster.

A ring has n >= k + m agents. Stripe j has its m parity pieces on the agents at positions j, j + 1, … and its k data
members on the next positions around the ring. So every agent is a member of k stripes, with a segment of its own data
in each, and holds m pieces, each as long as a segment: memory 1 + m/k. Losses are survived if at most m of any k + m
neighbours are lost. So any m agents of a ring may be lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from relight.errors import ConfigError
from relight.format.digest import digest
from relight.peers.galois import MEMBERS_MAX, ROWS_MAX

FINGERPRINT_BYTES = 16


class Peer(NamedTuple):
    """One agent.

    ``host`` and ``rack``: units that may fail at once; "" if unknown. ``ranks``: the ranks of its node, by lane.
    """

    id: str
    host: str
    rack: str
    address: str
    ranks: tuple[int, ...]


class PeerRing(NamedTuple):
    """Agents in a circle. Positions count from 0; after the last one comes position 0."""

    peers: tuple[Peer, ...]
    data: int
    parity: int

    def position(self, id: str) -> int | None:
        """Return the position of the agent ``id``; None if it is on another ring."""
        return next((position for position, peer in enumerate(self.peers) if peer.id == id), None)

    def holder(self, stripe: int, row: int) -> Peer:
        """Return the agent that holds that piece of parity."""
        return self.peers[(stripe + row) % len(self.peers)]

    def member(self, stripe: int, number: int) -> Peer:
        """Return the agent that provides member ``number`` of that stripe: its segment of the same number."""
        return self.peers[(stripe + self.parity + number) % len(self.peers)]

    def stripe_of(self, position: int, segment: int) -> int:
        """Return the stripe that contains segment ``segment`` of the agent at ``position``."""
        return (position - self.parity - segment) % len(self.peers)

    def fingerprint(self) -> bytes:
        """Return 16 bytes that are equal for equal rings: the same agents at the same addresses, with the same
        ranks."""
        return digest(msgspec.msgpack.encode(self))[:FINGERPRINT_BYTES]

    def survives(self, lost: Callable[[Peer], bool]) -> bool:
        """Return whether all data can be rebuilt without those agents."""
        gone = [lost(peer) for peer in self.peers]
        stripe = self.data + self.parity
        return all(sum((gone + gone)[start : start + stripe]) <= self.parity for start in range(len(gone)))


class FailureGroup(NamedTuple):
    """Several agents of a ring that may be lost at once."""

    kind: str
    """``rack`` or ``host``."""
    place: str
    agents: int
    of: int
    survived: bool

    def __str__(self) -> str:
        return f"{self.agents} of {self.of} in {self.kind} {self.place}: its loss is {'survived' if self.survived else 'not survived'}"


class Rings(NamedTuple):
    """All rings.

    ``shared`` lists places with several agents of a ring; ``short`` states why k and m are smaller than requested.
    """

    rings: tuple[PeerRing, ...]
    shared: tuple[FailureGroup, ...]
    short: str = ""

    def ring_of(self, id: str) -> PeerRing | None:
        """Return the ring of the agent ``id``; None if it is on none."""
        return next((ring for ring in self.rings if ring.position(id) is not None), None)


def rings(peers: Sequence[Peer], data: int, parity: int) -> Rings:
    """Return rings of at least ``data + parity`` agents each, of nearly the same length.

    Each rack's agents, then each host's, are distributed over the rings, so that every ring has as few of one place as
    possible. On a ring, agents of one place are as far apart as possible. The order of ``peers`` does not matter. If
    there are too few agents for one ring, smaller numbers that cost no more memory are used; if there are none, one
    copy. ``ConfigError`` for numbers out of range, or an id twice.
    """
    if not (1 <= data <= MEMBERS_MAX and 1 <= parity <= ROWS_MAX):
        raise ConfigError(f"data is 1 to {MEMBERS_MAX} and parity 1 to {ROWS_MAX}, not {data} and {parity}")
    twice = [id for id, count in Counter(peer.id for peer in peers).items() if count > 1]
    if twice:
        raise ConfigError(f"agent {twice[0]!r} is in the roster twice")
    if len(peers) < 2:
        return Rings((), (), "one agent alone has no peer to protect it" if peers else "")
    k, m, short = _affordable(len(peers), data, parity)
    racks, hosts = Counter(peer.rack for peer in peers), Counter((peer.rack, peer.host) for peer in peers)
    line = sorted(
        peers, key=lambda peer: (-racks[peer.rack], peer.rack, -hosts[peer.rack, peer.host], peer.host, peer.id)
    )
    count = len(line) // (k + m)
    planned = tuple(PeerRing(_arrange(line[number::count], k, m), k, m) for number in range(count))
    return Rings(planned, tuple(group for ring in planned for group in _shared(ring)), short)


def _affordable(count: int, data: int, parity: int) -> tuple[int, int, str]:
    """Return ``(k, m, why they differ from the request)`` for that many agents."""
    if count >= data + parity:
        return data, parity, ""
    m = next((m for m in range(parity, 0, -1) if 1 <= count - m <= data and m * data <= parity * (count - m)), 1)
    k = min(data, count - m)
    cost = (
        ""
        if m * data <= parity * k
        else f", which takes {m / k:.2g} times the data's memory instead of {parity / data:.2g}"
    )
    return (
        k,
        m,
        f"{count} agents are fewer than the {data + parity} of data={data}, parity={parity}: it is data={k}, parity={m}{cost}",
    )


def _arrange(peers: Sequence[Peer], k: int, m: int) -> tuple[Peer, ...]:
    """Return an order that no swap of two agents improves."""
    order = _spread(peers)
    best = _badness(order, k, m)
    better = best > (0, 0, 0, 0)
    while better:
        better = False
        for i in range(len(order)):
            for j in range(i + 1, len(order)):
                if order[i].rack == order[j].rack and order[i].host == order[j].host:
                    continue
                order[i], order[j] = order[j], order[i]
                now = _badness(order, k, m)
                if now < best:
                    best, better = now, True
                else:
                    order[i], order[j] = order[j], order[i]
    return tuple(order)


def _spread(peers: Sequence[Peer]) -> list[Peer]:
    """Return the agents with each rack's agents at even distances."""
    racks = Counter(peer.rack for peer in peers)
    seen: Counter[str] = Counter()
    keyed = []
    for peer in peers:
        keyed.append(((2 * seen[peer.rack] + 1) / (2 * racks[peer.rack]), peer.rack, peer))
        seen[peer.rack] += 1
    return [peer for _, _, peer in sorted(keyed, key=lambda entry: entry[:2])]


def _badness(order: Sequence[Peer], k: int, m: int) -> tuple[int, int, int, int]:
    """Return how many pieces too many stripes would lose with a rack, then with a host; how many neighbours share a
    rack, then a host."""
    racks = [peer.rack for peer in order]
    hosts = [f"{peer.rack}\0{peer.host}" for peer in order]
    return _excess(racks, k + m, m), _excess(hosts, k + m, m), _adjacent(racks), _adjacent(hosts)


def _excess(places: Sequence[str], stripe: int, bearable: int) -> int:
    count = len(places)
    in_stripe: Counter[str] = Counter(places[:stripe])
    total = 0
    for start in range(count):
        total += sum(number - bearable for number in in_stripe.values() if number > bearable)
        in_stripe[places[start]] -= 1
        in_stripe[places[(start + stripe) % count]] += 1
    return total


def _adjacent(places: Sequence[str]) -> int:
    return sum(place == places[position - 1] for position, place in enumerate(places))


def _shared(ring: PeerRing) -> list[FailureGroup]:
    groups = []
    for kind in ("rack", "host"):
        places = Counter(place for peer in ring.peers if (place := getattr(peer, kind)))
        for place, count in sorted(places.items()):
            if count > 1:
                survived = ring.survives(lambda peer, kind=kind, place=place: getattr(peer, kind) == place)  # type: ignore[misc]
                groups.append(FailureGroup(kind, place, count, len(ring.peers), survived))
    return groups
