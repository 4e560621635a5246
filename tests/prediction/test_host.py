"""Gauges of a node, read from files of the kernel."""

from __future__ import annotations

import math
from pathlib import Path

from relight.prediction import Accelerator, HostGauges, rss_bytes


def node(root: Path, **files: str) -> Path:
    """Make a root directory with a kernel's files."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


STAT = "cpu  {user} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1\n"


def test_rates_are_over_the_time_between_two_reads(tmp_path: Path) -> None:
    """Processor use and major faults are rates. The first read has none."""
    now = [10.0]
    gauges = HostGauges(
        (),
        str(node(tmp_path, proc__stat=STAT.format(user=0, idle=0), proc__vmstat="pgfault 5\npgmajfault 100\n")),
        lambda: now[0],
    )
    assert math.isnan(gauges.read().cpu)
    node(tmp_path, proc__stat=STAT.format(user=30, idle=70), proc__vmstat="pgmajfault 300\n")
    now[0] = 14.0
    result = gauges.read()
    assert (result.cpu, result.major_faults) == (0.3, 50.0)


def test_memory_load_and_pressure(tmp_path: Path) -> None:
    """Values are read from files in the kernel's format."""
    memory = "MemTotal:       1000 kB\nMemFree: 5 kB\nMemAvailable:    400 kB\n"
    pressure = "some avg10=1.50 avg60=0.10 avg300=0.00 total=5\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=1\n"
    host = HostGauges(
        (), str(node(tmp_path, proc__meminfo=memory, proc__loadavg="2.0 1 1 1/1 1", proc__pressure__io=pressure))
    ).read()
    assert (host.memory_available_bytes, host.memory_size_bytes) == (400 * 1024, 1000 * 1024)
    assert (host.psi_io_some, host.psi_io_full) == (1.5, 0.25) and math.isnan(host.psi_memory_some) and host.load > 0


def test_a_control_group_of_either_version(tmp_path: Path) -> None:
    """Use is without the cache that can be dropped. No limit is NaN."""
    version_2 = node(tmp_path / "two", proc__self__cgroup="0::/job\n")
    node(
        version_2 / "sys/fs/cgroup/job",
        **{"memory.current": "900\n", "memory.max": "1000\n", "memory.stat": "anon 5\ninactive_file 300\n"},
    )
    host = HostGauges((), str(version_2)).read()
    assert (host.group_used_bytes, host.group_limit_bytes) == (600, 1000)
    node(version_2 / "sys/fs/cgroup/job", **{"memory.max": "max\n"})
    assert math.isnan(HostGauges((), str(version_2)).read().group_limit_bytes)
    version_1 = node(tmp_path / "one", proc__self__cgroup="4:cpu:/\n3:memory:/job\n0::/\n")
    stat = "inactive_file 1\ntotal_inactive_file 100\n"
    node(
        version_1 / "sys/fs/cgroup/memory/job",
        **{"memory.usage_in_bytes": "700\n", "memory.limit_in_bytes": "800\n", "memory.stat": stat},
    )
    host = HostGauges((), str(version_1)).read()
    assert (host.group_used_bytes, host.group_limit_bytes) == (600, 800)
    node(version_1 / "sys/fs/cgroup/memory/job", **{"memory.limit_in_bytes": "9223372036854771712\n"})
    assert math.isnan(HostGauges((), str(version_1)).read().group_limit_bytes)


def test_a_node_without_files_has_only_nan(tmp_path: Path) -> None:
    """Each file is optional."""
    assert all(math.isnan(value) for value in HostGauges((), str(tmp_path)).read())
    assert math.isnan(HostGauges((str(tmp_path / "none"),)).rooms()[0].free_bytes)


def test_this_node_and_its_accelerators(tmp_path: Path) -> None:
    """A sample has this node's values, and those of a reader of accelerators."""

    class Two:
        def read(self) -> list[Accelerator]:
            return [Accelerator(50.0), Accelerator()]

    gauges = HostGauges((str(tmp_path),))
    first, second = gauges.sample(), gauges.sample((), Two())
    assert second.at > first.at and second.rooms[0].free_bytes <= second.rooms[0].size_bytes
    assert second.host.memory_available_bytes <= second.host.memory_size_bytes and len(second.accelerators) == 2
    assert rss_bytes(1) > 0 and math.isnan(rss_bytes(1 << 30))
