"""Checkpoints of a simulated run: where they are stored, which survive a failure, when they are deleted.

The product's code decides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

from relight.cost_model import Costs, Level, ScheduleDecision, level_intervals
from relight.cost_model.levels import least_between
from relight.cost_model.planned import share_restored_from
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
    """One save and the checkpoint that it becomes."""

    __slots__ = ("begun", "copied", "gone", "near", "sealed", "seq", "step", "whole", "work", "wrong")

    def __init__(self, seq: int, step: int, work: float, begun: float, wrong: bool, whole: bool = True) -> None:
        self.seq, self.step, self.work, self.begun, self.wrong, self.whole = seq, step, work, begun, wrong, whole
        self.sealed = self.gone = self.near = False
        self.copied: set[int] = set()


class CheckpointInventory:
    """All checkpoints of a simulated run, on every tier and in memory."""

    def __init__(self, scenario: Scenario, policy: Policy, seed: int = 0) -> None:
        self._restorable, self._dice = scenario.save.restorable, stream(seed, "restorable")
        self.in_vain = 0
        """Checkpoints that the last recovery failed to restore before one succeeded."""
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
        """Slots that lost their memory since the newest save was protected."""
        self._rings, self._ring_of = _rings_of(scenario, policy)
        self._going: deque[tuple[float, int]] = deque()
        """Retired checkpoints that can still be undeleted: (end of the undo window, bytes)."""
        self._undo = 0
        self._most = [0] * BUCKETS
        self._bucket = self._now_bytes = 0
        self._peaks = dict.fromkeys((NEAR, *(tier.name for tier in self._tiers)), 0)

    def new(self, step: int, work: float, now: float, *, wrong: bool) -> SimulatedSave:
        """Begin a save and return it."""
        self._count += 1
        whole = self._restorable >= 1 or float(self._dice.random()) < self._restorable
        return SimulatedSave(self._count, step, work, now, wrong, whole)

    def seal(self, made: SimulatedSave) -> None:
        """Record that the snapshot is complete."""
        made.sealed = True
        self._snapshot = made if self._memory else None

    def protect(self, made: SimulatedSave) -> None:
        """Record that other nodes have the save in memory."""
        self._protected = made
        self._unprotected = set()

    def commit(self, made: SimulatedSave, now: float) -> None:
        """Record that the save is durable at the nearest store, and delete what the retention rules no longer keep."""
        made.near = True
        self._near.append(made)
        self._update_peaks(now)  # the new checkpoint and those that retention deletes exist at the same time
        if not self._rules.is_everything:
            self._prune(now)
            self._update_peaks(now)

    def pace(self, decision: ScheduleDecision | None) -> None:
        """Set how often each tier gets a checkpoint, by the product's decision.

        Copies are assumed not to slow the steps.
        """
        if decision is None or not self._tiers:
            return
        count, numbers = len(self._tiers), decision.numbers
        levels = [
            Level(
                item.name,
                Costs(0.0, numbers["durable_s"] + self._takes_s(item), numbers["restart_s"]),
                share_restored_from(position, count),
            )
            for position, item in enumerate(self._tiers)
        ]
        placed = level_intervals(numbers["rate_per_h"] / 3600, decision.interval_s, levels)
        self._least_s = [least_between(item, decision.interval_s) for item in placed]

    def _takes_s(self, tier: Tier) -> float:
        return self._bytes / (tier.bytes_per_second or math.inf)

    def newest_step(self) -> int:
        """Return the step of the newest durable checkpoint; −1: there is none."""
        return self._near[-1].step if self._near else max((kept[-1].step for kept in self._far if kept), default=-1)

    def best(self, lost: tuple[int, ...], before: int | None) -> tuple[float, str]:
        """Return the seconds of training in the newest surviving checkpoint, and its place.

        ``before``: only checkpoints of earlier steps.
        """
        if lost:
            self._snapshot = None
            self._unprotected.update(lost)
            if self._local:
                for save in self._near:
                    save.near = False
                self._near = []
        if before is not None:
            self._drop(lambda save: save.step >= before)
        candidates: list[tuple[float, int, str]] = [(0.0, -99, NOTHING)]
        if self._snapshot is not None:
            candidates.append((self._snapshot.work, 0, MEMORY))
        if self._protected is not None and self._survives():
            candidates.append((self._protected.work, -1, PEERS))
        else:
            self._protected = None
        places = [
            (-2, NEAR, self._near),
            *((-3 - index, tier.name, kept) for index, (tier, kept) in enumerate(zip(self._tiers, self._far))),
        ]
        candidates += [
            (good.work, order, name) for order, name, kept in places if (good := _newest_whole(kept)) is not None
        ]
        work, _, place = max(candidates)
        tried = {save.seq for _, _, kept in places for save in kept if save.work > work and not save.whole}
        self.in_vain = 0 if place in (MEMORY, PEERS) else len(tried)
        return work, place

    def set_aside(self, onset: float) -> None:
        """Drop every checkpoint that was saved after ``onset``, when training became wrong."""
        self._drop(lambda save: save.work > onset)

    def _drop(self, goes: Callable[[SimulatedSave], bool]) -> None:
        for saves in (self._near, *self._far):
            while saves and goes(saves[-1]):  # oldest first
                saves.pop().gone = True
        if self._snapshot is not None and goes(self._snapshot):
            self._snapshot = None
        if self._protected is not None and goes(self._protected):
            self._protected = None

    def _survives(self) -> bool:
        """Return whether the peers' memory can still rebuild the protected save after the losses since then."""
        touched = {self._ring_of[slot] for slot in self._unprotected if slot < len(self._ring_of)}
        lost_slots = {str(slot) for slot in self._unprotected}
        return all(self._rings[number].survives(lambda peer: peer.id in lost_slots) for number in touched)

    # -- retention and copies --------------------------------------------------------------------------------------------------------

    def to_copy(self) -> Iterator[tuple[int, SimulatedSave, float]]:
        """Yield the next copy for each idle tier: index of the tier, save, seconds of the transfer."""
        for index, tier in enumerate(self._tiers):
            if self._sending[index] is not None or not self._near:
                continue
            lacking = [save for save in self._near if save.seq > self._after[index]]
            lacking_ids = owed(
                tier.keep,
                [self._candidate(save) for save in lacking],
                self._after[index],
                TierPace(self._least_s[index], self._last_s[index]),
            )
            made = next((save for save in lacking if str(save.seq) == lacking_ids[0]), None) if lacking_ids else None
            if made is not None:
                self._sending[index] = made
                yield index, made, self._takes_s(tier)

    def arrived(self, tier: int, made: SimulatedSave, now: float) -> None:
        """Record that a copy to tier ``tier`` ended, and apply that tier's retention rules."""
        self._sending[tier] = None
        if made.gone or (self._local and not made.near and made not in self._near):
            return  # the source of the copy was deleted meanwhile
        made.copied.add(tier)
        self._after[tier], self._last_s[tier] = made.seq, made.begun
        saves = self._far[tier]
        saves.append(made)
        stay = safe_on(self._tiers[tier], [self._candidate(save) for save in saves], {str(save.seq) for save in saves})
        self._far[tier] = [save for save in saves if str(save.seq) in stay]
        if not self._rules.is_everything:
            self._prune(now)
        self._update_peaks(now)

    def _prune(self, now: float) -> None:
        busy = {id(save) for save in self._sending if save is not None}
        newest = self._near[-1] if self._near else None
        candidates = [
            self._candidate(
                save,
                "is being copied"
                if id(save) in busy
                else "a further tier lacks it"
                if self._owes(save, newest)
                else "",
            )
            for save in self._near
        ]
        verdicts = decide_keep(self._rules, candidates)
        retired = sum(not save.keep for save in verdicts)
        if retired:
            self._near = [save for save, verdict in zip(self._near, verdicts, strict=True) if verdict.keep]
            if self._rules.undo_s is not None:
                self._going.append((now + self._rules.undo_s, retired * self._bytes))
                self._undo += retired * self._bytes

    def _owes(self, save: SimulatedSave, newest: SimulatedSave | None) -> bool:
        return bool(self._tiers) and save is newest and len(save.copied) < len(self._tiers)

    def _candidate(self, save: SimulatedSave, held: str = "") -> Candidate:
        known = {"bytes": self._bytes, "time_s": save.begun, "routine": self._routine}
        return Candidate(str(save.seq), save.seq, save.step, verified=True, held=held, **known)  # type: ignore[arg-type]

    # -- stored bytes ----------------------------------------------------------------------------------------------------------------

    def _update_peaks(self, now: float) -> None:
        while self._going and self._going[0][0] <= now:
            self._undo -= self._going.popleft()[1]
        total = len(self._near) * self._bytes + self._undo
        self._peaks[NEAR] = max(self._peaks[NEAR], total)
        for tier, kept in zip(self._tiers, self._far):
            self._peaks[tier.name] = max(self._peaks[tier.name], len(kept) * self._bytes)
            total += len(kept) * self._bytes
        self._fill(now)
        self._now_bytes = total
        self._most[self._bucket] = max(self._most[self._bucket], total)

    def _fill(self, now: float) -> None:
        """Extend the current number of bytes to every bucket until ``now``."""
        until = min(BUCKETS - 1, int(now / self._wall * BUCKETS))
        for bucket in range(self._bucket + 1, until + 1):
            self._most[bucket] = self._now_bytes
        self._bucket = max(self._bucket, until)

    def stored(self, now: float) -> tuple[dict[str, int], tuple[int, ...]]:
        """Return the peak bytes of each tier, and the peak bytes of all tiers together in each bucket of time."""
        self._fill(now)
        return dict(self._peaks), tuple(self._most)


def _newest_whole(kept: list[SimulatedSave]) -> SimulatedSave | None:
    return next((save for save in reversed(kept) if save.whole), None)


def _rings_of(scenario: Scenario, policy: Policy) -> tuple[tuple[PeerRing, ...], list[int]]:
    """Return the product's own peer rings over all slots, and for each slot the index of its ring."""
    if policy.peers is None:
        return (), []
    key = (scenario.nodes, scenario.nodes_per_rack, policy.peers.data, policy.peers.parity)
    if key not in _KNOWN:
        peers = [
            Peer(str(slot), str(slot), str(slot // scenario.nodes_per_rack), "", ()) for slot in range(scenario.nodes)
        ]
        new_rings = rings(peers, policy.peers.data, policy.peers.parity).rings
        ring_of = [0] * scenario.nodes
        for number, ring in enumerate(new_rings):
            for peer in ring.peers:
                ring_of[int(peer.id)] = number
        _KNOWN.clear()
        _KNOWN[key] = (new_rings, ring_of if new_rings else [])
    return _KNOWN[key]


_KNOWN: dict[tuple[int, int, int, int], tuple[tuple[PeerRing, ...], list[int]]] = {}
"""Rings of the last scenario. Computing them takes seconds for ten thousand machines."""
