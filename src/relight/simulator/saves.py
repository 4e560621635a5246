"""The checkpoints of a simulated run: where each is, which survive what, which go when. What goes is the product's decision."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

from relight.cost_model import Costs, Level, ScheduleDecision, onwards
from relight.cost_model.levels import least_between
from relight.cost_model.planned import share_behind
from relight.peers.rings import Peer, PeerRing, rings
from relight.policy.keep import Candidate, decide_keep
from relight.policy.tiers import Tier, TierPace, owed, safe_on
from relight.simulator.failure_events import stream
from relight.simulator.policies import Policy
from relight.simulator.result import BUCKETS
from relight.simulator.scenario import Scenario

NEAR = "near"
NOTHING, MEMORY, PEERS = "nothing", "memory", "peers"


class SimulatedSave:
    """One save, from its beginning on."""

    __slots__ = ("begun", "copied", "gone", "near", "sealed", "seq", "step", "whole", "work", "wrong")

    def __init__(self, seq: int, step: int, work: float, begun: float, wrong: bool, whole: bool = True) -> None:
        self.seq, self.step, self.work, self.begun, self.wrong, self.whole = seq, step, work, begun, wrong, whole
        self.sealed = self.gone = self.near = False
        self.copied: set[int] = set()


class CheckpointInventory:
    """All of them."""

    def __init__(self, scenario: Scenario, policy: Policy, seed: int = 0) -> None:
        self._restorable, self._dice = scenario.save.restorable, stream(seed, "restorable")
        self.in_vain = 0
        """Checkpoints that the last way back could not restore before it found one."""
        self._bytes, self._wall = scenario.save.bytes, scenario.wall_s
        self._rules, self._tiers, self._local, self._memory = policy.keep, policy.tiers, policy.local, policy.memory
        self._count = 0
        self._near: list[SimulatedSave] = []
        self._far: list[list[SimulatedSave]] = [[] for _ in self._tiers]
        self._sending: list[SimulatedSave | None] = [None] * len(self._tiers)
        self._after = [-1] * len(self._tiers)
        self._last_s: list[float | None] = [None] * len(self._tiers)
        self._least_s = [0.0] * len(self._tiers)
        self._routine = policy.schedule == "adaptive"
        self._snapshot: SimulatedSave | None = None
        self._protected: SimulatedSave | None = None
        self._unprotected: set[int] = set()
        """Slots whose memory was lost since the newest save was protected."""
        self._rings, self._ring_of = _rings_of(scenario, policy)
        self._going: deque[tuple[float, int]] = deque()
        """What was removed and can be recalled still: until when, bytes."""
        self._undo = 0
        self._most = [0] * BUCKETS
        self._bucket = self._now_bytes = 0
        self._peaks = dict.fromkeys((NEAR, *(one.name for one in self._tiers)), 0)

    def new(self, step: int, work: float, now: float, *, wrong: bool) -> SimulatedSave:
        """A save begins."""
        self._count += 1
        whole = self._restorable >= 1 or float(self._dice.random()) < self._restorable
        return SimulatedSave(self._count, step, work, now, wrong, whole)

    def seal(self, made: SimulatedSave) -> None:
        """Its snapshot is taken."""
        made.sealed = True
        self._snapshot = made if self._memory else None

    def protect(self, made: SimulatedSave) -> None:
        """Other nodes have it in memory."""
        self._protected = made
        self._unprotected = set()

    def commit(self, made: SimulatedSave, now: float) -> None:
        """It is durable at the nearest store, and what its rules no longer keep goes."""
        made.near = True
        self._near.append(made)
        self._reckon(now)  # for a moment both are there
        if not self._rules.is_everything:
            self._prune(now)
            self._reckon(now)

    def pace(self, decision: ScheduleDecision | None) -> None:
        """How often each tier gets one: the product's decision, where saves are decided. Copies take nothing from the steps."""
        if decision is None or not self._tiers:
            return
        count, numbers = len(self._tiers), decision.numbers
        levels = [
            Level(one.name, Costs(0.0, numbers["durable_s"] + self._takes_s(one), numbers["restart_s"]), share_behind(at, count))
            for at, one in enumerate(self._tiers)
        ]
        found = onwards(numbers["rate_per_h"] / 3600, decision.interval_s, levels)
        self._least_s = [least_between(one, decision.interval_s) for one in found]

    def _takes_s(self, tier: Tier) -> float:
        return self._bytes / (tier.bytes_per_second or math.inf)

    def newest_step(self) -> int:
        """Of what is durable; −1: nothing is."""
        return self._near[-1].step if self._near else max((kept[-1].step for kept in self._far if kept), default=-1)

    def best(self, lost: tuple[int, ...], before: int | None) -> tuple[float, str]:
        """How much training the newest holds that is still there, and where it is. ``before``: only what is older than that step."""
        if lost:
            self._snapshot = None
            self._unprotected.update(lost)
            if self._local:
                for one in self._near:
                    one.near = False
                self._near = []
        if before is not None:
            self._drop(lambda one: one.step >= before)
        found: list[tuple[float, int, str]] = [(0.0, -99, NOTHING)]
        if self._snapshot is not None:
            found.append((self._snapshot.work, 0, MEMORY))
        if self._protected is not None and self._survives():
            found.append((self._protected.work, -1, PEERS))
        else:
            self._protected = None
        places = [(-2, NEAR, self._near), *((-3 - at, tier.name, kept) for at, (tier, kept) in enumerate(zip(self._tiers, self._far)))]
        found += [(good.work, order, name) for order, name, kept in places if (good := _newest_whole(kept)) is not None]
        work, _, place = max(found)
        tried = {one.seq for _, _, kept in places for one in kept if one.work > work and not one.whole}
        self.in_vain = 0 if place in (MEMORY, PEERS) else len(tried)
        return work, place

    def set_aside(self, onset: float) -> None:
        """All that was saved behind the moment from which on training was wrong."""
        self._drop(lambda one: one.work > onset)

    def _drop(self, goes: Callable[[SimulatedSave], bool]) -> None:
        for kept in (self._near, *self._far):
            while kept and goes(kept[-1]):  # they are in order
                kept.pop().gone = True
        if self._snapshot is not None and goes(self._snapshot):
            self._snapshot = None
        if self._protected is not None and goes(self._protected):
            self._protected = None

    def _survives(self) -> bool:
        """Whether what nodes hold of each other is enough, without those whose memory was lost since."""
        touched = {self._ring_of[slot] for slot in self._unprotected if slot < len(self._ring_of)}
        gone = {str(slot) for slot in self._unprotected}
        return all(self._rings[at].survives(lambda peer: peer.id in gone) for at in touched)

    # -- what goes, and what is to be copied -----------------------------------------------------------------------------------------

    def to_copy(self) -> Iterator[tuple[int, SimulatedSave, float]]:
        """For each tier that is not busy the next that it lacks, and how long that takes."""
        for at, tier in enumerate(self._tiers):
            if self._sending[at] is not None or not self._near:
                continue
            lacking = [one for one in self._near if one.seq > self._after[at]]
            wanted = owed(
                tier.keep, [self._candidate(one) for one in lacking], self._after[at], TierPace(self._least_s[at], self._last_s[at])
            )
            made = next((one for one in lacking if str(one.seq) == wanted[0]), None) if wanted else None
            if made is not None:
                self._sending[at] = made
                yield at, made, self._takes_s(tier)

    def arrived(self, at: int, made: SimulatedSave, now: float) -> None:
        """A tier has one more, and its own rules say what goes there."""
        self._sending[at] = None
        if made.gone or (self._local and not made.near and made not in self._near):
            return  # what it was copied from went meanwhile
        made.copied.add(at)
        self._after[at], self._last_s[at] = made.seq, made.begun
        kept = self._far[at]
        kept.append(made)
        stay = safe_on(self._tiers[at], [self._candidate(one) for one in kept], {str(one.seq) for one in kept})
        self._far[at] = [one for one in kept if str(one.seq) in stay]
        if not self._rules.is_everything:
            self._prune(now)
        self._reckon(now)

    def _prune(self, now: float) -> None:
        busy = {id(one) for one in self._sending if one is not None}
        newest = self._near[-1] if self._near else None
        candidates = [
            self._candidate(one, "is being copied" if id(one) in busy else "a further tier lacks it" if self._owes(one, newest) else "")
            for one in self._near
        ]
        verdicts = decide_keep(self._rules, candidates)
        gone = sum(not one.keep for one in verdicts)
        if gone:
            self._near = [one for one, verdict in zip(self._near, verdicts, strict=True) if verdict.keep]
            if self._rules.undo_s is not None:
                self._going.append((now + self._rules.undo_s, gone * self._bytes))
                self._undo += gone * self._bytes

    def _owes(self, one: SimulatedSave, newest: SimulatedSave | None) -> bool:
        return bool(self._tiers) and one is newest and len(one.copied) < len(self._tiers)

    def _candidate(self, one: SimulatedSave, held: str = "") -> Candidate:
        known = {"bytes": self._bytes, "time_s": one.begun, "routine": self._routine}
        return Candidate(str(one.seq), one.seq, one.step, verified=True, held=held, **known)  # type: ignore[arg-type]

    # -- how much there is -----------------------------------------------------------------------------------------------------------

    def _reckon(self, now: float) -> None:
        while self._going and self._going[0][0] <= now:
            self._undo -= self._going.popleft()[1]
        held = len(self._near) * self._bytes + self._undo
        self._peaks[NEAR] = max(self._peaks[NEAR], held)
        for tier, kept in zip(self._tiers, self._far):
            self._peaks[tier.name] = max(self._peaks[tier.name], len(kept) * self._bytes)
            held += len(kept) * self._bytes
        self._fill(now)
        self._now_bytes = held
        self._most[self._bucket] = max(self._most[self._bucket], held)

    def _fill(self, now: float) -> None:
        """What there was stays what there is until now."""
        until = min(BUCKETS - 1, int(now / self._wall * BUCKETS))
        for at in range(self._bucket + 1, until + 1):
            self._most[at] = self._now_bytes
        self._bucket = max(self._bucket, until)

    def stored(self, now: float) -> tuple[dict[str, int], tuple[int, ...]]:
        """The most bytes on each tier, and on all together in each part of the time."""
        self._fill(now)
        return dict(self._peaks), tuple(self._most)


def _newest_whole(kept: list[SimulatedSave]) -> SimulatedSave | None:
    return next((one for one in reversed(kept) if one.whole), None)


def _rings_of(scenario: Scenario, policy: Policy) -> tuple[tuple[PeerRing, ...], list[int]]:
    """The product's own rings over all slots, by their racks; and by slot which ring it is on."""
    if policy.peers is None:
        return (), []
    key = (scenario.nodes, scenario.nodes_per_rack, policy.peers.data, policy.peers.parity)
    if key not in _KNOWN:
        peers = [Peer(str(slot), str(slot), str(slot // scenario.nodes_per_rack), "", ()) for slot in range(scenario.nodes)]
        made = rings(peers, policy.peers.data, policy.peers.parity).rings
        ring_of = [0] * scenario.nodes
        for number, ring in enumerate(made):
            for peer in ring.peers:
                ring_of[int(peer.id)] = number
        _KNOWN.clear()
        _KNOWN[key] = (made, ring_of if made else [])
    return _KNOWN[key]


_KNOWN: dict[tuple[int, int, int, int], tuple[tuple[PeerRing, ...], list[int]]] = {}
"""The last that was worked out: it takes seconds for ten thousand machines."""
