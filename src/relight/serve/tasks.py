"""Tasks: actions that take minutes and have their own page, such as a requested save or a drill of a copy.

An action starts a task. A task ends with the server at the latest.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from relight.errors import CheckpointNotFound, RelightError, StoreUnavailable
from relight.serve.pages_actions import ActionOutcome
from relight.serve.scope import asker, masked, reaches

KEPT_MAX, LINES_MAX, RUNNING_MAX, OF_ONE_MAX = 200, 100, 8, 3
"""Maximum numbers: of kept tasks, of lines of a task, of running tasks, and of running tasks of one caller."""
RUNNING, OK, FAILED = "running", "ok", "failed"


@dataclass(eq=False)
class ServerTask:
    """One task. ``lines``: its last lines of output. ``state``: ``running``, ``ok`` or ``failed``. Times are seconds since 1970.

    The last two fields of the API have its outcome. They are empty while it runs.
    """

    id: str
    verb: str
    store: str
    run: str
    who: str
    began: float
    lines: list[str] = field(default_factory=list)
    done: ActionOutcome | None = None
    ended: float | None = None
    ending: threading.Event = field(default_factory=threading.Event)
    """Set when the server ends: the task must then stop waiting."""
    which: str = ""
    """Id of the checkpoint that the task is about; empty for none."""
    asker: str = ""
    """Quota key of the caller that started it."""
    on_change: Callable[[], None] = lambda: None
    _then: list[Callable[[ActionOutcome], None]] = field(default_factory=list)
    """One callback for each caller: several may have asked for the same task, and each has an audit entry to end."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def when_over(self, then: Callable[[ActionOutcome], None]) -> None:
        """Call ``then`` once with the outcome: when the task ends, or at once if it has ended."""
        with self._lock:
            if self.done is None:
                self._then.append(then)
                return
        then(self.done)

    def end(self, done: ActionOutcome, now: float) -> None:
        """Set the outcome and call all callbacks of ``when_over``. Raise the first error of a callback, after all were called."""
        with self._lock:
            self.ended, self.done = now, done
            callbacks, self._then = self._then, []
        self.on_change()
        failed: list[Exception] = []
        for callback in callbacks:
            try:
                callback(done)
            except Exception as error:  # noqa: BLE001 (the audit entries of the other callers must end, too)
                failed.append(error)
        if failed:
            raise failed[0]

    @property
    def state(self) -> str:
        """``running``, ``ok`` or ``failed``."""
        return RUNNING if self.done is None else OK if self.done.ok else FAILED

    def add_line(self, line: str) -> None:
        """Add a line of output, from the task's own thread. The last ``LINES_MAX`` lines are kept."""
        self.lines = [*self.lines, line[:500]][-LINES_MAX:]
        self.on_change()

    def shown(self, now: float) -> dict[str, object]:
        """Return the task as plain values, without names of runs outside the caller's scope."""
        return {
            "id": self.id, "verb": self.verb, "store": self.store, "run": self.run, "who": self.who, "state": self.state,
            "began": self.began, "seconds": round((self.ended or now) - self.began, 1), "lines": [masked(line) for line in self.lines],
            "says": masked(self.done.says) if self.done is not None else "",
            "details": masked(self.done.details) if self.done is not None else "",
        }  # fmt: skip


class Tasks:
    """The latest tasks. ``changed`` is called with a store and a run when a task of that run has new output or has ended."""

    def __init__(
        self,
        changed: Callable[[str, set[str]], None] = lambda store, runs: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._changed, self._clock = changed, clock
        self._pool = ThreadPoolExecutor(RUNNING_MAX, thread_name_prefix="relight-serve-task")
        self._known: OrderedDict[str, ServerTask] = OrderedDict()
        self._lock = threading.Lock()
        self._ending = threading.Event()

    def begin(
        self, verb: str, store: str, run: str, who: str, work: Callable[[ServerTask], ActionOutcome], which: str = ""
    ) -> ServerTask:
        """Start a task in its own thread. A ``RelightError`` of ``work`` becomes the task's outcome.

        Raise ``StoreUnavailable`` if too many tasks run, of all callers or of this one.
        """
        task = ServerTask(
            secrets.token_hex(8), verb, store, run, who, self._clock(), ending=self._ending, which=which, asker=asker()
        )
        task.on_change = lambda: self._changed(store, {run})
        with self._lock:
            if sum(each.done is None for each in self._known.values()) >= RUNNING_MAX:
                hint = "try again when one has ended"
                raise StoreUnavailable(f"{RUNNING_MAX} tasks are already running", hint=hint, retryable=True)
            if (
                task.asker
                and sum(each.done is None and each.asker == task.asker for each in self._known.values()) >= OF_ONE_MAX
            ):
                hint = "try again when one has ended"
                raise StoreUnavailable(f"{OF_ONE_MAX} tasks that you started are running", hint=hint, retryable=True)
            self._known[task.id] = task
            while len(self._known) > KEPT_MAX:
                del self._known[next(name for name, known_task in self._known.items() if known_task.done is not None)]
        self._pool.submit(self._work, task, work)
        return task

    def under_way(self, verb: str, store: str, run: str, which: str = "") -> ServerTask | None:
        """Return the running task of that kind on that run and checkpoint; None if there is none."""
        with self._lock:
            matching = [
                task
                for task in self._known.values()
                if (task.verb, task.store, task.run, task.which) == (verb, store, run, which)
            ]
        return next((task for task in matching if task.done is None), None)

    def get(self, id_: str) -> ServerTask:
        """Return the task with this id. Raise ``CheckpointNotFound`` if it is unknown, or the caller may not see its run."""
        with self._lock:
            task = self._known.get(id_)
        if task is None or not reaches(task.store, task.run):
            raise CheckpointNotFound(
                f"no task {id_[:40]!r}", hint="only the latest tasks are kept, until the server restarts"
            )
        return task

    def all(self) -> Sequence[ServerTask]:
        """Return the tasks of runs that the caller may see, newest first."""
        with self._lock:
            tasks = list(self._known.values())
        return [task for task in reversed(tasks) if reaches(task.store, task.run)]

    def close(self) -> None:
        """Ask all running tasks to stop, and wait up to 5 s for them."""
        self._ending.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        ends = time.monotonic() + 5.0
        while time.monotonic() < ends and any(task.done is None for task in list(self._known.values())):
            time.sleep(0.05)

    def _work(self, task: ServerTask, work: Callable[[ServerTask], ActionOutcome]) -> None:
        done = ActionOutcome(False, "internal error: see the server's output")
        try:
            done = work(task)
        except RelightError as error:
            done = ActionOutcome(False, error.what, str(error))
        finally:
            task.end(done, self._clock())
