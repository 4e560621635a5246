"""Python's garbage collector, told to wait."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection inside. For building large structures that all stay: the collector, woken by their number, would go through all
    of them, and all of the program's, again and again, and took as long as the building. Nothing that makes garbage of its own belongs
    inside for long: reading does not."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
