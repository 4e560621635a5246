"""Values that the index returns to pages and API: plain data. Times are seconds since 1970 or ISO text; unknown values are None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

Time = float | str | None
Row = TypeVar("Row")


@dataclass(frozen=True)
class ListPage(Generic[Row]):
    """A piece of a long list. ``next``: the value of ``after`` for the next piece; None for the last piece."""

    rows: Sequence[Row]
    next: str | None = None
    total: int | None = None


@dataclass(frozen=True)
class StoreRow:
    """A followed store. ``id`` is its name in addresses. ``state``: ``ok`` or an error message."""

    id: str
    name: str
    runs: int = 0
    bytes: int = 0
    state: str = "ok"
    read_at: Time = None


@dataclass(frozen=True)
class RunRow:
    """A run in the overview. ``health``: ``good``, ``late``, ``failed`` or ``idle``; ``why``: the reason.

    ``state`` of its job: ``starting``, ``running``, ``finished``, ``failed``, ``given up`` or ``idle``; ``state_why``: the reason.
    """

    store: str
    run: str
    newest: str | None = None
    step: int | None = None
    age_s: float | None = None
    """Age of the newest good checkpoint in seconds."""
    good: bool = True
    health: str = "good"
    why: str = ""
    goodput: float | None = None
    risk: float | None = None
    checkpoints: int = 0
    bytes: int = 0
    incident: str | None = None
    state: str = "idle"
    state_why: str = ""
    last_step: int | None = None
    """The newest step that was saved or reported."""
    began_at: Time = None
    """When its first attempt began."""
    duration_s: float | None = None
    """Seconds from its first attempt to its last sign of life."""
    host: str = ""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """The newest value of each metric."""
    config: Mapping[str, str] = field(default_factory=dict)
    """The metadata that its script gave, nested names joined by dots."""


@dataclass(frozen=True)
class SpanRow:
    """A phase of a save on one rank: ``blocked``, ``snapshot``, ``held``, ``write``, ``wait``, ``parts``, ``commit``, ``drain``."""

    rank: int
    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class SaveRow:
    """A save. ``spans``: its phases, from the server's event feed; empty if this machine has no events of the save."""

    id: str
    step: int
    at: Time = None
    seconds: float | None = None
    bytes: int = 0
    spans: Sequence[SpanRow] = ()


@dataclass(frozen=True)
class IncidentRow:
    """An incident. Lists omit the evidence: ``clues``, ``stacks``, ``words`` and ``workers``."""

    id: str
    store: str
    run: str
    at: Time = None
    kind: str = ""
    why: str = ""
    rank: int | None = None
    step: int | None = None
    action: str = ""
    reason: str = ""
    steps_lost: int | None = None
    seconds: float | None = None
    clues: Sequence[Any] = ()
    stacks: Mapping[str, str] = field(default_factory=dict)
    words: str = ""
    workers: Sequence[Any] = ()
    host: str = ""


@dataclass(frozen=True)
class GoodputPart:
    """Time spent on ``training``, ``starting``, ``restoring`` and so on. ``cause``: the failure that caused the loss, or empty."""

    kind: str
    cause: str
    seconds: float


@dataclass(frozen=True)
class FollowerRow:
    """A process that follows a run: ``step`` and ``time`` of its last switch, the seconds from the commit to that switch, and the bytes
    that it has read since this server began. ``error``: why it could not take a newer checkpoint."""

    host: str
    pid: int
    rank: int
    step: float | None = None
    time: float | None = None
    lag_s: float | None = None
    bytes: int = 0
    source: str = ""
    error: str = ""


@dataclass(frozen=True)
class RunDetail:
    """A run. ``series``: pairs of step and value by metric."""

    row: RunRow
    series: Mapping[str, Sequence[tuple[int, float | None]]] = field(default_factory=dict)
    saves: Sequence[SaveRow] = ()
    incidents: Sequence[IncidentRow] = ()
    goodput: Sequence[GoodputPart] = ()
    tags: Sequence[tuple[str, int]] = ()
    branches: Sequence[str] = ()
    stages: Sequence[tuple[str, int]] = ()
    followers: Sequence[FollowerRow] = ()


