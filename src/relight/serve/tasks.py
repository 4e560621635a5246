"""What takes minutes and has a page of its own: asking a job for a save, drilling a copy. Begun by an action; none outlives the server."""

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
"""Tasks that are kept, lines of each, tasks that run at a time, and of them those of one asker."""
RUNNING, OK, FAILED = "running", "ok", "failed"


@dataclass(eq=False)
class ServerTask:
    """One. ``lines`` is what it has said so far; ``done`` how it ended, None until then. Times are seconds since the epoch."""

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
    """Set when the server ends: what is waited for is given up."""
    which: str = ""
    """The checkpoint's id, if it is about one."""
    asker: str = ""
    """What quotas count it by."""
    tells: Callable[[], None] = lambda: None
    _then: list[Callable[[ActionOutcome], None]] = field(default_factory=list)
    """One of each asker: several may have asked for the same task, and each has an audit entry to end."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def when_over(self, then: Callable[[ActionOutcome], None]) -> None:
        """Call ``then`` once, with how it ended; at once if it has."""
        with self._lock:
            if self.done is None:
                self._then.append(then)
                return
        then(self.done)

    def end(self, done: ActionOutcome, now: float) -> None:
        """It has ended so."""
        with self._lock:
            self.ended, self.done = now, done
            then, self._then = self._then, []
        self.tells()
        failed: list[Exception] = []
        for one in then:
            try:
                one(done)
            except Exception as error:  # noqa: BLE001 (the other askers' entries must end all the same)
                failed.append(error)
        if failed:
            raise failed[0]

    @property
    def state(self) -> str:
        """Of the three."""
        return RUNNING if self.done is None else OK if self.done.ok else FAILED

    def add_line(self, line: str) -> None:
        """A line more, from its own thread; of very many the last ones are kept."""
        self.lines = [*self.lines, line[:500]][-LINES_MAX:]
        self.tells()

    def shown(self, now: float) -> dict[str, object]:
        """For programs, without names of runs that the asker does not reach."""
        return {
            "id": self.id, "verb": self.verb, "store": self.store, "run": self.run, "who": self.who, "state": self.state,
            "began": self.began, "seconds": round((self.ended or now) - self.began, 1), "lines": [masked(one) for one in self.lines],
            "says": masked(self.done.says) if self.done is not None else "",
            "details": masked(self.done.details) if self.done is not None else "",
        }  # fmt: skip


class Tasks:
    """All of them, the latest few hundred. ``changed`` is called with a store and a run whenever a task of it says something new."""

    def __init__(self, changed: Callable[[str, set[str]], None] = lambda store, runs: None, clock: Callable[[], float] = time.time) -> None:
        self._changed, self._clock = changed, clock
        self._pool = ThreadPoolExecutor(RUNNING_MAX, thread_name_prefix="relight-serve-task")
        self._known: OrderedDict[str, ServerTask] = OrderedDict()
        self._lock = threading.Lock()
        self._ending = threading.Event()

    def begin(self, verb: str, store: str, run: str, who: str, work: Callable[[ServerTask], ActionOutcome], which: str = "") -> ServerTask:
        """Begin it now. ``StoreUnavailable`` if as many run already as may. What ``work`` raises of ours is how it ended."""
        task = ServerTask(secrets.token_hex(8), verb, store, run, who, self._clock(), ending=self._ending, which=which, asker=asker())
        task.tells = lambda: self._changed(store, {run})
        with self._lock:
            if sum(one.done is None for one in self._known.values()) >= RUNNING_MAX:
                hint = "try again when one has ended"
                raise StoreUnavailable(f"{RUNNING_MAX} such tasks are under way already", hint=hint, retryable=True)
            if task.asker and sum(one.done is None and one.asker == task.asker for one in self._known.values()) >= OF_ONE_MAX:
                hint = "try again when one has ended"
                raise StoreUnavailable(f"{OF_ONE_MAX} tasks that you began are under way", hint=hint, retryable=True)
            self._known[task.id] = task
            while len(self._known) > KEPT_MAX:
                del self._known[next(name for name, one in self._known.items() if one.done is not None)]
        self._pool.submit(self._work, task, work)
        return task

    def under_way(self, verb: str, store: str, run: str, which: str = "") -> ServerTask | None:
        """One of that kind that has not ended, if there is one."""
        with self._lock:
            found = [one for one in self._known.values() if (one.verb, one.store, one.run, one.which) == (verb, store, run, which)]
        return next((one for one in found if one.done is None), None)

    def get(self, id_: str) -> ServerTask:
        """The task of that name, if whoever is asking may know of its run."""
        with self._lock:
            found = self._known.get(id_)
        if found is None or not reaches(found.store, found.run):
            raise CheckpointNotFound(f"no task {id_[:40]!r}", hint="the latest ones are kept, until the server is started anew")
        return found

    def all(self) -> Sequence[ServerTask]:
        """Those that whoever is asking may know of, the newest first."""
        with self._lock:
            known = list(self._known.values())
        return [one for one in reversed(known) if reaches(one.store, one.run)]

    def close(self) -> None:
        """Have all that run give up; they are waited for a few seconds."""
        self._ending.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        ends = time.monotonic() + 5.0
        while time.monotonic() < ends and any(one.done is None for one in list(self._known.values())):
            time.sleep(0.05)

    def _work(self, task: ServerTask, work: Callable[[ServerTask], ActionOutcome]) -> None:
        done = ActionOutcome(False, "it broke off: a fault of the server's own, which its output tells")
        try:
            done = work(task)
        except RelightError as error:
            done = ActionOutcome(False, error.what, str(error))
        finally:
            task.end(done, self._clock())
