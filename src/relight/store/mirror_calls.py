"""One drive of a mirrored store: its directory, its threads, and how long others wait for it.

A drive that hangs must not stop the others. So each call to a drive runs in a thread of that drive, with memory that no caller reuses.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from relight.comm.new_threads import ThreadPool
from relight.errors import RelightError, StoreUnavailable
from relight.store.buffers import page_buffer
from relight.store.local import LocalStore
from relight.units import duration_text

T = TypeVar("T")
THREADS = 8
"""Calls to one drive at once."""
SLICE_S = 0.25
PROBE_AFTER_S = 0.5
"""Seconds after which a call to one drive is compared with a probe of another: perhaps the whole machine is slow."""
SKEW_S = 0.01
"""A shorter wait is no lag: two calls never end at the same time."""
LAG_SHARE = 0.1
"""Share of the time for which the others may wait for a drive, in addition to the limit."""
RATE_BPS = 1e9
"""Read rate that is assumed of a drive that was not read yet."""
ROOMS = 8
"""Buffers that are kept for the next call."""


class DriveTooSlow(StoreUnavailable):
    """The other drives have waited for this one longer than the limit."""


class Lag:
    """How long others have waited for a drive. Thread-safe.

    In any time T, a drive can make others wait for at most ``limit_s + LAG_SHARE * T`` before it is set aside.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._total, self._at = 0.0, time.monotonic()
        self._lock = threading.Lock()

    def add(self, seconds: float) -> bool:
        """Add a wait. Return whether the drive may still be waited for."""
        with self._lock:
            now = time.monotonic()
            self._total = max(0.0, self._total - (now - self._at) * LAG_SHARE) + seconds
            self._at = now
            return self._total <= self.limit_s


class Drive:
    """One place of a mirrored store. ``threads``: False runs each call in the caller's thread, which then waits without a limit."""

    def __init__(self, number: int, place: LocalStore, limit_s: float, *, threads: bool = True) -> None:
        self.number, self.place, self.lag = number, place, Lag(limit_s)
        self.rate_bps, self.queued = RATE_BPS, 0
        """Measured rate of reads, and bytes of the reads under way."""
        self._threads = threads
        self._pool: tuple[int, ThreadPool] | None = None
        self._lock = threading.Lock()

    def submit(self, work: Callable[..., T], *words: Any) -> Future[T]:
        """Run ``work`` in a thread of this drive."""
        if not self._threads:
            done: Future[T] = Future()
            try:
                done.set_result(work(*words))
            except RelightError as error:
                done.set_exception(error)
            return done
        with self._lock:
            if self._pool is None or self._pool[0] != os.getpid():  # a forked process has none of its parent's threads
                self._pool = os.getpid(), ThreadPool(THREADS, f"relight-drive-{self.number}")
            pool = self._pool[1]
        return pool.submit(work, *words)

    def probe(self) -> None:
        """Do what only a drive that answers can do."""
        self.place.sync("")

    def measured(self, length: int, seconds: float) -> None:
        """Add the rate of a read."""
        if length >= 1 << 16:
            self.rate_bps += 0.3 * (length / max(seconds, 1e-6) - self.rate_bps)


class CallBuffers:
    """Page-aligned buffers that are used again once no thread uses them. Thread-safe."""

    def __init__(self) -> None:
        self._rooms: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """Return a buffer of at least ``size`` bytes."""
        with self._lock:
            for index, room in enumerate(self._rooms):
                if size <= len(room) <= 4 * size + (1 << 20):
                    return self._rooms.pop(index)
        return page_buffer(size)

    def give(self, room: memoryview) -> None:
        """Take a buffer back."""
        with self._lock:
            if len(self._rooms) < ROOMS:
                self._rooms.append(room)


Outcome = dict[int, Any]
"""Result, or ``RelightError``, by number of the drive."""


def run_on(drives: Sequence[Drive], work: Callable[[Drive], T], witnesses: Iterable[Drive] = ()) -> Outcome:
    """Do ``work`` on all of ``drives`` at once. Return each drive's result or ``RelightError``.

    Once one has succeeded, the others' delay counts as their lag. If a single drive takes long, it is compared with a probe of one of the
    ``witnesses``. A drive beyond its limit gets ``DriveTooSlow``; its call continues in its thread.
    """
    began = time.monotonic()
    pending = {drive.submit(work, drive): drive for drive in drives}
    outcome: Outcome = {}
    probes: set[Future[None]] | None = None
    since: float | None = None
    """When another drive had answered."""
    while pending:
        watched: list[Future[Any]] = [*pending, *(probe for probe in probes or () if not probe.done())]
        concurrent.futures.wait(watched, SLICE_S, concurrent.futures.FIRST_COMPLETED)
        now = time.monotonic()
        waited = min(now - since, 2 * SLICE_S) if since is not None else 0.0  # a stopped process counts only once
        for future, drive in list(pending.items()):
            in_time = drive.lag.add(waited) if waited > SKEW_S else True
            if future.done():
                del pending[future]
                error = future.exception()
                if error is not None and not isinstance(error, RelightError):
                    raise error
                outcome[drive.number] = future.result() if error is None else error
                since = now if error is None and since is None else since
            elif not in_time:
                del pending[future]
                what = f"it has kept the other drive waiting for more than {duration_text(drive.lag.limit_s)}"
                outcome[drive.number] = DriveTooSlow(what, where=drive.place.url)
        if since is not None:
            since = now
        elif pending and probes is None and now - began > PROBE_AFTER_S:
            others = [drive for drive in witnesses if drive.number not in {each.number for each in drives}]
            probes = {drive.submit(drive.probe) for drive in others}
        elif probes and any(probe.done() and probe.exception() is None for probe in probes):
            since = now
    return outcome
