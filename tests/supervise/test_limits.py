"""Detection of late and hanging ranks, with simulated clocks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from relight.heartbeat import ENDED, Heartbeat
from relight.settings.supervise_settings import SuperviseSettings
from relight.supervise.limits import (
    OBSERVE_AGAIN_S,
    SILENT_OBSERVE_AGAIN_S,
    HangVerdict,
    JobWatch,
    LearnedDurations,
    RankObservation,
)

TICK_S = 0.1


class Rank:
    """A simulated rank that steps, and may stand still."""

    def __init__(self, takes: Callable[[], float], pid: int = 1) -> None:
        self._takes = takes
        self.beat = Heartbeat(pid=pid, phase="training", restored=-1)
        self.next = 0.0
        self.state, self.cpu_s, self.moved, self.frame = "S", 0.0, 0, 0
        self.stands = self.spins = False

    def at(self, now: float) -> None:
        """Advance the rank to time ``now``."""
        if self.stands:
            return
        self.cpu_s += 0.5 * TICK_S
        self.frame += 1
        if self.spins:
            return
        if not self.next:
            self.next = now + self._takes()
        while now >= self.next:
            self.beat = self.beat._replace(
                step=self.beat.step + 1,
                steps=self.beat.steps + 1,
                step_at=self.next,
                since=self.next,
                phase="training",
                expected_s=0.0,
                first_at=self.beat.first_at or self.next,
            )
            self.next += self._takes()

    def phase(self, name: str, now: float, seconds: float, expected_s: float = 0.0) -> None:
        """Enter phase ``name`` for ``seconds``."""
        self.beat = self.beat._replace(phase=name, since=now, expected_s=expected_s)
        self.next = now + seconds + self._takes()

    @property
    def sight(self) -> RankObservation:
        """Return what the supervisor observes."""
        return RankObservation(self.beat, self.state, self.cpu_s, self.moved)


def run(
    ranks: list[Rank],
    seconds: float,
    watch: JobWatch,
    clock: list[float],
    at: Callable[[float], None] = lambda now: None,
) -> HangVerdict:
    """Poll ten times a second for ``seconds``. Return the hang, if one was detected."""
    ends = clock[0] + seconds
    while clock[0] < ends:
        clock[0] += TICK_S
        now = clock[0]
        at(now)
        for rank in ranks:
            rank.at(now)
        sights = {number: rank.sight for number, rank in enumerate(ranks)}
        verdict = watch.update(now, sights)
        if verdict.what == "stacks":
            stacks = {number: str(rank.frame) for number, rank in enumerate(ranks)}
            for rank in ranks:  # writing stacks costs CPU time
                rank.cpu_s, rank.moved = rank.cpu_s + 0.3, rank.moved + 2000
            verdict = watch.judge_stacks(now, sights, stacks, {number: rank.sight for number, rank in enumerate(ranks)})
        if verdict.what == "hang":
            return verdict
    return HangVerdict()


def noisy(rng: random.Random, usual: float) -> Callable[[], float]:
    """Return a function that draws a step time from half to one and a half of the usual one."""
    return lambda: usual * rng.uniform(0.5, 1.5)


@pytest.mark.parametrize("usual", [0.02, 1.0, 30.0])
def test_an_hour_of_noisy_steps_is_no_hang(usual: float) -> None:
    """An hour with slow saves, undeclared evaluations and a disk that is thirty times slower has no hang."""
    rng = random.Random(1)
    ranks = [Rank(noisy(rng, usual)) for _ in range(2)]
    watch, clock = JobWatch(LearnedDurations(SuperviseSettings()), 0.0), [0.0]

    def at(now: float) -> None:
        if rng.random() < TICK_S / 300:  # an evaluation of eight steps' time and more
            for rank in ranks:
                rank.next += 8 * usual + 10
        if rng.random() < TICK_S / 200:
            for rank in ranks:
                rank.phase("saving", now, 30 * rng.uniform(0.5, 1.0), expected_s=1.0)
        for rank in ranks:
            rank.moved += 1  # the rank moves bytes

    assert run(ranks, 3600, watch, clock, at) == HangVerdict()


@pytest.mark.parametrize("usual", [0.02, 0.5, 5.0])
@pytest.mark.parametrize("how", ["stands", "stopped", "one stands"])
def test_a_hang_is_found_in_time(usual: float, how: str) -> None:
    """A hang is detected within three usual steps, five seconds and a tick. The late rank is named."""
    rng = random.Random(2)
    ranks = [Rank(noisy(rng, usual)) for _ in range(2)]
    watch, clock = JobWatch(LearnedDurations(SuperviseSettings()), 0.0), [0.0]
    assert run(ranks, 100 * usual, watch, clock).what == ""
    for rank in ranks:
        rank.stands = True
    if how == "stopped":
        ranks[1].state = "T"
    elif how == "one stands":
        ranks[0].beat = ranks[0].beat._replace(step=ranks[1].beat.step + 1)
    began = max(rank.beat.since for rank in ranks)
    verdict = run(ranks, 10 * usual + 60, watch, clock)
    assert verdict.what == "hang"
    assert clock[0] - began <= 1.1 * 3 * usual + 5 + 3 * TICK_S
    assert verdict.ranks == (
        (0, 1)
        if how == "stands" and ranks[0].beat.step == ranks[1].beat.step
        else (1,)
        if how != "stands"
        else verdict.ranks
    )
    if how == "stopped":
        assert "stopped by a signal" in verdict.why


def test_a_rank_that_waits_for_one_that_is_not_late_does_not_hang() -> None:
    """If rank 0 declares an evaluation, rank 1 may wait in a collective without a hang."""
    ranks = [Rank(lambda: 0.5), Rank(lambda: 0.5)]
    watch, clock = JobWatch(LearnedDurations(SuperviseSettings()), 0.0), [0.0]
    run(ranks, 20, watch, clock)
    ranks[0].phase("evaluating", clock[0], 1000, expected_s=60)
    ranks[1].stands = True
    assert run(ranks, 180, watch, clock).what == ""
    ranks[0].stands = True
    assert run(ranks, 60, watch, clock).what == "hang"


def test_a_long_wait_in_a_save_is_no_hang_and_a_stopped_one_is() -> None:
    """Rank 0 waits for memory, and Relight has reported this. Rank 1 has finished its save and waits for rank 0."""
    ranks = [Rank(lambda: 0.1), Rank(lambda: 0.1)]
    watch, clock = JobWatch(LearnedDurations(SuperviseSettings()), 0.0), [0.0]
    run(ranks, 20, watch, clock)
    ranks[0].phase("saving", clock[0], 1000, expected_s=200)
    ranks[0].stands = ranks[1].stands = True
    assert run(ranks, 120, watch, clock).what == ""
    began, ranks[0].state = clock[0], "T"
    verdict = run(ranks, 60, watch, clock)
    assert verdict.what == "hang" and verdict.ranks == (0,) and clock[0] - began < 6


def test_a_rank_that_the_others_overtake_hangs() -> None:
    """The other ranks do not wait for it, and continue."""
    ranks = [Rank(lambda: 0.5), Rank(lambda: 0.5)]
    watch, clock = JobWatch(LearnedDurations(SuperviseSettings()), 0.0), [0.0]
    run(ranks, 20, watch, clock)
    ranks[1].stands = True
    verdict = run(ranks, 20, watch, clock)
    assert verdict.what == "hang" and verdict.ranks == (1,)


def test_what_moves_is_given_time_and_not_for_ever() -> None:
    """A rank that works without progress has ten times the limit."""
    rank = Rank(lambda: 0.5)
    watch, clock = JobWatch(LearnedDurations(SuperviseSettings()), 0.0), [0.0]
    run([rank], 20, watch, clock)
    began, rank.spins = clock[0], True
    verdict = run([rank], 600, watch, clock)
    assert verdict.what == "hang" and 20 < clock[0] - began < 200


def test_before_anything_is_known_the_settings_limit_the_wait() -> None:
    """This is true of the first step, and of a phase that never was before."""
    rank = Rank(lambda: 1e9)
    rank.stands = True
    watch, clock = JobWatch(LearnedDurations(SuperviseSettings(start_s=30.0, phase_s=50.0)), 0.0), [0.0]
    assert run([rank], 29, watch, clock).what == ""
    assert run([rank], 29, watch, clock).what == "hang"
    other = Rank(lambda: 1e9)
    other.beat, other.stands = other.beat._replace(phase="exporting"), True
    watch, clock = JobWatch(LearnedDurations(SuperviseSettings(start_s=30.0, phase_s=50.0)), 0.0), [0.0]
    assert run([other], 49, watch, clock).what == ""
    assert run([other], 29, watch, clock).what == "hang"


def test_learned_durations_outlive_an_incarnation() -> None:
    """The first step of the next life has a limit that is known."""
    usual = LearnedDurations(SuperviseSettings())
    rank, clock = Rank(lambda: 0.5), [0.0]
    run([rank], 20, JobWatch(usual, 0.0), clock)
    second = Rank(lambda: 1e9, pid=2)
    second.beat, second.stands = second.beat._replace(since=clock[0]), True
    began = clock[0]
    assert run([second], 60, JobWatch(usual, clock[0]), clock).what == "hang"
    assert clock[0] - began < 3 * 0.6 + 5 + OBSERVE_AGAIN_S


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_steps_that_ended_between_two_polls_are_learned_from(steps: int) -> None:
    """The rank stopped moving before it was polled twice."""
    rank = Rank(lambda: 0.01)
    watch, clock = JobWatch(LearnedDurations(SuperviseSettings()), 0.0), [0.0]
    watch.update(0.05, {0: rank.sight})
    rank.beat = rank.beat._replace(
        steps=steps, step=steps, first_at=0.1, step_at=0.09 + 0.01 * steps, since=0.09 + 0.01 * steps
    )
    rank.stands, clock[0] = True, 0.5
    assert run([rank], 20, watch, clock).what == "hang" and clock[0] < 7


@pytest.mark.parametrize("beats", [True, False], ids=["with a heartbeat", "without one"])
def test_a_rank_that_has_ended_does_not_hang(beats: bool) -> None:
    """Rank 1 has ended normally, early. Rank 0 trains on, or hangs: its own hang is still detected."""
    ranks = [Rank(lambda: 0.5), Rank(lambda: 0.5, pid=2)]
    watch, clock = JobWatch(LearnedDurations(SuperviseSettings(phase_s=10.0)), 0.0), [0.0]
    assert run(ranks, 10, watch, clock).what == ""
    ranks[1].stands, ranks[1].state = True, ""
    if not beats:
        ranks[1].beat = None  # type: ignore[assignment]
    assert run(ranks, 600, watch, clock).what == ""
    ranks[0].stands = True
    verdict = run(ranks, 20, watch, clock)
    assert (verdict.what, verdict.ranks) == ("hang", (0,))


def test_a_rank_may_evaluate_for_hours_after_its_training() -> None:
    """It has closed its Checkpointer, and waits for another process. The other rank still trains, and its hang is detected."""
    ranks = [Rank(lambda: 0.5), Rank(lambda: 0.5, pid=2)]
    watch, clock = JobWatch(LearnedDurations(SuperviseSettings(phase_s=10.0)), 0.0), [0.0]
    assert run(ranks, 10, watch, clock).what == ""
    ranks[1].phase(ENDED, clock[0], 1e9)
    ranks[1].stands = True
    assert run(ranks, 3 * 600, watch, clock).what == ""
    ranks[0].stands = True
    verdict = run(ranks, 20, watch, clock)
    assert (verdict.what, verdict.ranks) == ("hang", (0,))


def test_a_rank_without_a_heartbeat_is_waited_for_as_starting() -> None:
    """No page was written."""
    watch = JobWatch(LearnedDurations(SuperviseSettings(phase_s=10.0)), 0.0)
    verdicts = []
    for now in (0.1 * tick for tick in range(800)):
        verdict = watch.update(now, {0: RankObservation(None, "S")})
        if verdict.what == "stacks":
            verdict = watch.judge_stacks(
                now, {0: RankObservation(None, "S")}, {0: "same"}, {0: RankObservation(None, "S")}
            )
        verdicts.append(verdict.what)
    assert "hang" in verdicts and verdicts.index("hang") >= 10 * (10 + SILENT_OBSERVE_AGAIN_S)


def test_one_that_knows_nothing_of_relight_may_work_for_ever() -> None:
    """No page is ever written, and it moves: a day."""
    watch = JobWatch(LearnedDurations(SuperviseSettings(phase_s=10.0)), 0.0)
    for tick in range(86400):
        sight = RankObservation(None, "R", float(tick))
        verdict = watch.update(float(tick), {0: sight})
        if verdict.what == "stacks":
            verdict = watch.judge_stacks(float(tick), {0: sight}, {0: "same"}, {0: sight})
        assert verdict.what != "hang"
