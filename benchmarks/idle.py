"""``python -m benchmarks.idle``: what starting costs, and what waiting costs: import, commands, agent, server, supervisor.

Starts come in rounds, each in a random order, every process a fresh one, the files in the page cache. Their floors are
in the same round: ``python -c pass``, and ``import torch`` where torch has to be. Memory is the proportional share
(PSS) of all processes of what is measured. Processor time is that of all of them over ``--seconds`` without any
request.
"""

from __future__ import annotations

import argparse
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
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.machine import busy_s, describe
from benchmarks.versions import make
from relight.agent.launch import connect
from relight.comm.ports import free_port

SETTLE_S = 3.0
"""Seconds for a started process to become idle, after its first answer."""
IMPORTED = "import time; {before}; began = time.perf_counter(); {what}; print(time.perf_counter() - began)"
CHECKPOINTER = "from relight import Checkpointer"


def whole(*command: str) -> float:
    """Seconds from starting a process to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def inside(what: str, before: str = "pass") -> float:
    """Seconds that an import takes in a process that is up, ``before`` imported."""
    script = IMPORTED.format(what=what, before=before)
    return float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)


def starts(folder: Path) -> dict[str, Callable[[], float]]:
    """Return what is started, by name. Each function returns its seconds."""
    return {
        "python -c pass": lambda: whole("-c", "pass"),
        "import relight": lambda: inside("import relight"),
        "import torch": lambda: inside("import torch"),
        "Checkpointer, torch there": lambda: inside(CHECKPOINTER, "import torch"),
        "relight --version": lambda: whole("-m", "relight", "--version"),
        "relight --help": lambda: whole("-m", "relight", "--help"),
        "relight ls": lambda: whole("-m", "relight", "ls", str(folder)),
        "agent": lambda: _timed(lambda: agent(folder)),
        "relight serve": lambda: _timed(lambda: server(folder)),
        "relight run": lambda: _timed(lambda: supervisor(folder)),
    }


FLOORS = {
    "relight --version": "python -c pass",
    "relight --help": "python -c pass",
    "relight ls": "python -c pass",
    "agent": "python -c pass",
    "relight serve": "python -c pass",
    "Checkpointer, torch there": "import torch",
    "relight run": "import torch",
}
"""What each start is compared with."""


def _timed(starting: Callable[[], Any]) -> float:
    began = time.perf_counter()
    with starting():
        return time.perf_counter() - began


@contextmanager
def _process(command: list[str], **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Python in a session of its own, ended with all that it started."""
    child = subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | more,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()


