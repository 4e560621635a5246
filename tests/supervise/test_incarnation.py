"""One incarnation of the ranks, without processes: the tests write the heartbeat pages themselves."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.log.test_log_stale_listings import save

from relight.commit import Attempt
from relight.heartbeat import HANDING_OVER, SETTING, Heartbeat, HeartbeatPage
from relight.heartbeat.heartbeat_page import UPDATING
from relight.settings.supervise_settings import SuperviseSettings
from relight.store import LocalStore
from relight.supervise.facts import Worker
from relight.supervise.incarnation import HANDOVER_BEGINS_S, UPDATE_EXTRA_S, Incarnation, JobDetectors
from relight.supervise.shared_pages import SharedPages
from relight.supervise.supervisor import Supervisor


def test_steps_of_an_earlier_incarnation_count_when_the_job_ends(tmp_path: Path) -> None:
    """If the job must end before the new incarnation has reached the step of the old one, the steps between are not
    stored."""
    watched = Supervisor(SuperviseSettings(), "job", tmp_path)
    try:
        for beat, stored in (
            (Heartbeat(pid=1, phase="training", step=9, steps=10, durable=9), True),
            (Heartbeat(pid=2, phase="training", restored=4), False),
            (Heartbeat(pid=3, phase="training", restored=9), True),
            (Heartbeat(pid=4, phase="training", restored=4, step=12, steps=8, durable=12), True),
        ):
            environments = watched.begin([0], {})
            watched.started({0: os.getpid()})
            HeartbeatPage(environments[0][SETTING]).write(beat)
            watched.poll()
            assert watched.incarnation.is_stored(watched.account.reached) is stored, beat
            watched.failed([Worker(0, -9, 1.0)])
    finally:
        watched.close()


def test_a_save_that_no_rank_saw_complete_counts_as_stored(tmp_path: Path) -> None:
    """Ranks ended before they knew that their save was sealed. The run's log has the checkpoint."""
    save(Attempt.begin(LocalStore(tmp_path / "s"), "r"), 12)
    watched = Supervisor(SuperviseSettings(), "job", tmp_path / "incidents")
    try:
        for url, step, stored in (
            ("", 12, False),
            (f"{tmp_path}/not", 12, False),
            (f"{tmp_path}/s", 12, True),
            (f"{tmp_path}/s", 13, False),
        ):
            environments = watched.begin([0], {})
            watched.started({0: os.getpid()})
            HeartbeatPage(environments[0][SETTING]).write(
                Heartbeat(pid=step, phase="training", step=step, steps=8, sealed=4, durable=4, url=url, run="r")
            )
            watched.poll()
            assert watched.incarnation.is_stored(watched.account.reached) is stored, (url, step)
            watched.failed([Worker(0, -9, 1.0)])
    finally:
        watched.close()


def test_another_process_with_an_agent_s_id_is_left_alone(tmp_path: Path) -> None:
    """If another process has the process id of an ended agent, it is left alone although saves are late."""
    watched = Supervisor(SuperviseSettings(), "job", tmp_path)
    process = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        environments = watched.begin([0], {})
        watched.started({0: os.getpid()})
        asked = time.monotonic() - 1000
        HeartbeatPage(environments[0][SETTING]).write(
            Heartbeat(pid=1, phase="training", step=1, steps=1, save_since=asked, agent=process.pid)
        )
        watched.poll()
        time.sleep(0.1)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        watched.close()


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[SharedPages]:
    """Make the pages of a supervisor in a directory of the test."""
    made = SharedPages(tmp_path)
    yield made
    made.close()


def start(
    pages: SharedPages, *beats: Heartbeat, number: int = 1, clock: Callable[[], float] = lambda: 100.0
) -> Incarnation:
    """Return an incarnation of ranks that have these heartbeats. This process is each of them."""
    made = Incarnation(pages, JobDetectors.starting(SuperviseSettings()), clock, number)
    environments = pages.begin(range(len(beats)), {})
    made.started(dict.fromkeys(range(len(beats)), os.getpid()))
    for rank, beat in enumerate(beats):
        HeartbeatPage(environments[rank][SETTING]).write(beat)
    made.observe()
    return made


