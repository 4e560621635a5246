"""Run migration tasks in local processes or on Ray."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from relight.comm.children import safe_spawn
from relight.errors import ConfigError, StoreUnavailable
from relight.migrate.work import MigrationTask, work

ENGINES = ("local", "ray")
Outcome = tuple[MigrationTask, dict[str, Any]]
_PR_SET_PDEATHSIG = 1


def outcomes(engine: str, jobs: int, tasks: Sequence[MigrationTask]) -> Iterator[Outcome]:
    """Yield the tasks' results as they finish.

    Tasks begin in order, at most ``jobs`` at the same time: a task may wait for earlier tasks, so all of these must have begun.
    """
    if engine not in ENGINES:
        raise ConfigError(f"no engine {engine!r}", hint=f"one of {', '.join(ENGINES)}")
    if not tasks:
        return
    yield from (_local if engine == "local" else _ray)(jobs, tasks)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, as no process would receive its result. (prctl(2))"""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _local(jobs: int, tasks: Sequence[MigrationTask]) -> Iterator[Outcome]:
    context = multiprocessing.get_context("spawn")
    with safe_spawn():
        made = ProcessPoolExecutor(jobs, mp_context=context, initializer=die_with_parent, initargs=(os.getpid(),))
    with made as pool:
        waiting = deque(tasks)
        running: dict[Future[dict[str, Any]], MigrationTask] = {}
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    task = waiting.popleft()
                    with safe_spawn():  # the first submit starts all processes
                        running[pool.submit(work, task)] = task
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        except BrokenProcessPool as error:
            raise StoreUnavailable(
                "a converting process was killed",
                hint="out of memory? repeat the command, with fewer --jobs: it continues",
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _ray(jobs: int, tasks: Sequence[MigrationTask]) -> Iterator[Outcome]:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "--engine ray needs Ray", hint="pip install 'ray>=2.40', on the cluster's nodes as here"
        ) from error
    mine = not ray.is_initialized()
    if mine:
        ray.init(
            address=os.environ.get("RAY_ADDRESS") or "local",
            log_to_driver=False,
            include_dashboard=False,
            logging_level="error",
        )
    try:
        jobs = max(1, min(jobs, int(ray.cluster_resources().get("CPU", 1))))
        remote: Callable[..., Any] = ray.remote(num_cpus=1, max_retries=0)(work).remote
        waiting, running = deque(tasks), dict[Any, MigrationTask]()
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.popleft()
                running[remote(task)] = task
            (done,), _ = ray.wait(list(running), num_returns=1)
            task = running.pop(done)
            try:
                yield task, ray.get(done)
            except ray.exceptions.RayError as error:
                raise StoreUnavailable(
                    f"Ray lost the process that converted {task.source}: {str(error).splitlines()[0][:200]}",
                    hint="repeat the command: it continues",
                ) from error
    finally:
        if mine:
            ray.shutdown()
