"""Default output of events: lines on stderr for an application that has not configured logging. May fail without harm."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from relight.errors import ConfigError
from relight.observe.progress_bar import hide_bar
from relight.units import duration_text, size_text

LEVELS = {
    "quiet": None,
    "warnings": logging.WARNING,
    "default": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
"""Values of ``RELIGHT_LOG``, and the lowest level that each shows; None: nothing."""
SHOWN = frozenset({"restore.done", "restore.fresh", "best.chosen", "save.coalesced"})
"""Events of level info that are shown by default.

The first ``save.durable`` of each start of a run is shown as well.
"""
POSTPONED_S = 60.0
"""Seconds between two lines about postponed saves. A slow disk may postpone a save at each interval."""

_lock = threading.RLock()  # a signal handler may emit while the same thread is in here
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_starts: list[str] = []
"""Runs that this process took charge of, and that have not saved since."""
_postponed_s = -POSTPONED_S
"""When the last line about a postponed save was printed: such lines are limited per process."""
_postponed = 0
"""Saves postponed since that line."""
_in_command = False
"""Whether this process is a command, which prints warnings only."""


def be_command() -> None:
    """Show only warnings from now on: a command of ``relight`` has output of its own."""
    global _in_command
    _in_command = True


def applies(logger: logging.Logger) -> bool:
    """Return whether the application has configured no logging: neither ``logger`` nor a logger above it has a
    handler."""
    return not logger.hasHandlers()


def show(logger: logging.Logger, name: str, level: int, text: str, fields: Mapping[str, Any]) -> None:
    """Write the event's line to stderr if it must be shown. Never raises."""
    try:
        line = _line(logger, name, level, text, fields)
        if line is not None and sys.stderr is not None:
            hide_bar()
            sys.stderr.write(f"relight: {line}\n")
            sys.stderr.flush()
    except (OSError, ValueError, RuntimeError, AttributeError):
        # closed, full, replaced, or entered again by a signal handler
        pass


def _line(logger: logging.Logger, name: str, level: int, text: str, fields: Mapping[str, Any]) -> str | None:
    if not logger.propagate or logging.lastResort is None or not _passes(logger, level, text):
        return None
    from relight.settings.environment import environment  # here, for a fast start of commands

    try:
        chosen: str = environment().log
    except ConfigError:  # an unknown word counts as the default
        chosen = "default"
    lowest = LEVELS[chosen]
    if lowest is None:
        return None
    if logger.level != logging.NOTSET:
        return _one_line(text) if level >= logger.level else None
    if level >= lowest:
        return _one_line(text)
    if chosen == "warnings" or _in_command or level < logging.INFO:  # another rank than 0 demotes its events
        return None
    return _by_default(name, text, fields)


def _by_default(name: str, text: str, fields: Mapping[str, Any]) -> str | None:
    """Return the line of an event of level info, if it is one of the few that are shown by default; else None."""
    global _postponed, _postponed_s
    with _lock:
        if name == "attempt.started":
            _starts.append(f"{str(fields.get('store', '')).rstrip('/')}/{fields.get('run', '')}")
            return None
        if name == "save.durable":
            if not _starts:
                return None
            # with several runs at once, it is not known which one saved
            where = f" in {_starts[0]}" if len(_starts) == 1 else ""
            _starts.clear()
            return _one_line(
                f"first save: step {fields['step']}{where} ({size_text(fields['bytes'])}, {duration_text(fields['seconds'])})"
            )
        if name == "save.coalesced":
            _postponed += 1
            if time.monotonic() - _postponed_s < POSTPONED_S:
                return None
            more = f" ({_postponed} postponed since the last such line)" if _postponed > 1 else ""
            _postponed, _postponed_s = 0, time.monotonic()
            return _one_line(text) + more
    return _one_line(text) if name in SHOWN else None


def _passes(logger: logging.Logger, level: int, text: str) -> bool:
    """Return whether ``logging.disable`` and the logger's own filters let the event through."""
    if logger.disabled or logger.manager.disable >= level:
        return False
    return not logger.filters or bool(logger.filter(logger.makeRecord(logger.name, level, "", 0, text, (), None)))


def _one_line(text: str) -> str:
    """Return the text as one line without control characters."""
    joined = " ".join(part.strip() for part in text.splitlines())
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in joined)
