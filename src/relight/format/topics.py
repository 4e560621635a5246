"""The register of NOTE topics: for each the type of its body, and which modules write and read it.

A NOTE of a run's log has a topic and a flat dict. Everything that writes or reads one goes through its ``Topic`` here. Readers ignore a
NOTE with a body that does not fit, because a newer Relight may have written it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from relight.decode import from_plain
from relight.format.records import Body, NoteBody, Record

Scalar = str | int | float | bool | None
B = TypeVar("B")
TOPICS: dict[str, Topic[Any]] = {}
"""Every topic by its name, filled while this module is imported."""


class Topic(Generic[B]):
    """One topic. ``kind``: the type of its body, a struct of scalars, or ``dict`` if the keys are free.

    ``written_by`` and ``read_by``: modules below ``relight``. A struct's field with the value None is left out of the record.
    """

    def __init__(self, name: str, kind: type[B], *, written_by: str, read_by: str) -> None:
        self.name, self.kind, self.written_by, self.read_by = name, kind, written_by.split(), read_by.split()
        assert name not in TOPICS
        TOPICS[name] = self

    def __repr__(self) -> str:
        return f"Topic({self.name!r})"

    def note(self, body: B) -> NoteBody:
        """Return the NOTE with this body."""
        data: Mapping[str, Scalar]
        if isinstance(body, Mapping):
            data = body
        else:
            data = {field: value for field, value in msgspec.structs.asdict(body).items() if value is not None}  # type: ignore[arg-type]
        return NoteBody(topic=self.name, data={**data})

    def read(self, body: Body) -> B | None:
        """Return the body of a NOTE of this topic. None for another record, and for a body that does not fit."""
        if not isinstance(body, NoteBody) or body.topic != self.name:
            return None
        try:
            return from_plain(body.data, self.kind)
        except msgspec.ValidationError:
            return None

    def among(self, records: Iterable[Record]) -> Iterator[tuple[Record, B]]:
        """Iterate over the records of this topic and their bodies, in the order of ``records``."""
        for record in records:
            if (body := self.read(record.body)) is not None:
                yield record, body


class RollbackNote(msgspec.Struct, frozen=True, kw_only=True):
    """Training must not resume from a checkpoint at or after step ``before``."""

    before: int
    skip: str = ""
    """``first-last``: samples of these steps are skipped; empty for none."""
    lr: float | None = None
    """Factor for learning rates."""
    first_step: int = 0
    """The number that the job which rolls back gives its first step: ``before`` is counted from it."""


class BestByNote(msgspec.Struct, frozen=True, kw_only=True):
    """ "Best" means the checkpoint with the least or greatest ``metric``."""

    metric: str
    mode: str
    """``min`` or ``max``."""

    @property
    def is_valid(self) -> bool:
        """Return whether it names a metric and a known mode."""
        return bool(self.metric) and self.mode in ("min", "max")


class FreshStartNote(msgspec.Struct, frozen=True, kw_only=True):
    """Training begins from scratch with ``fresh=True``."""

    job: str = ""
    """The launcher's job; empty if there is none."""


