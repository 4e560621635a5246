"""Worker processes of data loaders while the job ends: they ignore signals to their parent's process group, and end with their parent.

The workers share one page of memory with the trainer. It holds whether a Checkpointer handles signals, when the trainer was asked to end,
and which children the trainer itself terminates. A worker reads the page when a signal comes.

The handlers are Python's, not ``SIG_IGN``: an ignored signal survives ``exec``, and a program that a worker starts could not be ended.
A blocked signal survives ``exec`` as well. A handler does not.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import popen_fork
from pathlib import Path
from types import FrameType
from typing import Any

from relight.torch_private.loaders import WORKER_LOOPS, after_worker_handlers, report_unprotected_workers

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a job."""
EVIDENCE_S = 0.5
"""Seconds within which the parent of a signalled child must have been asked to end, too."""
HOLD_S = 30.0
"""Maximum seconds that a child waits for its parent to end."""
_EXIT_S = 3.0
"""Seconds that a worker has to end at the trainer's exit before it is killed."""
_COMM = "pt_data_worker"
"""The name that torch gives its worker processes."""
_LIVE, _ASKED, _NEXT, _WANTED, _FIELDS = 0, 1, 2, 8, mmap.PAGESIZE // 8


class WorkerPage:
    """Memory that a trainer shares with its workers. Written by the trainer only."""

    def __init__(self, owner: int, fd: int, memory: mmap.mmap) -> None:
        self.owner, self.fd = owner, fd
        self._fields = memoryview(memory).cast("q")

    @classmethod
    def made(cls) -> WorkerPage:
        """Return a new page of this process. ``OSError`` if no descriptor or memory is left."""
        fd = os.memfd_create("relight-workers", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls(os.getpid(), fd, mmap.mmap(fd, mmap.PAGESIZE))

    @classmethod
    def from_descriptor(cls, owner: int, fd: int) -> WorkerPage:
        """Return the page of process ``owner``, for a worker that was not forked. ``OSError`` if the owner has ended."""
        with open(f"/proc/{owner}/fd/{fd}", "r+b") as file:
            return cls(owner, -1, mmap.mmap(file.fileno(), mmap.PAGESIZE))

    def count(self, change: int) -> None:
        """Change the number of Checkpointers that handle signals by ``change``."""
        self._fields[_LIVE] = max(0, self._fields[_LIVE] + change)

    def ask(self) -> None:
        """Record that the trainer was asked to end."""
        self._fields[_ASKED] = time.monotonic_ns()

    def want(self, pid: int) -> None:
        """Record that the trainer itself terminates child ``pid``."""
        index = self._fields[_NEXT]
        self._fields[_WANTED + index % (_FIELDS - _WANTED)] = pid
        self._fields[_NEXT] = index + 1

    @property
    def holds(self) -> bool:
        """Whether this child must survive a signal: its parent lives, handles signals, and has not ended the child itself."""
        if not self._fields[_LIVE] or os.getppid() != self.owner:
            return False
        return not self.wants(os.getpid())

    @property
    def terminated(self) -> int:
        """How many children the trainer has terminated so far."""
        return self._fields[_NEXT]

    def wants(self, pid: int) -> bool:
        """Return whether the trainer itself terminated that child. An entry from before its start is an earlier child's with its number."""
        size, after = _FIELDS - _WANTED, self.terminated
        return any(
            self._fields[_WANTED + i % size] == pid for i in range(max(_terminated_at_fork, after - size), after)
        )

    def asked_since(self, since_s: float) -> bool:
        """Return whether the trainer was asked to end after that time of the monotonic clock."""
        return bool(self._fields[_ASKED] > since_s * 1e9)


class Loop:
    """A loader's worker function that installs handlers first. Picklable, for workers that are spawned."""

    def __init__(self, original: Callable[..., Any], module: str, name: str) -> None:
        self.original, self._module, self._name = original, module, name

    def __reduce__(self) -> tuple[Any, ...]:
        page = _page if _page is not None and _page.owner == os.getpid() else None
        return _loop_of, (self._module, self._name, *((page.owner, page.fd) if page is not None else (0, -1)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the worker, its handlers installed after those of torch."""
        after_worker_handlers(_be_worker)
        return self.original(*args, **kwargs)


def _loop_of(module: str, name: str, owner: int, fd: int) -> Callable[..., Any]:
    """Return the worker function in a spawned process."""
    global _page
    function = getattr(importlib.import_module(module), name)
    loop = function if isinstance(function, Loop) else Loop(function, module, name)
    if owner and _page is None:
        with contextlib.suppress(OSError):
            _page = WorkerPage.from_descriptor(owner, fd)
    return loop


def protect() -> None:
    """Protect the workers that loaders of this process start from now on. Idempotent; does nothing where no memory is left."""
    global _page
    if _page is None or _page.owner != os.getpid():
        with contextlib.suppress(OSError):
            _page = WorkerPage.made()
    report_unprotected_workers()
    for module, name in WORKER_LOOPS:
        function = getattr(sys.modules.get(module), name, None)
        if function is not None and not isinstance(function, Loop):
            setattr(sys.modules[module], name, Loop(function, module, name))
    if popen_fork.Popen._send_signal.__module__ != __name__:  # type: ignore[attr-defined]
        _note_terminations()


def handled(signals: object) -> Callable[[], object]:
    """Count ``signals`` as handling signals until the returned function is called, or until it is deleted."""
    page = _own()
    if page is None:
        return lambda: None
    page.count(1)
    return weakref.finalize(signals, _count_down, page)


def asked() -> None:
    """Record for the workers that this process was asked to end."""
    page = _own()
    if page is not None:
        page.ask()


def is_terminated() -> bool:
    """Return whether this process is a child that the trainer has terminated."""
    return _page is not None and _page.owner == os.getppid() and _page.wants(os.getpid())


def in_forked_child(number: int) -> None:
    """Act on a signal in a child that the trainer forked. SIGINT is left to the parent. SIGTERM and SIGHUP end the child: after the parent,
    if the parent was asked to end as well."""
    global _holding
    if number not in (signal.SIGTERM, signal.SIGHUP):
        return
    page = _page
    if page is None or not page.holds or _holding == "over":
        _end(number)
    elif _holding != "held":
        _holding = "held"
        try:
            threading.Thread(target=_hold, args=(page, number), name="relight-hold", daemon=True).start()
        except RuntimeError:  # the system starts no thread
            _end(number)


# -- inside


def _own() -> WorkerPage | None:
    return _page if _page is not None and _page.owner == os.getpid() else None


def _count_down(page: WorkerPage) -> None:
    if page.owner == os.getpid():
        page.count(-1)


def _be_worker() -> None:
    """Install the handlers of a loader's worker."""
    if _page is None or _page.owner == os.getpid():
        return
    for number in ENDING:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # not the main thread: this worker is a thread
                signal.signal(number, _on_worker)


def _on_worker(number: int, frame: FrameType | None) -> None:
    """Ignore the signal while the trainer handles signals; else do what torch's worker does."""
    if _page is not None and _page.holds:
        return
    if number == signal.SIGINT:
        signal.default_int_handler(number, frame)
    elif number == signal.SIGTERM and _page is not None and _page.wants(os.getpid()):
        os._exit(0)  # as torch does: another exit code would make the trainer report a failed worker
    else:
        _end(number)


def _hold(page: WorkerPage, number: int) -> None:
    """Wait until the parent has ended, or is known not to end; then end this process."""
    global _holding
    began = time.monotonic()
    while page.holds and (waited := time.monotonic() - began) < HOLD_S:
        if waited > EVIDENCE_S and not page.asked_since(began - EVIDENCE_S):
            break  # the signal was for this process alone
        time.sleep(0.05)
    _holding = "over"
    os.kill(os.getpid(), number)


def _end(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _note_terminations() -> None:
    """Make ``Process.terminate`` record the child in the page first: a worker cannot see which process sent a signal."""
    send = popen_fork.Popen._send_signal  # type: ignore[attr-defined]

    def noting(self: Any, number: int) -> None:
        if number == signal.SIGTERM and self.returncode is None and (page := _own()) is not None:
            page.want(self.pid)
        send(self, number)

    popen_fork.Popen._send_signal = noting  # type: ignore[attr-defined]


def _before_fork() -> None:
    global _terminated_at_fork
    if (page := _own()) is not None:
        _terminated_at_fork = page.terminated


def _at_exit() -> None:
    """Kill workers that do not end. ``multiprocessing`` would wait for them without limit: a handler does not run inside a C call."""
    if _own() is None:
        return
    workers = [child for child in multiprocessing.active_children() if child.daemon and _is_worker(child.pid)]
    for worker in workers:
        worker.terminate()
    ends = time.monotonic() + _EXIT_S
    for worker in workers:
        worker.join(max(0.0, ends - time.monotonic()))
        if worker.is_alive():
            worker.kill()


def _is_worker(pid: int | None) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith(_COMM)
    return False


_page: WorkerPage | None = None
"""The page of this process; in a child, the parent's page."""
_terminated_at_fork = 0
"""How many children the trainer had terminated when it forked this one."""
_holding = ""
"""In a forked child: ``held`` while it waits for its parent's end, ``over`` after that."""
os.register_at_fork(before=_before_fork)
atexit.register(_at_exit)  # after multiprocessing's own, which therefore runs later
