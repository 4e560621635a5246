"""Run a framework's example whole, and again with SIGKILL at several steps until it ends. Both must print the same
steps."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

import relight
from relight.errors import RelightError

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"(step +\d+|after +\d+) +((?:\w+ [-+.\de]+ ?)+)")
"""Pattern of names and numbers. torchrun's workers write unbuffered, so that a warning may follow on the same line."""


@dataclass
class KilledRun:
    """The printed steps of a run, whether it was killed, and its whole output for error messages."""

    steps: dict[str, str]
    killed: bool
    text: str

    @property
    def numbers(self) -> list[int]:
        """Return the steps in the order in which they were printed."""
        return [int(name.split()[1]) for name in self.steps if name.startswith("step")]


def run(
    command: Sequence[str],
    *,
    kill_at: int | None = None,
    saved: Path | None = None,
    env: dict[str, str] | None = None,
    timeout_s: float = 240,
) -> KilledRun:
    """Run a command. With ``kill_at``, kill it and all its children once it has printed that step.

    With ``saved``, a run, the kill waits until that run has a checkpoint: a save in the background may take longer
    than forty short steps.
    """
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "RELIGHT_BACKGROUND": "0",
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **(env or {}),
        },
    )
    steps: dict[str, str] = {}
    lines: list[str] = []
    ends, killed = time.monotonic() + timeout_s, False
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if match := STEP.search(line):
                steps[" ".join(match[1].split())] = match[2].strip()
                reached = kill_at is not None and match[1].startswith("step") and int(match[1].split()[1]) >= kill_at
                if reached and not killed and (saved is None or _has_checkpoint(saved)):
                    _kill(process.pid)
                    killed = True
            if time.monotonic() > ends:
                _kill(process.pid)
                raise AssertionError("too slow: " + "".join(lines)[-3000:])
    text = "".join(lines)
    assert killed or process.returncode == 0, text[-3000:]
    return KilledRun(steps, killed, text)


def _has_checkpoint(path: Path) -> bool:
    with contextlib.suppress(RelightError):
        return bool(relight.open(path).checkpoints())
    return False


def _kill(pid: int) -> None:
    """Kill a process and all its children at once, in all sessions. None may continue without the others."""
    first = psutil.Process(pid)
    for process in [first, *first.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
    for process in [*first.children(recursive=True), first]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def killed_and_resumed(
    command: Sequence[str],
    kills: Sequence[int],
    tmp_path: Path,
    env: dict[str, str] | None = None,
    *,
    background: bool = False,
) -> list[KilledRun]:
    """Run ``command RUN`` uninterrupted. Then kill a second run at each of ``kills``, and finish it. Every step must
    be equal, and none missing.

    Every attempt after the first must resume after the first step.
    """
    path = tmp_path / "killed" / "run"
    saved, env = (path, {**(env or {}), "RELIGHT_BACKGROUND": "1"}) if background else (None, env)
    straight = run([*command, str(tmp_path / "straight" / "run")], env=env)
    assert straight.numbers[0] == 1 and straight.numbers == sorted(straight.numbers), straight.text[-3000:]
    attempts = [run([*command, str(path)], kill_at=step, saved=saved, env=env) for step in [*kills, None]]
    assert [attempt.killed for attempt in attempts] == [*(True for _ in kills), False]
    for before, attempt in zip(attempts, attempts[1:]):
        assert 1 < attempt.numbers[0] <= before.numbers[-1] + 1, attempt.text[-3000:]
    together: dict[str, str] = {}
    for attempt in attempts:
        differing = {
            name: (printed, straight.steps.get(name))
            for name, printed in attempt.steps.items()
            if straight.steps.get(name) != printed
        }
        assert not differing, f"{differing}\n{attempt.text[-3000:]}"
        together |= attempt.steps
    assert together == straight.steps
    return attempts