def _until(is_there: Callable[[], bool], child: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 120
    while not is_there():
        assert child.poll() is None, f"{child.args} ended with {child.returncode}"
        assert time.monotonic() < ends, f"{child.args} does not answer"
        time.sleep(0.002)


@contextmanager
def agent(folder: Path) -> Iterator[int]:
    """An agent that this process holds a connection to, as a trainer does: it ends soon after the last one."""
    pids: list[int] = []
    reached = connect(f"{folder}/{random.random()}", "idle", seen=pids.append)
    try:
        yield pids[-1]
    finally:
        reached.close()
        with suppress(ProcessLookupError):
            os.kill(pids[-1], signal.SIGKILL)


@contextmanager
def server(folder: Path) -> Iterator[int]:
    """A dashboard, its first page had."""
    port = free_port()

    def shows() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as page:
                return bool(page.read())
        except urllib.error.HTTPError:
            raise
        except OSError:
            return False

    arguments = [
        "serve",
        str(folder),
        "--listen",
        f"127.0.0.1:{port}",
        "--anonymous-read",
        "--state",
        str(folder.parent / "state"),
    ]
    with _process(["-m", "relight", *arguments]) as child:
        _until(shows, child)
        yield child.pid


@contextmanager
def supervisor(folder: Path) -> Iterator[int]:
    """``relight run`` around a job that sleeps, which has begun."""
    begun, job = folder.parent / "begun", folder.parent / "sleeps.py"
    begun.unlink(missing_ok=True)
    job.write_text("import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(3600)\n")
    incidents = ["--incidents", str(folder.parent / "incidents")]
    with _process(
        ["-m", "relight", "run", *incidents, "--standalone", "--nproc-per-node", "1", str(job), str(begun)]
    ) as child:
        _until(begun.exists, child)
        yield child.pid


def family(pid: int) -> list[int]:
    """A process and all that it started, but for the job that sleeps."""
    pids = [pid]
    for parent in pids:
        children = Path(f"/proc/{parent}/task").glob("*/children")
        pids += [int(child) for path in children for child in path.read_text().split()]
    return [
        child for child in pids if b"sleeps.py\0" not in Path(f"/proc/{child}/cmdline").read_bytes() or child == pid
    ]


def pss_bytes(pids: list[int]) -> int:
    """The memory that they take, what is shared divided among those who share it."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
    return total


def spent(pids: list[int]) -> tuple[float, int]:
    """Processor seconds so far, and how often they gave the processor up by themselves, which counts what woke them."""
    seconds, woken = 0.0, 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
            lines = (task / "status").read_text().splitlines()
            woken += next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return seconds, woken


def at_rest(starting: Callable[[Path], Any], folder: Path, seconds: float) -> dict[str, float]:
    """Return memory, processor time and wake-ups of a process and its children while they get no request."""
    with starting(folder) as pid:
        time.sleep(SETTLE_S)
        pids = family(pid)
        (cpu, woken), began = spent(pids), time.perf_counter()
        time.sleep(seconds)
        (later, again), took = spent(pids), time.perf_counter() - began
        return {
            "pss_mb": round(pss_bytes(pids) / 1e6, 1),
            "cpu_percent": round(100 * (later - cpu) / took, 3),
            "wakes_per_s": round((again - woken) / took, 1),
            "processes": len(pids),
        }


def bare(code: str) -> float:
    """The memory of a Python that has done this and sleeps, MB."""
    with _process(["-c", f"{code}; import time; time.sleep(600)"]) as child:
        time.sleep(SETTLE_S if "torch" in code else 0.5)
        return round(pss_bytes([child.pid]) / 1e6, 1)


def measure(rounds: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Starts in rounds, then each of the three at rest."""
    store = folder / "runs"
    make(store, 20_000_000)
    todo = starts(store)
    took: dict[str, list[float]] = {name: [] for name in todo}
    began, busy = time.perf_counter(), busy_s()
    for name in todo:
        todo[name]()  # once for the page cache and the compiled files
    for number in range(rounds):
        for name in random.Random(number).sample(list(todo), len(todo)):
            took[name].append(todo[name]())
        print(f"round {number + 1} of {rounds}", flush=True)
    medians = {name: statistics.median(each) for name, each in took.items()}
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(took[name], took[floor], strict=True)), 2)
        for name, floor in FLOORS.items()
    }
    others = busy_s(), time.perf_counter()
    rest = {
        name: at_rest(process, store, seconds)
        for name, process in (("agent", agent), ("relight serve", server), ("relight run", supervisor))
    }
    quiet = 1 - (busy_s() - others[0]) / (time.perf_counter() - others[1]) / (os.cpu_count() or 1)
    return {
        "machine": describe(folder),
        "rounds": rounds,
        "busy_share_while_starting": round((others[0] - busy) / (others[1] - began) / (os.cpu_count() or 1), 2),
        "busy_share_while_resting": round(1 - quiet, 2),
        "start_ms": {name: round(1000 * value, 1) for name, value in medians.items()},
        "start_ms_least_most": {
            name: [round(1000 * min(each), 1), round(1000 * max(each), 1)] for name, each in took.items()
        },
        "of_floor": ratios,
        "floors": FLOORS,
        "rest_s": seconds,
        "rest": rest,
        "bare_pss_mb": {"python": bare("pass"), "import torch": bare("import torch")},
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw starts as bars with their least and most, and memory and processor time at rest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paper, ink, ours, floor = "#fbfaf7", "#22262e", "#1e3a5f", "#93a8bf"
    drawing = Figure(figsize=(11, 4.6), facecolor=paper, dpi=150)
    FigureCanvasAgg(drawing)
    left, right = drawing.subplots(1, 2, width_ratios=[3, 2])
    names = list(results["start_ms"])
    for position, name in enumerate(names):
        value, (least, most) = results["start_ms"][name], results["start_ms_least_most"][name]
        left.barh(position, value, color=floor if name in results["floors"].values() else ours, height=0.6)
        left.plot([least, most], [position, position], color="#b5482f", linewidth=1.2)
        left.text(max(value, most) * 1.06, position, f"{value:.0f} ms", va="center", fontsize=8.5, color=ink)
    left.set_yticks(range(len(names)), names, fontsize=8.5)
    left.set_xscale("log")
    left.set_xlim(right=3 * max(most for _, most in results["start_ms_least_most"].values()))
    left.invert_yaxis()
    left.set_title("to start, median; red: least to most; light: floors", fontsize=9, color=ink)
    for position, resting in enumerate(results["rest"].values()):
        right.barh(position, resting["pss_mb"], color=ours, height=0.6)
        label = f"{resting['pss_mb']:.0f} MB; {resting['cpu_percent']:.2f} % of a core"
        right.text(resting["pss_mb"] + 4, position, label, va="center", fontsize=8.5, color=ink)
    right.set_yticks(range(len(results["rest"])), list(results["rest"]), fontsize=8.5)
    right.set_xlim(0, 1.9 * max(resting["pss_mb"] for resting in results["rest"].values()))
    right.invert_yaxis()
    right.set_title("at rest: memory (PSS), processor", fontsize=9, color=ink)
    for axes in (left, right):
        axes.set_facecolor(paper)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    drawing.tight_layout()
    drawing.savefig(path, facecolor=paper)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each is watched at rest")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended, too
    folder = Path(tempfile.mkdtemp(prefix="relight-idle-"))
    try:
        report = measure(given.rounds, given.seconds, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report, indent=2))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if given.plot:
        draw(report, given.plot)


if __name__ == "__main__":
    main()
