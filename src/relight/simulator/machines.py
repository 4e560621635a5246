"""The machines of a fleet, told apart only where they differ: who was swapped for whom, who is away, who waits.

A place in the job is a *slot*; at first machine 0 is in slot 0, and so on. What is kept grows with what has failed, not with the fleet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from relight.simulator.failure_events import FailureEvent
from relight.simulator.policies import Policy
from relight.simulator.scenario import Scenario


class Machines:
    """Those of one run."""

    def __init__(self, scenario: Scenario, policy: Policy, lemons: frozenset[int]) -> None:
        self._nodes, self._rack = scenario.nodes, scenario.nodes_per_rack
        self._repair, self._cured = scenario.repair, scenario.lemons.cured
        spares = scenario.spares if policy.spares is None else policy.spares
        self._waiting = deque(range(self._nodes, self._nodes + spares))
        self._in: dict[int, int | None] = {}
        """By slot, the machine in it, where that is another than at first; None: empty."""
        self._slots: dict[int, int | None] = {}
        """By machine, where it is if that is not where it was at first; None: not in the job."""
        self._empty: deque[int] = deque()
        self._lemons = set(lemons)

    @property
    def missing(self) -> int:
        """How many slots are empty."""
        return len(self._empty)

    @property
    def waiting(self) -> int:
        """How many spares there are now."""
        return len(self._waiting)

    def at(self, slot: int) -> int:
        """The machine in a slot; −1: none."""
        found = self._in.get(slot, slot)
        return -1 if found is None else found

    def slot_of(self, machine: int) -> int | None:
        """Where a machine is; None: not in the job."""
        return self._slots.get(machine, machine if machine < self._nodes else None)

    def is_lemon(self, machine: int) -> bool:
        """Whether it fails again and again, still."""
        return machine in self._lemons

    def beside(self, slot: int, count: int) -> tuple[int, ...]:
        """So many slots around one: those of its rack first, then those of the racks behind it."""
        if count <= 1:
            return (slot,)[:count]
        first = slot - slot % self._rack if count >= self._rack else min(slot, slot - slot % self._rack + self._rack - count)
        return tuple((first + at) % self._nodes for at in range(count))

    def send_away(self, slots: tuple[int, ...], now: float, dice: FailureEvent) -> Iterator[tuple[int, float]]:
        """What is in these slots goes for repair, and spares take its place: machines, and when they are back."""
        for slot in slots:
            machine = self.at(slot)
            if machine < 0:
                continue
            self._slots[machine], self._in[slot] = None, None
            self._empty.append(slot)
            yield machine, now + self._repair.median_s * math.exp(self._repair.sigma * dice.z_repair)
            if machine in self._lemons and dice.u_cured < self._cured:
                self._lemons.discard(machine)
        self._fill()

    def back(self, machine: int) -> None:
        """A machine is repaired."""
        self._waiting.append(machine)
        self._fill()

    def _fill(self) -> None:
        while self._empty and self._waiting:
            slot, machine = self._empty.popleft(), self._waiting.popleft()
            self._in[slot], self._slots[machine] = machine, slot
