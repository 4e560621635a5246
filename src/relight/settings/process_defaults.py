"""Defaults of variables for this process only. Unlike variables, child processes do not inherit them."""

from __future__ import annotations

import os

_usual: dict[str, str] = {}
"""Not in the environment, so that child processes do not inherit them."""


def set_default(variable: str, value: str) -> None:
    """Make ``value`` this process's default for ``variable``, which counts while the variable is not set."""
    _usual[variable] = value


def get(variable: str) -> str:
    """Return the variable's value, else this process's default, else an empty text."""
    return os.environ.get(variable) or _usual.get(variable, "")
