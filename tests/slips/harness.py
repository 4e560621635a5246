"""Runner of slips. Each script has its own process and a new directory. Then the harness checks whether a checkpoint
was lost, or a wrong one restored."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tests.slips.slip import STEPS, Slip, error_in, plain

from proofs.warm import Warm

HERE = Path(__file__).parent
PARTS = HERE / "parts"
WAY_OUT = r"→|\b(must be|is|are|takes)\b.*\bnot\b"
"""Pattern of an error with a remedy: a hint, or a sentence that states what to give instead."""


def fast() -> str | None:
    """Return a file system in memory, where fsync costs nothing, or None if there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Outcome(NamedTuple):
    """Outcome of a slip."""

    output: str
    """Standard error and output, without what differs between two runs."""
    code: int
    faults: list[str]
    seconds: float
    """Of the script alone."""


class Runner:
    """Runner of scripts, forked from one process. ``source`` is the directory of the tested relight."""

    def __init__(self, root: Path, source: Path | None = None) -> None:
        self.root = root
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RELIGHT_")}
        environment.update(RELIGHT_EVENTS="0", RELIGHT_BACKGROUND="0", OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        environment["PYTHONPATH"] = os.pathsep.join([str(source or HERE.parents[1] / "src"), str(PARTS)])
        self._environment, self._warm = environment, Warm(["warmed"], environment)
        self._demo = root / "demo"
        self._demo.mkdir()
        shutil.copy(PARTS / "setup_demo.py", self._demo / "train.py")
        code, output, _ = self.process(self._demo, self._demo / "train.py")
        assert code == 0, output
        self._before: dict[str, list[object]] = self.look(self._demo, "runs/demo")["checkpoints"]  # type: ignore[assignment]
        assert [row[0] for row in self._before.values()] == list(STEPS)

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._warm.close()

    def process(self, directory: Path, script: Path, timeout: float = 60, **environment: str) -> tuple[int, str, float]:
        """Run a script in a directory. Return exit status, output and seconds."""
        out, err = directory / "out.txt", directory / "err.txt"
        started = time.monotonic()
        with out.open("wb", buffering=0) as output, err.open("wb", buffering=0) as errors:
            child = self._warm.start(
                [str(script)], output.fileno(), errors.fileno(), {**self._environment, **environment}, leads=True,
                directory=str(directory), path=[str(PARTS)], quick=True,
            )  # fmt: skip
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                code = 124
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # also processes that the script started and left
        text = out.read_text(encoding="utf-8", errors="replace") + err.read_text(encoding="utf-8", errors="replace")
        return code, text, time.monotonic() - started

    def look(self, directory: Path, run: str, **environment: str) -> dict[str, object]:
        """Return what a run contains, as ``parts/look.py`` writes it."""
        code, output, _ = self.process(
            directory,
            PARTS / "look.py",
            SLIP_RUN=run,
            HOME=str(directory),
            RELIGHT_LOG="quiet",
            RELIGHT_SETTINGS=str(PARTS / "empty.toml"),
            **environment,
        )
        if code != 0:
            return {"checkpoints": {}, "next": None, "why": f"reading the run failed: {output[-2000:]}"}
        content: dict[str, object] = json.loads((directory / "look.json").read_text(encoding="utf-8"))
        return content

    def run(self, slip: Slip) -> Outcome:
        """Run a slip and check everything about it."""
        directory = self.root / slip.name
        directory.mkdir()
        before: dict[str, list[object]] = {}
        if slip.setup == "demo":
            shutil.copytree(self._demo / "runs", directory / "runs", symlinks=True)
            before = self._before
        script = directory / "train.py"
        script.write_text("from ordinary import *\n" + slip.script.lstrip("\n"), encoding="utf-8")
        code, raw, seconds = self.process(directory, script, HOME=str(directory), **slip.environment)
        output = plain(raw, str(directory))
        faults = [*_of_the_end(slip, code, output)]
        if slip.setup == "demo":
            after = self.look(
                directory,
                slip.run,
                RELIGHT_BACKGROUND=slip.environment.get("RELIGHT_BACKGROUND", "0").replace("maybe", "0"),
            )
            demo = (
                self.look(directory, "runs/demo")
                if slip.run != "runs/demo" and (directory / "runs" / "demo" / "log").exists()
                else after
            )
            faults += _of_the_run(slip, before, demo["checkpoints"], after)  # type: ignore[arg-type]
        return Outcome(output, code, faults, seconds)


def _of_the_end(slip: Slip, code: int, output: str) -> list[str]:
    faults = []
    right = slip.code if slip.code is not None else int(slip.refused)
    if code != right:
        faults.append(f"exit status {code}, not {right}")
    if slip.refused and not error_in(output):
        faults.append("no error of Relight's")
    if slip.refused and error_in(output) and not re.search(WAY_OUT, error_in(output)):
        faults.append("the error has no way out")
    faults += [f"the output lacks /{pattern}/" for pattern in slip.shows if not re.search(pattern, output)]
    faults += [f"the output has /{pattern}/" for pattern in slip.hides if re.search(pattern, output)]
    return faults


def _of_the_run(
    slip: Slip, before: dict[str, list[object]], present: dict[str, list[object]], after: dict[str, object]
) -> list[str]:
    faults = []
    for key, (step, weight, _) in before.items():
        if step in slip.removes:
            continue
        if key not in present:
            faults.append(f"step {step} is lost")
        elif present[key][2]:
            faults.append(f"step {step} is damaged")
        elif present[key][1] != weight:
            faults.append(f"step {step} holds {present[key][1]}, not {weight}")
    if isinstance(slip.takes, tuple):
        start, origin = slip.takes
        if after["next"] != [start, 1000.0 * origin + start]:
            faults.append(
                f"the next start gets {after['next']}, not {[start, 1000.0 * origin + start]} {after['why']}".rstrip()
            )
    elif slip.takes == "refused" and after["next"] is not None:
        faults.append(f"the next start gets {after['next']}: it should be refused")
    return faults
