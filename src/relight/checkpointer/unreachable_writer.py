"""Decide whether a process of this host that cannot be connected to may still be in charge of a run."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from relight.comm.local_sockets import NAME, LocalDirectory

_SOCKET = re.compile(rf".*/({NAME})\.sock")
_LISTENS = 0x10000
"""In the flags of a socket in ``/proc/net/unix``."""
_CLOCK_S = 2.0
"""Seconds by which the kernel's start time of a process may differ from the wall clock of a record."""


def may_live(pid: int, at_s: float, address: str) -> bool:
    """Return whether the attempt that wrote a record at ``at_s`` (seconds since the epoch) as process ``pid`` may still be in charge.

    It is not if that process is gone, or if its socket ``address`` is in this directory and has no listener. The name has the boot and the
    network namespace, and each attempt has its own. So only that attempt made the file, as a process that this one could connect to.
    Without the file the process may have listened elsewhere, a cleaner may have removed the file, or there never was one. Nor is it if it
    listens for other runs only: this run may be a copy of the one that it trains.
    """
    if pid <= 0 or pid == os.getpid() or not _is_alive(pid, at_s):
        return False
    if _listens_for_others_only(pid, address):
        return False
    try:
        with LocalDirectory() as directory:
            return not directory.has_ended(address)
    except OSError:  # another user may have taken the directory's place: that proves nothing
        return True


def _is_alive(pid: int, at_s: float) -> bool:
    """Return whether a process with that id lives that may have begun before ``at_s``. A later one has the id of one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0] not in "ZX" and _booted_s() + int(fields[19]) / os.sysconf("SC_CLK_TCK") <= at_s + _CLOCK_S
    except (OSError, ValueError, IndexError, StopIteration):
        pass
    try:
        os.kill(pid, 0)  # /proc may hide the processes of other users
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


def _listens_for_others_only(pid: int, address: str) -> bool:
    """Return whether the process listens at sockets of Relight, as the kernel lists them, and not at ``address``.

    False if it is in another network or mount namespace, or cannot be read: the names of its sockets do not compare then.
    """
    try:
        if any(
            os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt")
        ):
            return False
        sockets = set()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                sockets.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except OSError:
        return False
    rows = [line.split(maxsplit=7) for line in lines]
    paths = [row[7] for row in rows if len(row) == 8 and int(row[3], 16) & _LISTENS and f"socket:[{row[6]}]" in sockets]
    names = [match[1] for path in paths if (match := _SOCKET.fullmatch(path))]
    return bool(names) and address not in names


def _booted_s() -> float:
    lines = Path("/proc/stat").read_text(encoding="ascii", errors="replace").splitlines()
    return float(next(line for line in lines if line.startswith("btime ")).split()[1])
