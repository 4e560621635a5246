"""Checks of what is expected, with a limit on how long it may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 240.0
"""How long a stage waits for what should take seconds, on a machine that may be busy with others."""


class Unexpected(Exception):
    """Something else happened than a stage expected."""


def expect(true: object, what: str) -> None:
    """Print what was expected, or raise ``Unexpected``."""
    if not true:
        raise Unexpected(f"not so: {what}")
    print(f"    as expected: {what}", flush=True)


def wait_until(true: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until it is true. Raise ``Unexpected`` after ``patience_s`` seconds."""
    ends = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > ends:
            raise Unexpected(f"not within {patience_s:.0f} s: {what}")
        time.sleep(0.1)
