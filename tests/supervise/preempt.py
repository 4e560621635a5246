"""``make preempt``: the machine is wanted back at 50 random moments for each of 30, 5 and 1 s of grace, with saves that fit and saves that do not.

The job gets SIGTERM; after the grace all its processes are gone, the agent's too. Is what the exit code says of the store so: 75, the last
step is stored; 76, it is not? Was it stored whenever it plainly fitted, did the job end soon where it plainly did not, is the newest
checkpoint whole, and does the next life begin behind it?
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
    """What is planned."""

    grace_s: float
    save_s: float
    """How long a save takes, by the speed that it is allowed."""
    every: int
    wait_s: float
    """From the first save's end; or, where there is none yet, from the first step."""
    early: bool
    """Before any save has shown how long one takes."""


def plan_of(rng: random.Random, grace_s: float) -> Moment:
    """Most saves fit, some cannot."""
    save_s = grace_s * (rng.uniform(0.05, 0.4) if rng.random() < 0.65 else rng.uniform(1.2, 1.6))
    every = max(5, int(1.5 * save_s / STEP_S))
    return Moment(grace_s, save_s, every, rng.uniform(0.0, 1.5 * every * STEP_S), rng.random() < 0.2)


class Outcome(NamedTuple):
    """What came of it."""

    code: int | None
    """None: it was killed."""
    took_s: float
    """From SIGTERM to its end."""
    first: int
    """The first step of this life."""
    last: int
    """The last one."""
    stored: int
    """The newest that is stored; −1: none."""
    longest_s: float
    """Of its saves, those that were durable when the signal came; infinite if none was."""
    begun: bool
    """Whether a save was under way when the signal came."""
    said: str


def stored(folder: Path) -> int:
    """The newest step that is a checkpoint."""
    try:
        live = fold(Log(open_bytes(folder / "store"), "run").read()).live
    except RelightError:
        return -1
    return max((one.step for one in live), default=-1)


def steps(folder: Path) -> list[int]:
    """All that were ended, as they came."""
    out = folder / "out"
    return [int(line.split()[0]) for line in out.read_text().splitlines()] if out.exists() else []


def play(moment: Moment, folder: Path, number: int) -> Outcome:
    """One life, to its end."""
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
    before, there = len(steps(folder)), stored(folder)
    log = folder / f"{number}.log"
    with log.open("w") as out:
        process = host.start(
            *command, str(folder / "store"), "1000000", str(folder / "plan.json"), str(folder / "out"), out=out, env=env, cwd=folder
        )
        try:
            wait_until(lambda: len(steps(folder)) > before, 180, f"life {number} does not train")
            if not moment.early:
                wait_until(lambda: stored(folder) > there, 90 + 3 * moment.save_s, f"life {number} does not save")
            time.sleep(moment.wait_s)
            due = steps(folder)[-1] // moment.every * moment.every
            begun = due > stored(folder) and due >= steps(folder)[before]
            longest_s = max(map(float, (folder / "trace" / f"saves-{host.name}").read_text().split()), default=float("inf"))
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
        code, took_s, lines[before], lines[-1], newest if code is not None else stored(folder), longest_s, begun, log.read_text()
    )


def wrong_with(moment: Moment, outcome: Outcome, there: int) -> list[str]:
    """All that is not as it should be. ``there``: the newest step that was stored before this life."""
    wrong = []
    if outcome.first != there + 1:
        wrong.append(f"step {there} was stored, and the life began at {outcome.first}")
    if outcome.code not in (75, 76, None):
        wrong.append(f"exit code {outcome.code}")
    if outcome.code == 75 and outcome.stored != outcome.last:
        wrong.append(f"it says that the last step is stored, which is {outcome.last}: {outcome.stored} is")
    if outcome.code == 76 and outcome.stored >= outcome.last and not outcome.begun:  # else it was made in what was left behind the exit
        wrong.append(f"it says that the last step is not stored, which is {outcome.last}, and is")
    least = 2 * outcome.longest_s if outcome.begun else outcome.longest_s
    has = moment.grace_s - kept_back(moment.grace_s) - 3 * STEP_S
    if outcome.code != 75 and 1.5 * least < has:
        wrong.append(
            f"a save took {outcome.longest_s:.2f} s at most{', as long as another is under way' if outcome.begun else ''}, and was not made"
        )
    if not moment.early and moment.save_s > moment.grace_s and not outcome.begun and outcome.took_s > max(0.6 * moment.grace_s, 3.0):
        wrong.append(f"nothing could be saved, and it took {outcome.took_s:.1f} s to end")
    return wrong


def whole(folder: Path) -> str:
    """What is wrong with the newest checkpoint, if anything."""
    if stored(folder) < 0:
        return ""
    command = [sys.executable, "-m", "relight", "verify", str(folder / "store" / "run"), "latest"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def main() -> int:
    """Exit code 1 if anything was wrong, 77 if nothing could be tried."""
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
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # the first process of a namespace is sent none that it has not asked for
    bad = 0
    with tempfile.TemporaryDirectory(prefix="preempt-") as top:
        for grace_s in options.grace or GRACES:
            rng = random.Random(f"{options.seed} {grace_s}")
            folder = Path(top) / f"{grace_s:g}"
            folder.mkdir()
            codes: dict[str, int] = {}
            for number in range(1, options.count + 1):
                moment, there = plan_of(rng, grace_s), stored(folder)
                outcome = play(moment, folder, number)
                wrong = wrong_with(moment, outcome, there)
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
                    print(outcome.said + "\n" + "\n".join(f"  {one}" for one in wrong), flush=True)
            print(f"{grace_s:g} s of grace, {options.count} moments: {json.dumps(codes)}", flush=True)
    print(f"{bad} moments went wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
