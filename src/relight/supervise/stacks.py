"""Python stacks of processes that may be stuck: each rank writes them to a file when it receives a signal.

Each rank registers the signal and the file at its start. ``faulthandler`` writes the stacks of all threads in the
signal's handler, without the GIL. A process without that handler gets no signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from relight.supervise.procfs import has_handler, sample_process, where_in_kernel

SETTING = "RELIGHT_STACKS"
"""The file that this process's stacks are written to."""
SIGNAL = signal.SIGRTMIN + 9
_WAIT_S = 1.0
_MAX_BYTES = 256 << 10


def offer() -> None:
    """Register the signal on which this process writes its stacks, if its supervisor has named a file for them."""
    path = os.environ.pop(SETTING, "")
    if path:
        with contextlib.suppress(OSError, ValueError):
            file = open(path, "a", encoding="utf-8")
            faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def take(pids: Mapping[int, int], files: Mapping[int, Path]) -> dict[int, str]:
    """Return the present stacks of all ranks, by rank. Takes at most a second.

    For a rank that does not answer, return its process state instead.
    """
    begins = {rank: _size(path) for rank, path in files.items()}
    signalled = []
    for rank, pid in pids.items():
        if sample_process(pid).state not in ("", "Z", "T", "t") and has_handler(pid, SIGNAL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, SIGNAL)
                signalled.append(rank)
    ends = time.monotonic() + _WAIT_S
    answers: dict[int, str] = {}
    while time.monotonic() < ends and len(answers) < len(signalled):
        time.sleep(0.02)
        for rank in signalled:
            text = _from(files[rank], begins[rank])
            if (
                rank not in answers
                and text.endswith("\n")
                and _is_whole(files[rank], begins[rank] + len(text.encode()))
            ):
                answers[rank] = text
    for rank, pid in pids.items():
        if rank not in answers:
            process = sample_process(pid)
            answers[rank] = (
                f"no answer: state {process.state or 'gone'}, waits in {where_in_kernel(pid) or 'user space'}\n"
            )
    return answers


def of_main_thread(text: str) -> str:
    """Return the stack of the script's main thread from the stacks of all threads.

    The other threads may poll, so their stacks change without progress.
    """
    blocks = [block for block in text.split("\n\n") if "in _run_module_as_main" in block]
    return blocks[-1].replace("Current thread", "Thread").strip() if blocks else text


def _is_whole(path: Path, size: int) -> bool:
    """Return whether a file stays at that size for 20 ms."""
    time.sleep(0.02)
    return _size(path) == size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _from(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
