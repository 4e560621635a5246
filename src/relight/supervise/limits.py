"""Hang detection: learns from the run when a rank is late, and decides when a late rank hangs.

Pure: the input is observations, the output is verdicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from relight.heartbeat import ENDED, LATE_AFTER, Heartbeat
from relight.settings.supervise_settings import SuperviseSettings
from relight.units import duration_text

OBSERVE_AGAIN_S = 2.0
"""Seconds between the two observations that distinguish a slow rank from a stuck one."""
SILENT_OBSERVE_AGAIN_S = 60.0
"""Seconds between them for a rank that never wrote a heartbeat.

Its script may not use Relight, so it must be idle for this long.
"""
SLACK_S = 5.0
GIVE_UP = 10.0
"""Multiple of the limit after which a rank counts as hung although its process is active."""
_IDLE = 0.05
"""A process that used a smaller share of CPU time between two observations counts as idle."""
STOPPED = ("T", "t", "Z", "X")


class LearnedDurations:
    """Durations of this job's steps and phases. They are kept from one incarnation to the next."""

    def __init__(self, settings: SuperviseSettings) -> None:
        self._settings = settings
        self._steps: deque[float] = deque(maxlen=64)
        self._firsts: deque[float] = deque(maxlen=8)
        self._phases: dict[str, deque[float]] = {}
        self._gaps: deque[float] = deque(maxlen=8)

    @property
    def step_s(self) -> float | None:
        """Return the median duration of a step; None before three steps were measured."""
        return median(self._steps) if len(self._steps) >= 3 else None

    def learn(self, before: Heartbeat | None, beat: Heartbeat) -> None:
        """Learn from two heartbeats of one rank."""
        if before is None or before.pid != beat.pid:
            return
        ended = beat.steps - before.steps
        if ended > 0 and before.steps > 0:
            step_s = (beat.step_at - before.step_at) / ended
            self._steps.extend([step_s] * min(ended, 4))
            usual = self.step_s
            if usual is not None and step_s > LATE_AFTER * usual:
                self._gaps.append(step_s)
        elif ended > 0:
            self._firsts.append(beat.first_at - before.since)
            if ended > 1:
                self._steps.extend([(beat.step_at - beat.first_at) / (ended - 1)] * min(ended - 1, 4))
        if beat.phase != before.phase and before.phase != "training" and beat.since > before.since:
            self._phases.setdefault(before.phase, deque(maxlen=8)).append(beat.since - before.since)

    def late_after(self, beat: Heartbeat) -> float:
        """Return how many seconds after ``beat.since`` the rank is late.

        The second observation comes ``OBSERVE_AGAIN_S`` later.
        """
        if beat.phase == "training":
            usual = self.step_s if beat.steps else None
            if usual is None:
                usual = max(self._firsts, default=None)
            if usual is None:
                return self._settings.start_s
            longest = max(self._gaps, default=0.0)  # the longest earlier gap that was not a hang, such as an evaluation
            return max(LATE_AFTER * usual, 1.5 * longest) + SLACK_S - OBSERVE_AGAIN_S
        expected = max([beat.expected_s, *self._phases.get(beat.phase, ())])
        return LATE_AFTER * expected + SLACK_S - OBSERVE_AGAIN_S if expected else self._settings.phase_s


class RankObservation(NamedTuple):
    """One rank at one time: its heartbeat and its process."""

    beat: Heartbeat | None
    state: str = ""
    cpu_s: float = 0.0
    """CPU time of all its threads, since it began."""
    moved_bytes: int = 0
    """Bytes read and written, since it began."""

    @property
    def exists(self) -> bool:
        """Return whether the process exists."""
        return bool(self.state)

    @property
    def is_over(self) -> bool:
        """Return whether the rank has ended, or has closed its Checkpointer. It cannot hang, and no other rank waits for it."""
        return not self.state or (self.beat is not None and self.beat.phase == ENDED)


class HangVerdict(NamedTuple):
    """Required action and its reason.

    ``""``: none; ``"stacks"``: take all ranks' stacks; ``"hang"``: end the incarnation.
    """

    what: str = ""
    why: str = ""
    ranks: tuple[int, ...] = ()
    """The ranks that probably cause it."""


