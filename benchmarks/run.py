"""``make bench``: Relight against every rival that installs: same model, same run, in rounds, all saves durable.

Each cell (a rival in a round) is a process of its own. Rounds shuffle the rivals by the seed; the machine's floors are one of them.
Writes ``<out>/bench-<size>.json`` after each cell, a table (``.md``) and plots (``.png``) at the end. Read ratios: machines are noisy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.floors import NAME as FLOORS
from benchmarks.machine import available_bytes, busy_s, describe, own_cpu_s, touch
from benchmarks.rivals import RIVALS
from benchmarks.targets import OURS
from benchmarks.watch import MARK, Peak, Processes
from benchmarks.workloads import SIZES, state_bytes

ROOT = Path(__file__).parents[1]
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Has malloc keep what training gives back at each step, as allocators made for such work do: or a step of M meets 190,000 page faults,
which take a fifth to two fifths of it, and differ from step to step by more than any save takes."""


AT = " at "
"""Between a rival's name and the commit of the Relight that is measured."""


def source_of(commit: str, folder: Path) -> Path:
    """Unpack ``src`` of a commit below ``folder``. Return the path for ``PYTHONPATH``."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder / "src"


def run_cell(rival: str, workload: str, folder: Path, *, seed: int, limit_s: float, source: Path) -> dict[str, Any]:
    """Return the cell's last message: ``figures``, ``why_not`` or ``error``. ``source``: the Relight that is imported."""
    mark = secrets.token_hex(8)
    folder.mkdir(parents=True)
    log = folder.parent / "cell.log"
    command = [
        sys.executable,
        "-m",
        "benchmarks.cell",
        "--rival",
        rival.partition(AT)[0],
        "--workload",
        workload,
        "--folder",
        str(folder),
        "--seed",
        str(seed),
    ]
    cell: dict[str, Any] = {}
    processes, peak = Processes(mark), None
    with open(log, "w") as errors:
        child = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **KEEPING, MARK: mark, "PYTHONPATH": str(source)}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip
        overdue = threading.Timer(limit_s, kill, (processes,))
        overdue.start()
        assert child.stdin and child.stdout
        try:
            for line in child.stdout:
                cell = json.loads(line)
                answer = 0
                if cell.get("ask") == "memory start":
                    peak = Peak(processes)
                elif cell.get("ask") == "memory stop" and peak is not None:
                    answer, peak = peak.stop(), None
                if "ask" in cell:
                    with contextlib.suppress(OSError):
                        child.stdin.write(f"{answer}\n")
                        child.stdin.flush()
            code = child.wait()
        except BaseException:  # an interrupted run leaves no process of a cell running
            kill(processes)
            raise
        finally:
            late = not overdue.is_alive()
            overdue.cancel()
    if peak is not None:
        peak.stop()
    left = wait_gone(processes)
    if not {"figures", "why_not", "error"} & cell.keys():
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:200]
        cell = {"error": f"took longer than {limit_s:.0f} s" if late else f"ended with {code}: {last}"}
    if left:
        cell["left_behind"] = left
        kill(processes)
    return cell


def wait_gone(processes: Processes) -> int:
    """How many of a cell's processes outlive it by more than two seconds."""
    deadline = time.monotonic() + 2
    while (left := len(processes.pids())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def kill(processes: Processes) -> None:
    """A cell that hangs, or what it left: only what carries its mark."""
    for pid in processes.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Run the rounds, keep what was found, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size",
        choices=sorted(SIZES),
        default="M",
        help="10 M, 125 M, 350 M parameters, or equal bytes over 1e2 … 1e5 tensors",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", metavar="COMMIT", help="also measure the Relight of this commit")
    parser.add_argument("--only", action="append", metavar="RIVAL", help=f"may be given often; of: {', '.join(RIVALS)}")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=float, default=900, metavar="SECONDS", help="the longest that one cell may take"
    )
    parser.add_argument(
        "--go-on", action="store_true", help="keep the whole rounds of an earlier run, and make those that are missing"
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="only write table and plots again, from the kept results of an earlier run",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it cleans up
    kept = options.out / f"bench-{options.size}.json"
    if not options.report:
        measure(options, kept)
    report.write(json.loads(kept.read_text(encoding="utf-8")), kept)


def measure(options: argparse.Namespace, kept: Path) -> None:
    """Run all rounds. ``kept`` is rewritten after each cell."""
    rivals = options.only or list(RIVALS)
    if unknown := [name for name in rivals if name not in RIVALS]:
        raise SystemExit(f"unknown: {unknown}; there are {list(RIVALS)}")
    rivals = [*rivals, *(f"{name}{AT}{options.against}" for name in rivals if name in OURS and options.against)]
    options.dir.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.dir, prefix="relight-bench-"))
    results: dict[str, Any] = {
        "size": options.size, "seed": options.seed, "rivals": rivals, "machine": describe(folder),
        "versions": {}, "how": {}, "why_not": {}, "state_bytes": {name: state_bytes(name) for name in SIZES[options.size]}, "rounds": [],
        "environment": KEEPING,
    }  # fmt: skip
    if options.go_on and kept.exists():
        results = whole_rounds(json.loads(kept.read_text(encoding="utf-8")), results)
    earlier = source_of(options.against, folder / "against") if options.against else None
    begun = len(results["rounds"]) // len(SIZES[options.size])
    try:
        for number in range(begun + 1, options.rounds + 1):
            shuffle = random.Random(f"{options.seed} {number}")
            for workload in SIZES[options.size]:
                touch(min(int(available_bytes() * 0.7), max(2 << 30, 4 * state_bytes(workload))))
                order = [FLOORS, *(name for name in rivals if name not in results["why_not"])]
                shuffle.shuffle(order)
                row: dict[str, Any] = {"round": number, "workload": workload, "order": order, "cells": {}}
                results["rounds"].append(row)
                for rival in order:
                    place = folder / f"{number}-{workload}-{len(row['cells'])}"
                    started, others = time.monotonic(), busy_s() - own_cpu_s()
                    source = earlier if AT in rival and earlier is not None else ROOT / "src"
                    cell = run_cell(
                        rival, workload, place / "saves", seed=options.seed, limit_s=options.limit, source=source
                    )
                    shutil.rmtree(place, ignore_errors=True)
                    took = time.monotonic() - started
                    # an agent has no parent among these processes
                    helpers = cell.get("figures", {}).get("helpers_cpu", 0.0)
                    cell["others"] = max(0.0, busy_s() - own_cpu_s() - helpers - others) / took / (os.cpu_count() or 1)
                    for key in ("version", "how", "why_not"):
                        if cell.get(key):
                            results["versions" if key == "version" else key][rival] = cell.pop(key)
                    row["cells"][rival] = cell
                    print(
                        f"{workload} round {number}/{options.rounds}  {rival:30} {took:5.0f} s  {report.brief(cell)}",
                        flush=True,
                    )
                    kept.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def whole_rounds(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier run's results up to its last whole round. Exit unless its subject and machine were the same."""
    for name in ("size", "seed", "rivals", "machine", "state_bytes", "environment"):
        if before.get(name) != now[name]:
            raise SystemExit(f"cannot continue: {name} was {before.get(name)}, and is {now[name]}")
    rounds = before["rounds"]
    while rounds and (len(rounds[-1]["cells"]) < len(rounds[-1]["order"]) or len(rounds) % len(SIZES[now["size"]])):
        rounds.pop()
    return before


if __name__ == "__main__":
    main()
