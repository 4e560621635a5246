"""``make preempt``: preemption at 50 random moments for each grace period of 30, 5 and 1 s, with saves that fit and saves that do not.

The job gets SIGTERM; after the grace period all its processes are killed, also the agent. These must hold: exit code 75 means
that the last step is stored, 76 that it is not. The step is stored if a save clearly fits, and the job ends early if it clearly
does not. The newest checkpoint verifies, and the next attempt begins after it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from relight.errors import RelightError
from relight.log import Log, fold
from relight.policy.grace import kept_back
from relight.store import open_bytes

if __package__:
    from tests.supervise.lab import Host, missing, wait_until, within
else:
    from lab import Host, missing, wait_until, within

JOB = Path(__file__).with_name("traced.py")
GRACES = (30.0, 5.0, 1.0)
STEP_S = 0.05
BALLAST = 2_000_000
"""Floats of the state: 8 MB."""


class Moment(NamedTuple):
    """The plan of one preemption."""

    grace_s: float
    save_s: float
    """Seconds that a save takes at its permitted speed."""
    every: int
    wait_s: float
    """Seconds to wait after the first save or, if ``early``, after the first step."""
    early: bool
    """Whether the signal comes before any save has finished."""


def plan_of(rng: random.Random, grace_s: float) -> Moment:
    """Draw a plan. Most saves fit into the grace period, some do not."""
    save_s = grace_s * (rng.uniform(0.05, 0.4) if rng.random() < 0.65 else rng.uniform(1.2, 1.6))
    every = max(5, int(1.5 * save_s / STEP_S))
    return Moment(grace_s, save_s, every, rng.uniform(0.0, 1.5 * every * STEP_S), rng.random() < 0.2)


class Outcome(NamedTuple):
    """The outcome of one preemption."""

    code: int | None
    """Exit code; None: the job was killed."""
    took_s: float
    """Seconds from SIGTERM to the job's end."""
    first: int
    """The first step of this attempt."""
    last: int
    """The last step of this attempt."""
    stored: int
    """The newest stored step; −1: none."""
    longest_s: float
    """Seconds of the longest save that was durable before the signal; infinite if there was none."""
    begun: bool
    """Whether a save was in progress when the signal came."""
    output: str


def stored(folder: Path) -> int:
    """Return the newest step with a checkpoint, or −1."""
    try:
        live = fold(Log(open_bytes(folder / "store"), "run").read()).live
    except RelightError:
        return -1
    return max((checkpoint.step for checkpoint in live), default=-1)


def steps(folder: Path) -> list[int]:
    """Return all completed steps in order."""
    out = folder / "out"
    return [int(line.split()[0]) for line in out.read_text().splitlines()] if out.exists() else []


def play(moment: Moment, folder: Path, number: int) -> Outcome:
    """Run one attempt to its end."""
    (folder / "hosts").write_text(f"127.0.0.1 localhost host{number}\n")
    (folder / "plan.json").write_text("[]")
    (folder / "trace").mkdir(exist_ok=True)
    (folder / "relight.toml").write_text(f"[supervise]\nspares = false\ngrace_s = {moment.grace_s}\n")
    env = {
        **os.environ, "JOB_EVERY": str(moment.every), "JOB_STEP_S": str(STEP_S), "JOB_BALLAST": str(BALLAST), "OMP_NUM_THREADS": "1",
        "JOB_TRACE": str(folder / "trace"), "JOB_BYTES_PER_SECOND": str(4 * BALLAST / moment.save_s / 2),  # each of two ranks
    }  # fmt: skip
    command = [sys.executable, "-m", "relight", "run", "--nproc-per-node", "2", str(JOB)]
    host = Host(f"host{number}", number, folder / "hosts")
    before, newest_before = len(steps(folder)), stored(folder)
    log = folder / f"{number}.log"
    with log.open("w") as out:
        process = host.start(
            *command,
            str(folder / "store"),
            "1000000",
            str(folder / "plan.json"),
            str(folder / "out"),
            out=out,
            env=env,
            cwd=folder,
        )
        try:
            wait_until(lambda: len(steps(folder)) > before, 180, f"life {number} does not train")
            if not moment.early:
                wait_until(
                    lambda: stored(folder) > newest_before, 90 + 3 * moment.save_s, f"life {number} does not save"
                )
            time.sleep(moment.wait_s)
            due = steps(folder)[-1] // moment.every * moment.every
            begun = due > stored(folder) and due >= steps(folder)[before]
            longest_s = max(
                map(float, (folder / "trace" / f"saves-{host.name}").read_text().split()), default=float("inf")
            )
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            asked = time.monotonic()
            os.kill(int(children[0]), signal.SIGTERM)
            code: int | None = None
            try:
                code = process.wait(moment.grace_s)
            except subprocess.TimeoutExpired:
                pass
            took_s = time.monotonic() - asked
            newest = stored(folder) if code is not None else -1
        finally:
            host.down()
    lines = steps(folder)
    return Outcome(
        code,
        took_s,
        lines[before],
        lines[-1],
        newest if code is not None else stored(folder),
        longest_s,
        begun,
        log.read_text(),
    )


