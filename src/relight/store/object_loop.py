"""An event loop that closes only after no other thread is inside ``call_soon_threadsafe``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")
LEAVE_S = 5.0


class _Loop(asyncio.SelectorEventLoop):
    """Counts the threads inside ``call_soon_threadsafe``."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = [0]

    def call_soon_threadsafe(  # type: ignore[override] # the same, in older words
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        # No thread switch happens between the last decrement and the return: 0 means that no thread is inside.
        self.inside[0] += 1
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        finally:
            self.inside[0] -= 1


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as ``asyncio.run`` does, and wait for the library's threads to leave the loop.

    Those threads deliver results by ``call_soon_threadsafe``, which releases the interpreter's lock. If the process ended during that
    call, the threads would be ended inside foreign code, which aborts the process silently (SIGABRT).
    """
    with asyncio.Runner(loop_factory=_Loop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, _Loop)
        try:
            return runner.run(main)
        finally:
            ends = time.monotonic() + LEAVE_S
            while loop.inside[0] and time.monotonic() < ends:
                time.sleep(0.0002)
