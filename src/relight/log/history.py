"""Fold log records into a run's history. Pure: the agent, the command line and the simulator use the same code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from relight.format import Record
from relight.format.names import BRANCH_TAGS, parse_dir
from relight.format.records import CommitBody, FenceBody, Metric, NoteBody, RecallBody, RetireBody, SweepBody, TagBody
from relight.format.topics import BEST_BY, REPACKED, ROLLED_BACK, RollbackNote
from relight.log.checkpoint_view import age_of, first_metrics
from relight.log.late_metrics import late_metrics
from relight.log.view import Line, LogSummary, LogView
from relight.observe.object_view import Facts, ObjectView
from relight.units import size_text

REPEATED_WITHIN = 1024
"""Records after a RETIRE within which a COMMIT of the retired id counts as a repetition and is void. A reader that begins at a summary
knows older retired ids no longer. A later COMMIT of the id is valid: a copy of the checkpoint was added again."""


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint(ObjectView):
    """A committed checkpoint as recorded in the log. ``seq`` orders it among all of the run's records; ``body`` is its COMMIT."""

    seq: int
    time: str
    """When it was committed, by the clock of the committing process: UTC in ISO 8601, such as ``2026-05-04T12:00:00Z``."""
    epoch: int
    body: CommitBody
    self_contained: bool = False
    """Whether it was repacked: it now owns all of its packs, although its COMMIT and its root name donors."""
    tags: tuple[str, ...] = field(default=(), compare=False)
    """Its tags, sorted, as ``relight.open(…).checkpoints()`` and ``latest()`` have read them; empty from elsewhere."""
    late_metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics that were reported after its commit, by name."""

    @property
    def requires(self) -> list[str]:
        """Ids of the donors: the checkpoints that store bytes of this one."""
        return [] if self.self_contained else self.body.requires

    @property
    def new_bytes(self) -> int:
        """The bytes of its files. After a repack, the whole packs are counted too: as large as a copy without donors."""
        return self.body.new_bytes + (self.body.alone_bytes if self.self_contained else 0)

    @property
    def id(self) -> str:
        """Return its ten-character id."""
        return self.body.id

    @property
    def original_id(self) -> str:
        """The id that all tiers' copies share: the id of the checkpoint that was copied first."""
        return self.body.origin or self.body.id

    @property
    def step(self) -> int:
        """The step after which the state was saved."""
        return self.body.step

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics of its step, and those that were reported after its commit, by name: a copy. Of two values, the later one."""
        return {**self.body.metrics, **self.late_metrics}

    @property
    def bytes(self) -> int:
        """The bytes that it would occupy in the store without any other checkpoint."""
        return self.body.stored_bytes

    def _facts(self) -> Facts:
        facts = ("id", self.id), ("size", size_text(self.bytes)), ("saved", age_of(self.time))
        more = ("tags", " ".join(self.tags)), ("reason", self.body.reason)
        return Facts(f"step {self.step}", (*facts, ("metrics", first_metrics(self.metrics)), *more))

    def directory_in(self, run: str) -> str:
        """Return the key of its directory. ``run``: the run of this log. A branch's first checkpoint is stored in its parent run."""
        return f"{self.body.home or run}/{self.body.dir}"


