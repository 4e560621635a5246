"""One incarnation of the ranks, without processes: the tests write the heartbeat pages themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.log.test_log_stale_listings import save

from relight.commit import Attempt
from relight.heartbeat import SETTING, Heartbeat, HeartbeatPage
from relight.store import LocalStore
from relight.supervise.decide import SuperviseRules
from relight.supervise.facts import Worker
from relight.supervise.limits import HangTimeouts
from relight.supervise.supervisor import Supervisor


def test_steps_of_an_earlier_incarnation_count_when_the_job_ends(tmp_path: Path) -> None:
    """If the job must end before the new incarnation has reached the step of the old one, the steps between are not
    stored."""
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
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
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / "incidents")
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
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
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
