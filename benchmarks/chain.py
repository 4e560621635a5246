"""``python -m benchmarks.chain``: restoring through a chain of ten differences, against a checkpoint that stands by itself.

A GPT in training; eleven saves, a step apart, under ``Compact(codecs="always", full_every=16)``: each but the first is
coded as its differences from the one before. Then the first and the last are restored in turns, with the page cache
emptied before each and every byte verified. So is the same state, saved without ``compact=``. Read the ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import relight
from benchmarks.cached import let_go
from benchmarks.machine import describe
from benchmarks.workloads import build
from relight.catalog import Run
from relight.layout import Bytes
from relight.reader import read_tensors
from relight.store import LocalStore

LENGTH = 10


def make(folder: Path, size: str) -> dict[str, tuple[str, str, int]]:
    """The run, the checkpoint and the stored bytes of each way."""
    checkpoints = {}
    for way, compact in (("chain", relight.Compact(codecs="always", full_every=16)), ("as it is", None)):
        work = build(size, seed=0)
        run = folder / way.replace(" ", "-") / "run"
        with relight.Checkpointer(
            run, model=work.model, optimizer=work.optimizer, compact=compact, limits=relight.Limits(when_busy="queue")
        ) as ckpt:
            ckpt.restore()
            work.train()
            for step in range(LENGTH + 1 if compact is not None else 1):
                work.train()
                ckpt.save(step).wait(120)
        for checkpoint in Run(LocalStore(run.parent), run.name).history().live:
            number = len(checkpoint.body.requires)
            name = way if compact is None else {0: "by itself", LENGTH: f"behind {LENGTH} differences"}.get(number)
            if name is not None:
                checkpoints[name] = (str(run), checkpoint.id, checkpoint.body.new_bytes)
    return checkpoints


def restored(run: str, checkpoint_id: str, rooms: dict[int, bytearray]) -> float:
    """Return seconds until the verified checkpoint is in allocated memory, from the store alone, without any agent."""
    path = Path(run)
    let_go(path.parent)
    began = perf_counter()
    run_there = Run(LocalStore(path.parent), path.name)
    checkpoint = run_there.history().find(checkpoint_id)
    assert checkpoint is not None
    opened = run_there.open(checkpoint)
    for part in opened.parts:
        for index, tensor in enumerate(part.tensors):
            if len(rooms.setdefault(index, bytearray())) != tensor.length:
                rooms[index] = bytearray(tensor.length)
        read_tensors(opened, part, {index: Bytes(rooms[index]) for index in range(len(part.tensors))})
    return perf_counter() - began


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="S", help="S (0.12 GB) or M (1.5 GB)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chain-", dir=options.dir))
    try:
        ways = make(folder, options.size)
        rooms: dict[int, bytearray] = {}
        rounds: list[dict[str, float]] = []
        for number in range(options.rounds + 1):  # the first one makes the memory
            report = {
                way: round(restored(run, checkpoint_id, rooms), 4)
                for way, (run, checkpoint_id, _) in random.Random(number).sample(list(ways.items()), len(ways))
            }
            rounds += [report] if number else []
            print("  ".join(f"{way} {report[way]:.3f} s" for way in ways), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ways_report = {
        way: {"median_s": statistics.median(round_[way] for round_ in rounds), "stored_bytes": ways[way][2]}
        for way in ways
    }
    last = f"behind {LENGTH} differences"
    ratios = {
        way: round(statistics.median(round_[last] / round_[way] for round_ in rounds), 3) for way in ways if way != last
    }
    for way, measured in ways_report.items():
        print(f"{way:24} {measured['median_s']:.3f} s, {measured['stored_bytes'] / 1e6:.0f} MB stored")
    print(f"{last}: {ratios}")
    if options.out:
        result: dict[str, Any] = {
            "machine": describe(options.dir),
            "size": options.size,
            "ways": ways_report,
            "ratios": ratios,
            "rounds": rounds,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
