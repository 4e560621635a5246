"""An example of a framework's, whole; and killed with SIGKILL again and again until it ends: what both print must be the same."""

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

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"(step +\d+|after +\d+) +((?:\w+ [-+.\de]+ ?)+)")
"""Names and numbers: torchrun's workers write without buffers, so that a warning may stand at the end of the line."""


@dataclass
class Told:
    """What a run has printed of its steps, whether it was killed, and everything for when something is wrong."""

    steps: dict[str, str]
    killed: bool
    text: str

    @property
    def numbers(self) -> list[int]:
        """The steps, in the order in which they were printed."""
        return [int(name.split()[1]) for name in self.steps if name.startswith("step")]


def run(command: Sequence[str], *, kill_at: int | None = None, env: dict[str, str] | None = None, timeout_s: float = 240) -> Told:
    """Run it; with ``kill_at`` kill it, and all its children, as soon as it has printed that step."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "RELIGHT_BACKGROUND": "0", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "", **(env or {})},
    )  # fmt: skip
    steps: dict[str, str] = {}
    lines: list[str] = []
    ends, killed = time.monotonic() + timeout_s, False
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if match := STEP.search(line):
                steps[" ".join(match[1].split())] = match[2].strip()
                if kill_at is not None and match[1].startswith("step") and int(match[1].split()[1]) >= kill_at and not killed:
                    _kill(process.pid)
                    killed = True
            if time.monotonic() > ends:
                _kill(process.pid)
                raise AssertionError("too slow: " + "".join(lines)[-3000:])
    text = "".join(lines)
    assert killed or process.returncode == 0, text[-3000:]
    return Told(steps, killed, text)


def _kill(pid: int) -> None:
    """It and all its children at once, whatever sessions they have made: none may go on without the others."""
    first = psutil.Process(pid)
    for one in [first, *first.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGSTOP)
    for one in [*first.children(recursive=True), first]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def killed_and_resumed(command: Sequence[str], kills: Sequence[int], tmp_path: Path, env: dict[str, str] | None = None) -> list[Told]:
    """``command RUN`` straight, then in a second run killed at each of ``kills`` and finished: every step equal, none left out.

    Every life after the first must have gone on from behind the beginning.
    """
    straight = run([*command, str(tmp_path / "straight" / "run")], env=env)
    assert straight.numbers[0] == 1 and straight.numbers == sorted(straight.numbers), straight.text[-3000:]
    lives = [run([*command, str(tmp_path / "killed" / "run")], kill_at=at, env=env) for at in [*kills, None]]
    assert [one.killed for one in lives] == [*(True for _ in kills), False]
    for before, life in zip(lives, lives[1:]):
        assert 1 < life.numbers[0] <= before.numbers[-1] + 1, life.text[-3000:]
    together: dict[str, str] = {}
    for life in lives:
        differing = {name: (one, straight.steps.get(name)) for name, one in life.steps.items() if straight.steps.get(name) != one}
        assert not differing, f"{differing}\n{life.text[-3000:]}"
        together |= life.steps
    assert together == straight.steps
    return lives
