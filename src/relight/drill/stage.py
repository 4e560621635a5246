"""A job that a rehearsal breaks: started, watched, acted upon, looked at when it is over."""

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

from relight.catalog import verify_checkpoint, verify_log
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
from relight.store import ByteStore, open_bytes
from relight.supervise.incidents import Incident, incidents_in, read_incidents

T = TypeVar("T")
LOOK_S = 0.02
STEPS_BEFORE = 3
"""A life has made so many steps before something is done to it."""


class Wrong(Exception):
    """A rehearsal did not go as it should, and why."""


class CannotTry(Exception):
    """A rehearsal can't be done here, and why."""


def own_store(path: str | Path) -> ByteStore:
    """One of the drill's: opened as the settings say, but how far its log goes is not to stand where that of the real one does."""
    return open_bytes(path, guard=StoreSecurity.from_settings(anchor=""))


class DrillJob:
    """One, in a directory of its own. What it starts ends with the ``with`` block."""

    def __init__(self, target: DrillTarget, folder: Path, store: Path, limit: Limit, prefix: Sequence[str] = ()) -> None:
        """``limit``: until when it may take; ``prefix``: what its processes are enclosed by."""
        folder.mkdir(parents=True, exist_ok=True)
        self.target, self.folder, self.store, self.limit = target, folder, store, limit
        self._started_at = time.monotonic()
        self.orders = DrillOrders(folder / "orders")
        self.warden = Warden(prefix)
        self.outside = Path(f"/proc/{self.warden.pid}/root") if prefix else Path("/")
        """Where the files that it sees are seen from here."""
        self._log = folder / "log"
        self._pages: Pages | None = None
        self._process = 0
        self._asked: dict[int, int] = {}
        self._enclosed = bool(prefix)

    def __enter__(self) -> DrillJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.warden.close()
        if self._pages is not None:
            self._pages.close()

    # -- its life --------------------------------------------------------------------------------------------------------------

    def start(self, *flags: str, env: Mapping[str, str] | None = None, without: int = -1) -> None:
        """For the first time, or again; the built-in job leaves out the samples of step ``without``."""
        if self._pages is not None:
            self._pages.close()
        told = {**environment(), **self.target.environment(self.store), **(env or {})}
        cwd = str(self.folder) if self.target.built_in else os.getcwd()
        command = self.target.command(self.folder, self.store, *flags, without=without)
        self._started_at = time.monotonic()
        self._process = self.warden.start(command, env=told, cwd=cwd, log=self._log)
        self._pages = Pages(self._process)

    @property
    def supervisor(self) -> int:
        """``relight run``'s process."""
        return self._process

    @property
    def code(self) -> int | None:
        """How ``relight run`` ended; None: it runs."""
        return self.warden.ended(self._process)

    def beats(self) -> dict[int, Heartbeat]:
        """What its ranks said last."""
        return self._pages.beats() if self._pages is not None else {}

    def said(self) -> str:
        """All that it has printed."""
        with contextlib.suppress(OSError):
            return self._log.read_text(encoding="utf-8", errors="replace")
        return ""

    def agents(self) -> list[int]:
        """The processes that write its saves."""
        return [pid for pid in descendants(self.warden.pid) if "relight.agent.server" in arguments_of(pid)]

    def send(self, pid: int, number: int) -> None:
        """A signal to a process of the job's; to no other, whatever a page says, and to none that has ended."""
        if is_below(pid, self.warden.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # -- waiting ---------------------------------------------------------------------------------------------------------------

    def wait(self, until: Callable[[], T | None], what: str, within_s: float = math.inf, *, over: bool = False) -> T:
        """Until it gives something that is not None. ``Wrong`` if time is up, or the job ends first, unless it may be ``over``.

        ``CannotTry`` if the drill's own end came first.
        """
        began = time.monotonic()
        while True:
            code = self.code  # looked at first: what it did before it ended counts
            found = until()
            if found is not None:
                return found
            if code is not None and not over:
                raise Wrong(f"relight run ended with {code} before {what}: {self.last_words()}")
            ends = min(self.limit.ends, began + within_s)
            if time.monotonic() > ends:
                if self.limit.cut_short and ends < began + within_s:
                    raise CannotTry(f"the drill's time was over (--deadline) before there was a {what}: {self._at()}")
                raise Wrong(f"no {what} within {ends - began:.0f} s: {self._at()}")
            time.sleep(LOOK_S)

    def makes_steps(self) -> None:
        """Take note of how long the start took that just ended: the bounds of all waits follow the slowest."""
        self.limit.pace.started(time.monotonic() - self._started_at)

    def ready(self) -> dict[int, Heartbeat]:
        """All ranks make steps, and there is a checkpoint to go back to: what they say then."""

        def look() -> dict[int, Heartbeat] | None:
            beats = self.beats()
            if not beats or any(beat.steps < STEPS_BEFORE for beat in beats.values()):
                return None
            if all(max(beat.durable, beat.restored) >= 0 for beat in beats.values()):
                return beats
            self.ask_for_a_save()
            return None

        beats = self.wait(look, "steps with a checkpoint behind them")
        self.makes_steps()
        return beats

    def ask_for_a_save(self) -> None:
        """Of a script that saves seldom, by the signal that it has for that; the built-in job saves by itself."""
        if self.target.built_in:
            return
        from relight.supervise.procfs import catches

        for beat in self.beats().values():
            if self._asked.get(beat.pid) != beat.steps and catches(beat.pid, signal.SIGUSR1):
                self._asked[beat.pid] = beat.steps  # once a step: it is heard of at its end
                self.send(beat.pid, signal.SIGUSR1)

    def durable(self) -> int:
        """The newest step that all ranks know to be stored."""
        return min((beat.durable for beat in self.beats().values()), default=-1)

    def step(self) -> int:
        """The last step that all ranks have ended."""
        return min((beat.step for beat in self.beats().values()), default=-1)

    def saves_again(self, behind: int, what: str) -> float:
        """A save of a later step is stored: when that was seen."""

        def look() -> float | None:
            if self.durable() > behind:
                return time.monotonic()
            self.ask_for_a_save()
            return None

        return self.wait(look, what)

    def over_it(self) -> Incident:
        """The first incident has been gone on from: it, with what it cost."""

        def look() -> Incident | None:
            found = self.incidents()
            return found[0] if found and found[0].after is not None else None

        return self.wait(look, "step behind the failure")

    def has_ended(self) -> int:
        """It ends by itself: with what."""
        return self.wait(lambda: self.code, "end of relight run", over=True)

    # -- what there is ---------------------------------------------------------------------------------------------------------

    def incidents(self) -> list[Incident]:
        """What relight run has written down, oldest first."""
        beat = next((one for one in self.beats().values() if one.url), None)
        found = incidents_in(self.folder / "incidents")
        if beat is not None:
            with contextlib.suppress(RelightError):
                found += read_incidents(own_store(self.seen(beat.url)), beat.run)
        return sorted(found, key=lambda one: one.id)

    def seen(self, path: str | Path) -> str:
        """A path of the job's, as it is from here."""
        return str(self.outside / str(path).lstrip("/")) if self._enclosed else str(path)

    def run(self) -> Run:
        """The one that it saves: from its store, not from what it says."""
        store = own_store(self.seen(self.store))
        names = list_runs(store)
        if len(names) != 1:
            raise Wrong(f"its store has {len(names)} runs, and not one" if names else "it has saved nothing")
        return Run(store, names[0])

    def checkpoints(self) -> list[Checkpoint]:
        """Those there are, oldest first."""
        return self.run().history().live

    def damage(self) -> dict[str, str]:
        """What ``relight verify`` would say: what is wrong, by checkpoint; under the empty name, with the log."""
        run = self.run()
        view, found = run.view(), {}
        if wrong := verify_log(run.store, view):
            found[""] = f"{wrong[0].file}: {wrong[0].detail}"
        for one in run.history().live:
            if findings := verify_checkpoint(run.store, view, one):
                found[one.id] = f"{findings[0].file}: {findings[0].detail}"
        return found

    def last_words(self) -> str:
        """The last thing that relight run said of it."""
        lines = [line for line in self.said().splitlines() if line.strip()]
        ours = [line.removeprefix("relight: ") for line in lines if line.startswith("relight: ") and "relight incidents" not in line]
        return (ours or lines or ["it said nothing"])[-1][:300]

    def _at(self) -> str:
        told = [f"rank {rank} {beat.phase}, behind step {beat.step}" for rank, beat in self.beats().items()]
        return ", ".join(told[:4]) or self.last_words()
