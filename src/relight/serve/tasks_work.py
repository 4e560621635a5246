"""The work of tasks: wait for a requested save; verify a checkpoint; run ``relight drill`` as a process that ends with the server."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from relight.catalog.checked import record_checked
from relight.catalog.run import Run
from relight.catalog.save_requests import Answer, describe_outcome, wait_for_answer
from relight.catalog.verify import verify_checkpoint
from relight.comm.children import child_command, child_environment
from relight.decode import from_json_bytes
from relight.drill.report import DrillReport, lines_of
from relight.errors import RelightError, StoreUnavailable
from relight.log import Checkpoint
from relight.serve.pages_actions import ActionOutcome
from relight.serve.tasks import ServerTask

DRILL_S = 1800.0
VERIFYING_MAX = 2
"""Verifications that read at a time; further ones wait. More would take the processors from the pages."""
_verifying = threading.BoundedSemaphore(VERIFYING_MAX)
_END_S = 5.0
_SAID_MAX = 1 << 20


def wait_for(task: ServerTask, run: Run, seq: int, timeout_s: float) -> ActionOutcome:
    """Until the save is there, or will not be."""
    began = time.monotonic()
    task.add_line(f"asked, in record {seq} of the log")

    def tell(answer: Answer) -> None:
        if not answer.over:
            task.add_line(f"heard on {answer.heard}; it saves at the end of its step")

    answer = wait_for_answer(run, seq, timeout_s, tell, task.ending)
    return ActionOutcome(answer.saved is not None, describe_outcome(answer, time.monotonic() - began))


def verify(task: ServerTask, run: Run, one: Checkpoint, verified: Callable[[bool], None]) -> ActionOutcome:
    """Read every byte of a checkpoint and record the result in the run's log. ``verified`` is called with whether all are as committed."""
    total, read, shown = max(1, one.body.stored_bytes), 0, 0

    def advance(count: int) -> None:
        nonlocal read, shown
        if task.ending.is_set():
            raise StoreUnavailable("the server ended before every byte was read", retryable=True)
        read += count
        if (tenths := min(9, 10 * read // total)) > shown:
            shown = tenths
            task.add_line(f"{10 * tenths} % of its bytes are verified")

    while not _verifying.acquire(timeout=0.2):
        if not task.lines:
            task.add_line(f"waits: {VERIFYING_MAX} verifications are running")
        if task.ending.is_set():
            raise StoreUnavailable("the server ended before it began", retryable=True)
    try:
        found = verify_checkpoint(run.store, run.view(), one, progress=advance)
    finally:
        _verifying.release()
    if not any(finding.is_silence for finding in found):
        record_checked(run.store, run.name, {one.id: f"{found[0].file}: {found[0].detail}" if found else ""}, "relight serve")
    verified(not found)
    lines = "\n".join(f"{finding.file}: {finding.detail}" for finding in found[:50])
    return ActionOutcome(not found, f"damaged: {len(found)} findings" if found else "every byte is as committed", lines)


def drill(task: ServerTask, url: str, deadline_s: float = DRILL_S) -> ActionOutcome:
    """The command's own, on copies of the run at ``url``: what it prints is what is said."""
    command = child_command("relight", "drill", "--copy", url, "--json", "--deadline", f"{deadline_s:g}")
    with subprocess.Popen(
        command, env=child_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        told: list[bytes] = []
        readers = [
            threading.Thread(target=lambda: told.append(process.stdout.read(_SAID_MAX) if process.stdout else b""), daemon=True),
            threading.Thread(target=_stream_output, args=(task, process), daemon=True),
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
        return ActionOutcome(False, "broken off: the server has ended, or it took too long")
    with suppress(RelightError, msgspec.MsgspecError):
        report = from_json_bytes(b"".join(told), DrillReport)
        return ActionOutcome(report.ok, report.summary(), "\n".join(lines_of(report)))
    return ActionOutcome(False, f"relight drill ended with {process.returncode} and no report", "\n".join(task.lines[-5:]))


def _stream_output(task: ServerTask, process: subprocess.Popen[bytes]) -> None:
    for line in process.stderr or ():
        if line.strip():
            task.add_line(_text(line))


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