@dataclass(frozen=True)
class SeriesDetail:
    """A metric of a run: for each point its step, the Unix time at which the step ended, and the value. None: NaN or infinite."""

    name: str
    steps: Sequence[int] = ()
    seconds: Sequence[float] = ()
    values: Sequence[float | None] = ()
    total: int = 0
    """Number of known points. If it is larger than the number of these points, they are a downsample."""


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint in a list."""

    id: str
    step: int
    at: Time = None
    bytes: int = 0
    seconds: float | None = None
    good: bool = True
    tags: Sequence[str] = ()
    why: str = ""
    """The reason if it is not good."""
    state: str = "good"
    """``good``, ``damaged``, ``suspect`` or ``rolled back``."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of a tensor's values: numbers by name, and a histogram (one edge more than counts)."""

    numbers: Sequence[tuple[str, float]]
    edges: Sequence[float] = ()
    counts: Sequence[int] = ()
    says: str = ""


@dataclass(frozen=True)
class TensorRow:
    """A tensor. ``codec``: the codec of its chunks, None for raw. ``ratio``: stored bytes per byte of the tensor."""

    path: str
    shape: Sequence[int]
    dtype: str
    bytes: int
    codec: str | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class TierRow:
    """Whether a tier has a checkpoint."""

    name: str
    there: bool
    bytes: int | None = None


@dataclass(frozen=True)
class CheckpointDetail:
    """A checkpoint with its tensors and facts."""

    row: CheckpointRow
    tensors: Sequence[TensorRow] = ()
    residency: Sequence[TierRow] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    facts: Sequence[tuple[str, Any]] = ()
    verified_at: Time = None
    hold: str = ""
    """Why it is on hold: retention keeps it. Empty if it is not."""
    next: str | None = None
    """Position of the next piece of the tensors, in answers of the API."""
    total: int = 0
    """Number of tensors."""
    largest_first: bool = False
    """Whether ``tensors`` are sorted by size, largest first, and then by path."""


@dataclass(frozen=True)
class DiffRow:
    """A tensor's difference. ``kind``: ``same``, ``changed``, ``added`` (only in b) or ``removed`` (only in a).

    ``share``: the fraction of its values that differ, 0 to 1. ``largest``: the largest difference.
    """

    name: str
    kind: str
    share: float | None = None
    largest: float | None = None
    bytes: int = 0


@dataclass(frozen=True)
class DiffDetail:
    """The difference of two checkpoints."""

    a: str
    b: str
    tensors: Sequence[DiffRow] = ()
    values: Sequence[tuple[str, Any, Any]] = ()
    next: str | None = None
    """Position of the next piece, in answers of the API. The totals count all pieces."""
    total: int = 0
    values_total: int = 0
    a_row: CheckpointRow | None = None
    b_row: CheckpointRow | None = None


@dataclass(frozen=True)
class Working:
    """Progress of a job that reads data, 0 to 1. Ask again for the result."""

    done: float
    says: str = ""


@dataclass(frozen=True)
class LineageRow:
    """A run and where it began."""

    run: str
    steps: Sequence[int] = ()
    parent: str | None = None
    at_step: int | None = None
    tags: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True)
class TierUse:
    """Used bytes of a tier. ``limit`` and ``free`` are None if unknown."""

    name: str
    used: float
    limit: float | None = None
    free: float | None = None


@dataclass(frozen=True)
class PlanRow:
    """A retired checkpoint that still has its bytes, and the reason why it was retired."""

    run: str
    id: str
    step: int
    what: str
    why: str
    bytes: int = 0


@dataclass(frozen=True)
class StorageDetail:
    """A store: tiers, stored bytes over time, when it will be full, and which retired checkpoints can be undeleted."""

    tiers: Sequence[TierUse] = ()
    trend: Sequence[tuple[float, float]] = ()
    full_at: float | None = None
    retention: Sequence[PlanRow] = ()
    retention_total: int = 0


