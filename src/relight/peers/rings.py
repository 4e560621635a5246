"""Who protects whom: agents on rings, and the stripes that are laid over them. Pure, and worked out by every agent alike from the roster.

A ring has n >= k + m agents. Stripe j has its m parity pieces on the agents at positions j, j + 1, … and its k data members behind them,
all around the ring. So every agent is a member of k stripes, with a segment of its own data in each, and holds m pieces, each as long as a
segment: memory 1 + m/k. Losses are survived if of no k + m neighbours more than m are lost; so any m agents of a ring may go.
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
    """One agent. ``host`` and ``rack``: what may be lost at once; "" where that is unknown. ``ranks``: of its node, by lane."""

    id: str
    host: str
    rack: str
    address: str
    ranks: tuple[int, ...]


class PeerRing(NamedTuple):
    """Agents in a circle. Positions count from 0, and go on from the beginning behind the last."""

    peers: tuple[Peer, ...]
    data: int
    parity: int

    def position(self, id: str) -> int | None:
        """Where the agent ``id`` is; None if it is on another ring."""
        return next((at for at, peer in enumerate(self.peers) if peer.id == id), None)

    def holder(self, stripe: int, row: int) -> Peer:
        """Who holds that piece of parity."""
        return self.peers[(stripe + row) % len(self.peers)]

    def member(self, stripe: int, number: int) -> Peer:
        """Whose data is member ``number`` of that stripe: its segment of the same number."""
        return self.peers[(stripe + self.parity + number) % len(self.peers)]

    def stripe_of(self, position: int, segment: int) -> int:
        """The stripe in which the agent at ``position`` has its segment ``segment``."""
        return (position - self.parity - segment) % len(self.peers)

    def fingerprint(self) -> bytes:
        """16 bytes that agents have in common if they mean the same ring: the same agents at the same addresses, with the same ranks."""
        return digest(msgspec.msgpack.encode(self))[:FINGERPRINT_BYTES]

    def survives(self, lost: Callable[[Peer], bool]) -> bool:
        """Whether everything can be read back without those agents."""
        gone = [lost(peer) for peer in self.peers]
        stripe = self.data + self.parity
        return all(sum((gone + gone)[at : at + stripe]) <= self.parity for at in range(len(gone)))


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
    """All rings. ``shared`` lists places with several agents of a ring; ``short`` says why k and m are smaller than asked for."""

    rings: tuple[PeerRing, ...]
    shared: tuple[FailureGroup, ...]
    short: str = ""

    def ring_of(self, id: str) -> PeerRing | None:
        """The ring that the agent ``id`` is on; None if it is on none."""
        return next((ring for ring in self.rings if ring.position(id) is not None), None)


def rings(peers: Sequence[Peer], data: int, parity: int) -> Rings:
    """Rings of at least ``data + parity`` agents each, of nearly the same length.

    A rack's agents are dealt out over the rings, then a host's, so that no ring has more of a place than it must; on a ring, those of one
    place stand as far from each other as they can. The order of ``peers`` does not matter. Too few for one ring: smaller numbers are taken
    that cost no more memory, or, if there are none, one copy. ``ConfigError``: numbers out of range, an id twice.
    """
    if not (1 <= data <= MEMBERS_MAX and 1 <= parity <= ROWS_MAX):
        raise ConfigError(f"data is 1 to {MEMBERS_MAX} and parity 1 to {ROWS_MAX}, not {data} and {parity}")
    twice = [id for id, count in Counter(peer.id for peer in peers).items() if count > 1]
    if twice:
        raise ConfigError(f"agent {twice[0]!r} is in the roster twice")
    if len(peers) < 2:
        return Rings((), (), "one agent alone has nobody to protect it" if peers else "")
    k, m, short = _affordable(len(peers), data, parity)
    racks, hosts = Counter(peer.rack for peer in peers), Counter((peer.rack, peer.host) for peer in peers)
    line = sorted(peers, key=lambda one: (-racks[one.rack], one.rack, -hosts[one.rack, one.host], one.host, one.id))
    count = len(line) // (k + m)
    found = tuple(PeerRing(_arrange(line[number::count], k, m), k, m) for number in range(count))
    return Rings(found, tuple(one for ring in found for one in _shared(ring)), short)


def _affordable(count: int, data: int, parity: int) -> tuple[int, int, str]:
    """``(k, m, why not what was asked for)`` for that many agents."""
    if count >= data + parity:
        return data, parity, ""
    m = next((m for m in range(parity, 0, -1) if 1 <= count - m <= data and m * data <= parity * (count - m)), 1)
    k = min(data, count - m)
    cost = "" if m * data <= parity * k else f", which takes {m / k:.2g} times the data's memory instead of {parity / data:.2g}"
    return k, m, f"{count} agents are fewer than the {data + parity} of data={data}, parity={parity}: it is data={k}, parity={m}{cost}"


def _arrange(peers: Sequence[Peer], k: int, m: int) -> tuple[Peer, ...]:
    """An order in which swapping no two agents makes it better."""
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
    """Each rack's agents at even distances along the line."""
    racks = Counter(peer.rack for peer in peers)
    seen: Counter[str] = Counter()
    keyed = []
    for peer in peers:
        keyed.append(((2 * seen[peer.rack] + 1) / (2 * racks[peer.rack]), peer.rack, peer))
        seen[peer.rack] += 1
    return [peer for _, _, peer in sorted(keyed, key=lambda one: one[:2])]


def _badness(order: Sequence[Peer], k: int, m: int) -> tuple[int, int, int, int]:
    """How many pieces too many of a rack, then of a host, stripes would lose; how many neighbours are in one rack, then on one host."""
    racks = [peer.rack for peer in order]
    hosts = [f"{peer.rack}\0{peer.host}" for peer in order]
    return _excess(racks, k + m, m), _excess(hosts, k + m, m), _beside(racks), _beside(hosts)


def _excess(places: Sequence[str], stripe: int, bearable: int) -> int:
    count = len(places)
    held: Counter[str] = Counter(places[:stripe])
    total = 0
    for at in range(count):
        total += sum(number - bearable for number in held.values() if number > bearable)
        held[places[at]] -= 1
        held[places[(at + stripe) % count]] += 1
    return total


def _beside(places: Sequence[str]) -> int:
    return sum(place == places[at - 1] for at, place in enumerate(places))


def _shared(ring: PeerRing) -> list[FailureGroup]:
    found = []
    for kind in ("rack", "host"):
        places = Counter(place for peer in ring.peers if (place := getattr(peer, kind)))
        for place, count in sorted(places.items()):
            if count > 1:
                survived = ring.survives(lambda peer, kind=kind, place=place: getattr(peer, kind) == place)  # type: ignore[misc]
                found.append(FailureGroup(kind, place, count, len(ring.peers), survived))
    return found
