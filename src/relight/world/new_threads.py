"""Threads that the system may refuse: the work is then done by the thread that asked for them, more slowly. Reported once a process.

A process at its limit (``ulimit -u``, ``ulimit -v``, a cgroup's ``pids.max``) gets "can't start new thread" from Python as a
``RuntimeError``. Training must not end by it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from relight.observe import emit

T = TypeVar("T")
_REFUSED = "can't start new thread"
_reported = threading.Event()


def is_refused(error: BaseException) -> bool:
    """Whether ``error`` is the system's refusal to start a thread."""
    return isinstance(error, RuntimeError) and _REFUSED in str(error)


def start(thread: threading.Thread) -> bool:
    """Start a thread. False, reported, if the system refuses it: the caller does without."""
    try:
        thread.start()
    except RuntimeError as error:
        if not is_refused(error):
            raise
        report(thread.name)
        return False
    return True


def report(name: str) -> None:
    """Report, once a process, that a thread was refused."""
    if not _reported.is_set():
        _reported.set()
        text = f"the system started no thread for {name}: saves and restores use fewer threads and take longer"
        emit("threads.refused", f"{text}; raise ulimit -u, ulimit -v or the cgroup's pids.max", thread=name)


class ThreadPool:
    """A ``ThreadPoolExecutor`` whose caller does the work itself where no thread can be started. Tasks must not wait for each other."""

    def __init__(self, size: int, name: str, initializer: Callable[..., object] | None = None, initargs: tuple[Any, ...] = ()) -> None:
        self._name = name
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=name, initializer=initializer, initargs=initargs)

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    def submit(self, work: Callable[..., T], /, *words: Any, **named: Any) -> Future[T]:
        """Have ``work`` done. Done when this returns if no thread could be started; its error is the future's in any case."""
        task = _Task(work, words, named)
        try:
            self._threads.submit(task.run)
        except RuntimeError as error:
            if is_refused(error):
                report(self._name)
            elif "interpreter shutdown" not in str(error):
                raise
            task.run()  # a thread that the pool has may have taken it from the queue meanwhile
        return task.future

    def map(self, work: Callable[[Any], T], values: Iterable[Any]) -> Iterator[T]:
        """Results of ``work`` for all values, in their order. All are begun at once."""
        return iter([future.result() for future in [self.submit(work, value) for value in values]])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads. See ``ThreadPoolExecutor``."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)


class _Task:
    """One call, made once: by a thread of the pool, or by the caller."""

    def __init__(self, work: Callable[..., Any], words: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._call, self._free = (work, words, named), threading.Lock()
        self.future: Future[Any] = Future()

    def run(self) -> None:
        if not self._free.acquire(blocking=False) or not self.future.set_running_or_notify_cancel():
            return
        (work, words, named), self._call = self._call, (None, (), {})  # type: ignore[assignment]
        try:
            result = work(*words, **named)
        except BaseException as error:  # noqa: BLE001 (who asks for the result gets it)
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
