"""The machines of a fleet, stored only where they differ: which were swapped, which are in repair, which wait as
spares.

A place in the job is a *slot*. At first machine 0 is in slot 0, and so on. Memory grows with the number of failures,
not with the fleet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from relight.simulator.failure_events import FailureEvent
from relight.simulator.policies import Policy
from relight.simulator.scenario import Scenario


class Machines:
    """Machines of one simulated run."""

    def __init__(self, scenario: Scenario, policy: Policy, lemons: frozenset[int]) -> None:
        self._nodes, self._rack = scenario.nodes, scenario.nodes_per_rack
        self._repair, self._cured = scenario.repair, scenario.lemons.cured
        spares = scenario.spares if policy.spares is None else policy.spares
        self._waiting = deque(range(self._nodes, self._nodes + spares))
        self._in: dict[int, int | None] = {}
        """Slot → its machine, where that differs from the start; None: empty."""
        self._slots: dict[int, int | None] = {}
        """Machine → its slot, where that differs from the start; None: not in the job."""
        self._empty: deque[int] = deque()
        self._lemons = set(lemons)

    @property
    def missing(self) -> int:
        """Number of empty slots."""
        return len(self._empty)

    @property
    def waiting(self) -> int:
        """Number of available spares."""
        return len(self._waiting)

    def at(self, slot: int) -> int:
        """Return the machine in a slot; −1: the slot is empty."""
        machine = self._in.get(slot, slot)
        return -1 if machine is None else machine

    def slot_of(self, machine: int) -> int | None:
        """Return the slot of a machine; None: it is not in the job."""
        return self._slots.get(machine, machine if machine < self._nodes else None)

    def is_lemon(self, machine: int) -> bool:
        """Return whether the machine is an uncured lemon."""
        return machine in self._lemons

    def adjacent(self, slot: int, count: int) -> tuple[int, ...]:
        """Return ``count`` adjacent slots that include ``slot``: of its rack first, then of the next racks."""
        if count <= 1:
            return (slot,)[:count]
        first = (
            slot - slot % self._rack
            if count >= self._rack
            else min(slot, slot - slot % self._rack + self._rack - count)
        )
        return tuple((first + offset) % self._nodes for offset in range(count))

    def send_away(self, slots: tuple[int, ...], now: float, dice: FailureEvent) -> Iterator[tuple[int, float]]:
        """Send the machines in these slots to repair, replace them by spares, and yield each machine with the time of
        its return.
        """
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
        """Return a repaired machine to the spares."""
        self._waiting.append(machine)
        self._fill()

    def _fill(self) -> None:
        while self._empty and self._waiting:
            slot, machine = self._empty.popleft(), self._waiting.popleft()
            self._in[slot], self._slots[machine] = machine, slot
