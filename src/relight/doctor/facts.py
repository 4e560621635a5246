"""Facts about a machine, a store, its runs and the settings, as plain values. A fact that is None or in ``unseen`` is unknown."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from relight.errors import RelightError


class Trouble(NamedTuple):
    """A Relight error as a value."""

    kind: str
    what: str
    where: str = ""
    hint: str = ""

    @classmethod
    def from_error(cls, error: RelightError | OSError, where: str = "") -> Trouble:
        """Return kind, text, place and hint of the error. ``where`` is the place if the error has none."""
        if isinstance(error, RelightError):
            return cls(error.kind, error.what, error.where or where, error.hint)
        return cls("store", error.strerror or str(error), str(error.filename or where))


class Package(NamedTuple):
    """A package that Relight needs: its oldest supported version, and the installed version; "" if it is not installed."""

    name: str
    least: str
    installed: str
    wanted_by: str = ""
    """What needs an optional package: a URL's scheme or a key's spec."""

    @property
    def command(self) -> str:
        """The command that installs a sufficient version."""
        return f"pip install '{self.name}>={self.least}'" if self.least else f"pip install {self.name}"


class PeersPlane(NamedTuple):
    """What moves the bytes of peers on this machine."""

    wanted: str
    """``Peers(plane=)``, from the settings."""
    plane: str
    why: str


class LiveProcess(NamedTuple):
    """A training process that runs on this machine under ``relight run``."""

    pid: int
    url: str
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine."""

    host: str = ""
    now: float = 0.0
    """Time of its clock, in seconds since 1970."""
    memory_bytes: int | None = None
    """Bytes of memory available now, within the limits of control groups."""
    commit_bytes: int | None = None
    """Bytes that the kernel would still commit; None if it overcommits."""
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    """Limits of this process, by name; unlimited ones are absent."""
    accelerators: Mapping[str, int] = field(default_factory=dict)
    """Number of accelerators by maker or family, such as NVIDIA."""
    fabric: bool = False
    """Whether there is a network card with RDMA."""
    peers_plane: PeersPlane | None = None
    """None if the settings have no peers and there is no such card."""
    preload: str = ""
    kernel: tuple[tuple[str, str], ...] = ()
    """Failures in the kernel's log of the last hour: kind and line."""
    dead_supervisors: tuple[str, ...] = ()
    """Directories of shared memory that a dead ``relight run`` has left."""
    packages: tuple[Package, ...] = ()
    live: tuple[LiveProcess, ...] = ()
    names: tuple[tuple[str, str, str], ...] = ()
    """Hosts in settings that do not resolve, or are not this machine: the setting, the host, the reason."""
    unseen: Mapping[str, str] = field(default_factory=dict)


class Mount(NamedTuple):
    """Mount of a path. ``options``: of the mount and of the file system."""

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
        """Whether it is an object store mounted as a file system."""
        return self.type.startswith(
            (
                "fuse.s3fs",
                "fuse.gcsfuse",
                "fuse.rclone",
                "fuse.goofys",
                "fuse.blobfuse",
                "fuse.geesefs",
                "fuse.mount-s3",
            )
        )

    @property
    def is_memory(self) -> bool:
        """Whether its content is lost when the machine is switched off."""
        return self.type in ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")

    def option(self, name: str) -> str | None:
        """Return the value of option ``name``; None if it is not set."""
        return next(
            (option.partition("=")[2] for option in sorted(self.options) if option.startswith(f"{name}=")), None
        )


class DriveFacts(NamedTuple):
    """A drive of a mirrored store: ``status`` is ``good``, ``doubted`` or ``away``."""

    path: str
    status: str
    since: str
    why: str


