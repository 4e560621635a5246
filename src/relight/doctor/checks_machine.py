"""Checks of this machine. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from relight.doctor.facts import DoctorFacts
from relight.doctor.finding import CheckHit, check
from relight.supervise.facts import KINDS
from relight.units import count_text, duration_text, size_text

_SHM_LEAST = 64 << 20
"""Bytes of ``/dev/shm`` in a container by default."""
_SHM = "/dev/shm"  # noqa: S108 - only read
_PAGES = 1 << 20
"""Bytes of shared memory that ``relight run`` needs, with a margin."""
_FILES_LEAST = 512
_PROCESSES_LEAST = 128
_YEAR_2025_S = 1_735_689_600
_LD_LIARS = ("eatmydata", "nosync")
SKEW_S = 300.0
"""Largest tolerated difference of clocks, in seconds. Clocks decide nothing, but displayed ages and ``keep(within=)`` use them."""


def slots_bytes(facts: DoctorFacts) -> int:
    """Return the bytes of memory for two copies of the largest state; 0 without a checkpoint."""
    return 2 * (facts.newest_bytes + facts.newest_bytes // 50 + (8 << 20)) if facts.newest_bytes else 0


@check(
    "memory", "warning", "machine", "memory has no room for two copies of the state, which background saves may need"
)
def _memory(facts: DoctorFacts) -> Iterator[CheckHit]:
    need, available = slots_bytes(facts), facts.machine.memory_bytes
    if need and available is not None and available < need:
        one_fits = available >= need // 2
        yield CheckHit(
            "memory has room for only one copy of the state"
            if one_fits
            else "memory has no room for a copy of the state",
            facts.machine.host,
            f"two copies of the newest checkpoint take {size_text(need)}, {size_text(available)} are available",
            "a save that is due while the previous one is being written has to wait"
            if one_fits
            else "the trainer writes saves itself, and waits for the disk",
            "give the job more memory, or bound the memory of saves: limits=relight.Limits(memory=…)",
            "relight bench",
        )


@check(
    "overcommit",
    "warning",
    "machine",
    "the kernel does not overcommit memory, and too little of its commit limit is left for the state's copies",
)
def _overcommit(facts: DoctorFacts) -> Iterator[CheckHit]:
    need, left = slots_bytes(facts), facts.machine.commit_bytes
    if need and left is not None and left < need:
        yield CheckHit(
            "the kernel's commit limit leaves no room for the state's copies",
            facts.machine.host,
            f"vm.overcommit_memory=2: {size_text(left)} of the commit limit are left, {size_text(need)} are needed",
            "allocations fail although memory is free",
            "raise vm.overcommit_ratio, or set vm.overcommit_memory=0",
            "sysctl vm.overcommit_memory=0",
        )


@check("shm", "warning", "machine", "`/dev/shm` is as small as a container's default (64 MiB)")
def _shm(facts: DoctorFacts) -> Iterator[CheckHit]:
    size = facts.machine.shm_bytes
    if size is not None and size <= _SHM_LEAST:
        yield CheckHit(
            "shared memory is as small as a container's default",
            _SHM,
            f"its size is {size_text(size)}",
            "data loaders' workers and collectives fail with a bus error; Relight's own copies do not use it",
            "start the container with more: --shm-size=8g, or an emptyDir with medium: Memory",
        )


@check("shm-full", "error", "machine", "`/dev/shm` has no room")
def _shm_full(facts: DoctorFacts) -> Iterator[CheckHit]:
    free = facts.machine.shm_free_bytes
    if free is not None and free < _PAGES:
        yield CheckHit(
            "shared memory is full",
            _SHM,
            f"{size_text(free)} are free",
            "relight run cannot create the ranks' heartbeat pages",
            "remove unused files",
            "ls -l /dev/shm",
        )


@check(
    "memlock",
    "warning",
    "machine",
    "the limit of locked memory is low, on a machine with accelerators or an RDMA fabric",
)
def _memlock(facts: DoctorFacts) -> Iterator[CheckHit]:
    limit = facts.machine.limits.get("memlock")
    if (
        limit is not None
        and (facts.machine.fabric or facts.machine.accelerators)
        and limit < (1 << 26 if facts.machine.fabric else 1 << 16)
    ):
        yield CheckHit(
            "the limit of locked memory is low",
            facts.machine.host,
            f"ulimit -l is {size_text(limit)}",
            "a fabric (InfiniBand, RoCE) and pinned buffers need locked memory: collectives fail, or are slow",
            "raise it for the job: LimitMEMLOCK=infinity, --ulimit memlock=-1",
            "ulimit -l unlimited",
        )


@check(
    "peers-plane",
    "note",
    "machine",
    'peers use TCP, although `Peers(plane="rdma")` is set or there is an RDMA fabric',
)
def _peers_plane(facts: DoctorFacts) -> Iterator[CheckHit]:
    seen = facts.machine.peers_plane
    if seen is None or seen.plane != "tcp" or seen.wanted == "tcp":
        return
    if seen.wanted == "rdma" or facts.machine.fabric:
        yield CheckHit(
            "peers use TCP, not RDMA",
            facts.machine.host,
            seen.why,
            "protecting snapshots and restoring from peers takes processor time of both nodes for each byte",
            'install NIXL, check the RDMA devices, or set peers.plane = "tcp"',
            "pip install --no-deps nixl-cu12",
        )


@check("open-files", "warning", "machine", "the limit of open files is low")
def _open_files(facts: DoctorFacts) -> Iterator[CheckHit]:
    limit = facts.machine.limits.get("open files")
    if limit is not None and limit < _FILES_LEAST:
        yield CheckHit(
            "the limit of open files is low",
            facts.machine.host,
            f"ulimit -n is {limit}",
            "ranks, loaders' workers and connections to stores each need descriptors: a save can fail with EMFILE",
            "raise it to 65536",
            "ulimit -n 65536",
        )


@check("processes", "warning", "machine", "a user's limit of processes and threads is low")
def _processes(facts: DoctorFacts) -> Iterator[CheckHit]:
    limit = facts.machine.limits.get("processes")
    if limit is not None and limit < _PROCESSES_LEAST:
        yield CheckHit(
            "the limit of processes and threads is low",
            facts.machine.host,
            f"ulimit -u is {limit}",
            "the agent, loaders' workers and spares cannot be started",
            "raise it",
            "ulimit -u 65536",
        )


@check("file-size", "error", "machine", "the limit of a file's size is smaller than a checkpoint")
def _file_size(facts: DoctorFacts) -> Iterator[CheckHit]:
    limit = facts.machine.limits.get("file size")
    if limit is not None and limit < max(facts.newest_bytes, 1 << 30):
        yield CheckHit(
            "the limit of a file's size is low",
            facts.machine.host,
            f"ulimit -f is {size_text(limit)}",
            "a larger pack ends its writer (SIGXFSZ), or the save fails as if the disk were full",
            "remove the limit",
            "ulimit -f unlimited",
        )


@check(
    "address-space",
    "warning",
    "machine",
    "the limit of a process's address space is smaller than two copies of the state",
)
def _address_space(facts: DoctorFacts) -> Iterator[CheckHit]:
    limit = facts.machine.limits.get("address space")
    if limit is not None and limit < max(slots_bytes(facts), 4 << 30):
        yield CheckHit(
            "the limit of address space is low",
            facts.machine.host,
            f"ulimit -v is {size_text(limit)}",
            "memory for the state's copies cannot be mapped",
            "remove the limit; control groups bound memory better",
            "ulimit -v unlimited",
        )


@check("preload", "error", "machine", "a library is preloaded that makes `fsync` return without flushing")
def _preload(facts: DoctorFacts) -> Iterator[CheckHit]:
    library = next((name for name in _LD_LIARS if name in facts.machine.preload), None)
    if library is not None:
        yield CheckHit(
            f"{library} is preloaded, which makes fsync do nothing",
            "LD_PRELOAD",
            f"LD_PRELOAD={facts.machine.preload[:200]}",
            "a power cut destroys checkpoints that were reported as saved",
            "start the job without it",
            "unset LD_PRELOAD",
        )


@check("clock-wrong", "warning", "machine", "this machine's clock is years slow")
def _clock_wrong(facts: DoctorFacts) -> Iterator[CheckHit]:
    if 0 < facts.machine.now < _YEAR_2025_S:
        yield CheckHit(
            "the clock is years slow",
            facts.machine.host,
            f"it shows {duration_text(facts.machine.now)} since 1970",
            "servers refuse signed requests and certificates; ages of checkpoints are wrong",
            "set it, and synchronize it with NTP",
            "chronyc makestep",
        )


@check(
    "clock-records", "warning", "machine", "a run's newest record is more than 5 minutes ahead of this machine's clock"
)
def _clock_records(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        ahead = (run.newest_record_s or 0.0) - facts.machine.now
        if run.newest_record_s is not None and facts.machine.now and ahead > SKEW_S:
            yield CheckHit(
                "a record's time is in the future",
                run.path,
                f"the newest was written {duration_text(ahead)} ahead of this machine's clock",
                "keep=relight.keep(within=…) and displayed ages use these times; no commit depends on them",
                "synchronize all machines' clocks with NTP",
                "chronyc tracking",
            )


@check(
    "clock-order",
    "note",
    "machine",
    "a run's records go back in time by more than 5 minutes: clocks of the machines that wrote it differ",
)
def _clock_order(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        if run.back_s > SKEW_S:
            yield CheckHit(
                "clocks of machines that wrote this run differ",
                run.path,
                f"a record's time is {duration_text(run.back_s)} before that of the previous record",
                "keep=relight.keep(within=…) uses these times; no commit depends on them",
                "synchronize all machines' clocks with NTP",
                f"relight log {quote(run.path)}",
            )


@check(
    "kernel-log",
    "warning",
    "machine",
    "the kernel logged a failed device, disk or link, or lack of memory, within the last hour",
)
def _kernel(facts: DoctorFacts) -> Iterator[CheckHit]:
    seen: dict[str, list[str]] = {}
    for kind, line in facts.machine.kernel:
        seen.setdefault(kind, []).append(line)
    for kind, lines in seen.items():
        what = KINDS.get(kind, kind).rpartition(":")[2].strip()
        yield CheckHit(
            f"the kernel logged {kind}: {what}",
            facts.machine.host,
            f"{lines[-1][:160]} ({len(lines)} such lines in the last hour)",
            "a machine with such errors fails again, or computes wrongly",
            "check the machine before training continues",
            "dmesg --level=err,crit",
        )


@check(
    "dead-supervisors",
    "note",
    "machine",
    "`relight run` was killed, and its ranks' heartbeat pages are still in memory",
)
def _dead_supervisors(facts: DoctorFacts) -> Iterator[CheckHit]:
    dead = facts.machine.dead_supervisors
    if dead:
        yield CheckHit(
            f"memory files of {count_text(len(dead), 'dead supervisor')}",
            dead[0],
            ", ".join(dead[:4]),
            "they use a little memory until the next relight run on this machine removes them",
            "remove them",
            fix="memory files",
        )


@check(
    "package-missing", "error", "machine", "a package that the store, its keys or Relight itself need is not installed"
)
def _missing(facts: DoctorFacts) -> Iterator[CheckHit]:
    for package in facts.machine.packages:
        if not package.installed:
            needs = package.wanted_by or "Relight"
            yield CheckHit(
                f"{package.name} is not installed",
                facts.machine.host,
                f"{needs} needs {package.name}>={package.least}" if package.least else f"{needs} needs it",
                "everything that needs it fails",
                "install it",
                package.command,
            )


@check("package-old", "warning", "machine", "a package is older than the oldest version that Relight is tested with")
def _old(facts: DoctorFacts) -> Iterator[CheckHit]:
    for package in facts.machine.packages:
        if package.installed and package.least and numbers(package.installed) < numbers(package.least):
            yield CheckHit(
                f"{package.name} is too old",
                facts.machine.host,
                f"{package.installed} is installed, {package.least} is the oldest tested version",
                "functions that Relight needs may be missing, or behave differently",
                "upgrade it",
                package.command,
            )


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version without trailing zeros: 2, 13 for ``2.13.0+cpu``."""
    result = []
    for word in version.split("+")[0].split("."):
        digits = word[: len(word) - len(word.lstrip("0123456789"))]
        if not digits:
            break
        result.append(int(digits[:9]))
    while result and result[-1] == 0:
        result.pop()
    return tuple(result)


@check(
    "names",
    "error",
    "machine",
    "a host in the settings does not resolve, or the address for peers is not this machine's",
)
def _names(facts: DoctorFacts) -> Iterator[CheckHit]:
    for setting, host, why in facts.machine.names:
        yield CheckHit(
            f"{setting} names a host that other nodes cannot use"
            if setting == "RELIGHT_PEERS_HOST"
            else f"{setting} names a host that does not resolve",
            setting,
            f"{host}: {why}",
            "nodes cannot connect: the job does not start, or peers protect nothing",
            "name an address of this machine that other nodes can reach"
            if setting == "RELIGHT_PEERS_HOST"
            else "correct the name, or the resolver",
            f"getent hosts {quote(host)}",
        )
