"""Trying again: for reads, which change nothing, and whatever else may be done twice."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from relight.errors import RelightError, StoreUnavailable
from relight.observe import emit

T = TypeVar("T")


class RetryPauses(Protocol):
    """What there is to know: see ``Patience``."""

    @property
    def deadline_s(self) -> float:
        """No try begins later."""

    @property
    def pause_s(self) -> float:
        """The first pause."""

    @property
    def pause_max_s(self) -> float:
        """The longest."""


def retry(patience: RetryPauses, call: Callable[[], T]) -> T:
    """What ``call`` gives; called again after what may pass, until the deadline. The last error is the one that is raised."""
    ends = time.monotonic() + patience.deadline_s
    pause = patience.pause_s
    while True:
        try:
            return call()
        except StoreUnavailable as error:
            if not error.retryable or time.monotonic() + pause > ends:
                raise
        sleep(pause)
        pause = min(2 * pause, patience.pause_max_s)


class FirstContact(NamedTuple):
    """Patience at the first contact with a store, before any step is lost: one failing call must not end a job."""

    deadline_s: float = 3.0
    pause_s: float = 0.1
    pause_max_s: float = 1.0


def first_contact(call: Callable[[], T], patience: FirstContact | None = None) -> T:
    """Return what ``call`` gives; repeat it for a few seconds while the store fails. ``call`` must be safe to repeat.

    The first failure is reported as an event. The last one is raised.
    """
    reported: list[bool] = []

    def watched() -> T:
        try:
            return call()
        except StoreUnavailable as error:
            if not reported and error.retryable:
                reported.append(True)
                emit("store.retried", f"the store failed at the first contact, and is tried again: {error}", kind=error.kind)
            raise

    return retry(patience or FirstContact(), watched)


def sleep(pause_s: float) -> None:
    """Wait about that long: who were turned away together do not come back together."""
    time.sleep(pause_s * (0.5 + random.random()))


def decode_with_reread(get: Callable[[], bytes], decode: Callable[[bytes], T], where: str, believed: int = 2) -> T:
    """What ``decode`` makes of what ``get`` reads. What is no good is read again: what was damaged on its way is whole the next time.

    ``believed``: how many times the same bytes must have come for their damage to be where they lie; ``decode``'s error is then raised.
    ``StoreUnavailable`` if they come otherwise each time.
    """
    came: Counter[bytes] = Counter()
    for _ in range(2 * believed):
        data = get()
        try:
            value = decode(data)
        except RelightError as error:
            came[data] += 1
            if came[data] == believed:
                raise
            last = error
            continue
        if came:
            report_reread(where)
        return value
    raise StoreUnavailable(f"it comes otherwise each time it is read: {last.what}", where=where) from last


def report_reread(where: str) -> None:
    """Say that bytes came damaged and were whole when read once more."""
    emit("read.retried", f"{where} came damaged, and whole when read once more: memory, a cable or a server may be failing", where=where)
