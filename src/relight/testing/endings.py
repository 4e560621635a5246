"""Endings of training jobs with data loader workers: signals to a whole process group, and what is saved by then.

``python -m relight.testing.endings --trials 200``. A trial starts a small training as a process group of its own,
ends it at a random moment in one of five ways, and checks: every step that the script completed is saved, the exit
code is correct, and no process is left. All 200 trials of each cell take about 15 hours of one core, so ``--first``
and ``--trials`` select a slice: trials 0 to 19, then 20 to 39.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import IO, NamedTuple

from relight.catalog.run import Run
from relight.comm.children import child_command, script_command
from relight.errors import RelightError
from relight.store import open_bytes
from relight.testing.warm import IMPORTED, Child, Warm
from relight.units import duration_text

WAYS = ("SIGTERM", "SIGINT", "SIGHUP", "timeout", "group")
"""SIGTERM to the job's first process; SIGINT and SIGHUP to its group, as a terminal sends them; GNU timeout; SIGTERM to the group."""
TIMED_OUT, SAVED = 124, 75
"""Exit codes of GNU timeout, and of ``relight run`` after it stored the last step."""
GRACE_S = 90.0
LEFT_S = 15.0
"""Seconds in which workers end after their trainer: torch's own check comes every 5 s."""
TRAINING = """
import os, sys, time, torch, relight
torch.set_num_threads(1)

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((4,), index / (1 << 20))

def main(run, workers, persistent):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=8, num_workers=workers, persistent_workers=persistent)
    with relight.Checkpointer(run, model=model, optimizer=optimizer, loader=loader, save=None) as ckpt:
        step = ckpt.restore()
        for batch in loader:
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
            ckpt.step(step)
            os.write(1, f"step {step}\\n".encode())
            step += 1

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True")
"""


RELIGHT = """
from relight.cli import main
if __name__ == "__main__":
    main()
"""
"""The command ``relight`` as a script, to be forked."""
_SUPERVISED = ("relight.cli.run", "relight.supervise.launch")
"""Modules of ``relight run`` in addition to those of a trainer."""


class Cell(NamedTuple):
    """One kind of trial."""

    way: str
    workers: int
    persistent: bool
    supervised: bool

    def __str__(self) -> str:
        kind = "persistent" if self.persistent else "plain"
        return f"{self.way:8} {self.workers} workers {kind:10} {'relight run' if self.supervised else 'alone'}"


@dataclass
class EndingReport:
    """Outcomes of trials, by cell."""

    held: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def cells() -> Iterator[Cell]:
    """Yield the whole matrix. Torch refuses persistent workers without workers."""
    for way, (workers, persistent), supervised in product(
        WAYS, ((0, False), (2, False), (2, True), (4, False), (4, True)), (False, True)
    ):
        yield Cell(way, workers, persistent, supervised)


def trial(cell: Cell, folder: Path, rng: random.Random, warm: Warm | None = None) -> str:
    """Run one trial in ``folder``. Return what was wrong; empty if nothing was.

    ``warm``: forks the job's first process, the trainer or ``relight run``, instead of starting a new interpreter. GNU timeout is
    started as ever.
    """
    script, run = folder / "train.py", folder / "store" / "run"
    script.write_text(textwrap.dedent(TRAINING))
    arguments = [str(script), str(run), str(cell.workers), str(cell.persistent)]
    with (folder / "errors").open("w+b") as errors:
        if warm is not None and cell.way != "timeout":
            if cell.supervised:
                relight = folder / "relight"
                relight.write_text(textwrap.dedent(RELIGHT))
                problems = _forked(cell, rng, warm, [str(relight), "run", *arguments], run, errors.fileno())
            else:
                problems = _forked(cell, rng, warm, arguments, run, errors.fileno())
        else:
            problems = _executed(cell, rng, arguments, errors.fileno())
        errors.seek(0)
        error_text = errors.read().decode(errors="replace")[-3000:]
    return f"{cell}: {'; '.join(problems)}\n{error_text}" if problems else ""


