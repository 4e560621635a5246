"""Check step numbers and names of checkpoints where callers pass them in. May import: ``errors``."""

from __future__ import annotations

import operator
from typing import Any

from relight.errors import ConfigError, shown
from relight.format.names import STEP_MAX


def step_of(value: Any, what: str = "step") -> int:
    """Return a step as an int: from an int, a NumPy integer, a 0-d integer tensor, or anything else with ``__index__``.

    Reading a tensor on an accelerator waits for its device at every call, so count in an int there. Raise ``ConfigError`` for everything
    else: a step that is not a whole number would fail later, during a save, or sort wrongly in the run.
    """
    number = value if type(value) is int else _index_of(value)
    if number is None:
        raise ConfigError(
            f"{what} must be a whole number from 0 up, not {shown(value)}", where=what, hint=_way_out(value, what)
        )
    if not 0 <= number <= STEP_MAX:
        shown_number = number if abs(number) <= 10 * STEP_MAX else f"a number of {number.bit_length()} bits"
        hint = (
            f"{what}s count from 0"
            if number < 0
            else f"a {what} is at most {STEP_MAX}: pass a count, and not a time or a hash"
        )
        raise ConfigError(
            f"{what} must be a whole number from 0 to {STEP_MAX}, not {shown_number}", where=what, hint=hint
        )
    return number


def which_of(which: Any) -> str | int:
    """Return the checkpoint that a caller names: a text (``latest``, ``best``, a tag, an id), or a step's number."""
    if isinstance(which, str) and which:
        return which
    number = None if isinstance(which, str) else _index_of(which)
    if number is None:
        hint = "leave it out, or pass 'latest', for the newest; 'best', a tag, a step or an id for that one"
        raise ConfigError(f"{shown(which)} names no checkpoint", where="which", hint=hint)
    if number < 0:
        raise ConfigError(
            f"{number} names no checkpoint", where="which", hint="'latest' is the newest; steps count from 0"
        )
    if number > STEP_MAX:  # Python shows no number of thousands of digits
        raise ConfigError(
            f"a number of {number.bit_length()} bits names no checkpoint", where="which", hint=f"steps go to {STEP_MAX}"
        )
    return number


def _index_of(value: Any) -> int | None:
    """Return ``operator.index(value)``; None if it has none. None also for a bool: passing one as a number is a mistake."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        return None


def _way_out(value: Any, what: str) -> str:
    if value is None or isinstance(value, bool):
        return f"pass the number of the {what} that ended, counting from 0"
    if isinstance(value, (str, bytes, float)):
        return f"pass int({what})"
    shape = getattr(value, "shape", ())
    return (
        f"pass one number: int({what}[…])"
        if isinstance(shape, tuple) and len(shape)
        else f"pass int({what}), or count in an int"
    )
