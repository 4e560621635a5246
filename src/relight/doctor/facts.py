"""What was seen of a machine, a store, its runs and the settings. Values only; None, or an entry in ``unseen``: it could not be seen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from relight.errors import RelightError


class Trouble(NamedTuple):
    """An error of ours, as a value."""

    kind: str
    what: str
    where: str = ""
    hint: str = ""

    @classmethod
    def from_error(cls, error: RelightError | OSError, where: str = "") -> Trouble:
        """What it says."""
        if isinstance(error, RelightError):
            return cls(error.kind, error.what, error.where or where, error.hint)
        return cls("store", error.strerror or str(error), str(error.filename or where))


class Package(NamedTuple):
    """Something that Relight stands on: what it must be at least, and what is there; "" if it is not."""

    name: str
    least: str
    installed: str
    wanted_by: str = ""
    """What needs it, if not all do: a URL's scheme, a key's spec."""


class LiveProcess(NamedTuple):
    """A training process that runs on this machine under ``relight run``."""

    pid: int
    url: str
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This one."""

    host: str = ""
    now: float = 0.0
    """Seconds since the epoch, as its clock has it."""
    memory_bytes: int | None = None
    """What could be had now, limits of control groups heeded."""
    commit_bytes: int | None = None
    """What the kernel would still promise; None where it promises more than there is."""
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    """Of this process, by name; what is without limit is left out."""
    accelerators: int = 0
    fabric: bool = False
    """Whether there is a network card that reads memory by itself."""
    preload: str = ""
    kernel: tuple[tuple[str, str], ...] = ()
    """Of the last hour: the kind of failure that a line of the kernel's log speaks of, and the line."""
    dead_supervisors: tuple[str, ...] = ()
    """Directories of memory that ``relight run`` has left, whose process is gone."""
    packages: tuple[Package, ...] = ()
    live: tuple[LiveProcess, ...] = ()
    names: tuple[tuple[str, str, str], ...] = ()
    """Hosts that settings name and that do not resolve, or are not this machine: the setting, the host, why."""
    unseen: Mapping[str, str] = field(default_factory=dict)


class Mount(NamedTuple):
    """Where a path lies: ``options`` of the mount and of the file system."""

    type: str
    source: str
    point: str
    options: frozenset[str]

    @property
    def is_network(self) -> bool:
        """Whether its bytes are on another machine."""
        return self.type.startswith(("nfs", "cifs", "smb", "ceph", "lustre", "beegfs", "gpfs", "9p")) or self.is_bucket

    @property
    def is_bucket(self) -> bool:
        """Whether it shows an object store as files."""
        return self.type.startswith(
            ("fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.goofys", "fuse.blobfuse", "fuse.geesefs", "fuse.mount-s3")
        )

    @property
    def is_memory(self) -> bool:
        """Whether what lies there is gone with the power."""
        return self.type in ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")

    def option(self, name: str) -> str | None:
        """What stands behind ``name=``; None if nothing does."""
        return next((one.partition("=")[2] for one in sorted(self.options) if one.startswith(f"{name}=")), None)


class StoreKey(NamedTuple):
    """One that opens an encrypted store."""

    label: str
    age_days: float
    opens: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """The store."""

    url: str = ""
    kind: str = "disk"
    """``disk``, ``stripe``, ``object``, ``web``, ``memory``."""
    there: bool = True
    """Whether there is something at that place."""
    absent: str = ""
    """What there is instead, if no store or run is."""
    error: Trouble | None = None
    """Why it cannot be listed or opened."""
    record: Trouble | None = None
    """What is wrong with ``relight.json``."""
    is_directory: bool = True
    mount: Mount | None = None
    free_bytes: int | None = None
    size_bytes: int | None = None
    free_inodes: int | None = None
    """None also where the file system makes them as they are needed."""
    mode: int | None = None
    probe: Trouble | None = None
    """What went wrong when a small file was written, read back and deleted."""
    probed: bool = False
    exclusive: bool | None = None
    """Whether of two creations of one name one fails."""
    direct: bool | None = None
    fsync_s: float | None = None
    """The usual time of making 4 KiB durable."""
    write_bps: float | None = None
    answer_s: float | None = None
    """The usual time of a small read."""
    skew_s: float | None = None
    """How far the store's clock is ahead of this machine's."""
    encrypted: bool | None = None
    keys: tuple[StoreKey, ...] = ()
    leftovers: tuple[str, ...] = ()
    """What a bench that was killed has left."""
    runs: tuple[str, ...] = ()
    unseen: Mapping[str, str] = field(default_factory=dict)


class CheckpointFacts(NamedTuple):
    """A live checkpoint. ``damage``: what is wrong with its metadata or sizes, or is known from reading it; None: it
    was not looked at."""

    id: str
    step: int
    time_s: float | None = None
    bytes: int = 0
    new_bytes: int = 0
    suspect: bool = False
    damage: tuple[str, ...] | None = None
    requires: int = 0
    metrics: Mapping[str, float] = {}
    set_aside: bool = False
    whole_s: float | None = None
    """When every byte of it was last read and found as committed, as its run's log has it."""


class AttemptFacts(NamedTuple):
    """One that took charge of a run, and how many checkpoints it committed."""

    epoch: int
    time_s: float | None
    host: str
    commits: int


class TierFacts(NamedTuple):
    """A further tier: why it cannot be read, how many of the run's checkpoints it lacks, and for how long the oldest of these is there."""

    name: str
    url: str
    error: Trouble | None = None
    lacks: int = 0
    lacks_s: float = 0.0
    same_device: bool = False
    """Whether it is on the disk of the store itself, so that one failure takes both."""


