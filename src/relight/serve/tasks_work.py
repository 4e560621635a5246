"""The work of tasks: wait for a requested save; verify a checkpoint or run ``relight drill`` in a process that ends with the server."""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

from relight.catalog.run import Run
from relight.comm.children import child_command, child_environment
from relight.decode import from_json_bytes
from relight.drill.report import DrillReport, lines_of
from relight.errors import RelightError, StoreUnavailable
from relight.log import Checkpoint
from relight.run_records.save_requests import Answer, describe_outcome, wait_for_answer
from relight.run_records.verification import record_checked
from relight.serve.pages_actions import ActionOutcome
from relight.serve.tasks import ServerTask
from relight.serve.verify_process import VerifyMessage, VerifyResult
from relight.store.wrapper import guard_of
from relight.units import percent_text

DRILL_S = 1800.0
VERIFYING_MAX = 2
"""Verifications that read at the same time, each in its own process. Others wait: more would take CPU time from the pages."""
_verifying = threading.BoundedSemaphore(VERIFYING_MAX)
_END_S = 5.0
_OUTPUT_BYTES_MAX = 1 << 20
"""Largest output of a child process that is read."""


def wait_for(task: ServerTask, run: Run, asked: Callable[[], int], timeout_s: float) -> ActionOutcome:
    """Wait for the answer to a requested save, at most ``timeout_s`` seconds, and return it as the task's outcome.

    ``asked`` waits until the request is in the log, and returns its record's number.
    """
    seq, began = asked(), time.monotonic()
    task.add_line(f"save requested, in record {seq} of the log")

    def report(answer: Answer) -> None:
        if not answer.over:
            task.add_line(f"received on {answer.acknowledged_by}; it saves at the end of its step")

    answer = wait_for_answer(run.store, run.name, seq, timeout_s, report, task.ending)
    return ActionOutcome(answer.saved is not None, describe_outcome(answer, time.monotonic() - began))


def verify(task: ServerTask, run: Run, checkpoint: Checkpoint, verified: Callable[[bool], None]) -> ActionOutcome:
    """Read every byte of a checkpoint and record the result in the run's log. ``verified`` is called with whether all are correct.

    A child process of low priority reads and hashes, so that the server's event loop has the interpreter for itself.
    """
    while not _verifying.acquire(timeout=0.2):
        if not task.lines:
            task.add_line(f"waiting: {VERIFYING_MAX} other verifications are running")
        if task.ending.is_set():
            raise StoreUnavailable("the server ended before the verification began", retryable=True)
    try:
        result = _verify_in_child(task, run, checkpoint.id)
    finally:
        _verifying.release()
    lines = [f"{file}: {detail}" for file, detail in result.findings]
    if not result.is_unknown:
        record_checked(run.store, run.name, {checkpoint.id: lines[0] if lines else ""}, "relight serve")
    verified(not result.count)
    if result.is_unknown:
        summary = "some files could not be read; nothing was recorded"
    else:
        summary = f"damaged: {result.count} findings" if result.count else "every byte is as committed"
    return ActionOutcome(not result.count, summary, "\n".join(lines))


def _verify_in_child(task: ServerTask, run: Run, checkpoint_id: str) -> VerifyResult:
    """Return the result of ``relight.serve.verify_process``. Raise the error that it sent, or ``StoreUnavailable`` without a result."""
    command = child_command("relight.serve.verify_process", run.store.url, run.name, checkpoint_id)
    try:
        process = subprocess.Popen(
            command,
            bufsize=0,
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )  # its errors go to the server's own output
    except OSError as error:  # no process or descriptor is free
        raise StoreUnavailable(
            f"starting the verification failed: {error.strerror or error}", retryable=True
        ) from error
    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it ended at once: its status is reported below
                process.stdin.write(guard_of(run.store).to_line())
            for line in _lines_until(process.stdout.fileno(), task.ending.is_set):
                message = VerifyMessage()
                with suppress(msgspec.MsgspecError):  # a library may print, too
                    message = from_json_bytes(line, VerifyMessage)
                if message.result is not None:
                    return message.result
                if message.error is not None:
                    raise message.error.to_exception()
                if message.tenths is not None:
                    task.add_line(f"{percent_text(message.tenths / 10)} of its bytes are verified")
            if task.ending.is_set():
                raise StoreUnavailable("the server ended before every byte was read", retryable=True)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            raise StoreUnavailable(
                f"the verification's process ended with {process.returncode} and no result", retryable=True
            )
        finally:
            process.stdin.close()  # the child ends with its standard input
            _ended(process)


def _lines_until(fd: int, is_over: Callable[[], bool]) -> Iterator[bytes]:
    """Yield lines from a pipe until its end, or until ``is_over`` returns True. It is called five times a second."""
    poll, buffer = select.poll(), b""
    poll.register(fd, select.POLLIN)
    while not is_over():
        if poll.poll(200):
            if not (data := os.read(fd, 1 << 16)):
                return
            *lines, buffer = (buffer + data).split(b"\n")
            yield from lines


def drill(task: ServerTask, url: str, deadline_s: float = DRILL_S) -> ActionOutcome:
    """Run ``relight drill`` on copies of the run at ``url``. Its output becomes the task's output and outcome."""
    command = child_command("relight", "drill", "--copy", url, "--json", "--deadline", f"{deadline_s:g}")
    with subprocess.Popen(
        command, env=child_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        outputs: list[bytes] = []
        readers = [
            threading.Thread(
                target=lambda: outputs.append(process.stdout.read(_OUTPUT_BYTES_MAX) if process.stdout else b""),
                daemon=True,
            ),
            threading.Thread(target=_stream_output, args=(task, process), daemon=True),
        ]
        for reader in readers:
            reader.start()
        ends = time.monotonic() + deadline_s + 60.0
        while process.poll() is None and time.monotonic() < ends and not task.ending.wait(0.2):
            pass
        broken_off = _ended(process)
        for reader in readers:
            reader.join(_END_S)
    if broken_off:
        return ActionOutcome(False, "aborted: the server has ended, or the drill took too long")
    with suppress(RelightError, msgspec.MsgspecError):
        report = from_json_bytes(b"".join(outputs), DrillReport)
        return ActionOutcome(report.ok, report.summary(), "\n".join(lines_of(report)))
    return ActionOutcome(
        False, f"relight drill ended with {process.returncode} and no report", "\n".join(task.lines[-5:])
    )


def _stream_output(task: ServerTask, process: subprocess.Popen[bytes]) -> None:
    for line in process.stderr or ():
        if line.strip():
            task.add_line(_text(line))


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """End a process, and return whether it was still running. It is killed if it ignores SIGTERM for ``_END_S``.

    On SIGTERM ``relight drill`` removes its copies.
    """
    if process.poll() is not None:
        return False
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
    return True


def _text(line: bytes) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in line.decode("utf-8", "replace").strip())[:500]