@dataclass(slots=True)
class History:
    """State of a run, computed from its log."""

    by_id: dict[str, Checkpoint] = field(default_factory=dict)
    """Live checkpoints, oldest first."""
    retired: dict[str, Checkpoint] = field(default_factory=dict)
    recallable: dict[str, Record] = field(default_factory=dict)
    """The RETIRE records of retired checkpoints that can be undeleted: no SWEEP has released their bytes yet. By checkpoint id."""
    tags: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    fences: list[Record] = field(default_factory=list)
    notes: list[Record] = field(default_factory=list)
    void: list[tuple[Record, str]] = field(default_factory=list)
    rolled_back_ids: set[str] = field(default_factory=set)
    """Ids of the checkpoints that a rollback discarded, also of retired ones. One of them is the latest only if there is no other."""
    skips: list[tuple[int, int]] = field(default_factory=list)
    """First and last step of each range of samples that training skips."""
    lr_factors: dict[str, float] = field(default_factory=dict)
    """Factor for the learning rates of a checkpoint that existed at a rollback, by id. Key ``""``: for a run that starts from scratch."""
    retired_at: dict[str, int] = field(default_factory=dict)
    """Number of the RETIRE record of each retired checkpoint, by id."""
    lines: dict[str, Line] = field(default_factory=dict)
    """Ancestors of checkpoints, by id, where the log's summary has left out the parents."""
    best_by: tuple[str, str] | None = None
    """The run's metric and its mode, ``min`` or ``max``, that select the best checkpoint. None if no attempt recorded a metric."""

    @property
    def attempts(self) -> list[str]:
        """Names of the run's attempts, in the order of their FENCEs."""
        return [fence.body.attempt for fence in self.fences if isinstance(fence.body, FenceBody)]

    @property
    def live(self) -> list[Checkpoint]:
        """A new list of the live checkpoints, oldest first."""
        return list(self.by_id.values())

    @property
    def there(self) -> list[Checkpoint]:
        """Checkpoints that must have their bytes: the live ones, and the retired ones that can be undeleted."""
        return [*self.live, *(self.retired[checkpoint_id] for checkpoint_id in self.recallable)]

    @property
    def committed_ids(self) -> set[str]:
        """Ids of all checkpoints that a valid COMMIT has named, including retired ones."""
        return self.by_id.keys() | self.retired.keys()

    def find(self, checkpoint_id: str) -> Checkpoint | None:
        """Return the live checkpoint with this id; None if there is none."""
        return self.by_id.get(checkpoint_id)

    def tagged(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the tags that users gave it."""
        tags = (tag for tag in self.tags_of(checkpoint.id) if not tag.startswith(BRANCH_TAGS))
        return replace(checkpoint, tags=tuple(tags))

    def tags_of(self, checkpoint_id: str) -> list[str]:
        """Return the tags of a checkpoint, sorted."""
        return sorted(name for name, target in self.tags.items() if target == checkpoint_id)


def fold(view: LogView | Sequence[Record]) -> History:
    """Return the history that results from ``view``: a log's view, or records in order.

    A COMMIT, TAG, RETIRE, RECALL or SWEEP of an epoch below the highest FENCE before it is void. Only a RECALL before the SWEEP brings a
    retired checkpoint back. A second COMMIT of an id is void while the checkpoint is live or can be undeleted, and within
    ``REPEATED_WITHIN`` records of its RETIRE. A view with a summary continues from the summary's state.
    """
    summary = view.summary if isinstance(view, LogView) else None
    history = _restored(summary) if summary is not None else History()
    for record in view.newer if isinstance(view, LogView) else view:
        body = record.body
        if isinstance(body, FenceBody):
            if record.epoch <= history.epoch:
                history.void.append((record, f"its epoch {record.epoch} is not above {history.epoch}"))
                continue
            history.epoch = record.epoch
            history.fences.append(record)
        elif isinstance(body, NoteBody):
            history.notes.append(record)
            if (late := late_metrics(body)) is not None:
                _reported(history, record.seq, *late)
            elif (repacked := REPACKED.read(body)) is not None:
                _repacked(history, repacked.id)
            elif (rollback := ROLLED_BACK.read(body)) is not None:
                _rolled_back(history, rollback)
            # a superseded attempt does not rename what is best
            elif (best := BEST_BY.read(body)) is not None and best.is_valid and record.epoch >= history.epoch:
                history.best_by = (best.metric, best.mode)
        elif isinstance(body, (CommitBody, RetireBody, RecallBody, SweepBody, TagBody)):
            if record.epoch < history.epoch:
                history.void.append((record, f"its epoch {record.epoch} was fenced by {history.epoch}"))
                continue
            history.epoch = max(history.epoch, record.epoch)  # the FENCE itself may be a damaged record
            _apply(history, record, body)
    return history


def _restored(summary: LogSummary) -> History:
    """Return the state after the last record that a summary covers."""
    by_seq = {record.seq: record for record in summary.records}
    alone = set(summary.alone)

    def checkpoint(seq: int) -> Checkpoint:
        record = by_seq[seq]
        body = record.body
        assert isinstance(body, CommitBody)
        parsed = parse_dir(body.dir)
        assert parsed is not None
        return Checkpoint(seq, record.time, parsed.epoch, body, seq in alone)

    history = History(
        tags=dict(summary.tags),
        epoch=summary.epoch,
        rolled_back_ids=set(summary.aside),
        skips=list(summary.skips),
        lr_factors=dict(summary.cuts),
        lines=dict(summary.lines),
        best_by=summary.best_by,
    )
    history.fences = [record for record in summary.records if isinstance(record.body, FenceBody)]
    history.notes = [record for record in summary.records if isinstance(record.body, NoteBody)]
    for seq in summary.live:
        restored = checkpoint(seq)
        history.by_id[restored.id] = restored
    for seq, retired_at, recallable in summary.retired:
        restored = checkpoint(seq)
        history.retired[restored.id], history.retired_at[restored.id] = restored, retired_at
        if recallable:
            history.recallable[restored.id] = by_seq[retired_at]
    for record in history.notes:
        if (late := late_metrics(record.body)) is not None:
            _reported(history, record.seq, *late)
    return history


def _is_repeated(history: History, checkpoint_id: str, seq: int) -> bool:
    """Return whether a COMMIT of this id at record ``seq`` repeats an earlier COMMIT."""
    if checkpoint_id in history.by_id or checkpoint_id in history.recallable:
        return True
    return checkpoint_id in history.retired and seq - history.retired_at[checkpoint_id] <= REPEATED_WITHIN


def _repacked(history: History, checkpoint_id: str) -> None:
    for checkpoints in (history.by_id, history.retired):
        if checkpoint_id in checkpoints:
            checkpoints[checkpoint_id] = replace(checkpoints[checkpoint_id], self_contained=True)


def _reported(history: History, seq: int, checkpoint_id: str, metrics: Mapping[str, Metric]) -> None:
    """Add metrics of record ``seq`` to a checkpoint. An older record belongs to an earlier COMMIT of the id."""
    for checkpoints in (history.by_id, history.retired):
        checkpoint = checkpoints.get(checkpoint_id)
        if checkpoint is not None and checkpoint.seq < seq:
            checkpoints[checkpoint_id] = replace(checkpoint, late_metrics={**checkpoint.late_metrics, **metrics})


def _rolled_back(history: History, note: RollbackNote) -> None:
    history.rolled_back_ids.update(
        checkpoint.id
        for checkpoint in (*history.by_id.values(), *history.retired.values())  # a retired one may be recalled later
        if checkpoint.body.steps_done > note.before - note.first_step
    )
    first, _, last = note.skip.partition("-")
    if first.isdecimal() and last.isdecimal() and len(first) <= 18 and len(last) <= 18:
        history.skips.append((int(first), int(last)))
    if note.lr is not None and 0 < note.lr < 1:
        for name in ("", *history.by_id):
            history.lr_factors[name] = note.lr * history.lr_factors.get(name, 1.0)


def _apply(history: History, record: Record, body: CommitBody | RetireBody | RecallBody | SweepBody | TagBody) -> None:
    if isinstance(body, CommitBody):
        parsed = parse_dir(body.dir)
        if parsed is None or (parsed.epoch != record.epoch and not body.home):
            history.void.append((record, "it commits a directory of another epoch"))
        elif _is_repeated(history, body.id, record.seq):
            history.void.append((record, "its checkpoint was committed before"))
        else:
            history.retired.pop(body.id, None)
            history.retired_at.pop(body.id, None)
            history.lines.pop(body.id, None)
            history.rolled_back_ids.discard(body.id)
            history.lr_factors.pop(body.id, None)
            history.by_id[body.id] = Checkpoint(record.seq, record.time, parsed.epoch, body)
    elif isinstance(body, RetireBody):
        for checkpoint_id in body.ids:
            checkpoint = history.by_id.pop(checkpoint_id, None)
            if checkpoint:
                history.retired[checkpoint_id], history.retired_at[checkpoint_id] = checkpoint, record.seq
                if body.undo_s:
                    history.recallable[checkpoint_id] = record
                for name in history.tags_of(checkpoint_id):
                    del history.tags[name]
    elif isinstance(body, SweepBody):
        for checkpoint_id in body.ids:
            history.recallable.pop(checkpoint_id, None)
    elif isinstance(body, RecallBody):
        back = {
            recalled: history.retired.pop(recalled) for recalled in body.ids if history.recallable.pop(recalled, None)
        }
        for recalled in back:
            history.retired_at.pop(recalled, None)
        if back:
            history.by_id = dict(sorted({**history.by_id, **back}.items(), key=lambda item: item[1].seq))
    elif body.id is None:
        history.tags.pop(body.name, None)
    elif history.find(body.id):
        history.tags[body.name] = body.id
