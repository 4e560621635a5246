"""What can be wrong with this machine. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from relight.doctor.facts import DoctorFacts
from relight.doctor.finding import CheckHit, check, gb, span
from relight.supervise.facts import KINDS

_SHM_LEAST = 64 << 20
"""What containers are given if nobody asks for more."""
_SHM = "/dev/shm"  # noqa: S108 - looked at only
_PAGES = 1 << 20
"""What ``relight run`` needs of memory that is shared, with room to spare."""
_FILES_LEAST = 512
_PROCESSES_LEAST = 128
_YEAR_2025_S = 1_735_689_600
_LD_LIARS = ("eatmydata", "nosync")
SKEW_S = 300.0
"""So far clocks may be apart: nothing is decided by them, but ages are shown by them."""


def slots_bytes(facts: DoctorFacts) -> int:
    """What two copies of the largest state take in memory."""
    return 2 * (facts.newest_bytes + facts.newest_bytes // 50 + (8 << 20)) if facts.newest_bytes else 0


@check("memory", "warning", "machine", "there is no room in memory for two copies of the state, which saves in the background need")
def _memory(facts: DoctorFacts) -> Iterator[CheckHit]:
    need, there = slots_bytes(facts), facts.machine.memory_bytes
    if need and there is not None and there < need:
        one = there >= need // 2
        yield CheckHit(
            "memory for one copy of the state only" if one else "no memory for a copy of the state",
            facts.machine.host,
            f"two copies of the newest checkpoint take {gb(need)}, {gb(there)} are available",
            "a save that is due while the last one is being written has to wait"
            if one
            else "the trainer writes saves itself, and waits for the disk",
            "give the job more memory, or bound what saves may take: limits=relight.Limits(memory=…)",
            "relight bench",
        )


@check(
    "overcommit",
    "warning",
    "machine",
    "the kernel promises no more memory than there is, and has promised what the state's copies would take",
)
def _overcommit(facts: DoctorFacts) -> Iterator[CheckHit]:
    need, left = slots_bytes(facts), facts.machine.commit_bytes
    if need and left is not None and left < need:
        yield CheckHit(
            "the kernel will not promise the memory for the state's copies",
            facts.machine.host,
            f"vm.overcommit_memory=2: {gb(left)} of promises are left, {gb(need)} are needed",
            "memory cannot be allocated although some is free",
            "raise vm.overcommit_ratio, or set vm.overcommit_memory=0",
            "sysctl vm.overcommit_memory=0",
        )


@check("shm", "warning", "machine", "`/dev/shm` is as small as containers have it (64 MiB)")
def _shm(facts: DoctorFacts) -> Iterator[CheckHit]:
    size = facts.machine.shm_bytes
    if size is not None and size <= _SHM_LEAST:
        yield CheckHit(
            "shared memory is as small as a container's",
            _SHM,
            f"it holds {gb(size)}",
            "data loaders' workers and collectives stop with a bus error; Relight's own copies are not bound to it",
            "start the container with more: --shm-size=8g, or an emptyDir with medium: Memory",
        )


@check("shm-full", "error", "machine", "`/dev/shm` has no room")
def _shm_full(facts: DoctorFacts) -> Iterator[CheckHit]:
    free = facts.machine.shm_free_bytes
    if free is not None and free < _PAGES:
        yield CheckHit(
            "shared memory is full",
            _SHM,
            f"{gb(free)} are free",
            "relight run cannot make the pages by which ranks are watched",
            "remove what nobody uses any more",
            "ls -l /dev/shm",
        )


@check("memlock", "warning", "machine", "memory may not be locked, on a machine with accelerators or a fabric that reads memory")
def _memlock(facts: DoctorFacts) -> Iterator[CheckHit]:
    limit = facts.machine.limits.get("memlock")
    if (
        limit is not None
        and (facts.machine.fabric or facts.machine.accelerators)
        and limit < (1 << 26 if facts.machine.fabric else 1 << 16)
    ):
        yield CheckHit(
            "little memory may be locked",
            facts.machine.host,
            f"ulimit -l is {gb(limit)}",
            "a fabric (InfiniBand, RoCE) and pinned buffers need locked memory: collectives fail, or are slow",
            "raise it for the job: LimitMEMLOCK=infinity, --ulimit memlock=-1",
            "ulimit -l unlimited",
        )


@check("open-files", "warning", "machine", "a process may open few files")
def _open_files(facts: DoctorFacts) -> Iterator[CheckHit]:
    limit = facts.machine.limits.get("open files")
    if limit is not None and limit < _FILES_LEAST:
        yield CheckHit(
            "few files may be open at once",
            facts.machine.host,
            f"ulimit -n is {limit}",
            "ranks, loaders' workers and connections to stores each take some: EMFILE in the middle of a save",
            "raise it to 65536",
            "ulimit -n 65536",
        )


@check("processes", "warning", "machine", "a user may have few processes and threads")
def _processes(facts: DoctorFacts) -> Iterator[CheckHit]:
    limit = facts.machine.limits.get("processes")
    if limit is not None and limit < _PROCESSES_LEAST:
        yield CheckHit(
            "few processes and threads may run at once",
            facts.machine.host,
            f"ulimit -u is {limit}",
            "the agent, loaders' workers and spares cannot be started",
            "raise it",
            "ulimit -u 65536",
        )


@check("file-size", "error", "machine", "no file may become as large as a checkpoint")
def _file_size(facts: DoctorFacts) -> Iterator[CheckHit]:
    limit = facts.machine.limits.get("file size")
    if limit is not None and limit < max(facts.newest_bytes, 1 << 30):
        yield CheckHit(
            "files may not become large",
            facts.machine.host,
            f"ulimit -f is {gb(limit)}",
            "a pack that is larger ends its writer, or the save fails as if the disk were full",
            "take the limit away",
            "ulimit -f unlimited",
        )


@check("address-space", "warning", "machine", "a process may not map as much memory as two copies of the state")
def _address_space(facts: DoctorFacts) -> Iterator[CheckHit]:
    limit = facts.machine.limits.get("address space")
    if limit is not None and limit < max(slots_bytes(facts), 4 << 30):
        yield CheckHit(
            "a process may map little memory",
            facts.machine.host,
            f"ulimit -v is {gb(limit)}",
            "memory for the state's copies cannot be mapped",
            "take the limit away; control groups bound memory better",
            "ulimit -v unlimited",
        )


@check("preload", "error", "machine", "a library is preloaded that answers `fsync` without doing it")
def _preload(facts: DoctorFacts) -> Iterator[CheckHit]:
    liar = next((one for one in _LD_LIARS if one in facts.machine.preload), None)
    if liar is not None:
        yield CheckHit(
            f"{liar} is preloaded, which makes fsync do nothing",
            "LD_PRELOAD",
            f"LD_PRELOAD={facts.machine.preload[:200]}",
            "what was told to be stored is gone with the power",
            "start the job without it",
            "unset LD_PRELOAD",
        )


@check("clock-wrong", "warning", "machine", "this machine's clock is years behind")
def _clock_wrong(facts: DoctorFacts) -> Iterator[CheckHit]:
    if 0 < facts.machine.now < _YEAR_2025_S:
        yield CheckHit(
            "the clock is years behind",
            facts.machine.host,
            f"it says {facts.machine.now:.0f} s since 1970",
            "servers refuse signed requests and certificates; ages of checkpoints make no sense",
            "set it, and keep it by NTP",
            "chronyc makestep",
        )


@check(
    "clock-records", "warning", "machine", "a run's newest record was written later than it is here: clocks differ by more than 5 minutes"
)
def _clock_records(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        ahead = (run.newest_record_s or 0.0) - facts.machine.now
        if run.newest_record_s is not None and facts.machine.now and ahead > SKEW_S:
            yield CheckHit(
                "a record comes from the future",
                run.path,
                f"the newest was written {span(ahead)} ahead of this machine's clock",
                "nothing is decided by clocks, but keep=relight.keep(within=…) and shown ages go by them",
                "keep all machines' clocks by NTP",
                "chronyc tracking",
            )


@check(
    "clock-order",
    "note",
    "machine",
    "a run's records go back in time: machines that wrote it have clocks that differ by more than 5 minutes",
)
def _clock_order(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        if run.back_s > SKEW_S:
            yield CheckHit(
                "clocks of machines that wrote this run differ",
                run.path,
                f"a record is {span(run.back_s)} older than the one before it",
                "nothing is decided by clocks, but keep=relight.keep(within=…) goes by them",
                "keep all machines' clocks by NTP",
                f"relight log {quote(run.path)}",
            )


@check("kernel-log", "warning", "machine", "the kernel has told of a broken device, disk, link or of lack of memory within the last hour")
def _kernel(facts: DoctorFacts) -> Iterator[CheckHit]:
    seen: dict[str, list[str]] = {}
    for kind, line in facts.machine.kernel:
        seen.setdefault(kind, []).append(line)
    for kind, lines in seen.items():
        what = KINDS.get(kind, kind).rpartition(":")[2].strip()
        yield CheckHit(
            f"the kernel tells of {kind}: {what}",
            facts.machine.host,
            f"{lines[-1][:160]} ({len(lines)} such in the last hour)",
            "a machine that says so fails again, or computes wrongly",
            "look at the machine before training goes on",
            "dmesg --level=err,crit",
        )


@check("dead-supervisors", "note", "machine", "`relight run` was killed, and pages of its ranks lie in memory still")
def _dead_supervisors(facts: DoctorFacts) -> Iterator[CheckHit]:
    dead = facts.machine.dead_supervisors
    if dead:
        yield CheckHit(
            f"memory files of {len(dead)} dead supervisor{'s' if len(dead) > 1 else ''}",
            dead[0],
            ", ".join(dead[:4]),
            "they take a little memory until the next relight run here removes them",
            "remove them",
            fix="memory files",
        )


@check("package-missing", "error", "machine", "a package that the store, its keys or Relight itself need is not installed")
def _missing(facts: DoctorFacts) -> Iterator[CheckHit]:
    for one in facts.machine.packages:
        if not one.installed:
            needs = one.wanted_by or "Relight"
            yield CheckHit(
                f"{one.name} is not installed",
                facts.machine.host,
                f"{needs} needs {one.name}>={one.least}" if one.least else f"{needs} needs it",
                "nothing that needs it works",
                "install it",
                f"pip install '{one.name}>={one.least}'" if one.least else f"pip install {one.name}",
            )


@check("package-old", "warning", "machine", "a package is older than what Relight was tested with at least")
def _old(facts: DoctorFacts) -> Iterator[CheckHit]:
    for one in facts.machine.packages:
        if one.installed and one.least and numbers(one.installed) < numbers(one.least):
            yield CheckHit(
                f"{one.name} is older than it should be",
                facts.machine.host,
                f"{one.installed} is installed, {one.least} is the oldest that is tested",
                "what Relight asks of it may be missing, or work otherwise",
                "upgrade it",
                f"pip install --upgrade '{one.name}>={one.least}'",
            )


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.13.0+cpu`` is 2, 13, 0; trailing zeros do not count."""
    found = []
    for word in version.split("+")[0].split("."):
        digits = word[: len(word) - len(word.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits[:9]))
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


@check("names", "error", "machine", "a host that settings name does not resolve, or an address that others are told is not this machine's")
def _names(facts: DoctorFacts) -> Iterator[CheckHit]:
    for setting, host, why in facts.machine.names:
        yield CheckHit(
            f"{setting} names a host that other nodes cannot use"
            if setting == "RELIGHT_PEERS_HOST"
            else f"{setting} names a host that is not found",
            setting,
            f"{host}: {why}",
            "nodes do not find each other: the job does not start, or peers protect nothing",
            "name an address of this machine that other nodes reach"
            if setting == "RELIGHT_PEERS_HOST"
            else "correct the name, or the resolver",
            f"getent hosts {quote(host)}",
        )
