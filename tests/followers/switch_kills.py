"""``python -m tests.followers.switch_kills``: a trainer, its agent and three followers are killed at random moments, from a seed.

The weights have a checksum: each layer has one value, and a buffer has the step and the values that belong to it. A follower compares them
after every poll. One follower reads in ``poll()``, one has a thread, and one reads in batches. A mixture, or a follower that does not
reach the newest checkpoint in the end, is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.agent.storm import agents_of
from tests.scripts import Script

from relight.catalog import Run
from relight.errors import CheckpointNotFound
from relight.store import LocalStore

MODEL = """
import sys, time
import torch
from torch import nn
import relight

torch.set_num_threads(1)
LAYERS = 6


class Net(nn.ModuleDict):
    def __init__(self):
        super().__init__({f"layer{number}": nn.Linear(1, 1 << 15, bias=False) for number in range(LAYERS)})
        self.register_buffer("sums", torch.zeros(LAYERS + 1, dtype=torch.float64))


net = Net()
"""
TRAINER = (
    MODEL
    + """
with relight.Checkpointer(
    sys.argv[1], model=net, save=relight.every(steps=1), keep=relight.keep(last=3), compact=sys.argv[2] == "compact"
) as ckpt:
    for step in range(ckpt.restore(), 1_000_000):
        with torch.no_grad():
            changed = step % LAYERS if step % 5 else None
            for number in range(LAYERS):
                if changed is None or number == changed:
                    net[f"layer{number}"].weight.fill_(step)
                    net.sums[number] = step
            net.sums[-1] = step
        ckpt.step(step)
        time.sleep(0.03)
"""
)
FOLLOWER = (
    MODEL
    + """
path, log, kind = sys.argv[1:]
options = {"inline": {}, "thread": {"every": 0.02}, "batches": {"memory": 1000}}[kind]
with open(log, "a", buffering=1) as out, relight.follow(path, net, **options) as follower:
    while True:
        try:
            switched = follower.poll()
        except relight.RelightError as error:
            if kind != "batches" or follower.checkpoint is not None:
                print("error", str(error).splitlines()[0], file=out)
            switched = None
        if follower.checkpoint is not None:
            layers = [net[f"layer{number}"].weight for number in range(LAYERS)]
            values = [float(layer.min()) for layer in layers]
            tops = [float(layer.max()) for layer in layers]
            if values != tops or [*values, float(follower.checkpoint.step)] != net.sums.tolist():
                print("mixture", values, tops, net.sums.tolist(), follower.checkpoint.step, file=out)
                break
        if switched:
            print("step", switched.step, switched.source, file=out)
        time.sleep(0.005)
"""
)
KINDS = ("inline", "thread", "batches")
LAST_S = 60.0


class Outcome(NamedTuple):
    """Kills by victim, switches by the source of the bytes, the newest step, and what is wrong."""

    kills: Counter[str]
    switches: Counter[str]
    steps: int
    wrong: list[str]


def kill_at_random(base: Path, count: int, seed: int) -> Outcome:
    """Kill ``count`` times, restart what was killed, and judge what the followers wrote."""
    pick, kills = random.Random(seed), Counter[str]()
    path, form = str(base / "s" / "run"), "compact" if seed % 2 else "plain"
    logs = {kind: base / f"{kind}.log" for kind in KINDS}

    def start(name: str) -> Script:
        if name == "trainer":
            return Script(TRAINER, path, form, RELIGHT_EVENTS="0", RELIGHT_PROGRESS="0")
        return Script(FOLLOWER, path, str(logs[name]), name, RELIGHT_EVENTS="0", RELIGHT_PROGRESS="0")

    running = {name: start(name) for name in ("trainer", *KINDS)}
    wrong: list[str] = []
    try:
        for _ in range(count):
            time.sleep(pick.uniform(0.05, 0.6))
            victim = pick.choice(("trainer", "agent", "both", *KINDS))
            if victim in ("agent", "both"):
                for agent in agents_of(running["trainer"].pid):
                    agent.kill()
            if victim != "agent":
                name = "trainer" if victim == "both" else victim
                running[name].kill()
                running[name].wait(10)
                _close(running[name])
                running[name] = start(name)
            kills[victim] += 1
            for name in KINDS:
                if running[name].poll() is not None and len(wrong) < 20:
                    wrong.append(f"{name} ended with {running[name].returncode}: {logs[name].read_text()[-300:]}")
                    _close(running[name])
                    running[name] = start(name)
        time.sleep(1)
        running["trainer"].kill()
        running["trainer"].wait(10)
        ends = time.monotonic() + LAST_S
        while (late := [name for name in KINDS if _last_step(logs[name]) != _newest(path)]) and time.monotonic() < ends:
            time.sleep(0.2)
        wrong += [f"{name} stays at step {_last_step(logs[name])}, and the newest is {_newest(path)}" for name in late]
    finally:
        for script in running.values():
            for agent in agents_of(script.pid) if script.returncode is None else ():
                agent.kill()
            script.kill()
            script.wait(10)
            _close(script)
    lines = [line.split() for log in logs.values() for line in log.read_text().splitlines()]
    wrong += [" ".join(words) for words in lines if words[:1] != ["step"]][:20]
    switches = Counter(words[2] for words in lines if words[:1] == ["step"] and len(words) == 3)
    return Outcome(kills, switches, _newest(path), wrong)


def _close(script: Script) -> None:
    script.stdout.close()
    script.stderr.close()


def _last_step(log: Path) -> int:
    steps = (
        [line.split()[1] for line in log.read_text().splitlines() if line.startswith("step ")] if log.exists() else []
    )
    return int(steps[-1]) if steps else -1


def _newest(path: str) -> int:
    store, _, run = path.rpartition("/")
    with contextlib.suppress(CheckpointNotFound, IndexError):
        return Run(LocalStore(store), run).history().live[-1].step
    return -1


def main() -> int:
    """Kill, and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = False
    for seed in (options.seed, options.seed + 1):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir="/dev/shm") as base:
            outcome = kill_at_random(Path(base), options.count // 2, seed)
        kills = ", ".join(f"{victim} {number}" for victim, number in sorted(outcome.kills.items()))
        switches = ", ".join(f"{number} from {source}" for source, number in sorted(outcome.switches.items()))
        print(
            f"seed {seed}: kills: {kills}; {outcome.steps} steps; switches: {switches}; {time.monotonic() - began:.0f} s"
        )
        for text in outcome.wrong:
            print(f"  {text}")
        failed |= bool(outcome.wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
