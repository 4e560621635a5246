"""Simulated processes that run one at a time: threads that pass a baton, in an order drawn from a seed.

They run the product's unchanged code. A process passes the baton when it calls the store or ``sleep``. Nothing waits
in real time, and nothing depends on the machine. After a process has died, every call of it raises ``Died``, so that
its ``except`` and ``finally`` blocks have no effect.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from relight.format.names import LOG_DIR
from relight.testing.simulated_store import FAULTS, Died
from relight.units import duration_text

STEPS_MAX = 20_000
"""Steps after which a schedule counts as endless: more than any schedule needs."""
MOMENT_S = 0.001


class Action(NamedTuple):
    """One line of a trace."""

    at: float
    who: str
    operation: str
    key: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.at:9.3f}  {self.who:10} {self.operation:12} {self.key}{'  -- ' + self.note if self.note else ''}"


class Weather(NamedTuple):
    """Parameters of a schedule, drawn from its seed: how often it switches processes, and which faults happen."""

    sticky: float
    """Probability that the same process continues."""
    slow: float
    """Probability that a call, or a sleep, takes long."""
    pause: float
    death: float
    rates: dict[tuple[str, str], float]
    """Probability of each ``(operation, fault)``."""
    budget: int
    """Largest number of faults."""
    deaths: int
    unread: bool
    """Whether records of the log may be unreadable for a moment."""
    ranked: bool
    """Whether the first process of a random order runs as long as it can. The order changes now and then."""

    @classmethod
    def draw(cls, rng: random.Random, kinds: frozenset[str]) -> Weather:
        """Draw the parameters, with faults of ``kinds`` only."""
        calm = rng.random() < 0.2
        every = [(operation, kind) for operation, faults in FAULTS.items() for kind in faults if kind in kinds]
        if calm or not every:
            rates = {}
        elif rng.random() < 0.4:  # a few faults that are frequent
            often = [*every, *(pair for pair in every if pair[0] == "put_once")]
            rates = {rng.choice(often): rng.choice((0.1, 0.3, 0.6)) for _ in range(rng.randrange(1, 5))}
        else:
            likely = {kind: rng.choice((0.004, 0.02, 0.1)) for kind in sorted(kinds) if rng.random() < 0.5}
            rates = {pair: likely[pair[1]] for pair in every if pair[1] in likely}
        return cls(
            sticky=rng.choice((0.0, 0.5, 0.8, 0.95)),
            slow=rng.choice((0.0, 0.02, 0.1)),
            pause=rng.choice((0.0, 0.002, 0.01)) if "pause" in kinds else 0.0,
            death=0.0 if calm or "death" not in kinds else rng.choice((0.0, 0.002, 0.01)),
            rates=rates,
            budget=rng.choice((1, 2, 4, 8, 16)),
            deaths=rng.choice((1, 1, 2, 4)),
            unread="unread" in kinds,
            ranked=rng.random() < 0.3,
        )


class Actor:
    """One process: a name, a program, a clock of its own."""

    def __init__(self, stage: ScheduleStage, name: str, program: Callable[[Actor], None], wake: float) -> None:
        rng = stage.rng
        self.stage, self.name, self.program = stage, name, program
        self.wake = wake
        self.dead = False
        self.epoch: int | None = None
        self.struck = 0
        """Faults of its calls so far."""
        self.doubts = 0
        """Appends of log records that failed with ``Uncertain``."""
        self.rank_of_all = rng.random()
        self._rate, self._offset = rng.choice((0.5, 0.9, 1.0, 1.0, 1.1, 2.0)), rng.uniform(-1e6, 1e6)
        self.step: Callable[[str, str], None] = functools.partial(stage.step, self)
        """Let other processes run."""
        self.worker = stage.crew.hire(self)

    def clock(self) -> float:
        """Return its own time, which has its own rate and offset."""
        return self.stage.now * self._rate + self._offset

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds`` or longer in simulated time."""
        stage = self.stage
        more = stage.rng.choice((0.0, 0.05, 0.3, 0.7)) + (
            stage.rng.uniform(0, 5) if stage.rng.random() < stage.weather.slow else 0
        )
        self.wake = stage.now + seconds / self._rate + more
        stage.step(self, "sleep", "")

    def takes(self, operation: str, key: str, moments: int) -> None:
        """Let other processes run for about ``moments`` steps."""
        stage = self.stage
        self.wake = max(self.wake, stage.now + moments * MOMENT_S)
        stage.step(self, operation, key)

    def fault(self, operation: str, key: str) -> str:
        """Return the fault of an operation, or an empty string."""
        stage = self.stage
        if not stage.budget or not stage.tables[operation]:
            return ""
        if operation == "get" and f"/{LOG_DIR}/" in key and not stage.weather.unread:
            return ""
        kind = stage.fault(self, operation)
        if kind in ("unsure", "unsure_done", "late") and f"/{LOG_DIR}/" in key:
            self.doubts += 1
        return kind


