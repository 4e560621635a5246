"""What pages and API are given: values, made by the index, all of plain data. Times are seconds since 1970 or ISO text; unknown is None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

Time = float | str | None
Row = TypeVar("Row")


@dataclass(frozen=True)
class ListPage(Generic[Row]):
    """A piece of a long list. ``next`` is what to ask for the piece behind it; None: this was the last."""

    rows: Sequence[Row]
    next: str | None = None
    total: int | None = None


@dataclass(frozen=True)
class StoreRow:
    """A store that is read. ``id`` stands in addresses; ``state`` is ``ok`` or an error's words."""

    id: str
    name: str
    runs: int = 0
    bytes: int = 0
    state: str = "ok"
    read_at: Time = None


@dataclass(frozen=True)
class RunRow:
    """A run in the overview. ``health``: ``good``, ``late``, ``failed``, ``idle``; ``why`` says what for."""

    store: str
    run: str
    newest: str | None = None
    step: int | None = None
    age_s: float | None = None
    """Of the newest good checkpoint."""
    good: bool = True
    health: str = "good"
    why: str = ""
    goodput: float | None = None
    risk: float | None = None
    checkpoints: int = 0
    bytes: int = 0
    incident: str | None = None


@dataclass(frozen=True)
class SpanRow:
    """One phase of a save on one rank: ``snapshot``, ``wait``, ``hash``, ``write``, ``ready``, ``commit``, ``drain``."""

    rank: int
    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class SaveRow:
    """A save. ``spans`` only where its events were seen."""

    id: str
    step: int
    at: Time = None
    seconds: float | None = None
    bytes: int = 0
    spans: Sequence[SpanRow] = ()


@dataclass(frozen=True)
class IncidentRow:
    """What happened to a run; the last fields only when one is looked at alone."""

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


@dataclass(frozen=True)
class GoodputPart:
    """Where time went: ``training``, ``starting``, ``restoring`` …; ``cause`` is the failure that it is lost to, or empty."""

    kind: str
    cause: str
    seconds: float


@dataclass(frozen=True)
class RunDetail:
    """One run. ``series``: by metric, pairs of step and value."""

    row: RunRow
    series: Mapping[str, Sequence[tuple[int, float | None]]] = field(default_factory=dict)
    saves: Sequence[SaveRow] = ()
    incidents: Sequence[IncidentRow] = ()
    goodput: Sequence[GoodputPart] = ()
    tags: Sequence[tuple[str, int]] = ()
    branches: Sequence[str] = ()
    stages: Sequence[tuple[str, int]] = ()


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
    """What is wrong with it, if it is not good."""


@dataclass(frozen=True)
class Statistics:
    """Of a tensor's values: numbers by name, and a histogram (one edge more than counts)."""

    numbers: Sequence[tuple[str, float]]
    edges: Sequence[float] = ()
    counts: Sequence[int] = ()
    says: str = ""


@dataclass(frozen=True)
class TensorRow:
    """A tensor. ``codec``: how its chunks are stored, None: as they are. ``ratio``: what is stored of its bytes, 0 to 1."""

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
    """One checkpoint."""

    row: CheckpointRow
    tensors: Sequence[TensorRow] = ()
    residency: Sequence[TierRow] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    facts: Sequence[tuple[str, Any]] = ()
    verified_at: Time = None
    next: str | None = None
    """Where the next piece of the tensors begins, in answers of the API; ``total`` counts the tensors."""
    total: int = 0
    largest_first: bool = False
    """Whether ``tensors`` are in that order already, by size and then by path."""


@dataclass(frozen=True)
class DiffRow:
    """A tensor by its name: ``same``, ``changed``, ``added`` (only in b), ``removed`` (only in a); of its values, 0 to 1."""

    name: str
    kind: str
    share: float | None = None
    largest: float | None = None
    bytes: int = 0


@dataclass(frozen=True)
class DiffDetail:
    """What differs between two checkpoints."""

    a: str
    b: str
    tensors: Sequence[DiffRow] = ()
    values: Sequence[tuple[str, Any, Any]] = ()
    next: str | None = None
    """Where the next piece begins, in answers of the API; the totals count all pieces."""
    total: int = 0
    values_total: int = 0


@dataclass(frozen=True)
class Working:
    """An answer that takes reading: how far it is, 0 to 1; the page asks again when it is there."""

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
    """How full a tier is; a limit or free space only where it has one."""

    name: str
    used: float
    limit: float | None = None
    free: float | None = None


@dataclass(frozen=True)
class PlanRow:
    """What retention would do next with a checkpoint, and why."""

    run: str
    id: str
    step: int
    what: str
    why: str
    bytes: int = 0


@dataclass(frozen=True)
class StorageDetail:
    """One store: tiers, bytes held over time, when it is full, what goes next."""

    tiers: Sequence[TierUse] = ()
    trend: Sequence[tuple[float, float]] = ()
    full_at: float | None = None
    retention: Sequence[PlanRow] = ()
    retention_total: int = 0


@dataclass(frozen=True)
class RiskRow:
    """A machine that looks like failing: 1 is where it is acted upon."""

    store: str
    run: str
    node: str
    at: Time = None
    detector: str = ""
    risk: float | None = None
    why: str = ""


@dataclass(frozen=True)
class AuditRow:
    """Who did what. ``how``: ``ok``, ``failed``, ``refused``; empty: begun, and its end is not written."""

    seq: int
    at: Time
    who: str
    what: str
    on: str
    how: str = ""
    role: str = ""
    token: str = ""
    """The id of the token that let the asker in."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Run, checkpoint, values before and after, reason, arguments; none for a token that has a scope."""


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
    """A rule that alerts are made of."""

    name: str
    says: str
    severity: str
    firing: bool = False


@dataclass(frozen=True)
class SettingsDetail:
    """Who may what, what is alerted on, what each run keeps."""

    tokens: Sequence[TokenRow] = ()
    alerts: Sequence[AlertRow] = ()
    policies: Sequence[tuple[str, str]] = ()


class IndexView(Protocol):
    """What pages ask. Nothing here waits for a store; what is not there is ``CheckpointNotFound``."""

    def stores(self) -> Sequence[StoreRow]:
        """All that are read."""

    def runs(self, after: str | None, limit: int) -> ListPage[RunRow]:
        """Of all stores, those first that need somebody."""

    def run(self, store: str, run: str) -> RunDetail:
        """One."""

    def checkpoints(self, store: str, run: str, after: str | None, limit: int) -> ListPage[CheckpointRow]:
        """Of a run, the newest first."""

    def checkpoint(self, store: str, run: str, which: str) -> CheckpointDetail:
        """One: by its id, a tag, ``latest``."""

    def diff(self, a: str, b: str) -> DiffDetail | Working:
        """Two checkpoints as ``[STORE/]RUN@WHICH``."""

    def lineage(self, store: str) -> Sequence[LineageRow]:
        """Runs, parents before their branches."""

    def storage(self, store: str) -> StorageDetail:
        """One store's."""

    def incidents(self, after: str | None, limit: int) -> ListPage[IncidentRow]:
        """Of all runs, the newest first."""

    def incident(self, store: str, run: str, which: str) -> IncidentRow:
        """One, whole."""

    def risk(self) -> Sequence[RiskRow]:
        """The highest first."""

    def audit(self, after: str | None, limit: int) -> ListPage[AuditRow]:
        """The newest first."""

    def settings(self) -> SettingsDetail:
        """For admins."""
