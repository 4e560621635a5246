"""``make migrations``: a migration killed again and again, at seeded moments, copies every checkpoint once."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from old_ones import check_arrived, make

from relight.migrate import plan_migration


def command(old: Path, new: Path, engine: str, *more: str) -> list[str]:
    """Return the command line of a migration."""
    return [
        sys.executable,
        "-m",
        "relight",
        "import",
        "--all",
        str(old),
        str(new),
        "--jobs",
        "2",
        "--engine",
        engine,
        *more,
    ]


def packs(folder: Path) -> set[Path]:
    """Return the packs of committed checkpoints and of unfinished ones, while a migration may move their folders."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return set(folder.rglob("pack-*"))


def kill_often(
    folder: Path, count: int, kills: int, seed: int, engine: str, begin_s: float, work_s: float
) -> list[int]:
    """Make ``count`` old checkpoints, begin to migrate them ``kills`` times, and a last time to the end. How many were left before each.

    A kill comes up to ``work_s`` after this start has written some packs. Every second kill comes at most ``begin_s``
    after the start.
    """
    draw = random.Random(seed)
    old, new = folder / "old", folder / "new"
    made = make(old, count)
    left = [count]
    for number in range(kills):
        before = packs(new)
        with open(folder / "output", "wb") as output:
            started = subprocess.Popen(command(old, new, engine), stdout=output, stderr=output, start_new_session=True)
        ends = time.monotonic() + draw.uniform(0, begin_s) if number % 2 == 0 else math.inf
        # on a fast machine, too, the last start has work left
        share = draw.randint(1, max(1, left[-1] // (kills - number)))
        while started.poll() is None and time.monotonic() < ends:
            if len(packs(new) - before) >= share:
                ends = min(ends, time.monotonic() + draw.uniform(0, work_s))
            time.sleep(0.005)
        assert started.poll() != 0, (
            f"all was done before kill {number + 1} of {kills}: take more checkpoints, or less time"
        )
        assert started.poll() is None, (started.returncode, (folder / "output").read_text())
        os.kill(started.pid, signal.SIGKILL)  # this process alone: its children must end by themselves
        started.wait()
        left.append(len(plan_migration(str(old), str(new), check=0).todo))
    answer = subprocess.run(command(old, new, engine, "--check", "full"), capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert " compared with what they were made of: all the same" in answer.stdout, answer.stdout
    check_arrived(new, made)
    again = subprocess.run(command(old, new, engine), capture_output=True, text=True, check=False)
    assert again.returncode == 0 and f"{count} were there already" in again.stdout, again.stdout + again.stderr
    check_arrived(new, made)
    return left


def main() -> None:
    """Kill, check, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--begin", type=float, default=4.0, help="most seconds from the start to every second kill")
    parser.add_argument("--work", type=float, default=0.05, help="most seconds from written packs to a kill")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        left = kill_often(Path(folder), given.count, given.kills, given.seed, given.engine, given.begin, given.work)
    print(
        f"{given.engine}: {given.count} checkpoints, {given.kills} kills (seed {given.seed}), left before each: {left}"
    )
    print(f"complete, each once, verified, compared with what they were made of; {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