class IncidentFacts(NamedTuple):
    """What ``relight run`` wrote down."""

    time_s: float | None
    kind: str
    action: str
    why: str


class MeasuredRestore(NamedTuple):
    """The newest checkpoint, read as a restore reads it. ``whole`` is False if only a part of it was."""

    bytes: int
    seconds: float
    whole: bool
    damage: tuple[str, ...] = ()


class Drilled(NamedTuple):
    """A drill that is remembered with a run."""

    time_s: float | None
    ok: bool
    summary: str
    script: str = ""
    """What was drilled; empty for the drill's own job."""
    why_not: tuple[str, str] = ("", "")
    """``no`` if it no longer counts, ``unknown`` if that cannot be seen, and the reason."""


class Proven(NamedTuple):
    """A proof that is remembered with a run. ``verified``: ids and steps of checkpoints that were read to the byte, and what was wrong."""

    kind: str
    time_s: float | None
    ok: bool
    summary: str
    verified: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run."""

    name: str = ""
    path: str = ""
    """As a command takes it."""
    error: Trouble | None = None
    records: int = 0
    faults: tuple[tuple[str, str], ...] = ()
    void: tuple[str, ...] = ()
    """Records of superseded attempts that came behind the one that superseded them."""
    attempts: tuple[AttemptFacts, ...] = ()
    checkpoints: tuple[CheckpointFacts, ...] = ()
    """Live ones, oldest first."""
    newest_record_s: float | None = None
    back_s: float = 0.0
    """By how much the time of a record was before that of the one behind it, at most."""
    retired: int = 0
    pinned: int = 0
    """Live checkpoints with a tag or a hold."""
    leftovers: tuple[tuple[str, str], ...] = ()
    held: tuple[tuple[str, str], ...] = ()
    temporaries: tuple[str, ...] = ()
    environment: Mapping[str, object] = field(default_factory=dict)
    """What the newest was made with."""
    exact: tuple[str, ...] = ()
    """Why a resume from the newest is not bit-exact."""
    tiers: tuple[TierFacts, ...] = ()
    incidents: tuple[IncidentFacts, ...] = ()
    supervised: bool = False
    """Whether a job of it ran under ``relight run``."""
    signed: bool = False
    drills: tuple[Drilled, ...] = ()
    proofs: tuple[Proven, ...] = ()
    measured: MeasuredRestore | None = None
    unseen: Mapping[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> CheckpointFacts | None:
        """The checkpoint that a resume takes, damage aside."""
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def interval_s(self) -> float | None:
        """The usual time between two checkpoints; None if there are not four."""
        times = [one.time_s for one in self.checkpoints if one.time_s is not None]
        gaps = sorted(after - before for before, after in itertools.pairwise(times))
        return gaps[len(gaps) // 2] if len(gaps) >= 3 else None


class KeyFile(NamedTuple):
    """A file that a key's spec names."""

    path: str
    mode: int
    in_store: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """What is set, around the process."""

    settings: frozenset[str] = frozenset()
    """Names of settings that have a value."""
    unknown: tuple[tuple[str, str], ...] = ()
    """Names that are no settings, and the nearest that is one."""
    bad: tuple[tuple[str, Trouble], ...] = ()
    """Settings whose value is none."""
    file: str = ""
    """The ``relight.toml`` that counts here; "" if there is none."""
    file_error: Trouble | None = None
    key_files: tuple[KeyFile, ...] = ()
    endpoint: str = ""
    cache: Trouble | None = None
    cache_mount: Mount | None = None
    single_writer: bool = False
    threads: str = ""
    """What ``OMP_NUM_THREADS`` says."""
    grace: bool = False
    """Whether it is known how long there is when the machine is wanted back."""
    assigned: frozenset[str] = frozenset()
    """Names of settings that variables or the file set: ``alerts.to``."""
    roles: Mapping[str, int] | None = None
    """Tokens of this user's dashboard that are valid, by role; None if there is no dashboard."""
    unseen: Mapping[str, str] = field(default_factory=dict)


class NodeFacts(NamedTuple):
    """A node among others."""

    rank: int
    there: bool = True
    host: str = ""
    versions: Mapping[str, str] = {}
    settings: Mapping[str, str] = {}
    """Of each setting a digest."""
    mount: Mount | None = None
    """Of the store's place there."""
    sees: bool | None = None
    """Whether it sees in the store what node 0 has written; None: nothing was."""
    ahead_s: float | None = None
    """By how much its clock is ahead of node 0's, to some tens of milliseconds."""
    memory_bytes: int | None = None
    accelerators: int = 0
    limits: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFacts:
    """All of it."""

    machine: Machine = field(default_factory=Machine)
    store: StoreFacts = field(default_factory=StoreFacts)
    runs: tuple[RunFacts, ...] = ()
    config: ConfigFacts = field(default_factory=ConfigFacts)
    nodes: tuple[NodeFacts, ...] = ()
    """All that were to be compared, this one too; none if only this one was looked at."""

    @property
    def newest_bytes(self) -> int:
        """What the largest of the runs' newest checkpoints takes; 0 if there is none."""
        return max((run.newest.bytes for run in self.runs if run.newest is not None), default=0)

    @property
    def unseen(self) -> dict[str, str]:
        """What could not be looked at, and why."""
        found = {**self.config.unseen, **self.machine.unseen, **self.store.unseen}
        for run in self.runs:
            found |= {f"{run.name}: {what}": why for what, why in run.unseen.items()}
        return found
