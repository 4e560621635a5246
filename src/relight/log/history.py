"""Folding records into what is true: pure, the same lines for agent, command line and simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from relight.format import Record
from relight.format.names import parse_dir
from relight.format.records import CommitBody, FenceBody, NoteBody, RecallBody, RetireBody, SweepBody, TagBody
from relight.log.view import Line, LogSummary, LogView

ROLLED_BACK = "rolled back"
"""Topic of the NOTE that what the run did from step ``before`` on is not to be gone on from, and that it does not train on the samples of
the steps ``skip`` any more, as ``first-last``."""
BEST_BY = "best by"
"""Topic of the NOTE that records the run's own metric: "best" means the checkpoint with the ``mode`` (``min`` or ``max``) of ``metric``."""
FRESH_START = "fresh start"
"""Topic of the NOTE that training begins from scratch with ``fresh=True``; ``job`` names the launcher's job, empty if there is none."""
REPACKED = "repacked"
"""Topic of the NOTE that a checkpoint, its ``id``, needs no donors any more."""


REPEATED_WITHIN = 1024
"""A COMMIT of a retired id is a repetition, and void, if it comes at most so many records after the RETIRE. A reader that begins at a
summary knows no retired id for longer. A later COMMIT of the id is a new one: a copy of the checkpoint that came back."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint as the log tells it. ``seq`` orders it among all of the run's records; ``body`` is its COMMIT."""

    seq: int
    time: str
    epoch: int
    body: CommitBody
    self_contained: bool = False
    """Whether it was repacked: all of its packs are files of its own now, though its COMMIT and its root name donors."""

    @property
    def requires(self) -> list[str]:
        """The ids of those whose bytes it needs."""
        return [] if self.self_contained else self.body.requires

    @property
    def id(self) -> str:
        """Its ten-character id."""
        return self.body.id

    @property
    def original_id(self) -> str:
        """The id it has in every tier: where it was copied from, if its own is another."""
        return self.body.origin or self.body.id

    @property
    def step(self) -> int:
        """The step whose end it is."""
        return self.body.step

    def lies_in(self, run: str) -> str:
        """Its directory's key in the store, where ``run`` is the one whose log it is in: its own, or the one that it branched off."""
        return f"{self.body.home or run}/{self.body.dir}"


@dataclass(slots=True)
class History:
    """What a log amounts to."""

    by_id: dict[str, Checkpoint] = field(default_factory=dict)
    """Those that are live, oldest first."""
    retired: dict[str, Checkpoint] = field(default_factory=dict)
    recallable: dict[str, Record] = field(default_factory=dict)
    """Of ``retired``: those whose bytes no SWEEP has given up yet, and the RETIRE that took each out."""
    tags: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    fences: list[Record] = field(default_factory=list)
    notes: list[Record] = field(default_factory=list)
    void: list[tuple[Record, str]] = field(default_factory=list)
    rolled_back_ids: set[str] = field(default_factory=set)
    """Ids of those that a roll-back went behind: they are there, and the latest is none of them as long as there is another."""
    skips: list[tuple[int, int]] = field(default_factory=list)
    """Steps, first and last, whose samples are not trained on."""
    lr_factors: dict[str, float] = field(default_factory=dict)
    """By what to multiply the learning rates of those that a roll-back came behind; ``""``: of a run that begins anew."""
    retired_at: dict[str, int] = field(default_factory=dict)
    """Of ``retired``: number of the RETIRE."""
    lines: dict[str, Line] = field(default_factory=dict)
    """By id, the ancestors of checkpoints whose parents the log's summary has left out."""
    best_by: tuple[str, str] | None = None
    """The run's own metric and its mode, ``min`` or ``max``: what "best" means here. None if no attempt recorded one."""

    @property
    def attempts(self) -> list[str]:
        """What those who took charge called themselves, in that order."""
        return [fence.body.attempt for fence in self.fences if isinstance(fence.body, FenceBody)]

    @property
    def live(self) -> list[Checkpoint]:
        """What is there, oldest first: a list of the caller's own."""
        return list(self.by_id.values())

    @property
    def there(self) -> list[Checkpoint]:
        """Whose bytes are there, or have to be: what is live, and what may be recalled."""
        return [*self.live, *(self.retired[one] for one in self.recallable)]

    @property
    def committed_ids(self) -> set[str]:
        """Every id a valid COMMIT ever named, retired ones too."""
        return self.by_id.keys() | self.retired.keys()

    def find(self, checkpoint_id: str) -> Checkpoint | None:
        """The live checkpoint of that id."""
        return self.by_id.get(checkpoint_id)

    def tags_of(self, checkpoint_id: str) -> list[str]:
        """The tags that point at it, sorted."""
        return sorted(name for name, target in self.tags.items() if target == checkpoint_id)


