"""``make engines``: workers and commanding processes of heavy commands are killed at random moments; every result is equal to the bit.

Each trial runs ``verify``, ``export`` or ``cp`` of one store with two workers, and kills some of its workers with SIGKILL: the command
must end as without kills. Every few trials the commanding process is killed instead: the target must have no incomplete checkpoint or file,
and a second call must complete it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

COMMANDS = ("verify", "export", "cp")
TIME_S = 300.0


def make(root: Path, megabytes: int, ranks: int = 4, steps: int = 2) -> None:
    """Save checkpoints of several ranks, which are threads, so that each has several packs."""
    from tests.drain.outward_kills import WideRanks

    from relight.layout import Box, Bytes, Item

    size = megabytes * 1_000_000 // ranks

    class LargeRanks(WideRanks):
        def request(self, rank: int, step: int, timeout_s: float, value: int) -> Any:
            request = super().request(rank, step, timeout_s, value)
            data = random.Random(f"{rank} {step}").randbytes(size)
            request.items[:] = [Item("t", "uint8", (self.world, size), "param", Bytes(data), Box((rank, 0), (1, size)))]
            return request

    saver = LargeRanks(root, ranks)
    for step in range(steps):
        errors = [result for result in saver.save(step) if isinstance(result, BaseException)]
        assert not errors, errors


def command(name: str, store: Path, target: Path, engine: str) -> list[str]:
    """Return the command line."""
    words = {
        "verify": ["verify", str(store / "run"), "--json"],
        "export": ["export", str(store / "run"), str(target / "model.safetensors"), "--all"],
        "cp": ["cp", str(store / "run"), f"{target}/copy"],
    }[name]
    return [sys.executable, "-m", "relight", *words, "--engine", engine, "--jobs", "2"]


def outcome(name: str, target: Path, printed: str) -> str:
    """Return what must be equal each time, as a hash: what was printed, or the bytes of exported files and copied packs."""
    if name == "verify":
        return hashlib.sha256(printed.encode()).hexdigest()
    digest = hashlib.sha256()
    for path in sorted(target.rglob("model.safetensors" if name == "export" else "pack-*")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def workers(process: int) -> list[int]:
    """Return the processes below ``process`` that run tasks: spawned ones, or Ray's that are busy."""
    parents: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
                names[int(entry.name)] = Path(entry.path, "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    below, todo = [], [process]
    while todo:
        for child in parents.get(todo.pop(), ()):
            todo.append(child)
            if "multiprocessing.spawn" in names.get(child, "") or names.get(child, "").startswith("ray::_"):
                below.append(child)
    return [child for child in below if not names[child].startswith("ray::IDLE")]


def incomplete(name: str, target: Path) -> str:
    """Return what is wrong with the target of a killed command; empty if nothing is."""
    if name == "cp" and (target / "copy" / "log").is_dir():
        checked = subprocess.run(
            [sys.executable, "-m", "relight", "verify", f"{target}/copy", "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        if checked.returncode:
            return f"a copy that was committed is damaged: {checked.stdout}{checked.stderr}"
    return ""


class Trials:
    """Runs trials and counts."""

    def __init__(self, folder: Path, engine: str, seed: int, megabytes: int) -> None:
        self.folder, self.engine, self.rng = folder, engine, random.Random(seed)
        self.store = folder / "store"
        make(self.store, megabytes)
        self.expected: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        for name in COMMANDS:
            target, began = self._target(), time.monotonic()
            done = self._start(name, target)
            printed, _ = done.communicate(timeout=TIME_S)
            assert done.returncode == 0, printed
            self.seconds[name] = time.monotonic() - began
            self.expected[name] = outcome(name, target, printed)
        self.killed = {"workers": 0, "commands": 0}
        self.problems: list[str] = []

    def _target(self) -> Path:
        target = self.folder / "target"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        return target

    def _start(self, name: str, target: Path) -> subprocess.Popen[str]:
        words = command(name, self.store, target, self.engine)
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def workers(self, name: str, most: int) -> None:
        """Kill workers at random moments, ``most`` at most; then compare."""
        target, kills = self._target(), 0
        process = self._start(name, target)
        ends = time.monotonic() + TIME_S
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(self.rng.uniform(0.0, 0.15))
            alive = workers(process.pid)
            if alive and kills < most:
                try:
                    os.kill(self.rng.choice(alive), signal.SIGKILL)
                    kills += 1
                except ProcessLookupError:
                    continue
        self.killed["workers"] += kills
        self._compare(name, target, process, f"after {kills} lost workers")

    def command(self, name: str) -> None:
        """Kill the commanding process at a random moment, check the target, and call the command again."""
        target = self._target()
        process = self._start(name, target)
        time.sleep(self.rng.uniform(0.2, 1.0) * self.seconds[name])
        if process.poll() is None:
            self.killed["commands"] += 1
            process.kill()
        process.communicate(timeout=TIME_S)
        if process.returncode < 0 and (wrong := incomplete(name, target)):
            self.problems.append(f"{name}: {wrong}")
        if name == "export" and list(target.glob("[!.]*")):  # it was killed after its end, or not at all
            if outcome(name, target, "") != self.expected[name]:
                self.problems.append("export: the target is there, and incomplete")
        else:
            self._compare(name, target, self._start(name, target), "by the second call")

    def _compare(self, name: str, target: Path, process: subprocess.Popen[str], when: str) -> None:
        printed, errors = process.communicate(timeout=TIME_S)
        if process.returncode:
            self.problems.append(f"{name} ends with {process.returncode} {when}: {errors[-400:]}")
        elif outcome(name, target, printed) != self.expected[name]:
            self.problems.append(f"{name} gives another result {when}: {printed[-600:]}")


def main() -> int:
    """Run until the wanted numbers of kills are reached; print counts and problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("processes", "ray"), default="processes")
    parser.add_argument("--workers", type=int, default=200, help="workers to kill")
    parser.add_argument("--commands", type=int, default=20, help="commanding processes to kill")
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", dest="as_json")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trials, number = Trials(Path(folder), given.engine, given.seed, given.megabytes), 0
        while trials.killed["workers"] < given.workers or trials.killed["commands"] < given.commands:
            name = COMMANDS[number % len(COMMANDS)]
            number += 1
            if trials.killed["workers"] < given.workers:
                trials.workers(name, min(3, given.workers - trials.killed["workers"]))
            if trials.killed["commands"] < given.commands:
                trials.command(name)
            if not given.as_json:
                print(f"{trials.killed}, {len(trials.problems)} problems, {time.monotonic() - began:.0f} s", flush=True)
    facts = {"engine": given.engine, "seed": given.seed, **trials.killed, "problems": trials.problems}
    print(json.dumps(facts) if given.as_json else "\n".join([f"{facts}", *trials.problems]))
    return bool(trials.problems)


if __name__ == "__main__":
    sys.exit(main())
