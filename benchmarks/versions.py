"""``python -m benchmarks.versions``: a branch of a checkpoint, and a comparison of two, with the floor of reading.

Two checkpoints of one model in float32, every tensor changed. In each round, interleaved, the page cache emptied of both before each: the
floor of reading both packs, and the comparison, in a process of its own. Rates are medians. Memory is the process's largest, less what it
has before it begins.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.export import peak_bytes
from benchmarks.machine import describe
from relight.bench.cache import drop_cache
from relight.bench.floors import direct_works, read, timed
from relight.catalog.run import Run
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.format import Leaf, encode_tree
from relight.layout import Bytes, Item
from relight.store import open_bytes
from relight.versions.branching import branch
from relight.versions.difference import diff

WIDTH = 1024


def make(store: Path, size: int) -> None:
    """Two checkpoints of about ``size`` bytes: an embedding of a tenth of it, and layers."""
    rng = np.random.default_rng(0)
    first = rng.standard_normal((size // 10 // WIDTH // 4, WIDTH), dtype="f4")
    shapes = {"model.embed.weight": first.shape}
    while sum(4 * rows * columns for rows, columns in shapes.values()) < size:
        shapes[f"model.layers.{len(shapes)}.weight"] = (4 * WIDTH, WIDTH)
    layer = rng.standard_normal((4 * WIDTH, WIDTH), dtype="f4")
    tree = {"model": {name: Leaf("tensor", (index,)) for index, name in enumerate(shapes)}}
    attempt = Attempt.begin(open_bytes(store), "run")
    for step in range(2):
        tensors = {name: first if shape == first.shape else layer for name, shape in shapes.items()}
        views = {name: Bytes(memoryview(tensors[name]).cast("B")) for name in shapes}
        items = [Item(f"model/{name}", "float32", shape, "param", views[name]) for name, shape in shapes.items()]
        attempt.save(SaveRequest(SaveInfo(step=step), tree=encode_tree(tree), items=items))
        first *= 1.001
        layer *= 0.999


def compare(store: str) -> dict[str, Any]:
    """Compare in this process. Return seconds, bytes read, and the peak of memory beyond what was there before."""
    run = Run(open_bytes(store), "run")
    first, second = (run.open(checkpoint) for checkpoint in run.history().live)
    Path("/proc/self/clear_refs").write_text("5")
    before, began, worked = peak_bytes(), time.perf_counter(), time.process_time()
    differences = diff(first, second)
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    assert all(tensor.state == "changed" for tensor in differences.tensors)
    return {"s": seconds, "cpu_s": worked, "bytes": differences.bytes_read, "memory_bytes": peak_bytes() - before}


def branches(store: Path, count: int) -> tuple[list[float], int]:
    """Seconds for each of so many branches, and the bytes that the last one takes."""
    run, took = Run(open_bytes(store), "run"), []
    newest = run.history().live[-1]
    for number in range(count):
        took.append(timed(lambda number=number: branch(run, newest, f"branch-{number}")))
    return took, sum(path.stat().st_size for path in (store / f"branch-{count - 1}").rglob("*") if path.is_file())


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="by default the directory of temporary files")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(compare(given.child)))
        return
    folder = Path(tempfile.mkdtemp(prefix="relight-versions-", dir=given.folder))
    try:
        make(folder / "runs", int(given.gigabytes * 1e9))
        packs = sorted((folder / "runs").rglob("pack-*"))
        direct, rows = direct_works(folder), []
        for number in range(given.rounds):
            drop_cache(folder)
            reading = timed(lambda: [read(pack, pack.stat().st_size, 2, direct=direct) for pack in packs])
            drop_cache(folder)
            child = [sys.executable, "-m", "benchmarks.versions", "--child", str(folder / "runs")]
            report = json.loads(
                subprocess.run(child, check=True, capture_output=True, text=True, env=os.environ).stdout
            )
            rows.append({"read_s": reading, "diff_s": report["s"], "memory_bytes": report["memory_bytes"]})
            print(
                f"round {number + 1}: " + ", ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()),
                flush=True,
            )
        took, held_bytes = branches(folder / "runs", 20)
        middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        total = sum(pack.stat().st_size for pack in packs)
        summary = {
            "machine": describe(folder),
            "bytes": total,
            "gb_s": {name: round(total / 1e9 / middle[f"{name}_s"], 3) for name in ("read", "diff")},
            "diff_of_the_read_floor": round(middle["read_s"] / middle["diff_s"], 3),
            "diff_memory_mb": round(max(row["memory_bytes"] for row in rows) / 1e6, 1),
            "branch_ms": round(1000 * statistics.median(took), 1),
            "branch_worst_ms": round(1000 * max(took), 1),
            "branch_bytes": held_bytes,
            "rounds": rows,
        }
        print(json.dumps(summary, indent=2))
        if given.out:
            given.out.write_text(json.dumps(summary, indent=1) + "\n")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
