"""The state of another process of this user, as the kernel shows it, and the signals for a stopped one. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
from pathlib import Path
from typing import NamedTuple

STOPPED = frozenset("Tt")
"""Kernel letters of a process that is stopped until it is continued: by a signal, or by a tracer."""
_WORDS = {
    "R": "running", "S": "waiting", "D": "waiting for a disk or a network file system", "T": "stopped by a signal",
    "t": "stopped by a debugger", "Z": "ended", "X": "ended", "": "gone",
}  # fmt: skip


class ProcessIdentity(NamedTuple):
    """One process: its pid and its start time, as a pid may be reused."""

    pid: int
    started: str

    @property
    def state(self) -> str:
        """The kernel's letter for the state; empty if the process is gone. Costs one small read."""
        state, started = _read(self.pid)
        return state if started == self.started else ""

    @property
    def words(self) -> str:
        """The state in words, for messages."""
        state = self.state
        return _WORDS.get(state, f"in state {state}")

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to this process, never to a later one with the same pid. Return whether it was sent."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:  # gone; or no descriptor is left, so use the pid
            if not self.state:
                return False
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)
                return True
            return False
        try:
            if not self.state:
                return False
            signal.pidfd_send_signal(handle, number)
            return True
        except OSError:
            return False
        finally:
            os.close(handle)


def has_ended(pid: int, wait_s: float = 0.0) -> bool:
    """Return whether the process has ended, or ends within ``wait_s`` seconds; False if that is unknown."""
    if not pid:  # in another process namespace
        return False
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        return error.errno == errno.ESRCH
    try:
        return bool(select.select([fd], [], [], wait_s)[0])
    finally:
        os.close(fd)


def process_at(pid: int) -> ProcessIdentity | None:
    """Return the process with that pid; None if there is none, or /proc does not show it."""
    state, started = _read(pid) if pid > 0 else ("", "")
    return ProcessIdentity(pid, started) if state else None


def command_of(pid: int) -> list[str]:
    """Return the command line of that process; empty if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _read(pid: int) -> tuple[str, str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""
