"""One rival, one workload, one round, in a process of its own, so that no rival's memory affects another.

Order: two steps of warm-up; two saves during which the parent samples memory; saves with an idle trainer, which give
CPU seconds; steps without, with, without a save and so on; loads of the last of these saves (from memory, if the rival
has that; cold; warm), each compared tensor by tensor with the state at the call. Between any two saves the state
changes.
Speaks JSON lines on what was standard output; rivals' own printing goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from benchmarks import floors
from benchmarks.files import allocated, drop_cache, read_through, resident
from benchmarks.rivals import Handle, Rival, make
from benchmarks.watch import MARK, Processes, own_status
from benchmarks.workloads import Workload, build

clock = time.perf_counter
AT_WORK, WINDOW_S = 0.01, 2.0
"""Share of a core, and seconds. Helpers that took more than this share in these last seconds are still busy with the
save, and steps count as steps during the save until then."""
WARM_UP = 2
STEPS_MAX = 30
"""Times the steps without a save: then the trainer waits."""


class Parent:
    """The process that started this cell."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def send(self, **line: Any) -> None:
        print(json.dumps(line), file=self._out, flush=True)

    def ask(self, question: str) -> Any:
        self.send(ask=question)
        return json.loads(sys.stdin.readline())


class Cell:
    """All measurements of a cell, in order. ``figures`` has seconds, bytes and checks by name."""

    def __init__(self, rival: Rival, work: Workload, folder: Path, parent: Parent) -> None:
        self.rival, self.work, self.folder, self.parent = rival, work, folder, parent
        self.figures: dict[str, Any] = {}
        self.processes = Processes(os.environ[MARK])
        self.step = 0

    def run(self) -> dict[str, Any]:
        """Measure everything. Return the figures."""
        for _ in range(2 if self.work.shape.steps else 0):
            self.work.train()
        if not self.work.shape.steps:
            self.work.digest()  # warms up what a step would
        self.figures["state_bytes"] = self.work.bytes
        self.memory_of_saves()
        self.idle_saves()
        expected = self.training() if self.work.shape.steps else self.work.digest()
        if self.rival.load_near is not None:
            self.load("near", self.rival.load_near, expected, lambda: None)
        self.figures["helpers_cpu"] = self.processes.others_cpu_s()
        self.rival.settle()
        self.load("cold", self.rival.load, expected, self.make_cold)
        self.load("warm", self.rival.load, expected, lambda: read_through(self.folder))
        self.rival.close()
        return self.figures

    @property
    def times(self) -> int:
        """How often a save without training, and a load, is timed."""
        return 3 if self.figures["state_bytes"] < floors.TIMES_BELOW else 1

    def make_cold(self) -> None:
        """Empty the page cache, and check that it is empty."""
        drop_cache(self.folder)
        self.figures["cold_resident"] = max(self.figures.get("cold_resident", 0.0), resident(self.folder))

    def save(self) -> tuple[float, Handle, float]:
        """Begin a save. Return the time of the call, the handle, and the seconds that the call blocked."""
        self.step += 1
        started = clock()
        handle = self.rival.save(self.step)
        blocked = clock() - started
        handle.start()
        return started, handle, blocked

    def saved(self) -> dict[str, float]:
        """A save of a new state, with an idle trainer, waited for."""
        self.work.nudge()
        cpu = self.processes.cpu_s()
        started, handle, blocked = self.save()
        handle.wait()
        seconds = {"blocked": blocked, "durable": handle.durable_at - started, "cpu": self.processes.cpu_s() - cpu}
        self.forget()
        return seconds

    def forget(self) -> None:
        """Remove all saves but the newest, untimed. Relight does so itself, within its own time."""
        for path in sorted(self.folder.glob("step-*"))[:-1]:
            shutil.rmtree(path, ignore_errors=True)

    def memory_of_saves(self) -> None:
        """Measure the memory of the first two saves beyond the training's own."""
        trim()
        self.parent.ask("memory start")
        self.rival.prepare(self.folder, self.work.model, self.work.optimizer)
        first = self.saved()
        self.figures |= {
            "first_blocked": first["blocked"],
            "first_durable": first["durable"],
            "disk_bytes": allocated(self.folder),
        }
        self.saved()
        self.figures["save_memory"] = self.parent.ask("memory stop")

    def training(self) -> dict[str, bytes]:
        """Steps without, with, without a save and so on. Gives the digest of the state at the last save's call."""
        shape = self.work.shape
        self.steps(WARM_UP)  # allocate again the memory that ``trim`` has freed
        plain = [self.steps(shape.steps)]
        seconds: dict[str, list[float]] = {"blocked": [], "durable": [], "lost": []}
        running: list[float] = []
        expected: dict[str, bytes] = {}
        for _ in range(shape.saves):
            expected = self.work.digest()
            started, handle, blocked = self.save()
            times: list[tuple[float, float]] = []
            spent = [(clock(), self.processes.others_cpu_s())]
            while (
                len(times) < shape.steps or not handle.done() or (busy(spent) and len(times) < STEPS_MAX * shape.steps)
            ):
                begun = clock()
                self.work.train()
                times.append((begun, clock() - begun))
                spent.append((clock(), self.processes.others_cpu_s()))
                if len(times) >= STEPS_MAX * shape.steps:
                    handle.wait()
            wall = clock() - started
            self.forget()
            plain.append(self.steps(shape.steps))
            seconds["lost"].append(wall - len(times) * statistics.mean(plain[-2] + plain[-1]))
            seconds["blocked"].append(blocked)
            seconds["durable"].append(handle.durable_at - started)
            running += [took for begun, took in times if begun < handle.durable_at]
        self.figures |= {name: statistics.median(each) for name, each in seconds.items()}
        self.figures |= {
            "lost_each": seconds["lost"],
            "steps_plain": [*chain.from_iterable(plain)],
            "steps_running": running,
        }
        return expected

    def steps(self, count: int) -> list[float]:
        """Seconds of each."""
        times = []
        for _ in range(count):
            begun = clock()
            self.work.train()
            times.append(clock() - begun)
        return times

    def idle_saves(self) -> None:
        """Saves that have the machine to themselves."""
        results = [self.saved() for _ in range(self.times)]
        for name in ("blocked", "durable", "cpu"):
            self.figures[f"idle_{name}"] = statistics.median(result[name] for result in results)

    def load(
        self,
        name: str,
        action: Callable[[nn.Module, Optimizer], None],
        expected: dict[str, bytes],
        before: Callable[[], None],
    ) -> None:
        """Load into the live objects after ``before`` has changed them.

        Count the tensors that then differ from the state at the call.
        """
        seconds = []
        for _ in range(self.times):
            before()
            self.work.scramble()
            trim()
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # restart the peak
            resting = own_status("VmRSS")
            started = clock()
            action(self.work.model, self.work.optimizer)
            seconds.append(clock() - started)
            if name != "near":  # a near load maps memory that counts for the saves
                self.figures["load_memory"] = max(self.figures.get("load_memory", 0), own_status("VmHWM") - resting)
            self.figures["wrong"] = max(self.figures.get("wrong", 0), differing(expected, self.work.digest()))
        self.figures[f"{name}_load"] = statistics.median(seconds)


