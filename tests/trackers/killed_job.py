"""Start the job, kill it with all of its processes at given steps, and start it again until it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

JOB = Path(__file__).with_name("job.py")


def run_job(kind: str, root: Path, steps: int, kill_at: int | None = None, *, fresh: bool = False) -> dict[int, float]:
    """Run the job and return the losses that it printed. With ``kill_at``: kill it after that step."""
    command = [sys.executable, str(JOB), kind, str(root), str(steps), *(["fresh"] if fresh else [])]
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    losses: dict[int, float] = {}
    for line in process.stdout:
        first, _, loss = line.partition(" ")
        if first.isdecimal():
            losses[int(first)] = float(loss)
            if int(first) == kill_at:
                _kill(process)
                break
    _, errors = process.communicate(timeout=120)
    assert kill_at is not None or process.returncode == 0, errors[-3000:]
    return losses


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the job and all processes that it started: a tracker's service, too, as when a machine is lost."""
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(member.pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired):
            member.wait(timeout=10)


def killed_five_times(kind: str, root: Path, steps: int, kills: Sequence[int]) -> None:
    """Run the job to its end, with a kill at each of the steps."""
    for step in kills:
        run_job(kind, root, steps, step)
    run_job(kind, root, steps)