class StoreKey(NamedTuple):
    """A key that opens an encrypted store."""

    label: str
    age_days: float
    opens: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """Facts about the store."""

    url: str = ""
    kind: str = "disk"
    """``disk``, ``stripe``, ``object``, ``web``, ``memory``."""
    there: bool = True
    """Whether anything exists at the store's place."""
    absent: str = ""
    """What exists at the path instead of a store or run."""
    error: Trouble | None = None
    """Why it cannot be listed or opened."""
    record: Trouble | None = None
    """The error of reading ``relight.json``."""
    is_directory: bool = True
    mount: Mount | None = None
    free_bytes: int | None = None
    size_bytes: int | None = None
    free_inodes: int | None = None
    """Free inodes; None also if the file system allocates them on demand."""
    mode: int | None = None
    probe: Trouble | None = None
    """Error while writing, reading back and deleting a small file."""
    probed: bool = False
    exclusive: bool | None = None
    """Whether the second of two exclusive creations of one name fails."""
    direct: bool | None = None
    fsync_s: float | None = None
    """Median time to make 4 KiB durable, in seconds."""
    write_bps: float | None = None
    answer_s: float | None = None
    """Median time of a small read, in seconds."""
    skew_s: float | None = None
    """Seconds by which the store's clock is ahead of this machine's."""
    drives: tuple[DriveFacts, ...] = ()
    """The drives of a mirrored store."""
    encrypted: bool | None = None
    keys: tuple[StoreKey, ...] = ()
    leftovers: tuple[str, ...] = ()
    """Directories that a killed bench has left."""
    runs: tuple[str, ...] = ()
    unseen: Mapping[str, str] = field(default_factory=dict)


class CheckpointFacts(NamedTuple):
    """A live checkpoint.

    ``damage`` is the known damage of its metadata, sizes or bytes: empty for a good checkpoint, None if it was not checked.
    """

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
    """Time of the last full read that found every byte as committed, from the run's log."""


class AttemptFacts(NamedTuple):
    """An attempt of a run, and the number of checkpoints that it committed."""

    epoch: int
    time_s: float | None
    host: str
    commits: int


class TierFacts(NamedTuple):
    """A further tier: its error, the number of the run's checkpoints that it lacks, and the age of the oldest of these."""

    name: str
    url: str
    error: Trouble | None = None
    lacks: int = 0
    lacks_s: float = 0.0
    same_device: bool = False
    """Whether it is on the same disk as the store, so that one failure loses both."""


class IncidentFacts(NamedTuple):
    """An incident that ``relight run`` recorded."""

    time_s: float | None
    kind: str
    action: str
    why: str


class MeasuredRestore(NamedTuple):
    """Bytes and seconds of reading the newest checkpoint as a restore does. ``whole`` is False if only a part was read."""

    bytes: int
    seconds: float
    whole: bool
    damage: tuple[str, ...] = ()


class Drilled(NamedTuple):
    """A drill that is recorded with a run."""

    time_s: float | None
    ok: bool
    summary: str
    script: str = ""
    """The drilled script; empty for the drill's own job."""
    why_not: tuple[str, str] = ("", "")
    """``no`` if the drill does not count, ``unknown`` if that cannot be determined, else ""; and the reason."""


