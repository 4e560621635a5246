"""Pause Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection in the block, while it builds a large structure that stays alive.

    The number of new objects would trigger the collector again and again. It would visit every object of the program each time, and take
    as long as the building itself. Do not run code inside that creates much garbage in cycles.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