def run(
    trials: int,
    seed: int,
    chosen: Sequence[Cell],
    jobs: int = 1,
    progress: Callable[[EndingReport], None] = lambda report: None,
    first: int = 0,
) -> EndingReport:
    """Run the trials ``first`` to ``first + trials - 1`` of each cell, ``jobs`` at a time.

    The seed, the cell and the trial's number decide every random choice of a trial.
    """
    report, began, lock = EndingReport(), time.monotonic(), threading.Lock()
    waiting = ((cell, number) for number in range(first, first + trials) for cell in chosen)

    def work() -> None:
        with Warm((*IMPORTED, *_SUPERVISED)) as warm:
            while True:
                with lock:
                    cell, number = next(waiting, (None, 0))
                if cell is None:
                    return
                folder = Path(tempfile.mkdtemp(prefix="relight-ending-"))
                try:
                    problems = trial(cell, folder, random.Random(f"{seed} {cell} {number}"), warm)
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                with lock:
                    report.held[str(cell)] = report.held.get(str(cell), 0) + (not problems)
                    report.wrong += [problems] if problems else []
                    report.seconds = time.monotonic() - began
                    progress(report)

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(work) for _ in range(jobs)]:
            done.result()
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every trial held, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m relight.testing.endings", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--trials", type=int, default=200, help="trials of each cell")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="trials at once")
    parser.add_argument("--only", default="", help="only cells with this text in their name")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) is signal.SIG_IGN:  # by a shell's background or nohup; a job would inherit that
            signal.signal(number, handler)
    chosen = [cell for cell in cells() if options.only in str(cell)]

    def progress(report: EndingReport) -> None:
        print(
            f"{sum(report.held.values())} of {sum(report.held.values()) + len(report.wrong)} held",
            file=sys.stderr,
            flush=True,
        )

    report = run(options.trials, options.seed, chosen, options.jobs, progress, options.first)
    if options.json:
        print(
            json.dumps(
                {
                    "first": options.first,
                    "trials": options.trials,
                    "held": report.held,
                    "wrong": report.wrong,
                    "seconds": report.seconds,
                },
                indent=1,
            )
        )
    else:
        print(
            "\n".join([*(f"{name}: {count} of {options.trials}" for name, count in report.held.items()), *report.wrong])
        )
    return 1 if report.wrong else 0


# -- inside


def _executed(cell: Cell, rng: random.Random, arguments: list[str], errors: int) -> list[str]:
    command = child_command("relight", "run", *arguments) if cell.supervised else script_command(*arguments)
    if cell.way == "timeout":
        command = ["timeout", "3600", *command]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    assert job.stdout is not None
    return _judged(cell, rng, job, job.stdout, Path(arguments[1]))


def _forked(cell: Cell, rng: random.Random, warm: Warm, arguments: list[str], run: Path, errors: int) -> list[str]:
    readable, writable = os.pipe()
    try:
        job = warm.start(arguments, writable, errors, leads=True)
    finally:
        os.close(writable)
    return _judged(cell, rng, job, os.fdopen(readable, "rb"), run)


def _judged(
    cell: Cell, rng: random.Random, job: subprocess.Popen[bytes] | Child, output: IO[bytes], run: Path
) -> list[str]:
    """End the job at a random step. Return what is wrong then."""
    with output:
        finished = _steps(job, output, cell, rng)
    try:
        code = job.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        return [f"not ended {duration_text(GRACE_S)} after the signal at step {finished}"]
    return [*_unsaved(run, finished), *_untrue(cell, code), *_left(run, job.pid)]


def _steps(job: subprocess.Popen[bytes] | Child, output: IO[bytes], cell: Cell, rng: random.Random) -> int:
    """Read the steps that the job reports until its end, and end it at a random one. Return the last."""
    finished, last_step, delay_s = -1, rng.randint(3, 20), rng.uniform(0.0, 0.02)
    late = threading.Timer(GRACE_S, job.kill)
    late.start()
    for line in output:
        word, _, number = line.decode(errors="replace").rpartition(" ")
        if not word.endswith("step"):
            continue
        finished = int(number)
        if finished == last_step:
            time.sleep(delay_s)
            _end(job.pid, cell.way)
    late.cancel()
    return finished


def _end(pid: int, ending: str) -> None:
    if ending == "timeout":
        os.kill(pid, signal.SIGALRM)  # its own timer's
    elif ending == "SIGTERM":
        os.kill(pid, signal.SIGTERM)
    else:
        os.killpg(pid, signal.SIGTERM if ending == "group" else signal.Signals[ending])


def _unsaved(run: Path, finished: int) -> Iterator[str]:
    try:
        steps = [
            (checkpoint.step, checkpoint.body.reason)
            for checkpoint in Run(open_bytes(Path(run).parent), Path(run).name).history().live
        ]
    except RelightError as error:
        steps = []
        yield f"the run cannot be read: {error}"
    if finished < 0:
        yield "no step was reported"
    if max((step for step, _ in steps), default=-1) < finished:
        yield f"step {finished} was finished, saved are {steps}"


def _untrue(cell: Cell, code: int) -> Iterator[str]:
    number = signal.SIGTERM if cell.way in ("timeout", "group") else signal.Signals[cell.way]
    expected = TIMED_OUT if cell.way == "timeout" else SAVED if cell.supervised else -number
    if code != expected:
        yield f"exit code {code} instead of {expected}"


def _left(run: Path, session: int) -> Iterator[str]:
    ends = time.monotonic() + LEFT_S
    while (pids := _processes_of(run, session)) and time.monotonic() < ends:
        time.sleep(0.1)
    for pid in pids:
        yield f"process {pid} was left"


def _processes_of(run: Path, session: int) -> list[int]:
    """Return the processes of the job: those of its session, and those that have the run's path as an argument."""
    pids = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (directory / "cmdline").read_bytes().split(b"\0")
            fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if (os.fsencode(run) in arguments or int(fields[3]) == session) and fields[0] != b"Z":
            pids.append(int(directory.name))
    return pids


if __name__ == "__main__":
    sys.exit(main())