class JobWatch:
    """Watches one incarnation of a job.

    Call ``update`` at each poll. If it requests stacks, call ``judge_stacks`` with them: it returns whether the job hangs.
    """

    def __init__(self, usual: LearnedDurations, began: float) -> None:
        self._usual, self._began = usual, began
        self._seen: dict[int, Heartbeat] = {}
        self._first: tuple[float, dict[int, RankObservation], dict[int, str]] | None = None
        self._asked = False
        self._factor: dict[int, float] = {}

    def update(self, now: float, sights: Mapping[int, RankObservation]) -> HangVerdict:
        """Check every rank. Cheap: call it some times a second."""
        for rank, sight in sights.items():
            self._learn(rank, sight)
        late = {rank for rank, sight in sights.items() if self._is_late(rank, sight, now)}
        if not late:
            self._first, self._asked = None, False
            return HangVerdict()
        between = OBSERVE_AGAIN_S if all(sights[rank].beat is not None for rank in late) else SILENT_OBSERVE_AGAIN_S
        if not self._asked and (self._first is None or now - self._first[0] >= between):
            self._asked = True
            return HangVerdict("stacks", self._reason(late, sights, now), tuple(sorted(late)))
        return HangVerdict()

    def judge_stacks(
        self,
        now: float,
        sights: Mapping[int, RankObservation],
        stacks: Mapping[int, str],
        after: Mapping[int, RankObservation],
    ) -> HangVerdict:
        """Return the verdict from the stacks that ``update`` requested.

        ``stacks``: one text for each rank, empty for a rank that wrote none. ``sights`` were taken before the stacks,
        ``after`` afterwards: a process uses CPU time and bytes to write its stacks.
        """
        self._asked = False
        late = {rank for rank, sight in sights.items() if self._is_late(rank, sight, now)}
        if not late:
            self._first = None
            return HangVerdict()
        if self._first is None:
            self._first = (now, dict(after), dict(stacks))
            return HangVerdict()
        then, before, earlier = self._first
        self._first = None
        stuck = [
            rank
            for rank in sorted(late)
            if _is_idle(sights[rank], before.get(rank), now - then, stacks.get(rank), earlier.get(rank))
        ]
        overdue = [rank for rank in sorted(late) if self._overdue(rank, sights[rank], now)]
        if any(_may_wait_for(sights[rank], other) for rank in late for other in _others(sights, late)):
            return HangVerdict()
        if len(stuck) == len(late) or overdue:
            causes = _causes(stuck if len(stuck) == len(late) else overdue, sights, stacks)
            return HangVerdict("hang", self._reason(set(causes), sights, now), tuple(causes))
        for rank in late:  # the process is active: slow, not stuck
            self._factor[rank] = 2 * self._factor.get(rank, 1.0)
        return HangVerdict()

    def _learn(self, rank: int, sight: RankObservation) -> None:
        if sight.beat is None:
            return
        before = self._seen.get(rank)
        if before is not None and (before.steps != sight.beat.steps or before.phase != sight.beat.phase):
            self._factor.pop(rank, None)
        self._usual.learn(before, sight.beat)
        self._seen[rank] = sight.beat

    def _limit(self, rank: int, sight: RankObservation) -> tuple[float, float]:
        """Return since when the rank is in its phase, and the limit in seconds."""
        beat = sight.beat or Heartbeat(phase="starting", since=self._began)
        return beat.since, self._usual.late_after(beat)

    def _is_late(self, rank: int, sight: RankObservation, now: float) -> bool:
        if sight.is_over:
            return False
        since, limit = self._limit(rank, sight)
        if sight.state in STOPPED:  # no progress is possible, whatever its phase
            limit = min(limit, LATE_AFTER * (self._usual.step_s or 0.0) + SLACK_S - OBSERVE_AGAIN_S)
        return now - since > limit * self._factor.get(rank, 1.0)

    def _overdue(self, rank: int, sight: RankObservation, now: float) -> bool:
        since, limit = self._limit(rank, sight)
        return sight.beat is not None and now - since > GIVE_UP * limit

    def _reason(self, ranks: set[int], sights: Mapping[int, RankObservation], now: float) -> str:
        words = []
        for rank in sorted(ranks)[:4]:
            sight = sights[rank]
            since, _ = self._limit(rank, sight)
            beat = sight.beat
            phase = (
                "no heartbeat yet"
                if beat is None
                else f"{beat.phase}, after step {beat.step}"
                if beat.step >= 0
                else beat.phase
            )
            stopped = (
                ", stopped by a signal"
                if sight.state in ("T", "t")
                else ", in the kernel"
                if sight.state == "D"
                else ""
            )
            words.append(f"rank {rank} for {duration_text(now - since)} ({phase}{stopped})")
        usual = self._usual.step_s
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return (
            "no progress: "
            + ", ".join(words)
            + more
            + (f"; a step usually takes {duration_text(usual)}" if usual is not None else "")
        )


def _others(sights: Mapping[int, RankObservation], late: set[int]) -> list[RankObservation]:
    return [sight for rank, sight in sights.items() if rank not in late and not sight.is_over]


def _may_wait_for(late: RankObservation, other: RankObservation) -> bool:
    """Return whether a late rank may only be waiting for ``other``.

    That is possible if ``other`` is not late and not a step ahead.
    """
    return (other.beat.step if other.beat is not None else -1) <= (late.beat.step if late.beat is not None else -1)


def _is_idle(
    sight: RankObservation, before: RankObservation | None, seconds: float, stacks: str | None, earlier: str | None
) -> bool:
    """Return whether a rank was idle between two observations."""
    if sight.state in STOPPED:
        return True
    if before is None:
        return False
    idle = sight.cpu_s - before.cpu_s < _IDLE * seconds and sight.moved_bytes == before.moved_bytes
    return idle and stacks == earlier


def _causes(ranks: list[int], sights: Mapping[int, RankObservation], stacks: Mapping[int, str]) -> list[int]:
    """Return the ranks that delay the others: stopped ranks, else the ranks with the fewest steps.

    Of these, ranks that are not in a collective come first.
    """
    stopped = [rank for rank in ranks if sights[rank].state in STOPPED]
    if stopped:
        return stopped
    steps = {rank: beat.step if (beat := sights[rank].beat) is not None else -1 for rank in ranks}
    last = [rank for rank in ranks if steps[rank] == min(steps.values())]
    return [rank for rank in last if not _in_exchange(stacks.get(rank, ""))] or last


def _in_exchange(stack: str) -> bool:
    """Return whether a main thread's stack, innermost first, shows that it waits for other ranks."""
    frames = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
    return any("torch/distributed/" in line for line in frames[:3])
