"""Draining to an object store and reading back from it, against the client library alone: same bytes, same server, same round.

``python -m benchmarks.drain``: a checkpoint on the local disk is drained to a new place of an S3-compatible server (Ceph's gateway if it is
installed, else moto), and its packs are put there by the client library; then both are read back into memory. Rounds are interleaved; read
the ratios: the server runs on the same two cores.
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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import obstore
from obstore.store import S3Store
from tests.store.servers import has_rados, moto, rados

from benchmarks.machine import describe
from relight.catalog import Run
from relight.catalog.tiers import announce
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.drain import drain
from relight.format import Leaf, encode_tree
from relight.layout import Bytes, Item
from relight.policy import Tiers, tier
from relight.reader import open_checkpoint, read_tensors
from relight.store import LocalStore, open_bytes
from relight.store.object_writer import PARALLEL, PART_BYTES

RANGE_BYTES = 4 << 20


def save(folder: Path, url: str, megabytes: int) -> Attempt:
    """Save a checkpoint of ``megabytes`` in 64 tensors, in a run with a further tier at ``url``."""
    attempt = Attempt.begin(LocalStore(folder), "run")
    tiers = Tiers(near=folder / "run", far=f"{url}/run")
    announce(attempt.place.log, tiers.tiers, attempt.epoch)
    rng, each = random.Random(7), megabytes * 1_000_000 // 64
    items = [Item(f"t{n}", "uint8", (each,), "param", Bytes(rng.randbytes(each)), None, True) for n in range(64)]
    attempt.save(
        SaveRequest(
            SaveInfo(step=0), tree=encode_tree({i.name: Leaf("tensor", (n,)) for n, i in enumerate(items)}), items=items
        )
    )
    return attempt


def client_put(bucket: Any, prefix: str, packs: list[Path]) -> None:
    """The packs, by the library from their files."""
    for number, pack in enumerate(packs):
        with open(pack, "rb") as file:
            obstore.put(
                bucket, f"{prefix}/{number}", file, chunk_size=PART_BYTES, max_concurrency=PARALLEL, use_multipart=True
            )


def client_get(bucket: Any, prefix: str, packs: list[Path]) -> None:
    """Read the packs by the library in ranges, sixteen at a time, into allocated memory."""
    for number, pack in enumerate(packs):
        size = pack.stat().st_size
        room = memoryview(bytearray(size))

        def get(start: int, room: memoryview = room, path: str = f"{prefix}/{number}", size: int = size) -> None:
            end = min(start + RANGE_BYTES, size)
            room[start:end] = memoryview(obstore.get_range(bucket, path, start=start, end=end))

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(get, range(0, size, RANGE_BYTES)))


def ours_get(url: str) -> None:
    """The checkpoint, every byte verified, into memory that is there."""
    run = Run(open_bytes(url), "run")
    view, checkpoint = run.view(), run.history().live[-1]
    opened = open_checkpoint(run.store, "run", checkpoint, store_id=view.store_id, run_id=view.run_id)
    for part in opened.parts:
        read_tensors(
            opened, part, {index: Bytes(bytearray(tensor.length)) for index, tensor in enumerate(part.tensors)}
        )


def steps_during_drain(folder: Path, megabytes: int, bytes_per_second: float | None, seed: int) -> dict[str, float]:
    """Return the median step of training on all cores, alone and while another process drains to the same disk."""
    import torch

    from benchmarks.ranks import gpt
    from relight.drain import Drainer

    torch.manual_seed(seed)
    model = gpt("S")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 100, (4, 64))
    near, far = folder / "steps-near", folder / "steps-far"
    attempt = save(near, str(far), megabytes)
    limited = Tiers(near=near / "run", far=tier(far / "run", bytes_per_second=bytes_per_second))
    announce(attempt.place.log, limited.tiers, attempt.epoch)

    def step() -> float:
        def work() -> None:
            optimizer.zero_grad()
            model(tokens).float().square().mean().backward()
            optimizer.step()

        return timed(work)

    for _ in range(10):
        step()
    alone = [step() for _ in range(40)]
    drainer = Drainer(str(near), "run", lambda name, say, fields: None, lambda: False)
    drainer.wake()
    while not (far / "run").exists():
        time.sleep(0.01)
    during = []
    while drainer.busy:
        during.append(step())
    alone += [step() for _ in range(40)]
    drainer.stop()
    shutil.rmtree(near)
    shutil.rmtree(far)
    mean = statistics.fmean(during) / statistics.fmean(alone)
    return {
        "alone": statistics.median(alone),
        "beside": statistics.median(during),
        "steps beside": len(during),
        "mean ratio": mean,
    }


def timed(call: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("build/bench-drain"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    options.dir = options.dir.resolve()
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    which = rados if has_rados() else moto
    report: dict[str, Any] = {
        "machine": describe(folder),
        "server": which.__name__,
        "megabytes": options.megabytes,
        "rounds": [],
    }
    try:
        with which(folder / "server") if which is rados else which(folder) as server:
            os.environ.update(server.environment)
            for number in range(options.rounds):
                report["rounds"].append(one_round(server, folder, number, options.megabytes))
                print(json.dumps(report["rounds"][-1]), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report["steps"] = [steps_during_drain(options.dir, options.megabytes, 50e6, seed) for seed in range(options.rounds)]
    report["step beside a drain of 50 MB/s / alone"] = statistics.median(
        steps["beside"] / steps["alone"] for steps in report["steps"]
    )
    print(json.dumps(report["steps"]), report["step beside a drain of 50 MB/s / alone"])
    rounds = report["rounds"]
    report["drain / client"] = statistics.median(round_["client put"] / round_["drain"] for round_ in rounds)
    report["restore / client"] = statistics.median(round_["client get"] / round_["restore"] for round_ in rounds)
    print(f"of the client's rate: drain {report['drain / client']:.2f}, restore {report['restore / client']:.2f}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "drain.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def one_round(server: Any, folder: Path, number: int, megabytes: int) -> dict[str, float]:
    """Run all four measurements in random order, and delete what was put."""
    name = server.new_bucket()
    bucket, url = S3Store(name, client_options={"allow_http": True, "timeout": "120s"}), f"s3://{name}/tier"
    near = folder / f"near-{number}"
    attempt = save(near, url, megabytes)
    packs = sorted(near.rglob("pack*"))
    for pack in packs:
        pack.read_bytes()  # both read from the page cache
    timings: dict[str, float] = {}

    def ours() -> None:
        timings["drain"] = timed(lambda: drain(attempt.store, "run"))
        timings["restore"] = timed(lambda: ours_get(url))

    def theirs() -> None:
        timings["client put"] = timed(lambda: client_put(bucket, "alone", packs))
        timings["client get"] = timed(lambda: client_get(bucket, "alone", packs))

    turns = [ours, theirs]
    random.Random(number).shuffle(turns)
    for turn in turns:
        turn()
    for page in obstore.list(bucket):
        obstore.delete(bucket, [entry["path"] for entry in page])
    shutil.rmtree(near)
    return {name: round(seconds, 3) for name, seconds in timings.items()}


if __name__ == "__main__":
    main()
