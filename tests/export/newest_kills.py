"""``python -m tests.export.newest_kills``: ``relight export --follow`` is killed at random moments, while a reader reads all the time.

A trainer saves all the time; every value of a checkpoint is its step. The reader resolves the link once, and must find all files of one
checkpoint. In the end the export is that of the newest checkpoint, and nothing else than the version before is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.format import Leaf, encode_tree
from relight.layout import Bytes, Item
from relight.policy import Keep
from relight.reclaim.prune import execute, plan_prune
from relight.save_reason import END, SaveReason
from relight.store import LocalStore

TENSORS, ELEMENTS = 8, 4096


class Outcome(NamedTuple):
    """Reads, checkpoints that the reader saw, and what is wrong."""

    reads: int
    steps: int
    wrong: list[str]


def save(attempt: Attempt, step: int, *, last: bool = False) -> None:
    """Commit a checkpoint; each value is the step."""
    data = struct.pack("<f", step) * ELEMENTS
    items = [
        Item(f"model/t{number}", "float32", (ELEMENTS,), "param", Bytes(data), trainable=True)
        for number in range(TENSORS)
    ]
    tree = {"model": {f"t{number}": Leaf("tensor", (number,)) for number in range(TENSORS)}}
    info = SaveInfo(step, reason=END if last else SaveReason("every", "every 1 steps"), components={"model": "module"})
    attempt.save(SaveRequest(info, tree=encode_tree(tree), items=items))


def step_of(path: Path) -> int:
    """Return the step of an export, a file or a directory. Raise ``AssertionError`` for a mixture."""
    files = [path]
    if path.is_dir():
        assert (path / "config.json").read_text() == "{}"
        index = json.loads((path / "model.safetensors.index.json").read_text())
        files = sorted({path / name for name in index["weight_map"].values()})
        assert len(files) > 1
    values, names = set[float](), 0
    for file in files:
        data = file.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                values.update(struct.unpack_from(f"<{(end - begin) // 4}f", data, 8 + length + begin))
                names += 1
    assert len(values) == 1 and names == TENSORS, f"{path}: {names} tensors, values {sorted(values)}"
    return int(values.pop())


def wait_for(output: Path, text: str, count: int) -> None:
    """Wait until ``text`` was printed ``count`` times more, or for a while."""
    wanted, ends = output.read_text().count(text) + count, time.monotonic() + 15
    while output.read_text().count(text) < wanted and time.monotonic() < ends:
        time.sleep(0.01)


def kill_exports(base: Path, count: int, seed: int, *, folder: bool) -> Outcome:
    """Kill ``count`` exports, and let the last one end."""
    pick, stop, wrong, seen = random.Random(seed), threading.Event(), list[str](), list[int]()
    (base / "more").mkdir()
    (base / "more/config.json").write_text("{}")
    target = base / ("out" if folder else "out.safetensors")
    attempt, last = Attempt.begin(LocalStore(str(base / "s")), "run"), 0

    def train() -> None:
        nonlocal last
        while not stop.is_set():
            last += 1
            save(attempt, last)
            execute(plan_prune(attempt.store, "run", Keep(last=3)), attempt.store)
            time.sleep(pick.uniform(0.02, 0.2))
        last += 1
        save(attempt, last, last=True)

    def read() -> None:
        while not stop.is_set():
            resolved = Path(os.path.realpath(target))
            try:
                seen.append(step_of(resolved))
            except FileNotFoundError as error:
                if seen and os.path.realpath(target) == str(resolved) and not resolved.exists():
                    wrong.append(f"the export was gone: {error}")
            except AssertionError as error:
                wrong.append(str(error))
            time.sleep(0.005)

    def start() -> subprocess.Popen[bytes]:
        options = ["--files", "more", "--shard", "40kB"] if folder else []
        arguments = ["export", "--follow", "s/run", str(target), "--every", "0.05", *options]
        return subprocess.Popen([sys.executable, "-m", "relight", *arguments], cwd=base, stdout=log, stderr=log)

    threads = [threading.Thread(target=train), threading.Thread(target=read)]
    with (base / "output").open("ab") as log:
        for thread in threads:
            thread.start()
        try:
            for _ in range(count):
                export = start()
                wait_for(base / "output", "written to", pick.randrange(4))
                time.sleep(pick.uniform(0, 0.3))
                export.kill()
                export.wait()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if code := start().wait(60):
            wrong.append(f"the last export ended with {code}")
    if (step := step_of(Path(os.path.realpath(target)))) != last:
        wrong.append(f"the export is of step {step}, and the newest is {last}")
    left = sorted(path.name for path in base.iterdir() if "out" in path.name and path.name != "output")
    if left != ([".out.versions", "out"] if folder else ["out.safetensors"]):
        wrong.append(f"left over: {left}")
    if folder and len(versions := os.listdir(base / ".out.versions")) > 2:
        wrong.append(f"left over: {versions}")
    if seen != sorted(seen):
        wrong.append("an older checkpoint replaced a newer one")
    return Outcome(len(seen), len(set(seen)), wrong)


def main() -> int:
    """Kill, and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = False
    for folder in (True, False):
        with tempfile.TemporaryDirectory() as base:
            outcome = kill_exports(Path(base), options.count // 2, options.seed, folder=folder)
        print(f"{'directory' if folder else 'file'}: {outcome.reads} reads of {outcome.steps} checkpoints")
        for text in outcome.wrong:
            print(f"  {text}")
        failed |= bool(outcome.wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
