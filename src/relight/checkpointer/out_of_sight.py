"""Recognise a process of this host whose sockets this process cannot see: another user's, or one with another temporary directory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from relight.world.local_sockets import LocalDirectory

_CLOCK_S = 2.0
"""Seconds by which the kernel's start time of a process may differ from the wall clock of a record."""


def out_of_sight(pid: int, at_s: float) -> bool:
    """Return whether a process with that id lives that may have written a record at ``at_s``, and has another private directory.

    ``at_s``: seconds since the epoch. A process that started later has the id of one that is gone.
    """
    if pid <= 0 or pid == os.getpid():
        return False
    with suppress(OSError, ValueError, IndexError, StopIteration):
        top = Path(f"/proc/{pid}")
        fields = (top / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        if fields[0] in "ZX" or _booted_s() + int(fields[19]) / os.sysconf("SC_CLK_TCK") > at_s + _CLOCK_S:
            return False
        lines = (top / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        words = next(line for line in lines if line.startswith("Uid:"))
        if int(words.split()[2]) != os.geteuid():
            return True
        with LocalDirectory() as directory:
            mine = os.fstat(directory.fd)
            try:
                theirs = os.stat(f"{top}/root{directory.path}")
            except FileNotFoundError:
                return True
            except OSError:  # a process with keys does not let another one look
                return False
            return (mine.st_dev, mine.st_ino) != (theirs.st_dev, theirs.st_ino)
    return False


def _booted_s() -> float:
    lines = Path("/proc/stat").read_text(encoding="ascii", errors="replace").splitlines()
    return float(next(line for line in lines if line.startswith("btime ")).split()[1])
