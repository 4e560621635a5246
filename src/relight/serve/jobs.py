"""What takes reading: a few at a time, a bounded number waiting, each done once; how far it is can be asked."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from relight.errors import StoreUnavailable

T = TypeVar("T")
KEPT_MAX = 256
WAITING_MAX = 32
Progress = Callable[[int], None]


class Job(Generic[T]):
    """One piece of work: ``key`` names it, ``total`` is how many bytes it will read."""

    def __init__(self, key: str, total: int) -> None:
        self.key, self.total, self.bytes_done = key, total, 0
        self.future: Future[T] = Future()
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        """So many bytes more, from any thread."""
        with self._lock:
            self.bytes_done += count

    @property
    def done(self) -> float:
        """How far it is, 0 to 1."""
        if self.future.done():
            return 1.0
        return min(0.99, self.bytes_done / self.total) if self.total else 0.0

    def result_within(self, seconds: float) -> T | None:
        """What came out, if it is there by then. Its error, if it ended so."""
        try:
            return self.future.result(seconds)
        except TimeoutError:
            if self.future.done():
                raise
            return None


class Jobs:
    """All of them. ``changed`` is called when one has ended."""

    def __init__(self, changed: Callable[[], None] = lambda: None, workers: int = 2) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="relight-serve-job")
        self._known: OrderedDict[str, Job[Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._changed = changed

    def ask(self, key: str, total: int, work: Callable[[Progress], T]) -> Job[T]:
        """The job of that key: begun now, unless it is known. One that failed is begun again. ``StoreUnavailable`` if too many wait."""
        with self._lock:
            known = self._known.get(key)
            if known is not None and not (known.future.done() and known.future.exception() is not None):
                self._known.move_to_end(key)
                return known
            if sum(not one.future.done() for one in self._known.values()) >= WAITING_MAX:
                raise StoreUnavailable(f"{WAITING_MAX} such tasks are waiting already", hint="try again in a minute", retryable=True)
            job: Job[T] = Job(key, total)
            self._known[key] = job
            while len(self._known) > KEPT_MAX:
                oldest = next((name for name, one in self._known.items() if one.future.done()), None)
                if oldest is None:
                    break
                del self._known[oldest]
        running = self._pool.submit(work, job.advance)
        running.add_done_callback(lambda ended: self._ended(job, ended))
        return job

    def _ended(self, job: Job[T], ended: Future[T]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if ended.cancelled() or error is not None:
            job.future.set_exception(error or StoreUnavailable("the server is ending", retryable=True))
        else:
            job.future.set_result(ended.result())
        self._changed()

    def close(self) -> None:
        """Begin nothing more; what runs is waited for no longer than it takes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
