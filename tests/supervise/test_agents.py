"""The process that writes saves: if stopped, it is detected and ended; if slow, it is left alone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.supervise.test_run import Job

from relight.heartbeat import Heartbeat, read_beat
from relight.log import Log, fold
from relight.store import open_bytes
from relight.supervise.agent_watch import UNKNOWN_S, AgentWatch
from relight.supervise.procfs import ProcessSample


def beat(asked: float = 0.0, saves: int = 1, took: float = 1.0) -> Heartbeat:
    """Return the heartbeat of a rank with saves of ``took`` seconds, and with another save requested."""
    return Heartbeat(pid=7, agent=99, save_since=asked, saves=saves, saves_s=took)


def first_seen(state: str, *, moves: bool = False, known: bool = True, until: float = 600.0) -> float | None:
    """A save is asked for at 100 s: when is its writer called stuck?"""
    watch = AgentWatch()
    now = 100.0
    watch.update(now, [beat(0.0) if known else beat(0.0, 0, 0.0)], lambda _: ProcessSample("S"))
    while now < 100 + until:
        now += 0.5
        process = ProcessSample(state, 1.0, int(now) if moves else 5)
        if watch.update(now, [beat(100.0) if known else beat(100.0, 0, 0.0)], lambda _: process) is not None:
            return now - 100
    return None


def test_a_stopped_one_is_found_within_what_was_learned() -> None:
    """The limit is three times the longest save and five seconds; before the first save, a minute."""
    assert first_seen("T") == pytest.approx(8, abs=1)
    assert first_seen("T", known=False) == pytest.approx(UNKNOWN_S, abs=1)


def test_a_slow_agent_is_left_alone() -> None:
    """An agent that moves bytes or waits for the disk is left alone for ten minutes, with saves of a second."""
    assert first_seen("S", moves=True) is None
    assert first_seen("D") is None
    assert first_seen("R", moves=True) is None
    assert first_seen("") is None


def test_one_that_does_nothing_is_given_ten_times_as_long() -> None:
    """A sleeping agent that moves nothing has ten times the limit."""
    assert first_seen("S") == pytest.approx(88, abs=2)


@pytest.mark.slow
def test_a_stopped_agent_costs_one_save(tmp_path: Path) -> None:
    """In a real job the stopped agent is found and ended, and another agent makes the later saves."""
    job = Job(tmp_path, [], JOB_EVERY="3", JOB_STEP_S="0.15")
    process = job.start(steps=120)
    try:
        stopped = None
        ends = time.monotonic() + 120
        while stopped is None and time.monotonic() < ends:
            time.sleep(0.1)
            for page in Path("/dev/shm").glob(f"relight-run-{process.pid}-*/heartbeat-0"):
                result = read_beat(page)
                if result is not None and result.agent and result.saves >= 2:
                    stopped = result
        assert stopped is not None
        os.kill(stopped.agent, signal.SIGSTOP)
        output = process.communicate(timeout=200)[0]
    finally:
        process.kill()
        if stopped is not None and psutil.pid_exists(stopped.agent):
            os.kill(stopped.agent, signal.SIGKILL)
    assert process.returncode == 0, output
    assert f"{stopped.agent}, is stopped" in output, output
    assert not job.incidents, output
    saved = [checkpoint.step for checkpoint in fold(Log(open_bytes(tmp_path / "store"), "run").read()).live]
    assert saved[-1] == 119 and len([step for step in saved if step > stopped.step]) > 5, saved