class Proven(NamedTuple):
    """A proof that is recorded with a run. ``verified``: id, step and damage of each checkpoint that was read completely."""

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
    """Path of the run, as a command accepts it."""
    error: Trouble | None = None
    records: int = 0
    faults: tuple[tuple[str, str], ...] = ()
    void: tuple[str, ...] = ()
    """Records of superseded attempts after the FENCE that superseded them."""
    attempts: tuple[AttemptFacts, ...] = ()
    checkpoints: tuple[CheckpointFacts, ...] = ()
    """Live checkpoints, oldest first."""
    newest_record_s: float | None = None
    back_s: float = 0.0
    """Largest number of seconds by which a record's time is before that of the previous record."""
    retired: int = 0
    pinned: int = 0
    """Number of live checkpoints with a tag or a hold."""
    leftovers: tuple[tuple[str, str], ...] = ()
    held: tuple[tuple[str, str], ...] = ()
    temporaries: tuple[str, ...] = ()
    environment: Mapping[str, object] = field(default_factory=dict)
    """Environment of the newest checkpoint."""
    exact: tuple[str, ...] = ()
    """Why a resume from the newest checkpoint is not bit-exact."""
    tiers: tuple[TierFacts, ...] = ()
    incidents: tuple[IncidentFacts, ...] = ()
    supervised: bool = False
    """Whether a job of the run ran under ``relight run``."""
    signed: bool = False
    drills: tuple[Drilled, ...] = ()
    proofs: tuple[Proven, ...] = ()
    measured: MeasuredRestore | None = None
    unseen: Mapping[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> CheckpointFacts | None:
        """The checkpoint that a resume would take if nothing is damaged."""
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def interval_s(self) -> float | None:
        """Median seconds between two checkpoints; None for fewer than four."""
        times = [checkpoint.time_s for checkpoint in self.checkpoints if checkpoint.time_s is not None]
        gaps = sorted(after - before for before, after in itertools.pairwise(times))
        return gaps[len(gaps) // 2] if len(gaps) >= 3 else None


class KeyFile(NamedTuple):
    """A key file named by a key's spec."""

    path: str
    mode: int
    in_store: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """Settings in effect for this process."""

    settings: frozenset[str] = frozenset()
    """Names of settings that have a value."""
    unknown: tuple[tuple[str, str], ...] = ()
    """Unknown names of settings, each with the nearest known one."""
    bad: tuple[tuple[str, Trouble], ...] = ()
    """Settings with an invalid value."""
    file: str = ""
    """The ``relight.toml`` in effect; "" without one."""
    file_error: Trouble | None = None
    key_files: tuple[KeyFile, ...] = ()
    endpoint: str = ""
    cache: Trouble | None = None
    cache_mount: Mount | None = None
    single_writer: bool = False
    threads: str = ""
    """Value of ``OMP_NUM_THREADS``."""
    grace: bool = False
    """Whether a grace period or a source of preemption notices is set."""
    assigned: frozenset[str] = frozenset()
    """Names of settings that variables or the file set: ``alerts.to``."""
    roles: Mapping[str, int] | None = None
    """Tokens of this user's dashboard that are valid, by role; None if there is no dashboard."""
    unseen: Mapping[str, str] = field(default_factory=dict)


class NodeFacts(NamedTuple):
    """Facts about one node of a job."""

    rank: int
    there: bool = True
    host: str = ""
    versions: Mapping[str, str] = {}
    settings: Mapping[str, str] = {}
    """Digest of each setting's value."""
    mount: Mount | None = None
    """Mount of the store's path on that node."""
    sees: bool | None = None
    """Whether it sees the file that node 0 wrote to the store; None if node 0 wrote none."""
    ahead_s: float | None = None
    """Seconds by which its clock is ahead of node 0's, to some tens of milliseconds."""
    memory_bytes: int | None = None
    accelerators: Mapping[str, int] = {}
    """See ``Machine``."""
    limits: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFacts:
    """All facts."""

    machine: Machine = field(default_factory=Machine)
    store: StoreFacts = field(default_factory=StoreFacts)
    runs: tuple[RunFacts, ...] = ()
    config: ConfigFacts = field(default_factory=ConfigFacts)
    nodes: tuple[NodeFacts, ...] = ()
    """All nodes to compare, including this one; empty if only this node was checked."""

    @property
    def newest_bytes(self) -> int:
        """Bytes of the largest of the runs' newest checkpoints; 0 without any."""
        return max((run.newest.bytes for run in self.runs if run.newest is not None), default=0)

    @property
    def unseen(self) -> dict[str, str]:
        """Probes that failed or were skipped, with the reason."""
        unseen = {**self.config.unseen, **self.machine.unseen, **self.store.unseen}
        for run in self.runs:
            unseen |= {f"{run.name}: {what}": why for what, why in run.unseen.items()}
        return unseen