def test_a_rank_that_has_ended_ends_no_job(tmp_path: Path) -> None:
    """Rank 1 has ended normally long ago, a step before rank 0, which trains on. Its time is training."""
    now = [time.monotonic()]
    watched = Supervisor(SuperviseSettings(), "job", tmp_path, lambda: now[0])
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    try:
        environments = watched.begin([0, 1], {})
        watched.started({0: os.getpid(), 1: process.pid})
        training, ended = (HeartbeatPage(environments[rank][SETTING]) for rank in range(2))
        ended.write(Heartbeat(pid=2, phase="ending", since=now[0], step=5, steps=6, restored=-1, first_at=now[0]))
        began = now[0]
        for step in range(6, 40):
            now[0] += 100.0
            training.write(
                Heartbeat(
                    pid=1,
                    phase="training",
                    since=now[0],
                    step=step,
                    steps=step + 1,
                    step_at=now[0],
                    restored=-1,
                    first_at=began,
                )
            )
            assert watched.poll() == ""
        assert watched.account.present().spent.keys() == {"starting", "training"}
    finally:
        watched.close()


def test_an_incarnation_begins_with_nothing(pages: SharedPages) -> None:
    """A new object has no ranks, heartbeats or hanging ranks, whatever the one before had."""
    first = start(pages, Heartbeat(pid=1, steps=3, ahead=5), Heartbeat(pid=2, steps=4, ahead=7))
    first.hung = (1,)
    assert (first.steps, first.ahead_bytes, len(first.seen()), first.is_over) == (3, 7, 2, False)
    second = Incarnation(pages, JobDetectors.starting(SuperviseSettings()), lambda: 200.0, 2, "meeting")
    assert (second.steps, second.ahead_bytes, second.seen(), second.hung) == (0, 0, {}, ())
    assert (second.number, second.meeting, second.began, second.is_over) == (2, "meeting", 200.0, False)
    assert Incarnation(pages, JobDetectors.starting(SuperviseSettings())).is_over, "nothing has started yet"


def test_all_ranks_must_have_trained(pages: SharedPages) -> None:
    """A rank without a step, or without a heartbeat, is one that has not trained."""
    assert start(pages, Heartbeat(pid=1, steps=1), Heartbeat(pid=2)).trained() == []
    assert len(start(pages, Heartbeat(pid=1, steps=1), Heartbeat(pid=2, steps=1)).trained()) == 2
    made = Incarnation(pages, JobDetectors.starting(SuperviseSettings()))
    pages.begin([0, 1], {})
    made.started({0: os.getpid(), 1: os.getpid()})
    assert made.trained() == []


@pytest.mark.parametrize(
    ("beat", "seconds"),
    [
        (Heartbeat(pid=1), 0.0),
        (Heartbeat(pid=1, heir=1), HANDOVER_BEGINS_S),
        (Heartbeat(pid=1, heir=UPDATING, steps=11, first_at=10.0, step_at=40.0), HANDOVER_BEGINS_S + 6.0),
        (Heartbeat(pid=1, heir=UPDATING, steps=2, first_at=10.0, step_at=90.0), HANDOVER_BEGINS_S + UPDATE_EXTRA_S),
        (Heartbeat(pid=1, phase=HANDING_OVER, since=99.0, expected_s=1.0), math.inf),
        (Heartbeat(pid=1, phase=HANDING_OVER, since=10.0, expected_s=1.0), 0.0),
    ],
    ids=["no heir", "heir", "in its update", "in a long update", "hands over", "hands over for too long"],
)
def test_a_handover_gets_the_time_that_it_needs(pages: SharedPages, beat: Heartbeat, seconds: float) -> None:
    """Only ranks that are alive count."""
    made = start(pages, beat)
    assert made.handing_over_s({0}) == seconds
    assert made.handing_over_s({1}) == 0.0


def test_the_evidence_has_stacks_only_after_a_hang(pages: SharedPages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks that were taken, because a rank was late, are no evidence of a crash that follows."""
    now = [100.0]
    made = start(pages, Heartbeat(pid=1, phase="training", steps=3, step=2, since=100.0), clock=lambda: now[0])
    monkeypatch.setattr(
        "relight.supervise.incarnation.stacks.take", lambda pids, files: dict.fromkeys(pids, "File …\n")
    )
    now[0] += 1e6
    made.check(made.observe())
    workers = [Worker(0, 1, 1.0), Worker(7, 1, 1.0, state="Z")]
    crashed, hung = made.with_evidence(workers, hung=False), made.with_evidence(workers, hung=True)
    assert [worker.stacks for worker in (*crashed, *hung)] == ["", "", "File …\n", ""]
    assert crashed[0].beat is not None and crashed[0].beat.step == 2 and crashed[0].state
    assert crashed[1].beat is None and crashed[1].state == "Z"
