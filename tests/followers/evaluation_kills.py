"""``python -m tests.followers.evaluation_kills``: followers that evaluate each checkpoint, and their commands, are killed at random moments.

A trainer saves all the time. Each trial starts one or two followers with the same name, and after a random time sends SIGKILL to the
followers, to the running command, or to both. In the end every checkpoint must have exactly one result, with the right number.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.export.newest_kills import wait_for

from relight.catalog import Run
from relight.format.topics import RESULT
from relight.run_records.results import results_of
from relight.store import LocalStore

NAME = "killed"
TRAINER = """
import sys, time
import torch
import relight

model = torch.nn.Linear(8, 1)
path, ends = sys.argv[1], sys.argv[2]
with relight.Checkpointer(path, model=model, save=relight.every(steps=2), background=False) as ckpt:
    for step in range(ckpt.restore(), 1_000_000):
        ckpt.step(step, loss=1.0 / (step + 1))
        time.sleep(0.1)
        try:
            open(ends).close()
            break
        except FileNotFoundError:
            pass
"""
COMMAND = """
import json, os, random, sys, time
print("evaluating", sys.argv[1], flush=True)
time.sleep(random.random() * 0.1)
result = json.dumps({"score": int(sys.argv[2]) * 3})
if random.random() < 0.5:
    print(result)
else:
    with open(os.environ["RELIGHT_RESULT"], "w") as file:
        file.write(result)
"""
VICTIMS = ("follower", "follower", "command", "both")
COMMANDS_S = 60.0


class Killed(NamedTuple):
    """The outcome: checkpoints, kills by victim, evaluations that ran, and what is wrong."""

    checkpoints: int
    kills: Counter[str]
    runs: int
    wrong: list[str]


def kill_followers(base: Path, count: int, seed: int, *, everything: bool = True) -> Killed:
    """Kill ``count`` times, then let one follower end. ``everything``: ``--all``; otherwise only the newest waits."""
    pick, kills = random.Random(seed), Counter[str]()
    (base / "train.py").write_text(TRAINER)
    (base / "evaluate.py").write_text(COMMAND)
    log = (base / "output").open("ab")
    environment = {
        **os.environ,
        "RELIGHT_EVENTS": str(base / "events"),
    }  # one of them may be the only report of the end
    trainer = subprocess.Popen(
        [sys.executable, "train.py", "s/run", "ends"], cwd=base, stdout=log, stderr=log, env=environment
    )
    while not (base / "s/run").exists():
        assert trainer.poll() is None, (base / "output").read_text()
        time.sleep(0.05)

    def start() -> subprocess.Popen[bytes]:
        command = f"{sys.executable} -S -E evaluate.py {{checkpoint}} {{step}}"
        # the command may be killed in each try of a checkpoint
        options = ["--run", command, "--name", NAME, "--every", "0.05", "--retries", "20"]
        arguments = ["follow", "s/run", *options, *(["--all"] if everything else [])]
        return subprocess.Popen(
            [sys.executable, "-m", "relight", *arguments], cwd=base, stdout=log, stderr=log, env=environment
        )

    try:
        for _ in range(count):
            followers = [start() for _ in range(pick.choice((1, 1, 2)))]
            victim = pick.choice(VICTIMS)
            wait_for(base / "output", "evaluating", pick.randrange(5))
            time.sleep(pick.uniform(0, 0.3))
            if victim != "follower":
                _kill_commands(base)
            for follower in followers:
                if victim != "command" or pick.random() < 0.5:
                    follower.kill()
            if victim == "command":
                time.sleep(pick.uniform(0, 0.3))
            for follower in followers:
                follower.kill()
                follower.wait()
            kills[victim] += 1
        (base / "ends").touch()
        assert trainer.wait(60) == 0, (base / "output").read_text()
        last = start()
        code = last.wait(COMMANDS_S + count)
    finally:
        trainer.kill()
        trainer.wait()
        _kill_commands(base)
        log.close()
    checkpoints, wrong = _judge(base, everything, code)
    return Killed(checkpoints, kills, (base / "output").read_text().count("evaluating"), wrong)


def _kill_commands(base: Path) -> None:
    """Kill the commands that run now, also those of killed followers."""
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            try:
                words = (directory / "cmdline").read_bytes().split(b"\0")
                if b"evaluate.py" in words and os.path.samefile(directory / "cwd", base):
                    os.kill(int(directory.name), signal.SIGKILL)
            except OSError:
                continue


def _judge(base: Path, everything: bool, code: int) -> tuple[int, list[str]]:
    """Return the number of checkpoints, and what is wrong with their results."""
    history = Run(LocalStore(str(base / "s")), "run").history()
    counted = Counter(note.id for _, note in RESULT.among(history.notes) if note.by == NAME)
    wrong = [] if code == 0 else [f"the last follower ended with {code}"]
    for checkpoint in history.live:
        must = everything or checkpoint is history.live[-1]
        if counted[checkpoint.id] != 1 and (must or counted[checkpoint.id]):
            wrong.append(f"step {checkpoint.step} has {counted[checkpoint.id]} results")
        if counted[checkpoint.id] and checkpoint.metrics.get("score") != checkpoint.step * 3:
            wrong.append(f"step {checkpoint.step} has the metrics {checkpoint.metrics}")
    wrong += [f"{result.id}: {result}" for result in results_of(history, NAME) if result.failed or result.skipped]
    return len(history.live), wrong


def main() -> int:
    """Kill, and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = False
    for everything in (True, False):
        with tempfile.TemporaryDirectory() as base:
            outcome = kill_followers(Path(base), options.count // 2, options.seed, everything=everything)
        kills = ", ".join(f"{victim} {number}" for victim, number in sorted(outcome.kills.items()))
        mode = "--all" if everything else "--queue 1"
        print(f"{mode}: {outcome.checkpoints} checkpoints, {outcome.runs} evaluations, kills: {kills}")
        for text in outcome.wrong:
            print(f"  {text}")
        failed |= bool(outcome.wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
