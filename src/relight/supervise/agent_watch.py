"""Whether the process that writes a node's saves has stopped, judged by how long saves have taken before. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from relight.heartbeat import LATE_AFTER, Heartbeat
from relight.supervise.limits import GIVE_UP, SLACK_S, STOPPED
from relight.supervise.procfs import ProcessSample

UNKNOWN_S = 60.0
"""How long the first save may take; a first one that takes longer is doubted only if its writer is stopped."""


class Stuck(NamedTuple):
    """A process that is to be ended, and why."""

    pid: int
    why: str


class AgentWatch:
    """Told at each look what the ranks say. Stopped processes are called stuck at once when a save is late; others, which may only have a
    slow disk, or wait for another node's part, if they neither moved a byte nor used the processor for ten times as long."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=32)
        self._saves: dict[int, int] = {}
        self._still: tuple[int, float, ProcessSample] | None = None

    def update(self, now: float, beats: Iterable[Heartbeat], look: Callable[[int], ProcessSample]) -> Stuck | None:
        """``look`` is asked only when a save is late."""
        late: tuple[float, int] | None = None
        limit = self.limit_s
        for beat in beats:
            if beat.saves != self._saves.get(beat.pid, 0):
                self._saves[beat.pid] = beat.saves
                self._took.append(beat.saves_s)
            if beat.save_since and beat.agent and now - beat.save_since > limit:
                late = max(late or (0.0, 0), (now - beat.save_since, beat.agent))
        if late is None:
            self._still = None
            return None
        waited, pid = late
        seen = look(pid)
        if not seen.state or seen.state in ("Z", "X"):
            return None  # gone: who waits for it knows
        say = f"a save takes {waited:.1f} s, and {limit:.1f} s are usual at most"
        if seen.state in STOPPED:
            return Stuck(pid, f"{say}: the process that writes it, {pid}, is stopped")
        before = self._still[2] if self._still is not None and self._still[0] == pid else None
        if before is None or (before.cpu_s, before.moved_bytes) != (seen.cpu_s, seen.moved_bytes) or seen.state == "D":
            self._still = pid, now, seen
        elif self._still is not None and now - self._still[1] > GIVE_UP * limit:
            return Stuck(pid, f"{say}: the process that writes it, {pid}, has done nothing for {now - self._still[1]:.0f} s")
        return None

    @property
    def limit_s(self) -> float:
        """After so long a save is late."""
        return LATE_AFTER * max(self._took) + SLACK_S if self._took else UNKNOWN_S
