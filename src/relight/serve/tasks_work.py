"""What is behind a task: waiting for a save that was asked for; ``relight drill`` as a process of its own, which ends with the server."""

from __future__ import annotations

import subprocess
import threading
import time
from contextlib import suppress

import msgspec

from relight.catalog.asking import Answer, came_of, wait_for_answer
from relight.catalog.run import Run
from relight.drill.report import DrillReport, lines_of
from relight.errors import RelightError
from relight.serve.pages_actions import Done
from relight.serve.tasks import Task
from relight.typed import from_json_bytes
from relight.world.children import child_command, child_environment

DRILL_S = 1800.0
_END_S = 5.0
_SAID_MAX = 1 << 20


def wait_for(task: Task, run: Run, seq: int, timeout_s: float) -> Done:
    """Until the save is there, or will not be."""
    began = time.monotonic()
    task.say(f"asked, in record {seq} of the log")

    def tell(answer: Answer) -> None:
        if not answer.over:
            task.say(f"heard on {answer.heard}; it saves at the end of its step")

    answer = wait_for_answer(run, seq, timeout_s, tell, task.ending)
    return Done(answer.saved is not None, came_of(answer, time.monotonic() - began))


def drill(task: Task, url: str, deadline_s: float = DRILL_S) -> Done:
    """The command's own, on copies of the run at ``url``: what it prints is what is said."""
    command = child_command("relight", "drill", "--copy", url, "--json", "--deadline", f"{deadline_s:g}")
    with subprocess.Popen(
        command, env=child_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        told: list[bytes] = []
        readers = [
            threading.Thread(target=lambda: told.append(process.stdout.read(_SAID_MAX) if process.stdout else b""), daemon=True),
            threading.Thread(target=_told, args=(task, process), daemon=True),
        ]
        for one in readers:
            one.start()
        ends = time.monotonic() + deadline_s + 60.0
        while process.poll() is None and time.monotonic() < ends and not task.ending.wait(0.2):
            pass
        broken_off = _ended(process)
        for one in readers:
            one.join(_END_S)
    if broken_off:
        return Done(False, "broken off: the server has ended, or it took too long")
    with suppress(RelightError, msgspec.MsgspecError):
        report = from_json_bytes(b"".join(told), DrillReport)
        return Done(report.ok, report.summary(), "\n".join(lines_of(report)))
    return Done(False, f"relight drill ended with {process.returncode} and no report", "\n".join(task.lines[-5:]))


def _told(task: Task, process: subprocess.Popen[bytes]) -> None:
    for line in process.stderr or ():
        if line.strip():
            task.say(_text(line))


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it had to be: it removes its copies if it is asked to end, and is killed if it does not."""
    if process.poll() is not None:
        return False
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
    return True


def _text(line: bytes) -> str:
    return "".join(one if one.isprintable() else " " for one in line.decode("utf-8", "replace").strip())[:500]
