"""``python -m benchmarks.export``: export of a checkpoint to safetensors, next to the machine's floors for the same
bytes, and its memory.

A checkpoint of random bytes, shaped as a language model's, is exported in a process of its own. In each round, interleaved: the floor of
reading it, the floor of writing as much (the better of past the page cache and through it, fsync included), that of both at once, which
is more than either where they share a device, and the export; the page cache is emptied of the files first. Rates are medians. Memory is
the process's largest, less what it has before it begins.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from relight.bench.cache import drop_cache
from relight.bench.floors import BLOCK_BYTES, direct_works, random_bytes, read, timed, write
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.format import Leaf, encode_tree
from relight.layout import Bytes, Item
from relight.store import open_bytes

WIDTH = 2048


def make(store: Path, size: int) -> None:
    """A checkpoint of about ``size`` bytes: an embedding, and layers of a few shapes, in bfloat16."""
    memory = random_bytes(max(size // 8, 4 * WIDTH * WIDTH * 2))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(memory) // (2 * WIDTH), WIDTH)}
    layer = 0
    while sum(2 * shape[0] * shape[-1] for shape in shapes.values()) < size:
        shapes |= {f"model.layers.{layer}.{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
        shapes |= {f"model.layers.{layer}.{name}.weight": (4 * WIDTH, WIDTH) for name in ("gate", "up")}
        shapes[f"model.layers.{layer}.norm.weight"] = (1, WIDTH)
        layer += 1
    items = [
        Item(f"model/{name}", "bfloat16", shape, "param", Bytes(memory[: 2 * shape[0] * shape[1]]))
        for name, shape in shapes.items()
    ]
    tree = {"model": {name: Leaf("tensor", (index,)) for index, name in enumerate(shapes)}}
    Attempt.begin(open_bytes(store), "run").save(SaveRequest(SaveInfo(step=1), tree=encode_tree(tree), items=items))


def peak_bytes() -> int:
    """The largest memory that this process has had."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def export(store: str, target: str, options: dict[str, Any]) -> dict[str, Any]:
    """Export in this process. Return seconds, bytes, and the peak of memory beyond what was there before."""
    from relight.catalog import open_run
    from relight.export import Options, execute_export, plan_export

    run = open_run(open_bytes(store), "run")
    plan = plan_export(run.open(run.history().live[-1]), target, Options(**options))
    Path("/proc/self/clear_refs").write_text("5")  # the largest is counted from here on
    before = peak_bytes()
    report = execute_export(plan)
    after = peak_bytes()
    largest = max(tensor.length for tensor in plan.whole.tensors)
    return {"s": report.seconds, "bytes": report.bytes, "memory_bytes": after - before, "largest_bytes": largest}


def at_once(*actions: Callable[[], object]) -> None:
    """Run all actions at once, each in a thread."""
    with ThreadPoolExecutor(len(actions)) as pool:
        for done in [pool.submit(action) for action in actions]:
            done.result()


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint is, by default in the folder of temporary files"
    )
    parser.add_argument("--target", type=Path, help="where the export goes, if elsewhere")
    parser.add_argument("--options", default="{}", help='of the export, as JSON: {"to": "pt"}')
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(export(given.child[0], given.child[1], json.loads(given.child[2]))))
        return
    folder = Path(tempfile.mkdtemp(prefix="relight-export-", dir=given.folder))
    target = Path(tempfile.mkdtemp(prefix="relight-export-", dir=given.target or given.folder))
    try:
        measure(folder, target, int(given.gigabytes * 1e9), given.rounds, given.options)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(target)


def measure(folder: Path, there: Path, size: int, rounds: int, options: str) -> None:
    """Return the rounds and their medians."""
    store, target = folder / "runs", there / "out"
    make(store, size)
    pack = max(store.rglob("pack-*"), key=lambda path: path.stat().st_size)
    pack_bytes = pack.stat().st_size
    block, direct = random_bytes(BLOCK_BYTES), (direct_works(folder), direct_works(there))
    rows: list[dict[str, float]] = []

    def reads() -> None:
        read(pack, pack_bytes, 2, direct=direct[0])

    def writes(past: bool) -> float:
        (there / "floor").unlink(missing_ok=True)
        return timed(lambda: write(there / "floor", block, pack_bytes, direct=past))

    for number in range(rounds):
        drop_cache(folder)
        reading = timed(reads)
        through = {past: writes(past) for past in {False, direct[1]}}
        better, writing = min(through.items(), key=lambda one: one[1])
        drop_cache(folder)
        both = timed(partial(at_once, reads, partial(writes, better)))
        (there / "floor").unlink()
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)
        drop_cache(folder)
        child = [sys.executable, "-m", "benchmarks.export", "--child", str(store), str(target), options]
        report = json.loads(subprocess.run(child, check=True, capture_output=True, text=True, env=os.environ).stdout)
        rows.append(
            {
                "read_s": reading,
                "write_s": writing,
                "both_s": both,
                "export_s": report["s"],
                "memory_bytes": report["memory_bytes"],
            }
        )
        print(
            f"round {number + 1}: " + ", ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()), flush=True
        )
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    floor = max(middle["read_s"], middle["write_s"])
    print(json.dumps({
        "machine": describe(folder),
        "options": json.loads(options),
        "bytes": pack_bytes,
        "gb_s": {name: round(pack_bytes / 1e9 / middle[f"{name}_s"], 3) for name in ("read", "write", "both", "export")},
        "of_the_slower_floor": round(floor / middle["export_s"], 3),
        "of_both_at_once": round(middle["both_s"] / middle["export_s"], 3),
        "memory_mb": round(max(row["memory_bytes"] for row in rows) / 1e6, 1),
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
