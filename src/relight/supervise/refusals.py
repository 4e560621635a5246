"""The system's refusals of descriptors, memory, threads and processes to ``relight run``.

A refusal is the machine's state, not a fault in code: the job ends with the reason, and the limit to raise.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from relight.errors import ConfigError, RelightError, is_no_memory

_LIMITS = (
    ((errno.EMFILE, errno.ENFILE), ("Too many open files",), "ulimit -n"),
    (
        (errno.EAGAIN,),
        ("can't start new thread", "Resource temporarily unavailable"),
        "ulimit -u, ulimit -v or the cgroup's pids.max",
    ),
    ((errno.ENOMEM,), (), "ulimit -v or the cgroup's memory"),
)
"""Error numbers, parts of a ``RuntimeError``'s message, and the limit to raise."""
_FIXED, _EACH_RANK = 13, 2
"""Descriptors that the rendezvous, the ranks' store and the pipes need, and those of each rank. Measured: with fewer, torch waits five
minutes for a connection to itself."""


def limit_of(error: BaseException) -> str:
    """Return the limit to raise if ``error`` is a refusal of the system; empty if it is another error."""
    if isinstance(error, RelightError):
        return ""
    for numbers, words, limit in _LIMITS:
        if isinstance(error, OSError) and error.errno in numbers:
            return limit
        if isinstance(error, RuntimeError) and any(word in str(error) for word in words):
            return limit
    return _LIMITS[-1][2] if is_no_memory(error) else ""


def shown_refusal(error: BaseException, limit: str, program: str = "relight run") -> str:
    """Return a refusal as a sentence, with the limit to raise."""
    words = str(error).splitlines()[0][:200] if str(error) else ""
    return f"the system refused {program} what it needs: {type(error).__name__}{': ' if words else ''}{words}; raise {limit}"


def check_descriptors(ranks: int) -> None:
    """Raise ``ConfigError`` if this process may not open the descriptors that it needs for ``ranks``.

    The soft limit is raised to the hard one first, where that is needed. Without the check, torch would try to connect to its own store for
    five minutes.
    """
    needed = _FIXED + _EACH_RANK * ranks
    if _can_open(needed):
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if not _can_open(needed):
        what = f"{needed} descriptors are needed for {'1 rank' if ranks == 1 else f'{ranks} ranks'}, and the system allows fewer"
        raise ConfigError(f"relight run cannot start: {what} (ulimit -n is {soft})", hint="raise ulimit -n")


def _can_open(count: int) -> bool:
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True
