"""Retries with backoff and jitter, for reads and other idempotent operations."""

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
    """Deadline and pauses of retries: see ``RetryTimes``."""

    @property
    def deadline_s(self) -> float:
        """Seconds after which no try begins."""

    @property
    def pause_s(self) -> float:
        """First pause in seconds."""

    @property
    def pause_max_s(self) -> float:
        """Longest pause in seconds."""


def retry(patience: RetryPauses, call: Callable[[], T]) -> T:
    """Return ``call()``. Repeat it after retryable errors until the deadline, then raise the last error."""
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
    """Retry times at the first contact with a store, before any step could be lost: one failed call must not end a job."""

    deadline_s: float = 3.0
    pause_s: float = 0.1
    pause_max_s: float = 1.0


def first_contact(call: Callable[[], T], patience: FirstContact | None = None) -> T:
    """Return ``call()``. Repeat it for a few seconds while the store fails. ``call`` must be idempotent.

    The first failure is reported as an event. The last one is raised.
    """
    reported: list[bool] = []

    def watched() -> T:
        try:
            return call()
        except StoreUnavailable as error:
            if not reported and error.retryable:
                reported.append(True)
                emit(
                    "store.retried",
                    f"the first contact with the store failed, and is retried: {error}",
                    kind=error.kind,
                )
            raise

    return retry(patience or FirstContact(), watched)


def sleep(pause_s: float) -> None:
    """Wait ``pause_s`` ± 50% (jitter), so that processes that failed together do not retry together."""
    time.sleep(pause_s * (0.5 + random.random()))


def decode_with_reread(get: Callable[[], bytes], decode: Callable[[bytes], T], where: str, believed: int = 2) -> T:
    """Return ``decode(get())``. If decoding fails, read again: data that was damaged in transit is good at the next read.

    ``believed``: identical reads after which the damage counts as stored. ``decode``'s error is then raised.
    Raise ``StoreUnavailable`` if the reads keep differing.
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
    raise StoreUnavailable(f"each read returns other bytes: {last.what}", where=where) from last


def report_reread(where: str) -> None:
    """Emit ``read.retried``: a read returned damaged bytes, and a second read returned good ones."""
    emit(
        "read.retried",
        f"{where} was damaged on the first read, and intact on the second: memory, a cable or a server may be failing",
        where=where,
    )
