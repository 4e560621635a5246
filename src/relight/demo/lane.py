"""One of the two runs: its process, which may be killed and restarted, and the entries of its journal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from relight.comm.children import child_command, child_environment
from relight.demo import witness
from relight.demo.compare import Finished
from relight.demo.journal import Tail
from relight.demo.shape import DemoSize
from relight.errors import RelightError
from relight.settings.environment import leave_out_tiers
from relight.units import duration_text

SILENCE_S_MAX = 120.0
"""Seconds without a journal entry after which a process counts as hung."""


class DemoRun:
    """A run of the training script. ``steps`` has every finished step, and repeated steps more than once."""

    def __init__(
        self, name: str, folder: Path, shape_name: str, shape: DemoSize, seed: int, device: str = "cpu"
    ) -> None:
        self.name = name
        self.run = folder / "store" / name
        self.steps: list[Finished] = []
        self.stalls_s: list[float] = []
        self.save_bytes: list[int] = []
        self.facts: dict[str, Any] = {}
        self.digest: str | None = None
        self.on_entry: Callable[[dict[str, Any]], None] = lambda entry: None
        self.last: int | None = None
        self._journal = folder / f"{name}.jsonl"
        self._output = folder / f"{name}.out"
        self._tail = Tail(self._journal)
        self._process: subprocess.Popen[bytes] | None = None
        self._last_entry_s = 0.0
        self._times: list[float] = []
        self._leftovers: set[str] = set()
        self._over: set[str] = set()
        self._command = child_command(
            "relight.demo.train", "--store", str(folder / "store"), "--run", name, "--shape", shape_name,
            "--steps", str(shape.steps), "--seed", str(seed), "--journal", str(self._journal),
            "--device", device,
        )  # fmt: skip

    # -- the process ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the script: for the first time, or again."""
        self.last = None
        self._times.clear()
        self._leftovers = witness.unfinished(self.run)
        self._over = witness.saves(self.run)
        self._last_entry_s = time.monotonic()
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,
            )

    def kill(self) -> tuple[float, str | None]:
        """Send SIGKILL to the process and its loader's workers. Return the Unix time, and the directory of an unfinished save, if any."""
        assert self._process is not None
        killed_at = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self.poll()
        inside = witness.unfinished(self.run) - self._leftovers
        return killed_at, next(iter(inside), None)

    def stop(self) -> None:
        """Kill the process if it is running."""
        if self._process is not None:
            self.kill()

    @property
    def ended(self) -> bool:
        """Whether all steps are done and the process has ended. Raise ``RelightError`` if the process ended earlier, or hangs."""
        if self._process is None:
            return self.digest is not None
        code = self._process.poll()
        if code is None:
            if time.monotonic() - self._last_entry_s > SILENCE_S_MAX:
                raise self._trouble(f"wrote nothing for {duration_text(SILENCE_S_MAX)}")
            return False
        self.poll()
        if code or self.digest is None:
            raise self._trouble(f"ended by itself, with exit code {code}")
        self._process = None
        return True

    def _trouble(self, what: str) -> RelightError:
        lines = self._output.read_text(errors="replace").splitlines()
        return RelightError(f"the training process of the {self.name} run {what}", details=lines[-12:])

    # -- the journal ---------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Read the journal's new entries."""
        for entry in self._tail.read():
            self._last_entry_s = time.monotonic()
            match entry["what"]:
                case "started":
                    self.facts = entry
                case "finished":
                    self.last = entry["step"]
                    self.steps.append(Finished(entry["step"], entry["loss"], entry["samples"]))
                    self._times.append(entry["time"])
                case "saved":
                    self.stalls_s.append(entry["stall_s"])
                    self.save_bytes.append(entry["bytes"])
                case "ended":
                    self.digest = entry["digest"]
            self.on_entry(entry)

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        gaps = [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        return median(gaps) if gaps else 0.05

    @property
    def save_s(self) -> float:
        """Median seconds of a save."""
        return median(self.stalls_s) if self.stalls_s else 0.0

    def saving(self) -> str | None:
        """Return the directory of the save that is being written now.

        Cost: lists one directory; reads the log only after a new name.
        """
        new = witness.saves(self.run) - self._over
        if new:
            self._over |= new & witness.committed(self.run)
        return next(iter(new - self._over), None)


def _environment() -> dict[str, str]:
    """Return the child's environment, which limits each run to one core and to the demo's store."""
    variables = child_environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    leave_out_tiers(variables)
    return variables