def fold(view: LogView | Sequence[Record]) -> History:
    """The history that ``records``, in order, amount to.

    A COMMIT, TAG, RETIRE, RECALL or SWEEP of an epoch below the highest FENCE before it is void. A retired checkpoint comes back by RECALL
    alone, and not after its SWEEP. A second COMMIT of an id is void while the checkpoint is live or may be recalled, and within
    ``REPEATED_WITHIN`` records of its RETIRE. A view with a summary continues from the state that the summary has.
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
            if body.topic == REPACKED:
                _repacked(history, str(body.data.get("id")))
            elif body.topic == ROLLED_BACK:
                _rolled_back(history, body.data.get("before"), body.data.get("skip"), body.data.get("lr"))
            elif body.topic == BEST_BY and record.epoch >= history.epoch:  # a superseded attempt does not rename what is best
                history.best_by = _best_by(body.data.get("metric"), body.data.get("mode")) or history.best_by
        elif isinstance(body, (CommitBody, RetireBody, RecallBody, SweepBody, TagBody)):
            if record.epoch < history.epoch:
                history.void.append((record, f"its epoch {record.epoch} was fenced by {history.epoch}"))
                continue
            history.epoch = max(history.epoch, record.epoch)  # the FENCE itself may be a damaged record
            _apply(history, record, body)
    return history


def _restored(summary: LogSummary) -> History:
    """The state after the last record that a summary covers."""
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
        tags=dict(summary.tags), epoch=summary.epoch, rolled_back_ids=set(summary.aside), skips=list(summary.skips),
        lr_factors=dict(summary.cuts), lines=dict(summary.lines), best_by=summary.best_by,
    )  # fmt: skip
    history.fences = [record for record in summary.records if isinstance(record.body, FenceBody)]
    history.notes = [record for record in summary.records if isinstance(record.body, NoteBody)]
    for seq in summary.live:
        one = checkpoint(seq)
        history.by_id[one.id] = one
    for seq, at, recallable in summary.retired:
        one = checkpoint(seq)
        history.retired[one.id], history.retired_at[one.id] = one, at
        if recallable:
            history.recallable[one.id] = by_seq[at]
    return history


def _is_repeated(history: History, checkpoint_id: str, seq: int) -> bool:
    """Whether a COMMIT of this id at ``seq`` repeats one that the history knows."""
    if checkpoint_id in history.by_id or checkpoint_id in history.recallable:
        return True
    return checkpoint_id in history.retired and seq - history.retired_at[checkpoint_id] <= REPEATED_WITHIN


def _best_by(metric: object, mode: object) -> tuple[str, str] | None:
    return (metric, mode) if isinstance(metric, str) and metric and isinstance(mode, str) and mode in ("min", "max") else None


def _repacked(history: History, checkpoint_id: str) -> None:
    for held in (history.by_id, history.retired):
        if checkpoint_id in held:
            held[checkpoint_id] = replace(held[checkpoint_id], self_contained=True)


def _rolled_back(history: History, before: object, skip: object, lr: object) -> None:
    if type(before) is int:
        history.rolled_back_ids.update(one.id for one in history.by_id.values() if one.step >= before)
    first, _, last = str(skip or "").partition("-")
    if first.isdecimal() and last.isdecimal() and len(first) <= 18 and len(last) <= 18:
        history.skips.append((int(first), int(last)))
    if type(lr) is float and 0 < lr < 1:
        for name in ("", *history.by_id):
            history.lr_factors[name] = lr * history.lr_factors.get(name, 1.0)


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
            found = history.by_id.pop(checkpoint_id, None)
            if found:
                history.retired[checkpoint_id], history.retired_at[checkpoint_id] = found, record.seq
                if body.undo_s:
                    history.recallable[checkpoint_id] = record
                for name in history.tags_of(checkpoint_id):
                    del history.tags[name]
    elif isinstance(body, SweepBody):
        for checkpoint_id in body.ids:
            history.recallable.pop(checkpoint_id, None)
    elif isinstance(body, RecallBody):
        back = {one: history.retired.pop(one) for one in body.ids if history.recallable.pop(one, None)}
        for one in back:
            history.retired_at.pop(one, None)
        if back:
            history.by_id = dict(sorted({**history.by_id, **back}.items(), key=lambda item: item[1].seq))
    elif body.id is None:
        history.tags.pop(body.name, None)
    elif history.find(body.id):
        history.tags[body.name] = body.id
