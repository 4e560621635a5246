"""Submit calls to processes: of this machine, or of a Ray cluster."""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TextIO

from relight.comm.children import safe_spawn
from relight.errors import ConfigError, RelightError

_PR_SET_PDEATHSIG = 1


class Lost(Exception):
    """The process that ran a call has ended without a result."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, as no process would receive its result. (prctl(2))"""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Processes:
    """Processes of this machine. If one is lost, all are replaced: their pool ends with it."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, function: Callable[[Any], Any], task: Any) -> Future[Any]:
        """Begin a call."""
        with safe_spawn():  # the first call to a pool starts its processes
            if self._pool is not None:
                try:
                    return self._pool.submit(function, task)
                except BrokenProcessPool:
                    self.close()
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self._jobs, mp_context=context, initializer=die_with_parent, initargs=(os.getpid(),)
            )
            return self._pool.submit(function, task)

    def wait(self, calls: Collection[Future[Any]]) -> Collection[Future[Any]]:
        """Return the calls that have ended, at least one."""
        return wait(calls, return_when=FIRST_COMPLETED).done

    def result(self, call: Future[Any]) -> Any:
        """Return an ended call's result, or raise what it raised; ``Lost`` if its process was lost."""
        try:
            return call.result()
        except BrokenProcessPool as error:
            raise Lost("a process of this machine was killed") from error

    def close(self) -> None:
        """End the processes after their present calls."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


class _OwnOutput(io.TextIOBase):
    """``stream`` without what Ray's threads print: Ray prints warnings to stdout, where a program expects JSON. They go to stderr."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """See ``io.TextIOBase``."""
        of_ray = threading.current_thread().name.startswith("ray_")
        return (sys.stderr if of_ray else self.stream).write(text)

    def flush(self) -> None:
        """See ``io.IOBase``."""
        self.stream.flush()

    def isatty(self) -> bool:
        """See ``io.IOBase``."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """See ``io.IOBase``."""
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """See ``io.TextIOBase``."""
        return self.stream.encoding


class Ray:
    """Processes of the cluster at ``RAY_ADDRESS``; without it, of a Ray that is started here and ends with ``close``."""

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                "--engine ray needs Ray", hint="pip install 'ray>=2.40', on the cluster's nodes as here"
            ) from error
        self._ray, self._mine = ray, not ray.is_initialized()
        self._stdout = sys.stdout
        sys.stdout = _OwnOutput(self._stdout)
        if self._mine:
            ray.init(
                address=os.environ.get("RAY_ADDRESS") or "local",
                log_to_driver=False,
                include_dashboard=False,
                logging_level="error",
            )
        self.cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._remote: dict[Callable[[Any], Any], Any] = {}

    def submit(self, function: Callable[[Any], Any], task: Any) -> Any:
        """Begin a call."""
        if function not in self._remote:
            self._remote[function] = self._ray.remote(num_cpus=1, max_retries=0)(function)
        return self._remote[function].remote(task)

    def wait(self, calls: Collection[Any]) -> Collection[Any]:
        """Return the calls that have ended, at least one."""
        ended, _ = self._ray.wait(list(calls), num_returns=1)
        return list(ended)

    def result(self, call: Any) -> Any:
        """Return an ended call's result, or raise what it raised; ``Lost`` if its process or node was lost."""
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RelightError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayError as error:
            raise Lost(str(error).splitlines()[0][:200]) from error

    def close(self) -> None:
        """End the Ray that was started here."""
        if self._mine:
            with contextlib.redirect_stdout(sys.stderr):  # it prints what it has held back of its messages
                self._ray.shutdown()
        sys.stdout = self._stdout
