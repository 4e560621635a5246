"""Record real failures of this machine. `relight plan predict eval --recordings` is tested on them and on synthetic runs.
Needs root on Linux.

Each life is a process that takes steps of numpy, in a memory group of its own of 512 MiB and with a file system of its own in memory.
Some leak until the kernel kills them, some fill their disk until it refuses, some are killed without any sign; the healthy ones fill a
cache that levels off and have minutes of slow steps; all write checkpoints.

    python -m benchmarks.recordings build/recordings --lives 12 --minutes 15
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from relight.prediction import FailurePredictor, HostGauges, Rank, SampleShape, rss_bytes

GROUP_BYTES, DISK_BYTES = 512 << 20, 256 << 20
KINDS = ("leak", "disk", "sudden", "healthy", "healthy", "healthy")
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")  # of control groups' version 1
STEP = struct.Struct("<d")


def work(kind: str, minutes: float, disk: Path, page: Path, seed: int) -> None:
    """The process that is watched: steps, and what is the matter with it from half its time on."""
    rng, blocks, begun = random.Random(seed), [], time.monotonic()
    with page.open("r+b") as file:
        step_page = mmap.mmap(file.fileno(), STEP.size)
    matrix = np.random.default_rng(seed).random((200, 200))
    onset, end = 60 * minutes * rng.uniform(0.4, 0.8), 60 * minutes * rng.uniform(0.85, 1.0)
    log, begins, busy_until = (disk / "log").open("ab", buffering=0), time.monotonic(), 0.0
    while (passed := time.monotonic() - begun) < end:
        before = time.monotonic()
        for _ in range(20):
            matrix = np.tanh(matrix @ matrix / 100)
        time.sleep(0.5)
        share = max(0.0, (passed - onset) / (end - onset))
        if kind == "leak":
            grow(blocks, share * 1.15 * GROUP_BYTES)
        elif kind == "healthy":
            grow(blocks, 0.5 * GROUP_BYTES * (1 - np.exp(-passed / 200)))
        if kind == "disk":
            log.write(bytes(max(0, int(share * 1.1 * DISK_BYTES) - log.tell())))
        if time.monotonic() - begins > 60:  # a checkpoint, and the one before it goes
            (disk / "checkpoint").write_bytes(bytes(16 << 20))
            begins = time.monotonic()
        if kind == "healthy" and rng.random() < 0.001:
            busy_until = time.monotonic() + rng.uniform(20, 120)
        if time.monotonic() < busy_until:
            matrix = np.tanh(np.linalg.inv(matrix + 3 * np.eye(200)))
            time.sleep(rng.uniform(0, 0.3))
        STEP.pack_into(step_page, 0, time.monotonic() - before)
    if kind == "sudden":
        os.kill(os.getpid(), signal.SIGKILL)


def grow(held: list[bytearray], size: float) -> None:
    """Grow ``held`` to ``size`` bytes of touched memory."""
    while len(held) < size / (1 << 20):
        held.append(bytearray(os.urandom(4096) * 256))


def live(directory: Path, kind: str, minutes: float, seed: int) -> None:
    """One life, recorded by a process in the same group."""
    group = MEMORY_GROUPS / f"relight-{os.getpid()}"
    group.mkdir()
    disk = Path(tempfile.mkdtemp(prefix="relight-disk-"))
    try:
        (group / "memory.limit_in_bytes").write_text(str(GROUP_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)], check=True)
        page = directory / f"page-{os.getpid()}"
        page.write_bytes(bytes(STEP.size))
        foresight = FailurePredictor(shape=SampleShape(1, 1, 0), hours=1.0)
        command = [
            sys.executable,
            "-m",
            "benchmarks.recordings",
            str(directory),
            "--work",
            kind,
            "--minutes",
            str(minutes),
        ]
        child = subprocess.Popen(
            [*command, "--disk", str(disk), "--page", str(page), "--seed", str(seed)], stderr=subprocess.DEVNULL
        )
        node = HostGauges((str(disk),))
        while child.poll() is None:
            step_s = STEP.unpack(page.read_bytes())[0] or float("nan")
            for alarm in foresight.sample(node.sample([Rank(step_s, rss_bytes=rss_bytes(child.pid))])):
                print(f"{kind}: {alarm.why}: {alarm.action}", flush=True)
            time.sleep(1 - time.time() % 1)
        if child.returncode:
            foresight.failed({"leak": "memory", "disk": "storage"}.get(kind, "killed"), cause=kind)
        print(f"{kind}: ended with {child.returncode}", flush=True)
        foresight.recorder.trace(kind=kind).write(directory / f"{kind}-{seed}.trace")
        page.unlink()
    finally:
        subprocess.run(["umount", str(disk)], check=False)
        disk.rmdir()
        (MEMORY_GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def main() -> None:
    """One life, the process in it, or all of them, a few at a time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lives", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    for name in ("--work", "--life", "--disk", "--page"):
        parser.add_argument(name)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.work:
        work(options.work, options.minutes, Path(options.disk), Path(options.page), options.seed)
        return
    if options.life:
        live(options.directory, options.life, options.minutes, options.seed)
        return
    running: list[subprocess.Popen[bytes]] = []
    for number in range(options.lives):
        while sum(process.poll() is None for process in running) >= options.at_once:
            time.sleep(1)
        command = [
            sys.executable,
            "-m",
            "benchmarks.recordings",
            str(options.directory),
            "--life",
            KINDS[number % len(KINDS)],
        ]
        running.append(
            subprocess.Popen([*command, "--minutes", str(options.minutes), "--seed", str(options.seed + number)])
        )
    for process in running:
        process.wait()


if __name__ == "__main__":
    main()
