"""The job of a rehearsal: start it, monitor it, make it fail, and check its results."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from relight.catalog.run import Run, list_runs
from relight.drill.orders import DrillOrders
from relight.drill.pace import Limit
from relight.drill.pages import Pages
from relight.drill.processes import arguments_of, descendants, is_below
from relight.drill.target import DrillTarget
from relight.drill.warden import Warden, environment
from relight.errors import RelightError
from relight.heartbeat import Heartbeat
from relight.keys import StoreSecurity
from relight.log import Checkpoint
from relight.reader import verify_checkpoint, verify_log
from relight.store import ByteStore, open_bytes
from relight.supervise.incidents import Incident, incidents_in, read_incidents
from relight.units import duration_text

T = TypeVar("T")
POLL_INTERVAL_S = 0.02
STEPS_BEFORE = 3
"""Steps that an incarnation makes before the rehearsal acts on it."""


class Wrong(Exception):
    """A rehearsal failed; the message has the reason."""


class CannotTry(Exception):
    """A rehearsal cannot be done here; the message has the reason."""


def own_store(path: str | Path) -> ByteStore:
    """Open a store of the drill with the user's settings, but without an anchor: the anchor has the state of the real run's log."""
    return open_bytes(path, guard=StoreSecurity.from_settings(anchor=""))


class DrillJob:
    """A job in a directory of its own. Its processes end with the ``with`` block."""

    def __init__(
        self, target: DrillTarget, folder: Path, store: Path, limit: Limit, prefix: Sequence[str] = ()
    ) -> None:
        """``limit``: deadline of the rehearsal; ``prefix``: command that encloses its processes."""
        folder.mkdir(parents=True, exist_ok=True)
        self.target, self.folder, self.store, self.limit = target, folder, store, limit
        self._started_at = time.monotonic()
        self.orders = DrillOrders(folder / "orders")
        self.warden = Warden(prefix)
        self.outside = Path(f"/proc/{self.warden.pid}/root") if prefix else Path("/")
        """Root directory of the job's mount namespace, as a path of this process."""
        self._log = folder / "log"
        self._pages: Pages | None = None
        self._process = 0
        self._asked: dict[int, int] = {}
        self._enclosed = bool(prefix)

    def __enter__(self) -> DrillJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.warden.close()
        if self._pages is not None:
            self._pages.close()

    # -- its life --------------------------------------------------------------------------------------------------------------

    def start(self, *flags: str, env: Mapping[str, str] | None = None, without: int = -1) -> None:
        """Start the job, or start it again. The built-in job skips the samples of step ``without``."""
        if self._pages is not None:
            self._pages.close()
        variables = {**environment(), **self.target.environment(self.store), **(env or {})}
        cwd = str(self.folder) if self.target.built_in else os.getcwd()
        command = self.target.command(self.folder, self.store, *flags, without=without)
        self._started_at = time.monotonic()
        self._process = self.warden.start(command, env=variables, cwd=cwd, log=self._log)
        self._pages = Pages(self._process)

    @property
    def supervisor(self) -> int:
        """Process id of ``relight run``."""
        return self._process

    @property
    def code(self) -> int | None:
        """Exit code of ``relight run``; None while it runs."""
        return self.warden.ended(self._process)

    def beats(self) -> dict[int, Heartbeat]:
        """Return the newest heartbeat of each rank."""
        return self._pages.beats() if self._pages is not None else {}

    def output(self) -> str:
        """Return all output of the job."""
        with contextlib.suppress(OSError):
            return self._log.read_text(encoding="utf-8", errors="replace")
        return ""

    def agents(self) -> list[int]:
        """Return the agents' process ids."""
        return [pid for pid in descendants(self.warden.pid) if "relight.agent.server" in arguments_of(pid)]

    def send(self, pid: int, number: int) -> None:
        """Send a signal to a living process of the job, and to no other process, whatever a heartbeat page contains."""
        if is_below(pid, self.warden.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # -- waiting ---------------------------------------------------------------------------------------------------------------

    def wait(self, until: Callable[[], T | None], what: str, within_s: float = math.inf, *, over: bool = False) -> T:
        """Call ``until`` until it returns a value that is not None, and return that value.

        Raise ``Wrong`` at a timeout, or if the job ends first and ``over`` is False. Raise ``CannotTry`` if the drill's own deadline
        passed first. ``what`` is the awaited event, for the message.
        """
        began = time.monotonic()
        while True:
            code = self.code  # read first: what the job did before it ended counts
            result = until()
            if result is not None:
                return result
            if code is not None and not over:
                raise Wrong(f"relight run ended with {code} before {what}: {self.last_words()}")
            ends = min(self.limit.ends, began + within_s)
            if time.monotonic() > ends:
                if self.limit.cut_short and ends < began + within_s:
                    raise CannotTry(
                        f"the drill's deadline (--deadline) passed while waiting for: {what}; {self._position_text()}"
                    )
                raise Wrong(f"no {what} within {duration_text(ends - began)}: {self._position_text()}")
            time.sleep(POLL_INTERVAL_S)

    def makes_steps(self) -> None:
        """Record the duration of the start that has just ended. The bounds of all waits are derived from the slowest start."""
        self.limit.pace.started(time.monotonic() - self._started_at)

    def ready(self) -> dict[int, Heartbeat]:
        """Wait until all ranks make steps and a checkpoint is stored. Return the ranks' heartbeats."""

        def ready_beats() -> dict[int, Heartbeat] | None:
            beats = self.beats()
            if not beats or any(beat.steps < STEPS_BEFORE for beat in beats.values()):
                return None
            if all(max(beat.durable, beat.restored) >= 0 for beat in beats.values()):
                return beats
            self.ask_for_a_save()
            return None

        beats = self.wait(ready_beats, "steps after a checkpoint")
        self.makes_steps()
        return beats

    def ask_for_a_save(self) -> None:
        """Ask a script for a save with SIGUSR1, in case it saves rarely. The built-in job saves often enough."""
        if self.target.built_in:
            return
        from relight.supervise.procfs import has_handler

        for beat in self.beats().values():
            if self._asked.get(beat.pid) != beat.steps and has_handler(beat.pid, signal.SIGUSR1):
                self._asked[beat.pid] = beat.steps  # once per step: the process handles it at the step's end
                self.send(beat.pid, signal.SIGUSR1)

    def durable(self) -> int:
        """Return the newest step that all ranks know to be stored."""
        return min((beat.durable for beat in self.beats().values()), default=-1)

    def step(self) -> int:
        """Return the last step that all ranks have finished."""
        return min((beat.step for beat in self.beats().values()), default=-1)

    def saves_again(self, after_step: int, what: str) -> float:
        """Wait until a save of a later step than ``after_step`` is stored. Return that time, on the monotonic clock."""

        def stored_at() -> float | None:
            if self.durable() > after_step:
                return time.monotonic()
            self.ask_for_a_save()
            return None

        return self.wait(stored_at, what)

    def wait_for_recovery(self) -> Incident:
        """Wait until training has continued after the first incident. Return the incident, with its cost."""

        def first_incident() -> Incident | None:
            incidents = self.incidents()
            return incidents[0] if incidents and incidents[0].after is not None else None

        return self.wait(first_incident, "step after the failure")

    def has_ended(self) -> int:
        """Wait until relight run ends by itself. Return its exit code."""
        return self.wait(lambda: self.code, "end of relight run", over=True)

    # -- what there is ---------------------------------------------------------------------------------------------------------

    def incidents(self) -> list[Incident]:
        """Return the incidents that relight run recorded, oldest first."""
        beat = next((beat for beat in self.beats().values() if beat.url), None)
        incidents = incidents_in(self.folder / "incidents")
        if beat is not None:
            with contextlib.suppress(RelightError):
                incidents += read_incidents(own_store(self.seen(beat.url)), beat.run)
        return sorted(incidents, key=lambda incident: incident.id)

    def seen(self, path: str | Path) -> str:
        """Return a path of the job as a path of this process."""
        return str(self.outside / str(path).lstrip("/")) if self._enclosed else str(path)

    def run(self) -> Run:
        """Return the run that the job saves, as found in its store and not as named in its heartbeats."""
        store = own_store(self.seen(self.store))
        names = list_runs(store)
        if len(names) != 1:
            raise Wrong(f"the job's store has {len(names)} runs instead of 1" if names else "the job has saved nothing")
        return Run(store, names[0])

    def checkpoints(self) -> list[Checkpoint]:
        """Return the live checkpoints, oldest first."""
        return self.run().history().live

    def damage(self) -> dict[str, str]:
        """Return the damage that ``relight verify`` finds, by checkpoint id; the key "" is the log."""
        run = self.run()
        view, damage = run.view(), {}
        if wrong := verify_log(run.store, view):
            damage[""] = f"{wrong[0].file}: {wrong[0].detail}"
        for checkpoint in run.history().live:
            if findings := verify_checkpoint(run.store, view, checkpoint):
                damage[checkpoint.id] = f"{findings[0].file}: {findings[0].detail}"
        return damage

    def last_words(self) -> str:
        """Return the last line of relight run's output."""
        lines = [line for line in self.output().splitlines() if line.strip()]
        ours = [
            line.removeprefix("relight: ")
            for line in lines
            if line.startswith("relight: ") and "relight incidents" not in line
        ]
        return (ours or lines or ["it printed nothing"])[-1][:300]

    def _position_text(self) -> str:
        states = [f"rank {rank} {beat.phase}, after step {beat.step}" for rank, beat in self.beats().items()]
        return ", ".join(states[:4]) or self.last_words()
