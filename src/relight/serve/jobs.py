"""Jobs that read data for pages: a few at a time, divided fairly among callers, each done once. A job without clients is cancelled."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from relight.errors import StoreUnavailable
from relight.serve.scope import ANONYMOUS, asker
from relight.units import duration_text

T = TypeVar("T")
KEPT_MAX, ROWS_KEPT_MAX = 256, 400_000
"""Number of cached results, and of rows in all of them together (about 200 MB)."""
WAITING_MAX, OF_ONE_MAX, OF_ANONYMOUS_MAX = 32, 4, 8
"""Unfinished jobs: of all callers, of one caller, and of all clients without credentials together."""
QUICK_MAX, QUICK_OF_ONE_MAX = 64, 8
ABANDONED_S = 60.0
"""Seconds since the last request for a job after which it is cancelled: its clients have left."""
PROGRESS_S = 5.0
"""Seconds between notifications that jobs advance. Pages that wait for a job then load again."""
Progress = Callable[[int], None]


class PooledJob(Generic[T]):
    """One job. ``key`` identifies it, ``total`` is the number of bytes that it will read. ``quick``: it reads metadata only."""

    def __init__(
        self, key: str, total: int, quick: bool = False, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        self.key, self.total, self.bytes_done = key, total, 0
        self.quick, self.asker, self.asked_at, self.rows = quick, asker(), time.monotonic(), 1
        self.future: Future[T] = Future()
        self._lock, self._on_progress = threading.Lock(), on_progress

    @property
    def is_anonymous(self) -> bool:
        """Whether a client without credentials started it."""
        return self.asker.startswith(ANONYMOUS)

    @property
    def is_abandoned(self) -> bool:
        """Whether its clients have left."""
        return time.monotonic() - self.asked_at > ABANDONED_S

    def advance(self, count: int) -> None:
        """Count bytes that were read. Any thread may call it. Raise ``StoreUnavailable`` if the job is abandoned, which ends it."""
        with self._lock:
            self.bytes_done += count
        self._on_progress()
        if self.is_abandoned:
            raise clients_left()

    @property
    def done(self) -> float:
        """Progress, 0 to 1."""
        if self.future.done():
            return 1.0
        return min(0.99, self.bytes_done / self.total) if self.total else 0.0

    def result_within(self, seconds: float) -> T | None:
        """Return the result, or None if the job has not ended after ``seconds``. Raise the job's error if it failed."""
        try:
            return self.future.result(seconds)
        except TimeoutError:
            if self.future.done():
                raise
            return None


