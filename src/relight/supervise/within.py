"""Calls with a limit, for calls that may not end, such as those to a store that does not answer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from relight.comm import new_threads
from relight.errors import RelightError

T = TypeVar("T")
LEAST_S = 0.1
"""Seconds that every call has. One that needs no store returns in this time."""


def within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """Return the result of ``call``, or ``otherwise`` if it takes longer than ``seconds``, at least ``LEAST_S``: its thread is then
    abandoned.

    Raise the call's ``RelightError`` or ``OSError``. This thread makes the call if ``seconds`` is infinite, or if the system
    refuses a thread.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except (RelightError, OSError) as error:
            outcome.set_exception(error)

    if math.isinf(seconds) or not new_threads.start(threading.Thread(target=run, name="relight-within", daemon=True)):
        return call()
    try:
        return outcome.result(max(seconds, LEAST_S))
    except TimeoutError:
        return outcome.result() if outcome.done() else otherwise
