"""What counts in this process alone, where no variable says otherwise. What it starts hears nothing of it, other than of a variable."""

from __future__ import annotations

import os

_usual: dict[str, str] = {}


def set_default(variable: str, value: str) -> None:
    """From now on ``variable`` is taken to say ``value`` here, unless it is set."""
    _usual[variable] = value


def get(variable: str) -> str:
    """What the variable says; what is usual here; or nothing."""
    return os.environ.get(variable) or _usual.get(variable, "")
