"""Reads the node's state from /proc and /sys: some small reads, a fraction of a millisecond. Unknown values are NaN."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from relight.prediction.sample import NAN, DiskSpace, Gauges, Host, NodeSample, Rank

_UNLIMITED = 1 << 60
"""A control group's limit from this value on means unlimited, in cgroup version 1."""


class HostGauges:
    """Reads one node. Rates are over the time since the last read, so the first has none."""

    def __init__(
        self, places: Sequence[str] = (".",), root: str = "/", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``places``: paths in the file systems to sample.

        ``root``: the directory that contains ``proc`` and ``sys``.
        """
        self._places, self._root, self._clock = tuple(places), Path(root), clock
        self._cores = os.cpu_count() or 1
        self._since = time.time() - clock()  # so that samples never go back in time when the wall clock is set
        self._group = self._find_group()
        self._last: tuple[float, float, float, float] | None = None

    def read(self) -> Host:
        """Return all values except those of the file systems."""
        memory = self._table("proc/meminfo", ":")
        used, limit = self._group_bytes()
        cpu, faults = self._rates()
        load = self._words("proc/loadavg")
        psi = {
            f"psi_{resource}_{how}": self._pressure(resource, how)
            for resource in ("memory", "io", "cpu")
            for how in ("some", "full")
        }
        return Host(
            cpu=cpu, load=float(load[0]) / self._cores if load else NAN, memory_size_bytes=1024 * memory.get("MemTotal", NAN),
            memory_available_bytes=1024 * memory.get("MemAvailable", NAN), group_used_bytes=used, group_limit_bytes=limit,
            major_faults=faults, **psi,
        )  # fmt: skip

    def rooms(self) -> tuple[DiskSpace, ...]:
        """Return the space of each place.

        It blocks while a network file system hangs, so call it only in a separate thread.
        """
        return tuple(map(_room, self._places))

    def sample(self, ranks: Sequence[Rank] = (), gauges: Gauges | None = None) -> NodeSample:
        """Return a sample of the whole node."""
        accelerators = tuple(gauges.read()) if gauges is not None else ()
        return NodeSample(self._since + self._clock(), self.read(), self.rooms(), tuple(ranks), accelerators)

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _text(self, path: str | Path) -> str:
        with contextlib.suppress(OSError):
            return (self._root / path).read_text(encoding="ascii", errors="replace")
        return ""

    def _words(self, path: str) -> list[str]:
        return self._text(path).split()

    def _table(self, path: str | Path, mark: str = "") -> dict[str, float]:
        """Return the lines that consist of a name and a number."""
        table = {}
        for line in self._text(path).splitlines():
            words = line.split()
            if len(words) >= 2 and words[1].isdecimal():
                table[words[0].removesuffix(mark)] = float(words[1])
        return table

    def _rates(self) -> tuple[float, float]:
        """Return the used share of the cores, and major page faults a second."""
        now = self._clock()
        ticks = [float(word) for word in self._text("proc/stat").partition("\n")[0].split()[1:9]]
        faults = self._table("proc/vmstat").get("pgmajfault", NAN)
        if len(ticks) < 5:
            return NAN, NAN
        busy, spent = sum(ticks) - ticks[3] - ticks[4], sum(ticks)
        last, self._last = self._last, (now, busy, spent, faults)
        if last is None or now <= last[0]:
            return NAN, NAN
        cpu = (busy - last[1]) / (spent - last[2]) if spent > last[2] else NAN
        return min(1.0, max(0.0, cpu)), max(0.0, (faults - last[3]) / (now - last[0]))

    def _pressure(self, what: str, how: str) -> float:
        for line in self._text(f"proc/pressure/{what}").splitlines():
            if line.startswith(f"{how} avg10="):
                with contextlib.suppress(ValueError):
                    return float(line.split()[1][len("avg10=") :])
        return NAN

    def _find_group(self) -> tuple[Path, bool] | None:
        """Return this process's memory control group, and whether it is of version 1; None without one."""
        for line in self._text("proc/self/cgroup").splitlines():
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            for top, old in (("sys/fs/cgroup/memory", True), ("sys/fs/cgroup", False)):
                name = "memory.usage_in_bytes" if old else "memory.current"
                for inner in (path.lstrip("/"), ""):  # in a container, the process's own group is at the top
                    group = Path(top) / inner
                    if old == ("memory" in controllers.split(",")) and (self._root / group / name).is_file():
                        return group, old
        return None

    def _group_bytes(self) -> tuple[float, float]:
        if self._group is None:
            return NAN, NAN
        group, old = self._group
        current = self._words(str(group / ("memory.usage_in_bytes" if old else "memory.current")))
        limit = self._words(str(group / ("memory.limit_in_bytes" if old else "memory.max")))
        statistics = self._table(group / "memory.stat")
        cached = statistics.get("total_inactive_file" if old else "inactive_file", 0.0)
        if not current or not limit or not limit[0].isdecimal() or int(limit[0]) >= _UNLIMITED:
            return NAN, NAN
        return max(0.0, float(current[0]) - cached), float(limit[0])


def _room(place: str) -> DiskSpace:
    with contextlib.suppress(OSError):
        status = os.statvfs(place)
        usable = status.f_blocks - status.f_bfree + status.f_bavail
        return DiskSpace(float(status.f_bavail * status.f_frsize), float(usable * status.f_frsize))
    return DiskSpace()


def rss_bytes(pid: int) -> float:
    """Return the resident memory of a process in bytes; NaN if it does not exist."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return float(
            int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        )
    return NAN
