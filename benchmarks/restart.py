"""``python -m benchmarks.restart``: from SIGKILL of a rank to the next step that ends, and to a new one, under torchrun and `relight run`.

The same job, two ranks, the same state; each round kills each way once, in a random order. Relight is measured without
spare processes, with spares that have done their imports, and with spares that have run the script up to
``relight.standby()``. torchrun gets a store for each incarnation (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``): with its
default (2.13), ranks on gloo do not find each other again, and the job does not come back at all. NVIDIA's
``ft_launcher`` (torchrun's agent, with heartbeats) starts the job that torchrun starts with DCP; where it is not
installed, its row states that.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from relight.store import open_bytes
from relight.supervise.incidents import read_incidents

JOB = Path(__file__).with_name("restart_job.py")
PATIENCE_S = 300.0
SETTLED_S = 20.0
"""Seconds until processes that work ahead have finished: jobs usually fail hours after their start."""
WAYS = ["torch.save", "DCP", "DCP, ft_launcher", "Relight", "Relight, spares", "Relight, standby"]
LAUNCHERS = {"ft_launcher": "nvidia_resiliency_ext.fault_tolerance.launcher"}
"""Launcher of a way that names one; torchrun otherwise."""


def command(way: str, folder: Path, parameters: int) -> list[str]:
    """Return the command line that starts the job this way."""
    job = [str(JOB), way, str(folder), str(parameters)]
    if not way.startswith("Relight"):
        launcher = LAUNCHERS.get(way.partition(", ")[2], "torch.distributed.run")
        return [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", *job]
    spares = "false" if way == "Relight" else "true"
    (folder / "relight.toml").write_text(f"[supervise]\nspares = {spares}\n")
    return [sys.executable, "-m", "relight", "run", "--nproc-per-node", "2", *job]


def missing(way: str) -> str:
    """Return why this way cannot be measured here; empty if it can."""
    package = LAUNCHERS.get(way.partition(", ")[2], "").partition(".")[0]
    is_installed = not package or importlib.util.find_spec(package) is not None
    return (
        ""
        if is_installed
        else f"{package} is not installed; pip install --no-deps --require-hashes -r requirements/bench.txt"
    )


def lines(folder: Path) -> list[tuple[int, int, float]]:
    """Step, life, clock."""
    try:
        rows = [line.split() for line in (folder / "out").read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [(int(row[0]), int(row[1]), float(row[2])) for row in rows if len(row) == 3]


def once(way: str, folder: Path, parameters: int, every: int) -> dict[str, Any]:
    """Kill rank 1 after some saves. Return seconds until a step has ended, and the lost steps."""
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "EVERY": str(every)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command(way, folder, parameters), cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=log
        )
    try:
        began = time.monotonic()
        while not any(step >= 36 for step, _, _ in lines(folder)):
            time.sleep(0.05)
            if process.poll() is not None or time.monotonic() - began > PATIENCE_S:
                raise RuntimeError((folder / "log").read_text()[-2000:])
        time.sleep(SETTLED_S)
        killed = time.monotonic()
        os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
        before = -1
        while not any(life and step > before for step, life, _ in lines(folder)):
            time.sleep(0.01)
            before = max(step for step, life, _ in lines(folder) if not life)
            if process.poll() is not None or time.monotonic() - killed > PATIENCE_S:
                raise RuntimeError((folder / "log").read_text()[-2000:])
        first = next((step, time_s) for step, life, time_s in lines(folder) if life)
        new = next(time_s for step, life, time_s in lines(folder) if life and step > before)
        row: dict[str, Any] = {"seconds": first[1] - killed, "new_s": new - killed, "steps_lost": before - first[0] + 1}
        if way.startswith("Relight"):
            time.sleep(1.0)
            after = read_incidents(open_bytes(folder / "store"), "run")[-1].after
            row["parts"] = dict(after.seconds) if after is not None else {}
        return row
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        for rank in range(2):
            try:
                os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)
            except (ProcessLookupError, FileNotFoundError):
                pass


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=125_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=10, help="steps from one save to the next")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    asked = options.only or WAYS
    left_out = {way: why for way in asked if (why := missing(way))}
    for way, why in left_out.items():
        print(f"{way:16} not measured: {why}")
    ways = [way for way in asked if way not in left_out]
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(options.rounds):
        for way in rng.sample(ways, len(ways)):
            folder = Path(tempfile.mkdtemp(prefix="restart-", dir=options.dir))
            try:
                row = once(way, folder, options.parameters, options.every)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            rows[way].append(row)
            again = f"{row['steps_lost']} steps again  {row.get('parts', '')}"
            took = f"{row['seconds']:7.2f} s, {row['new_s']:7.2f} s to a new one"
            print(f"round {number + 1}/{options.rounds}  {way:16} {took}, {again}", flush=True)
        if options.out and number + 1 < options.rounds:
            write(options, summary_of(rows), rows, left_out)  # a run that is stopped keeps its rows
    summary = summary_of(rows)
    for way, row in summary.items():
        took = f"{row['median_s']:.2f} s ({row['least_s']:.2f}–{row['most_s']:.2f}), {row['new_s']:.2f} s to a new one"
        print(f"{way:16} {took} {row['parts'] or ''}")
    if options.out:
        write(options, summary, rows, left_out)


def summary_of(found: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians, by way."""
    summary = {}
    for way, rows in found.items():
        seconds = [row["seconds"] for row in rows]
        parts = {name: statistics.median(row["parts"][name] for row in rows) for name in (rows[0].get("parts") or {})}
        summary[way] = {
            "median_s": statistics.median(seconds), "least_s": min(seconds), "most_s": max(seconds),
            "new_s": statistics.median(row["new_s"] for row in rows),
            "steps_lost": statistics.median(row["steps_lost"] for row in rows), "parts": parts,
        }  # fmt: skip
    return summary


def write(
    options: argparse.Namespace,
    summary: Mapping[str, Any],
    found: Mapping[str, list[dict[str, Any]]],
    left_out: Mapping[str, str],
) -> None:
    """Write the results with the machine and the options."""
    rounds = min(map(len, found.values()))
    asked = {"parameters": options.parameters, "rounds": rounds, "seed": options.seed, "every": options.every}
    report = {"machine": describe(options.dir), **asked, "ways": summary, "left_out": left_out, "rows": found}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
