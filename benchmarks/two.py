"""``python -m benchmarks.two``: what two ranks with the same state save in, against one alone, where the store is not the limit.

Jobs of one and of two ranks in turns, each rank on a core of its own, a replicated model with AdamW, into memory (``/dev/shm``). A figure
is a job's first save, from the call until it is durable, waiting: plans and the comparison of replicas are in it. Later ones are no
measure on a virtual machine, which asks its host for each new page of memory. The trainers write themselves: the agent has threads for
both.
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

import torch
import torch.distributed as dist

import relight
from benchmarks.machine import describe
from benchmarks.ranks import gpt


def rank_main(size: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    model = gpt(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    ckpt = relight.Checkpointer(folder / "run", model=model, optimizer=optimizer, signals=False, background=False)
    ckpt.restore()
    dist.barrier()
    started = time.perf_counter()
    ckpt.save(0)
    dist.barrier()
    seconds = time.perf_counter() - started
    if rank == 0:
        written = relight.open(folder / "run").latest().body.logical_bytes
        print(json.dumps({"seconds": seconds, "bytes": written}), flush=True)
    ckpt.close(save=False)
    dist.destroy_process_group()


def job(ranks: int, size: str, folder: Path, port: int) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port), "-m", "benchmarks.two",
        "--size", size, "--folder", str(folder),
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    row: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return row


def main() -> None:
    """Run the jobs, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["S", "M"], default="M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        rank_main(options.size, options.folder)
        return
    rows = []
    for number in range(options.rounds):
        results = {}
        for ranks in (1, 2) if number % 2 else (2, 1):
            folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="relight-two-"))
            try:
                results[ranks] = job(ranks, options.size, folder, 29621 + ranks)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        alone, two = results[1], results[2]
        ratios = {"time": two["seconds"] / alone["seconds"], "bytes": two["bytes"] / alone["bytes"]}
        row = {"one_s": alone["seconds"], "two_s": two["seconds"], **ratios}
        rows.append(row)
        print(json.dumps(row), flush=True)
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    report = {
        "size": options.size,
        "machine": describe(Path("/dev/shm")),
        "torch": torch.__version__,
        "median": middle,
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"two-{options.size}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"two ranks take {middle['time']:.2f} of one's time, and store {middle['bytes']:.4f} of its bytes")


if __name__ == "__main__":
    main()