@dataclass(frozen=True)
class RiskRow:
    """A job with an alarm of a failure to come. ``risk``: the score of the latest alarm, from 0 to 1."""

    store: str
    run: str
    node: str
    at: Time = None
    detector: str = ""
    risk: float | None = None
    why: str = ""


@dataclass(frozen=True)
class AuditRow:
    """An audit entry. ``how``: ``ok``, ``failed`` or ``refused``; empty if the outcome is not recorded yet."""

    seq: int
    at: Time
    who: str
    what: str
    on: str
    how: str = ""
    role: str = ""
    token: str = ""
    """Id of the caller's token."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Run, checkpoint, values before and after, reason, arguments. Empty if the caller's token has a scope."""


@dataclass(frozen=True)
class LogRow:
    """A record of a run's log. ``fault``: why it is void or damaged; else empty."""

    seq: int
    written: Time
    kind: str
    what: str
    fault: str = ""


@dataclass(frozen=True)
class TokenRow:
    """A token without its secret; ``state``: ``valid``, ``expired``, ``revoked``."""

    id: str
    name: str
    role: str
    scope: str = ""
    made_at: Time = None
    ends_at: Time = None
    state: str = "valid"


@dataclass(frozen=True)
class AlertRow:
    """An alert rule, and whether it fires."""

    name: str
    says: str
    severity: str
    firing: bool = False


@dataclass(frozen=True)
class FiringRow:
    """An alert that fires now. ``run`` is empty if it is about the whole store."""

    kind: str
    severity: str
    store: str
    run: str
    why: str
    since: Time = None
    hint: str = ""
    """The command to begin with."""


@dataclass(frozen=True)
class SettingsDetail:
    """Tokens, alert rules, and the retention rules of tiers."""

    tokens: Sequence[TokenRow] = ()
    alerts: Sequence[AlertRow] = ()
    policies: Sequence[tuple[str, str]] = ()


class IndexView(Protocol):
    """Queries of pages. No method waits for a store. A method raises ``CheckpointNotFound`` for an unknown object."""

    def stores(self) -> Sequence[StoreRow]:
        """Return all followed stores."""

    def runs(self, after: str | None, limit: int, find: str = "", state: str = "", sort: str = "") -> ListPage[RunRow]:
        """Return runs of all stores: failed ones first, then late, good and idle ones; or sorted and filtered."""

    def run(self, store: str, run: str) -> RunDetail:
        """Return one run."""

    def series(self, store: str, run: str) -> Mapping[str, SeriesDetail]:
        """Return the metrics of a run by name."""

    def checkpoints(self, store: str, run: str, after: str | None, limit: int) -> ListPage[CheckpointRow]:
        """Return checkpoints of a run, newest first."""

    def log(self, store: str, run: str, after: str | None, limit: int) -> ListPage[LogRow]:
        """Return records of a run's log, newest first."""

    def checkpoint(self, store: str, run: str, which: str) -> CheckpointDetail:
        """Return a checkpoint by its id, a tag or ``latest``."""

    def diff(self, a: str, b: str) -> DiffDetail | Working:
        """Compare two checkpoints, named as ``[STORE/]RUN@WHICH``."""

    def sides(self, a: str, b: str) -> Sequence[CheckpointRow]:
        """Return the rows of the two checkpoints of a comparison."""

    def lineage(self, store: str) -> Sequence[LineageRow]:
        """Return runs, parents before their branches."""

    def storage(self, store: str) -> StorageDetail:
        """Return the size and retention plan of a store."""

    def incidents(self, after: str | None, limit: int) -> ListPage[IncidentRow]:
        """Return incidents of all runs, newest first."""

    def incident(self, store: str, run: str, which: str) -> IncidentRow:
        """Return one incident with its evidence."""

    def firing(self) -> Sequence[FiringRow]:
        """Return alerts that fire now, critical ones first."""

    def risk(self) -> Sequence[RiskRow]:
        """Return machines that are likely to fail, highest risk first."""

    def audit(self, after: str | None, limit: int) -> ListPage[AuditRow]:
        """Return audit entries, newest first."""

    def settings(self) -> SettingsDetail:
        """Return what the settings page shows."""