def wrong_with(moment: Moment, outcome: Outcome, there: int) -> list[str]:
    """Return the violations. ``there``: the newest step that was stored before this attempt."""
    wrong = []
    if outcome.first != there + 1:
        wrong.append(f"step {there} was stored, and the attempt began at {outcome.first}")
    if outcome.code not in (75, 76, None):
        wrong.append(f"exit code {outcome.code}")
    if outcome.code == 75 and outcome.stored != outcome.last:
        wrong.append(
            f"exit code 75, but the last step is {outcome.last} and the newest stored step is {outcome.stored}"
        )
    # a begun save may finish after the exit
    if outcome.code == 76 and outcome.stored >= outcome.last and not outcome.begun:
        wrong.append(f"exit code 76, but the last step {outcome.last} is stored")
    least = 2 * outcome.longest_s if outcome.begun else outcome.longest_s
    has = moment.grace_s - kept_back(moment.grace_s) - 3 * STEP_S
    if outcome.code != 75 and 1.5 * least < has:
        wrong.append(
            f"a save took {outcome.longest_s:.2f} s at most{', as long as another is under way' if outcome.begun else ''}, and was not made"
        )
    if (
        not moment.early
        and moment.save_s > moment.grace_s
        and not outcome.begun
        and outcome.took_s > max(0.6 * moment.grace_s, 3.0)
    ):
        wrong.append(f"nothing could be saved, and it took {outcome.took_s:.1f} s to end")
    return wrong


def whole(folder: Path) -> str:
    """Return what is wrong with the newest checkpoint; empty if it verifies."""
    if stored(folder) < 0:
        return ""
    command = [sys.executable, "-m", "relight", "verify", str(folder / "store" / "run"), "latest"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def main() -> int:
    """Run all preemptions. Exit code 1: a violation. 77: none could run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="moments for each grace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grace", type=float, action="append")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        if lacks := missing():
            print(lacks)
            return 77
        os.execvp("unshare", within(__file__, [*sys.argv[1:], "--inside"]))
    # the first process of a namespace gets only signals that it handles
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    bad = 0
    with tempfile.TemporaryDirectory(prefix="preempt-") as top:
        for grace_s in options.grace or GRACES:
            rng = random.Random(f"{options.seed} {grace_s}")
            folder = Path(top) / f"{grace_s:g}"
            folder.mkdir()
            codes: dict[str, int] = {}
            for number in range(1, options.count + 1):
                moment, newest_before = plan_of(rng, grace_s), stored(folder)
                outcome = play(moment, folder, number)
                wrong = wrong_with(moment, outcome, newest_before)
                if broken := whole(folder):
                    wrong.append(f"the newest checkpoint: {broken}")
                code = "killed" if outcome.code is None else str(outcome.code)
                codes[code] = codes.get(code, 0) + 1
                print(
                    f"{grace_s:g} s, {number}: a save takes {moment.save_s:.2f} s{', not known yet' if moment.early else ''}"
                    f"{', one under way' if outcome.begun else ''}: {code} after {outcome.took_s:.2f} s, {outcome.stored} of {outcome.last} stored; {'wrong' if wrong else 'well'}",
                    flush=True,
                )
                if wrong:
                    bad += 1
                    print(outcome.output + "\n" + "\n".join(f"  {problem}" for problem in wrong), flush=True)
            print(f"{grace_s:g} s of grace, {options.count} moments: {json.dumps(codes)}", flush=True)
    print(f"{bad} moments went wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
