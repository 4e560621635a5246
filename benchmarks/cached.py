"""Restoring from an object store with and without a cache on the local disk, against the same checkpoint in a directory of that disk.

``python -m benchmarks.cached``: a checkpoint of 300 MB in an S3-compatible server (Ceph's gateway if it is installed, else moto) and in a
directory is read back into memory, every byte verified: from the directory, from the server, through an empty cache, through the full one,
and through the full one with the page cache dropped. Rounds are interleaved; read the ratios: the server runs on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.store.servers import has_rados, moto, rados

from benchmarks.drain import timed
from benchmarks.machine import describe
from relight.catalog import Run
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.format import Leaf, encode_tree
from relight.layout import Bytes, Item
from relight.reader import open_checkpoint, read_tensors
from relight.store import ByteStore, LocalStore
from relight.store.blocks import BlockCache
from relight.store.cached import CachedStore
from relight.store.objects import ObjectStore


def save(store: ByteStore, megabytes: int) -> None:
    """Return a state of ``megabytes`` in 64 tensors."""
    rng, each = random.Random(7), megabytes * 1_000_000 // 64
    items = [Item(f"t{n}", "uint8", (each,), "param", Bytes(rng.randbytes(each)), None, True) for n in range(64)]
    tree = encode_tree({item.name: Leaf("tensor", (n,)) for n, item in enumerate(items)})
    Attempt.begin(store, "run").save(SaveRequest(SaveInfo(step=0), tree=tree, items=items))


def read(store: ByteStore) -> None:
    """The checkpoint, every byte verified, into memory that is there."""
    run = Run(store, "run")
    view, checkpoint = run.view(), run.history().live[-1]
    opened = open_checkpoint(store, "run", checkpoint, store_id=view.store_id, run_id=view.run_id)
    for part in opened.parts:
        read_tensors(opened, part, {index: Bytes(room) for index, room in enumerate(ROOMS)})


ROOMS: list[bytearray] = []


def let_go(folder: Path) -> None:
    """Drop the files from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def one_round(url: str, near: Path, cache: Path) -> dict[str, float]:
    """Seconds of each. Each through objects of its own: nothing is kept in memory but by the kernel."""
    shutil.rmtree(cache, ignore_errors=True)

    def cached() -> ByteStore:
        return CachedStore(ObjectStore(url), BlockCache(cache))

    timings = {}
    let_go(near)
    timings["directory"] = timed(lambda: read(LocalStore(near)))
    timings["server"] = timed(lambda: read(ObjectStore(url)))
    timings["empty cache"] = timed(lambda: read(cached()))
    timings["full cache"] = timed(lambda: read(cached()))
    let_go(cache)
    timings["full cache, from the disk"] = timed(lambda: read(cached()))
    for path in near.rglob("pack*"):
        path.read_bytes()
    timings["directory, in memory"] = timed(lambda: read(LocalStore(near)))
    return {name: round(seconds, 3) for name, seconds in timings.items()}


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("build/bench-cached"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.dir)).absolute()
    which = rados if has_rados() else moto
    report: dict[str, Any] = {
        "machine": describe(folder),
        "server": which.__name__,
        "megabytes": options.megabytes,
        "rounds": [],
    }
    ROOMS.extend(bytearray(b"\1") * (options.megabytes * 1_000_000 // 64) for _ in range(64))
    try:
        with which(folder / "server") if which is rados else which(folder) as server:
            os.environ.update(server.environment)
            url = f"s3://{server.new_bucket()}/store"
            save(ObjectStore(url), options.megabytes)
            save(LocalStore(folder / "near"), options.megabytes)
            for _ in range(options.rounds):
                report["rounds"].append(one_round(url, folder / "near", folder / "cache"))
                print(json.dumps(report["rounds"][-1]), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rounds = report["rounds"]
    report["seconds"] = {name: statistics.median(round_[name] for round_ in rounds) for name in rounds[0]}
    report["ratios"] = {
        "server / directory": statistics.median(round_["server"] / round_["directory"] for round_ in rounds),
        "empty cache / server": statistics.median(round_["empty cache"] / round_["server"] for round_ in rounds),
        "full cache / directory": statistics.median(
            round_["full cache, from the disk"] / round_["directory"] for round_ in rounds
        ),
        "full cache / directory, both in memory": statistics.median(
            round_["full cache"] / round_["directory, in memory"] for round_ in rounds
        ),
        "server / full cache": statistics.median(
            round_["server"] / round_["full cache, from the disk"] for round_ in rounds
        ),
    }
    print(json.dumps(report["ratios"], indent=1))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cached.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
