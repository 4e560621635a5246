"""Python stacks of processes that may be stuck: each wrote down, when it began, where to, and on which signal.

``faulthandler`` does it: in the signal's handler, without the GIL, all threads. A process without such a handler is sent nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from relight.supervise.procfs import catches, sample_process, where_in_kernel

SETTING = "RELIGHT_STACKS"
"""The file that this process's stacks are written to."""
SIGNAL = signal.SIGRTMIN + 9
_WAIT_S = 1.0
_MAX_BYTES = 256 << 10


def offer() -> None:
    """Have this process write its stacks down when it is asked to, if somebody wants them."""
    path = os.environ.pop(SETTING, "")
    if path:
        with contextlib.suppress(OSError, ValueError):
            file = open(path, "a", encoding="utf-8")
            faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def take(pids: Mapping[int, int], files: Mapping[int, Path]) -> dict[int, str]:
    """The stacks of all ranks now, by rank. At most a second; of one that does not answer, what the kernel says."""
    begins = {rank: _size(path) for rank, path in files.items()}
    asked = []
    for rank, pid in pids.items():
        if sample_process(pid).state not in ("", "Z", "T", "t") and catches(pid, SIGNAL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, SIGNAL)
                asked.append(rank)
    ends = time.monotonic() + _WAIT_S
    found: dict[int, str] = {}
    while time.monotonic() < ends and len(found) < len(asked):
        time.sleep(0.02)
        for rank in asked:
            text = _from(files[rank], begins[rank])
            if rank not in found and text.endswith("\n") and _is_whole(files[rank], begins[rank] + len(text.encode())):
                found[rank] = text
    for rank, pid in pids.items():
        if rank not in found:
            seen = sample_process(pid)
            found[rank] = f"no answer: state {seen.state or 'gone'}, waits in {where_in_kernel(pid) or 'user space'}\n"
    return found


def of_main_thread(text: str) -> str:
    """Of all threads' stacks the one of the thread that the script began in: others may poll, and stand elsewhere each time."""
    blocks = [block for block in text.split("\n\n") if "in _run_module_as_main" in block]
    return blocks[-1].replace("Current thread", "Thread").strip() if blocks else text


def _is_whole(path: Path, size: int) -> bool:
    """Nothing came behind it for a moment."""
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
