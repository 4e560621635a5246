"""CPU seconds and memory of a cell and all its processes, from ``/proc``.

A process belongs to a cell when its environment carries the cell's mark: parentage would lose an agent that was detached.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

from benchmarks.machine import own_cpu_s

MARK = "RELIGHT_BENCH_CELL"
_TICKS = os.sysconf("SC_CLK_TCK")


class Processes:
    """The processes that carry a mark. A process that was once seen without it is not checked again."""

    def __init__(self, mark: str) -> None:
        self._needle = f"{MARK}={mark}".encode()
        self._known: dict[int, bool] = {}

    def pids(self) -> list[int]:
        """Return the ids of the live processes."""
        alive = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        self._known = {pid: known for pid, known in self._known.items() if pid in set(alive)}
        for pid in alive:
            if pid not in self._known:
                self._known[pid] = self._needle in _read(f"/proc/{pid}/environ")
        return [pid for pid in alive if self._known[pid]]

    def cpu_s(self) -> float:
        """User and system time so far of this process, of its ended children and of the marked others."""
        return own_cpu_s() + self.others_cpu_s()

    def others_cpu_s(self) -> float:
        """Return user and system time of the marked others alone."""
        stats = [_read(f"/proc/{pid}/stat").rpartition(b")")[2].split() for pid in self.pids() if pid != os.getpid()]
        return sum(int(field) for fields in stats for field in fields[11:15]) / _TICKS

    def memory(self) -> int:
        """Bytes: private and shared anonymous memory, shared pages counted once, whether mapped or only held by a descriptor."""
        anonymous, mapped, mapped_files = 0, 0, {}
        for pid in self.pids():
            for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
                if line.startswith(b"Pss_Anon:"):
                    anonymous += int(line.split()[1]) << 10
                elif line.startswith(b"Pss_Shmem:"):
                    mapped += int(line.split()[1]) << 10
            with contextlib.suppress(OSError):
                for number in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        path = f"/proc/{pid}/fd/{number}"
                        if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                            status = os.stat(path)
                            mapped_files[status.st_dev, status.st_ino] = status.st_blocks * 512
        return anonymous + max(mapped, sum(mapped_files.values()))


class Peak:
    """The most memory beyond that at the start, sampled so that sampling takes at most a twentieth of a core."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._start = self._most = processes.memory()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        cost_s = 0.0
        while not self._stop.wait(max(0.01, 20 * cost_s)):
            started = time.perf_counter()
            self._most = max(self._most, self._processes.memory())
            cost_s = time.perf_counter() - started

    def stop(self) -> int:
        """Bytes."""
        self._stop.set()
        self._thread.join()
        return max(self._most, self._processes.memory()) - self._start


def own_status(key: str) -> int:
    """A line of this process's status, in bytes."""
    line = next(line for line in _read("/proc/self/status").splitlines() if line.startswith(key.encode()))
    return int(line.split()[1]) << 10


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
