"""Saves and restores of a state by Relight: foreground and background saves, restores from disk, page cache and memory. Needs torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from relight.bench.cache import drop_cache, read_through, resident
from relight.bench.state import BenchState
from relight.checkpointer import Checkpointer, Save
from relight.errors import CorruptCheckpoint, SaveFailed
from relight.format.names import parse_dir
from relight.observe import subscribe
from relight.observe.events import Event
from relight.policy import Limits, every
from relight.settings.environment import TIERS, leave_out_tiers

WORK_S = 0.2
"""Seconds for which training's speed is measured, before and after a save."""
DEADLINE_S = 120.0


class Ours:
    """Two runs in ``folder``: one saves in the foreground, one in the background. All times are seconds of a call as a user sees it."""

    def __init__(self, folder: Path, state: BenchState) -> None:
        self.state = state
        self._folder = folder
        self._step = 0
        self._event_names: set[str] = set()
        self.cold_resident = 0.0
        """Largest fraction of a checkpoint that was still in the page cache at a cold restore."""
        self.waits, self.background = (
            Checkpointer(
                folder,
                run=run,
                model=state.model,
                optimizer=state.optimizer,
                save=every(steps=1),
                on_failure="raise",
                signals=False,
                background=run == "background",
                limits=Limits(when_busy="queue", deadline_s=DEADLINE_S),
            )
            for run in ("waits", "background")
        )

    def warm_up(self) -> bool:
        """Make a save of each kind, which creates runs, agent and memory. Return whether background saves work."""
        self.save_waiting()
        self.forget()
        self.save_background()
        self.forget()
        return "save.sealed" in self._event_names

    def save_waiting(self) -> float:
        """Return the seconds of a foreground save, which the trainer waits for."""
        return self._save(self.waits)[0]

    def save_background(self) -> tuple[float, float]:
        """Return the seconds until ``step()`` returned, and until the save was durable, without training meanwhile."""
        return self._save(self.background)

    def save_training(self) -> float:
        """Return the seconds that training on all cores loses by one save: the time until it is durable, minus the work done meanwhile."""
        self._change()
        before = self.state.work_s(WORK_S)
        started = perf_counter()
        save = self._save_request(self.background)
        done = 0
        while not save.done and save.error is None:
            self.state.work()
            done += 1
        passed = perf_counter() - started
        save.wait(DEADLINE_S)
        after = self.state.work_s(WORK_S)
        return max(passed - done * (before + after) / 2, save.timings.get("blocked", 0.0))

    def restore_cold(self) -> float:
        """Return the seconds of a restore of the last foreground save, with an empty page cache."""
        folder = self._folder / "waits"
        drop_cache(folder)
        self.cold_resident = max(self.cold_resident, resident(folder))
        return self._restore(self.waits)

    def restore_warm(self) -> float:
        """Return the seconds of a restore of the last foreground save from the page cache."""
        read_through(self._folder / "waits")
        return self._restore(self.waits)

    def restore_memory(self) -> float | None:
        """Return the seconds of a restore from the agent's memory; None if it came from the disk."""
        self._event_names.discard("from memory")
        seconds = self._restore(self.background)
        return seconds if "from memory" in self._event_names else None

    def forget(self) -> None:
        """Remove all checkpoints, to make room for the next."""
        for run in ("waits", "background"):
            for path in (self._folder / run).glob("*"):
                if parse_dir(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def on_event(self, event: Event) -> None:
        """Note events that show how a save or restore was done."""
        self._event_names.add(event.name)
        if event.name == "restore.done" and event.fields.get("source") == "memory":
            self._event_names.add("from memory")

    def _save(self, ckpt: Checkpointer) -> tuple[float, float]:
        self._change()
        started = perf_counter()
        save = self._save_request(ckpt)
        blocked = perf_counter() - started
        save.wait(DEADLINE_S)
        return blocked, perf_counter() - started

    def _save_request(self, ckpt: Checkpointer) -> Save:
        self._step += 1
        try:
            save = ckpt.step(self._step)
        except SaveFailed as error:
            raise error.__cause__ or error from None
        assert save is not None, "every step must be saved"
        return save

    def _change(self) -> None:
        self.background.barrier()
        self.state.nudge()

    def _restore(self, ckpt: Checkpointer) -> float:
        expected = self.state.digest()
        self.state.scramble()
        started = perf_counter()
        ckpt.restore()
        seconds = perf_counter() - started
        if self.state.digest() != expected:
            raise CorruptCheckpoint(
                "a restore gave other bytes than were saved", hint="a bug, or this machine's memory: please report it"
            )
        return seconds


@contextmanager
def without_tiers() -> Iterator[None]:
    """Keep the settings' further tiers out of the Checkpointers that are made meanwhile."""
    before = {name: value for name, value in os.environ.items() if name.startswith(TIERS)}
    try:
        leave_out_tiers(os.environ)
        yield
    finally:  # only these: other threads read and set the other variables meanwhile
        leave_out_tiers(os.environ)
        del os.environ[TIERS]
        os.environ.update(before)


@contextmanager
def at_work(folder: Path, state: BenchState) -> Iterator[Ours]:
    """Create runs and agent, and close them at the end."""
    with without_tiers():
        runs = Ours(folder, state)
    undo = subscribe(runs.on_event)
    try:
        yield runs
    finally:
        undo()
        for ckpt in (runs.waits, runs.background):
            ckpt.close(save=False)
