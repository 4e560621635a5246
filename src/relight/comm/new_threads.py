"""Start threads, and do without them if the system refuses: the caller then does the work itself, more slowly.
Reported once a process.

A process at its limit (``ulimit -u``, ``ulimit -v``, a cgroup's ``pids.max``) gets "can't start new thread" from
Python as a ``RuntimeError``. Training must not fail because of it.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from queue import Empty, SimpleQueue
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

from relight.errors import NoMemory
from relight.observe import emit
from relight.observe.thread_start import REFUSED, start_thread

T = TypeVar("T")
_AT_SHUTDOWN = "at interpreter shutdown"
_reported = threading.Event()
_END_S = 10.0
"""Seconds that the end of the process waits for tasks that are not done, at most."""
_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()
"""For the handler at exit, which gets no arguments and ends them."""
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Their threads, for which that handler waits."""


def is_refused(error: BaseException) -> bool:
    """Return whether ``error`` is the system's refusal to start a thread."""
    return isinstance(error, RuntimeError) and REFUSED in str(error)


def start(thread: threading.Thread) -> bool:
    """Start a thread. If the system refuses it, report that and return False: the caller works without the thread."""
    try:
        start_thread(thread)
    except RuntimeError as error:
        if _AT_SHUTDOWN in str(error):
            return False
        if not is_refused(error):
            raise
        report_refused(thread.name)
        return False
    return True


def report_refused(name: str) -> None:
    """Report, once a process, that a thread was refused."""
    if not _reported.is_set():
        _reported.set()
        text = f"the system started no thread for {name}: saves and restores use fewer threads and take longer"
        emit("threads.refused", f"{text}; raise ulimit -u, ulimit -v or the cgroup's pids.max", thread=name)


class ThreadPool:
    """Threads that run tasks. If no thread can be started, the caller runs the task itself. Tasks must not wait for
    each other.

    ``ThreadPoolExecutor`` is unsuitable: ``Thread.start`` may block for ever (``observe.thread_start``), and a thread
    that runs out of memory between two tasks loses the next one.
    """

    def __init__(
        self, size: int, name: str, initializer: Callable[..., object] | None = None, initargs: tuple[Any, ...] = ()
    ) -> None:
        self._size, self._name = size, name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._words = (self._tasks, self._idle, initializer, initargs)
        self._threads: list[threading.Thread] = []
        self._lock, self._closed = threading.Lock(), False
        self._end = weakref.finalize(self, self._tasks.put, None)
        _pools.add(self)

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def submit(self, work: Callable[..., T], /, *words: Any, **named: Any) -> Future[T]:
        """Run ``work`` in a thread, or now if no thread can be started. Its error is the future's in both cases."""
        task = _Task(work, words, named)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the pool {self._name} is shut down")
            if self._idle.acquire(blocking=False):
                self._tasks.put(task)
                return task.future
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if len(self._threads) >= self._size:
                self._tasks.put(task)
                return task.future
            thread = threading.Thread(
                target=_work, args=self._words, name=f"{self._name}_{len(self._threads)}", daemon=True
            )
            if start(thread):
                self._threads.append(thread)
                _threads.add(thread)
                self._tasks.put(task)
                return task.future
        task.run()
        return task.future

    def map(self, work: Callable[[Any], T], values: Iterable[Any]) -> Iterator[T]:
        """Return an iterator over the results of ``work`` for all values, in their order. All are submitted at once."""
        return iter([future.result() for future in [self.submit(work, value) for value in values]])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once all tasks are done. ``cancel_futures``: cancel tasks that have not begun."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                with contextlib.suppress(Empty):
                    while True:
                        task = self._tasks.get_nowait()
                        if task is not None:
                            task.future.cancel()
            self._end()
        for thread in self._threads if wait else ():
            thread.join()


class ThreadTasks:
    """Tasks that may wait for each other: each has its own thread, or is not started. Used by one thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started: list[tuple[threading.Thread, Future[Any]]] = []

    def start(self, work: Callable[[], object]) -> bool:
        """Run ``work`` in a new thread. Return False if the system refuses the thread."""
        task = _Task(work, (), {})
        name = f"{self._name}_{len(self._started)}"
        thread = threading.Thread(target=task.run, name=name, daemon=True)
        if not start(thread):
            return False
        _threads.add(thread)
        self._started.append((thread, task.future))
        return True

    def results(self) -> list[Any]:
        """Return the results, in the order of ``start``. Raise the error of the first task that failed."""
        results = []
        for thread, future in self._started:
            thread.join()
            if not future.done():  # the thread had no memory even for its error: nothing will set a result
                raise NoMemory("a thread ended without a result")
            results.append(future.result())
        return results

    def wait(self) -> None:
        """Wait until all tasks have ended. Their errors are not raised."""
        for thread, _ in self._started:
            thread.join()


class _Task:
    """One call, run once."""

    def __init__(self, work: Callable[..., Any], words: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._call = (work, words, named)
        self.future: Future[Any] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        (work, words, named), self._call = self._call, (None, (), {})  # type: ignore[assignment]
        try:
            result = work(*words, **named)
        except BaseException as error:  # noqa: BLE001 (the caller of result() gets it)
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


def _work(
    tasks: SimpleQueue[_Task | None],
    idle: threading.Semaphore,
    initializer: Callable[..., object] | None,
    initargs: tuple[Any, ...],
) -> None:
    """Run tasks until the pool ends. Holds no reference to the pool, so that a pool without an owner ends."""
    if initializer is not None:
        with contextlib.suppress(Exception):  # a refused priority must not stop the tasks
            initializer(*initargs)
    while True:
        task = tasks.get()
        if task is None:
            tasks.put(None)  # for the next thread
            return
        try:
            task.run()
        except BaseException as error:  # noqa: BLE001 (no memory for the call itself: the waiting caller must get an error)
            with contextlib.suppress(InvalidStateError):
                task.future.set_exception(error)
        task = None
        idle.release()


@atexit.register
def _at_exit() -> None:
    """End all pools' threads: a thread inside a library during interpreter shutdown may crash the process."""
    ends = monotonic() + _END_S
    for pool in list(_pools):
        pool.shutdown(wait=False)
    for thread in list(_threads):
        thread.join(max(0.0, ends - monotonic()))
