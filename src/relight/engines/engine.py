"""Run tasks of one function, wherever the engine runs them, and run the task of a lost process again."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from relight.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    from relight.engines.backends import Processes, Ray

ENGINES = ("local", "processes", "ray")
TRIES = 5
"""Processes that one task may lose. A task that needs too much memory loses every one."""
ALONE_FROM = 2
"""Lost processes from which a task runs alone: a lost process ends others with it, and their tasks must not count as the cause."""
T = TypeVar("T")
R = TypeVar("R")


class Engine:
    """Where tasks run: ``local``, in this process, one after the other; ``processes``, in processes of this machine; or ``ray``.

    A context manager: its end ends the processes. ``jobs``: largest number of tasks at once; None: the cores of this process, or of the
    Ray cluster. Processes start with the first task. Raise ``ConfigError`` for an unknown engine, or if Ray is not installed.
    """

    def __init__(self, name: str = "local", jobs: int | None = None) -> None:
        if name not in ENGINES:
            raise ConfigError(f"no engine {name!r}", hint=f"one of {', '.join(ENGINES)}")
        self.name = name
        self._backend: Processes | Ray | None = None
        self.jobs = 1
        if name == "local":  # most commands: they need not import what starts processes
            return
        from relight.engines.backends import Processes, Ray

        if name == "processes":
            self.jobs = jobs or max(1, len(os.sched_getaffinity(0)))
            self._backend = Processes(self.jobs)
        else:
            self._backend = Ray()
            self.jobs = min(jobs or self._backend.cpus, self._backend.cpus)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._backend is not None:
            self._backend.close()

    @property
    def is_local(self) -> bool:
        """Whether tasks run in this process."""
        return self._backend is None

    def run(
        self, function: Callable[[T], R], tasks: Iterable[T], *, tries: int = TRIES
    ) -> Generator[tuple[T, R], None, None]:
        """Yield each task with its result, as they finish. ``tasks`` is read as processes become free.

        Raise what a task raises; running tasks then end unheard. Raise ``StoreUnavailable`` if a task has lost ``tries`` processes.
        """
        backend = self._backend
        if backend is None:
            for task in tasks:
                yield task, function(task)
            return
        from relight.engines.backends import Lost

        left, again = iter(tasks), deque[tuple[T, int]]()
        running: dict[Any, tuple[T, int]] = {}
        while True:
            while len(running) < self.jobs and not any(lost >= ALONE_FROM for _, lost in running.values()):
                if again:
                    if again[0][1] >= ALONE_FROM and running:
                        break
                    item = again.popleft()
                else:
                    try:
                        item = next(left), 0
                    except StopIteration:
                        break
                running[backend.submit(function, item[0])] = item
            if not running:
                return
            for handle in backend.wait(list(running)):
                task, lost = running.pop(handle)
                try:
                    result = backend.result(handle)
                except Lost as error:
                    if lost + 1 >= tries:
                        raise StoreUnavailable(
                            f"a task lost its process {'' if tries == 1 else f'{tries} times'}".rstrip() + f": {error}",
                            hint="repeat the command, which continues the work; if memory was short, with fewer --jobs",
                        ) from error
                    again.append((task, lost + 1))
                    continue
                yield task, result


IN_PROCESS = Engine()
"""The engine that runs every task in this process. It has no state."""