class RunEndedNote(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt ended normally, and its last step had been saved before."""

    step: int


class RepackNote(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint no longer needs donors."""

    id: str


class RebuildingNote(msgspec.Struct, frozen=True, kw_only=True):
    """``relight log --rebuild`` is about to append records: of so many checkpoints, or a FENCE of an epoch."""

    checkpoints: int | None = None
    epoch: int | None = None


class RebuiltNote(msgspec.Struct, frozen=True, kw_only=True):
    """``relight log --rebuild`` has appended its records."""

    checkpoints: int = 0


class RestoredElsewhereNote(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt restored a checkpoint that this log never had."""

    checkpoint: str


class SummaryNote(msgspec.Struct, frozen=True, kw_only=True):
    """Vouches for a summary of the records up to ``upto``: hash and bytes of its file."""

    upto: int
    hash: str
    bytes: int


class VerificationNote(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a verification: ``whole``, ids separated by spaces; or ``damaged``, one id, and ``what``."""

    whole: str | None = None
    damaged: str | None = None
    what: str | None = None
    by: str = ""
    """The tool and its host."""


class HoldNote(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint ``id`` is put on hold or released."""

    id: str
    why: str = ""


class SaveRequestNote(msgspec.Struct, frozen=True, kw_only=True):
    """A user requests a save."""

    by: str = ""
    why: str | None = None


class SaveAcknowledgedNote(msgspec.Struct, frozen=True, kw_only=True):
    """A supervisor acknowledges the requests up to record ``upto``."""

    upto: int
    by: str = ""
    """Its machine."""
    refused: str | None = None
    """Why its job cannot be asked to save."""


class CopiedNote(msgspec.Struct, frozen=True, kw_only=True):
    """A further tier has a copy of the checkpoint ``id``."""

    tier: str
    id: str
    bytes: int | None = None
    """Bytes that it takes there; older versions did not record them."""


class CopyingNote(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint ``id`` is being copied to a further tier: it stays near until the copy is complete."""

    tier: str
    id: str


class CarriedNote(msgspec.Struct, frozen=True, kw_only=True):
    """A tag or hold of the checkpoint ``id`` is being written to a further tier; an empty ``id``: it was removed there."""

    tier: str
    mark: str
    """The tag's name, or ``hold`` and the checkpoint's id."""
    id: str = ""


class UserNote(msgspec.Struct, frozen=True, kw_only=True):
    """A user's note about the checkpoint ``id``."""

    id: str
    text: str = ""
    by: str = ""


class ResultNote(msgspec.Struct, frozen=True, kw_only=True):
    """A result for the checkpoint ``id``, from after its commit: metrics, or why there are none."""

    id: str
    metrics: str = "{}"
    """JSON object: numbers by name; ``nan``, ``inf`` and ``-inf`` as texts."""
    by: str = ""
    """Name of the evaluation: at most one result of each name counts for a checkpoint. Empty for a result without a name."""
    failed: str | None = None
    """Why the evaluation failed."""
    skipped: str | None = None
    """Why there was no evaluation."""
    seconds: float | None = None
    """Seconds that it took."""


Free = dict[str, Scalar]
"""Body of a topic with free keys."""

ROLLED_BACK = Topic(
    "rolled back", RollbackNote, written_by="restore.rollback", read_by="log.history monitoring.outcomes"
)
BEST_BY = Topic("best by", BestByNote, written_by="run_records.best_by", read_by="log.history")
FRESH_START = Topic(
    "fresh start",
    FreshStartNote,
    written_by="checkpointer.fresh_start run_records.fresh_starts",
    read_by="run_records.fresh_starts",
)
RUN_ENDED = Topic(
    "ended",
    RunEndedNote,
    written_by="run_records.run_end",
    read_by="run_records.run_end checkpointer.adaptive_schedule checkpointer.takeover",
)
REPACKED = Topic("repacked", RepackNote, written_by="transfer.repack", read_by="log.history")
REBUILDING = Topic("rebuilding", RebuildingNote, written_by="reclaim.rebuild", read_by="log.truncated")
REBUILT = Topic("rebuilt", RebuiltNote, written_by="reclaim.rebuild", read_by="log.truncated")
RESTORED_ELSEWHERE = Topic(
    "restored-elsewhere", RestoredElsewhereNote, written_by="restore.result", read_by="log.truncated"
)
SUMMARY = Topic("summary", SummaryNote, written_by="log.summarizing", read_by="log.summary audit.audit_log")
VERIFIED = Topic(
    "checked",
    VerificationNote,
    written_by="run_records.verification",
    read_by="run_records.verification log.known_damage log.summary",
)
HOLD = Topic("hold", HoldNote, written_by="run_records.holds drain.carried_marks", read_by="run_records.holds")
RELEASE = Topic("release", HoldNote, written_by="run_records.holds drain.carried_marks", read_by="run_records.holds")
SAVE_REQUEST = Topic(
    "save asked", SaveRequestNote, written_by="run_records.save_requests", read_by="run_records.save_requests"
)
SAVE_ACKNOWLEDGED = Topic(
    "save heard", SaveAcknowledgedNote, written_by="run_records.save_requests", read_by="run_records.save_requests"
)
TIERS = Topic("tiers", Free, written_by="catalog.tiers", read_by="catalog.tiers serve.index")
"""A run's tiers, nearest first, as ``policy.tiers.encode_tiers`` returns them: every reader of the log then knows them."""
TIER_PACE = Topic(
    "tiers' pace",
    Free,
    written_by="checkpointer.adaptive_schedule checkpointer.tier_replication",
    read_by="catalog.tiers checkpointer.tier_replication cli.log_why",
)
"""Seconds between copies of scheduled saves to each further tier, by its name, and as ``NAME.why`` the reason."""
COPIED = Topic("drained", CopiedNote, written_by="drain.outwards", read_by="catalog.tiers")
COPYING = Topic("copying outwards", CopyingNote, written_by="drain.outwards", read_by="catalog.tiers")
CARRIED = Topic("carried outwards", CarriedNote, written_by="drain.carried_marks", read_by="drain.carried_marks")
SCHEDULE = Topic(
    "schedule",
    Free,
    written_by="checkpointer.adaptive_schedule",
    read_by="checkpointer.adaptive_schedule cli.log_why",
)
"""The save interval from a step on, and the reason, as ``cost_model.schedule_note`` encodes them."""
USER_NOTE = Topic("note", UserNote, written_by="versions.stages", read_by="versions.stages log.summary")
RESULT = Topic(
    "result", ResultNote, written_by="run_records.results", read_by="run_records.results log.late_metrics log.summary"
)
AUDIT = Topic("audit", Free, written_by="audit.audit_log", read_by="audit.audit_log")
"""An action of a user, or (with ``begun``) the outcome of one."""
