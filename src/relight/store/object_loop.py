"""An event loop that is left only when no other thread is still telling it something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")
LEFT_AFTER_S = 5.0


class _Loop(asyncio.SelectorEventLoop):
    """Counts who is within ``call_soon_threadsafe``."""

    def __init__(self) -> None:
        super().__init__()
        self.telling = [0]

    def call_soon_threadsafe(  # type: ignore[override] # the same, in older words
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        # No interpreter gives way to another thread between the last count and the return: whoever sees 0 knows that it is over.
        self.telling[0] += 1
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        finally:
            self.telling[0] -= 1


def run(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``. The library's own threads tell the loop of a result, by a call that gives up the interpreter's lock on its way; a
    process that ends just then would have them ended in the midst of foreign code, which aborts (SIGABRT, silently)."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, _Loop)
        try:
            return runner.run(main)
        finally:
            ends = time.monotonic() + LEFT_AFTER_S
            while loop.telling[0] and time.monotonic() < ends:
                time.sleep(0.0002)