def busy(spent: list[tuple[float, float]]) -> bool:
    """Return whether helpers still work. ``spent``: moments, and the helpers' processor time until each."""
    now, total = spent[-1]
    before = [(time_s, had) for time_s, had in spent if now - time_s >= WINDOW_S]
    return not before or total - before[-1][1] > AT_WORK * (now - before[-1][0])


def differing(expected: dict[str, bytes], found: dict[str, bytes]) -> int:
    """How many tensors."""
    return sum(found.get(name) != digest for name, digest in expected.items())


def trim() -> None:
    """Give free memory back, so that what is needed next is seen."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def main() -> None:
    """Run one cell. Print its figures, the reason why it cannot run, or its error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rival", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    parent = Parent()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some rivals hold a descriptor a tensor
    try:
        if options.rival == floors.NAME:
            parent.send(figures=floors.measure(options.folder, options.workload), version="")
            return
        rival = make(options.rival)
        reason = rival.why_not()
        if reason is not None:
            parent.send(why_not=reason)
            return
        cell = Cell(rival, build(options.workload, options.seed), options.folder, parent)
        parent.send(figures=cell.run(), version=rival.version(), how=rival.how)
    except ImportError as error:
        parent.send(why_not=f"cannot be imported: {error}")
    except Exception as error:
        traceback.print_exc()
        parent.send(error=f"{type(error).__name__}: {error}".splitlines()[0][:300])


if __name__ == "__main__":
    main()
