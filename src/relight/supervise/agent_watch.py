"""Detects that a node's agent (the process that writes saves) has stopped, from how long earlier saves took. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from relight.heartbeat import LATE_AFTER, Heartbeat
from relight.supervise.limits import GIVE_UP, SLACK_S, STOPPED
from relight.supervise.procfs import ProcessSample
from relight.units import duration_text

UNKNOWN_S = 60.0
"""Seconds after which the first save of a job is late. No earlier save gives a limit."""


class Stuck(NamedTuple):
    """An agent that must be killed, and the reason."""

    pid: int
    why: str


class AgentWatch:
    """Watches the agents of one node. Call ``update`` at each poll, with the ranks' heartbeats.

    If a save is late, a stopped agent is reported at once. Another agent may have a slow disk, or may wait for another
    node's part. It is reported if it moved no byte and used no CPU time for ten times the limit.
    """

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=32)
        self._saves: dict[int, int] = {}
        self._still: tuple[int, float, ProcessSample] | None = None

    def update(self, now: float, beats: Iterable[Heartbeat], sampler: Callable[[int], ProcessSample]) -> Stuck | None:
        """Return the agent that is stuck, or None.

        ``sampler`` samples a process; it is called only if a save is late.
        """
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
        sample = sampler(pid)
        if not sample.state or sample.state in ("Z", "X"):
            return None  # the agent has ended: the ranks that wait for it notice that themselves
        late_text = f"a save has taken {duration_text(waited)}, more than {duration_text(limit)}"
        if sample.state in STOPPED:
            return Stuck(pid, f"{late_text}: the agent that writes it, process {pid}, is stopped")
        before = self._still[2] if self._still is not None and self._still[0] == pid else None
        if (
            before is None
            or (before.cpu_s, before.moved_bytes) != (sample.cpu_s, sample.moved_bytes)
            or sample.state == "D"
        ):
            self._still = pid, now, sample
        elif self._still is not None and now - self._still[1] > GIVE_UP * limit:
            return Stuck(
                pid,
                f"{late_text}: the agent that writes it, process {pid}, has been idle for {duration_text(now - self._still[1])}",
            )
        return None

    @property
    def limit_s(self) -> float:
        """Return the seconds after which a save is late."""
        return LATE_AFTER * max(self._took) + SLACK_S if self._took else UNKNOWN_S