class ScheduleStage:
    """The processes, and which of them runs."""

    def __init__(self, rng: random.Random, weather: Weather, crew: Crew) -> None:
        self.rng, self.weather, self.crew = rng, weather, crew
        self.now = 0.0
        self.actors = 0
        """Number of processes so far."""
        self.trace: list[tuple[float, str, str, str, str]] = []
        """Each an ``Action``."""
        self.faults: Counter[str] = Counter()
        self.budget = weather.budget
        """Faults that may still happen."""
        self.problems: list[str] = []
        self.steps = 0
        self.under_way: Sequence[object] = ()
        self.after_step: Callable[[], None] | None = None
        """Called at each step while anything is ``under_way``."""
        self.ends_at = STEPS_MAX + 1
        """Step at which all processes die."""
        self.over = False
        self._waiting: list[Actor] = []
        self._main = threading.Lock()
        self._main.acquire()
        self.tables: dict[str, list[tuple[float, str]]] = {}
        """Faults of each operation with their cumulated probabilities."""
        for operation, kinds in FAULTS.items():
            total, table = 0.0, []
            for kind in kinds:
                if (operation, kind) in weather.rates:
                    total += weather.rates[operation, kind]
                    table.append((total, kind))
            self.tables[operation] = table

    def add(self, name: str, program: Callable[[Actor], None], delay_s: float = 0.0) -> Actor:
        """Add a process that starts ``delay_s`` seconds from now."""
        actor = Actor(self, name, program, self.now + delay_s)
        self.actors += 1
        self._waiting.append(actor)
        return actor

    def run(self) -> None:
        """Run until all processes have ended or died."""
        first = self._next(None)
        if first is not None:
            first.worker.lock.release()
            self._main.acquire()

    def step(self, actor: Actor, operation: str, key: str) -> None:
        """Choose the process that runs next. ``actor`` calls this before each operation."""
        if actor.dead or self.over:
            actor.dead = True
            raise Died
        weather, draw = self.weather, self.rng.random
        self.steps += 1
        self.now += MOMENT_S
        if weather.slow and operation != "sleep" and draw() < weather.slow:
            actor.wake = self.now + self.rng.choice((0.01, 0.3, 2.0)) * draw()
        if weather.pause and draw() < weather.pause:
            actor.wake = self.now + self.rng.uniform(0.5, 15.0)
            self.note(actor, "paused", "", f"until {actor.wake:.3f}")
        if self.under_way and self.after_step is not None:
            self.after_step()
        if self.steps >= self.ends_at:
            self.over = True
            if self.steps > STEPS_MAX:
                self.problems.append(
                    f"(8) {actor.name} has not ended after {self.steps} steps and {duration_text(self.now)}"
                )
        elif actor.wake > self.now or draw() >= weather.sticky:
            chosen = self._next(actor)
            if chosen is not actor and chosen is not None:
                chosen.worker.lock.release()
                actor.worker.lock.acquire()
        if self.over:
            actor.dead = True
            raise Died
        if weather.death and draw() < weather.death and weather.deaths > self.faults["death"]:
            self.faults["death"] += 1
            actor.dead = True
            self.note(actor, operation, key, "dies instead")
            raise Died
        self.trace.append((self.now, actor.name, operation, key, ""))

    def fault(self, actor: Actor, operation: str) -> str:
        """Draw a fault."""
        table = self.tables[operation]
        drawn = self.rng.random()
        if drawn >= table[-1][0]:
            return ""
        kind = next(kind for limit, kind in table if drawn < limit)
        self.budget -= 1
        self.faults[f"{operation} {kind}"] += 1
        actor.struck += 1
        self.trace[-1] = (*self.trace[-1][:4], kind)
        return kind

    def note(self, actor: Actor | None, operation: str, key: str, note: str = "") -> None:
        """Add a line to the trace that is not an operation."""
        self.trace.append((self.now, actor.name if actor else "", operation, key, note))

    def ended(self, actor: Actor) -> None:
        """Pass the baton on after ``actor`` has ended or died."""
        self._waiting.remove(actor)
        chosen = self._next(None)
        if chosen is None:
            self._main.release()
        else:
            chosen.worker.lock.release()

    def _next(self, actor: Actor | None) -> Actor | None:
        waiting = self._waiting
        if not waiting:
            return None
        if self.over:
            return waiting[0] if actor is None else actor
        now = self.now
        able = [waiter for waiter in waiting if waiter.wake <= now]
        if not able:
            self.now = now = min([waiter.wake for waiter in waiting])
            able = [waiter for waiter in waiting if waiter.wake <= now]
        if len(able) == 1:
            return able[0]
        if self.weather.ranked:
            if self.rng.random() < 0.03:
                self.rng.choice(able).rank_of_all = self.rng.random()
            return min(able, key=_rank_of_all)
        return able[int(self.rng.random() * len(able))]


def _rank_of_all(actor: Actor) -> float:
    return actor.rank_of_all


class Crew:
    """Threads that run one process after the other. A new thread costs more than a reused one."""

    def __init__(self) -> None:
        self._free: list[_Worker] = []

    def hire(self, actor: Actor) -> _Worker:
        """Return a thread for ``actor``. It waits for the baton."""
        worker = self._free.pop() if self._free else _Worker(self)
        worker.actor = actor
        return worker

    def free(self, worker: _Worker) -> None:
        """Return a thread to the free ones after its process has ended."""
        self._free.append(worker)

    def dismiss(self) -> None:
        """End the threads."""
        for worker in self._free:
            worker.actor = None
            worker.lock.release()
            worker.thread.join()
        self._free.clear()


class _Worker:
    def __init__(self, crew: Crew) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.actor: Actor | None = None
        self._crew = crew
        self.thread = threading.Thread(target=self._loop, name="relight-simulated", daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        while True:
            self.lock.acquire()
            actor = self.actor
            if actor is None:
                return
            stage = actor.stage
            try:
                if stage.over or actor.dead:
                    raise Died
                actor.program(actor)
            except Died:
                pass
            except BaseException as error:
                stage.problems.append(f"(0) {actor.name} fails: {type(error).__name__}: {error}")
            del actor.program
            self._crew.free(self)
            stage.ended(actor)
            actor = None