class Jobs:
    """Queue and workers of all jobs. ``changed`` is called after a job ended, ``progressed`` every ``PROGRESS_S`` while jobs advance.

    Jobs that read metadata have separate workers, so that long reads do not delay pages. Clients without credentials never occupy
    the last worker for long reads. A free worker takes a job of the caller with the fewest running jobs.
    """

    def __init__(
        self,
        changed: Callable[[], None] = lambda: None,
        workers: int = 2,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self._workers = workers
        self._pool = ThreadPoolExecutor(2 * workers, thread_name_prefix="relight-serve-job")
        self._known: OrderedDict[str, PooledJob[Any]] = OrderedDict()
        self._pending: list[tuple[PooledJob[Any], Callable[[Progress], Any], Callable[[Any], int]]] = []
        self._running: list[PooledJob[Any]] = []
        self._lock = threading.Lock()
        self._changed, self._progressed, self._noticed_at = changed, progressed, 0.0
        self._ending = False

    def ask(
        self,
        key: str,
        total: int,
        work: Callable[[Progress], T],
        *,
        quick: bool = False,
        rows: Callable[[T], int] = lambda _: 1,
    ) -> PooledJob[T]:
        """Return the job with that key. Start it if it is unknown or has failed. ``rows`` counts the rows of its result.

        Raise ``StoreUnavailable`` if too many jobs wait, of all callers or of this one.
        """
        with self._lock:
            known = self._known.get(key)
            if known is not None and not (known.future.done() and known.future.exception() is not None):
                self._known.move_to_end(key)
                known.asked_at = time.monotonic()
                return known
            self._drop_abandoned()
            self._check_quota(quick)
            job: PooledJob[T] = PooledJob(key, total, quick, self._notify_clients)
            self._known[key] = job
            self._known.move_to_end(key)
            self._pending.append((job, work, rows))
            self._forget()
            self._start()
        return job

    def _check_quota(self, quick: bool) -> None:
        open_jobs = [job for job in self._known.values() if job.quick == quick and not job.future.done()]
        own_jobs = sum(job.asker == asker() for job in open_jobs)
        strangers = sum(job.is_anonymous for job in open_jobs)
        most, of_one = (QUICK_MAX, QUICK_OF_ONE_MAX) if quick else (WAITING_MAX, OF_ONE_MAX)
        if len(open_jobs) >= most:
            raise StoreUnavailable(
                f"{most} such tasks are waiting already", hint="try again in a minute", retryable=True
            )
        if asker() and own_jobs >= of_one:
            raise StoreUnavailable(
                f"{of_one} tasks that you asked for are unfinished", hint="try again when one has ended", retryable=True
            )
        if asker().startswith(ANONYMOUS) and strangers >= most * OF_ANONYMOUS_MAX // WAITING_MAX:
            raise StoreUnavailable(
                "too many clients without a token wait", hint="log in, or try again in a minute", retryable=True
            )

    def _drop_abandoned(self) -> None:
        """End pending jobs that no client waits for any more."""
        abandoned = [entry for entry in self._pending if entry[0].is_abandoned]
        self._pending = [entry for entry in self._pending if not entry[0].is_abandoned]
        for job, _, _ in abandoned:
            job.future.set_exception(clients_left())

    def _forget(self) -> None:
        """Drop the oldest results until at most ``KEPT_MAX`` with ``ROWS_KEPT_MAX`` rows are left."""
        rows = sum(job.rows for job in self._known.values())
        for key, job in list(self._known.items())[:-1]:
            if len(self._known) <= KEPT_MAX and rows <= ROWS_KEPT_MAX:
                break
            if job.future.done():
                rows -= job.rows
                del self._known[key]

    def _start(self) -> None:
        """Give free workers their next jobs."""
        for quick in (True, False):
            while not self._ending and (chosen := self._next(quick)) is not None:
                self._pending.remove(chosen)
                self._running.append(chosen[0])
                self._pool.submit(self._work, *chosen)

    def _next(self, quick: bool) -> tuple[PooledJob[Any], Callable[[Progress], Any], Callable[[Any], int]] | None:
        running = [job for job in self._running if job.quick == quick]
        if len(running) >= self._workers:
            return None
        strangers_may = self._workers == 1 or sum(entry.is_anonymous for entry in running) < self._workers - 1
        waiting = [
            entry for entry in self._pending if entry[0].quick == quick and (strangers_may or not entry[0].is_anonymous)
        ]
        busy = Counter(entry.asker for entry in running)
        return min(waiting, key=lambda entry: (busy[entry[0].asker], entry[0].is_anonymous), default=None)

    def _work(self, job: PooledJob[Any], work: Callable[[Progress], Any], rows: Callable[[Any], int]) -> None:
        try:
            if job.is_abandoned:
                raise clients_left()
            result = work(job.advance)
            job.rows = rows(result)
        except BaseException as error:  # noqa: BLE001 (raised to the job's clients)
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
        with self._lock:
            self._running.remove(job)
            self._forget()
            self._start()
        self._changed()

    def _notify_clients(self) -> None:
        now = time.monotonic()
        if now - self._noticed_at > PROGRESS_S:
            self._noticed_at = now
            self._progressed()

    def close(self) -> None:
        """Fail pending jobs, and return without waiting for running ones."""
        with self._lock:
            self._ending, pending, self._pending = True, self._pending, []
        for job, _, _ in pending:
            job.future.set_exception(StoreUnavailable("the server is ending", retryable=True))
        self._pool.shutdown(wait=False, cancel_futures=True)


def clients_left() -> StoreUnavailable:
    """Return the error of a job that was cancelled because its clients left."""
    return StoreUnavailable(
        f"cancelled: no client asked for the result within {duration_text(ABANDONED_S)}",
        hint="ask again",
        retryable=True,
    )
