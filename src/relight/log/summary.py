"""Summaries of a log (log compaction): one file with the records, up to some record, that still matter. Pure.

A reader that begins at a summary folds to the same live checkpoints, tags, lines of descent and state as one that reads every record. A
summary grows with the number of live checkpoints, not with the number of records. Retired checkpoints that nothing needs are left out.
The lines of descent stay complete: each kept checkpoint names its nearest kept ancestors.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from relight.decode import from_json_bytes
from relight.errors import CorruptCheckpoint, RelightError, UnsafeContent
from relight.format import Record
from relight.format.digest import is_hex
from relight.format.names import RUN_ID, STAGES, is_tag_name
from relight.format.records import (
    COMMIT,
    VERSION,
    Body,
    CommitBody,
    NoteBody,
    RetireBody,
    RunBody,
    TagBody,
    body_of,
    check_version,
    epoch_max,
    plain_body,
)
from relight.format.topics import RESULT, SUMMARY, USER_NOTE, VERIFIED
from relight.log.ancestors import FRESH, REBUILT, epochs_of, parents_of
from relight.log.history import REPEATED_WITHIN, Checkpoint, History, fold
from relight.log.view import Fault, Line, LogSummary, LogView

SUMMARY_EVERY = 64
"""Records between two summaries. The process that appends records writes them."""
BYTES_MAX = 64 << 20
"""Most bytes of a summary's file."""
PLAIN_BYTES_MAX = 256 << 20
"""Most bytes of a summary before compression."""
FAULTS_MAX = 128
FIRST_FENCES = 8
"""Oldest FENCEs that are kept: shared attempts prove that two tiers belong to one run."""
FENCES_MAX = 64
"""Newest FENCEs that are kept, in addition to those of kept checkpoints."""
OF_A_TOPIC = 32
"""Newest NOTEs of a topic that are kept, in addition to those about kept checkpoints."""
OF_AN_ID = 8
"""Newest NOTEs of a topic about one checkpoint that are kept."""
SHAPES_MAX = 256
"""Most sets of NOTE fields. The newest NOTE with each set is kept."""
TAGS_OF_A_STAGE = 32
_NO_HASH = "0" * 64


def condense(view: LogView, *, trusted: bool) -> LogSummary:
    """Return the summary of all records of a view. ``trusted``: whether only records of named signers are valid in it."""
    history = fold(view)
    full, stubs = _kept(history, view.head)
    notes = _notes(history.notes, full)
    for name in {word for note in notes for word in _words(note)}.intersection(history.retired).difference(full):
        stubs[name] = history.retired[name]  # a kept NOTE refers to it, for example that a tier has a copy
    kept = {**full, **stubs}
    fences = _fences(history, full.values())
    records = _records(view, history, full, [*fences, *notes])
    less = {checkpoint.seq: _stub(checkpoint.body) for checkpoint in stubs.values()}
    records.update(
        {
            checkpoint.seq: msgspec.structs.replace(checkpoint, body=less[checkpoint.seq])
            for checkpoint in view.records
            if checkpoint.seq in less
        }
    )
    faults = view.faults[-FAULTS_MAX:]
    older = view.summary.more_faults if view.summary is not None else 0
    return LogSummary(
        store=view.store_id,
        run=view.run_id,
        upto=view.head,
        hash=view.head_hash,
        counted=view.counted,
        trusted=trusted and (view.summary is None or view.summary.trusted),
        records=tuple(_bare(records[seq]) for seq in sorted(records)),
        faults=faults,
        more_faults=older + len(view.faults) - len(faults),
        epoch=history.epoch,
        live=tuple(checkpoint.seq for checkpoint in history.live),
        retired=tuple(
            (checkpoint.seq, history.retired_at[checkpoint.id], int(checkpoint.id in history.recallable))
            for checkpoint in history.retired.values()
            if checkpoint.id in kept
        ),
        alone=tuple(sorted(checkpoint.seq for checkpoint in kept.values() if checkpoint.self_contained)),
        tags=dict(history.tags),
        aside=tuple(sorted(history.rolled_back_ids & kept.keys())),
        skips=tuple(history.skips),
        cuts={
            checkpoint: factor
            for checkpoint, factor in history.lr_factors.items()
            if not checkpoint or checkpoint in kept
        },
        best_by=history.best_by,
        lines=_lines(history, kept, {fence.epoch for fence in fences}),
    )


def _kept(history: History, head: int) -> tuple[dict[str, Checkpoint], dict[str, Checkpoint]]:
    """Return the checkpoints that are kept with their full COMMIT, and those that are kept as stubs, by id.

    Stubs are the recently retired checkpoints, as their COMMIT may be repeated, and the last checkpoint of each of the newest attempts.
    """
    full = {checkpoint.id: checkpoint for checkpoint in history.there}
    for checkpoint in list(full.values()):
        full.update({donor: history.retired[donor] for donor in checkpoint.requires if donor in history.retired})
    stubs = {
        checkpoint_id: checkpoint
        for checkpoint_id, checkpoint in history.retired.items()
        if checkpoint_id not in full and head - history.retired_at[checkpoint_id] <= REPEATED_WITHIN
    }
    last: dict[int, Checkpoint] = {}
    for checkpoint in (*history.live, *history.retired.values()):
        if checkpoint.epoch not in last or last[checkpoint.epoch].seq < checkpoint.seq:
            last[checkpoint.epoch] = checkpoint
    for epoch in [fence.epoch for fence in history.fences[-FENCES_MAX:]]:
        if epoch in last and last[epoch].id not in full:
            stubs[last[epoch].id] = last[epoch]
    return full, stubs


def _fences(history: History, kept: Iterable[Checkpoint]) -> list[Record]:
    epochs = {checkpoint.epoch for checkpoint in kept}
    newest = history.fences[-FENCES_MAX:]
    older = history.fences[: len(history.fences) - len(newest)]
    return [*(fence for index, fence in enumerate(older) if index < FIRST_FENCES or fence.epoch in epochs), *newest]


def _records(view: LogView, history: History, full: dict[str, Checkpoint], others: list[Record]) -> dict[int, Record]:
    """Return the kept records by number, without the COMMITs of stubs."""
    commits = {checkpoint.seq for checkpoint in full.values()} | {record.seq for record in history.recallable.values()}
    kept = {record.seq: record for record in others}
    void = {record.seq for record, _ in history.void}
    tagged: dict[str, list[Record]] = {}
    for record in view.records:
        if record.seq in commits or isinstance(record.body, RunBody):
            kept[record.seq] = record
        elif isinstance(record.body, TagBody) and record.seq not in void:
            tagged.setdefault(record.body.name, []).append(record)
    for name, moves in tagged.items():
        for record in moves[-TAGS_OF_A_STAGE:] if name in STAGES else moves[-1:] if name in history.tags else ():
            kept[record.seq] = record
    return kept


def _notes(notes: Sequence[Record], full: dict[str, Checkpoint]) -> list[Record]:
    """Return the kept NOTEs: the newest of each topic, the newest with each set of fields, and those about kept checkpoints."""
    kept = []
    of_topic, of_id = Counter[str](), Counter[tuple[str, str]]()
    shapes: set[tuple[str, ...]] = set()
    for record in reversed(notes):
        body = record.body
        assert isinstance(body, NoteBody)
        if body.topic == SUMMARY.name:
            continue
        of_topic[body.topic] += 1
        shape = (body.topic, str(body.data.get("tier", "")), *sorted(body.data))  # keeps the last copy to each tier
        is_kept = of_topic[body.topic] <= OF_A_TOPIC
        if shape not in shapes and len(shapes) < SHAPES_MAX:
            shapes.add(shape)
            is_kept = True
        for word in _words(record):
            if word in full:
                of_id[body.topic, word] += 1
                # all results of a kept checkpoint are kept, all notes of users about it, and each damage that was found
                is_kept |= (
                    body.topic in (RESULT.name, USER_NOTE.name)
                    or (body.topic == VERIFIED.name and "damaged" in body.data)
                    or of_id[body.topic, word] <= OF_AN_ID
                )
        if is_kept:
            kept.append(record)
    return kept


def _words(note: Record) -> list[str]:
    """Return the words of a NOTE's values, which include checkpoint ids."""
    assert isinstance(note.body, NoteBody)
    return [word for value in note.body.data.values() if isinstance(value, str) for word in value.split()]


def _lines(history: History, kept: dict[str, Checkpoint], epochs: set[int]) -> dict[str, Line]:
    """Return the nearest kept ancestors of each kept checkpoint with a parent that is not kept.

    ``epochs``: epochs of the kept FENCEs. If a checkpoint's FENCE is left out, the checkpoint needs its line too: the FENCE has the reason.
    """
    known = {**history.retired, **history.by_id}
    fresh, rebuilt = epochs_of(history, FRESH), epochs_of(history, REBUILT)
    lines = {}
    for checkpoint in kept.values():
        parents, unknown = parents_of(history, known, checkpoint, fresh, rebuilt)
        has_reason = checkpoint.epoch in epochs or checkpoint.epoch not in fresh | rebuilt
        if checkpoint.id not in history.lines and has_reason and all(parent in kept for parent in parents):
            continue
        nearest: dict[str, None] = {}
        front, seen, todo = set(unknown), set(parents), list(reversed(parents))
        while todo:
            parent = todo.pop()
            if parent in kept:
                nearest[parent] = None
                continue
            further, more = parents_of(history, known, known[parent], fresh, rebuilt)
            front |= set(more)
            todo += [each for each in reversed(further) if each not in seen]
            seen |= set(further)
        lines[checkpoint.id] = Line(tuple(nearest), _greatest(front))
    return lines


def _greatest(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs that no other pair exceeds in both numbers. A pair below any of the input is below one of these."""
    greatest: list[tuple[int, int]] = []
    for seq, step in sorted(pairs, reverse=True):
        if not greatest or step > greatest[-1][1]:
            greatest.append((seq, step))
    return tuple(greatest)


def _stub(body: CommitBody) -> CommitBody:
    return msgspec.structs.replace(body, root=_NO_HASH, root_bytes=0, requires=[])


def _bare(record: Record) -> Record:
    return (
        record if not record.prev and not record.file_hash else msgspec.structs.replace(record, prev="", file_hash="")
    )


class _Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    seq: int
    epoch: int
    time: str
    writer: int
    kind: str
    body: dict[str, Any]


class _Line(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    id: str
    parents: list[str]
    unknown: list[tuple[int, int]]


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    relight: Literal["summary"] = "summary"
    version: int = VERSION
    store: str
    run: str
    upto: int
    hash: str
    counted: int
    trusted: bool
    writers: list[str]
    records: list[_Row]
    faults: list[tuple[int, str, str]]
    more_faults: int
    epoch: int
    live: list[int]
    retired: list[tuple[int, int, int]]
    alone: list[int]
    tags: dict[str, str]
    aside: list[str]
    skips: list[tuple[int, int]]
    cuts: dict[str, float]
    best_by: tuple[str, str] | None
    lines: list[_Line]


def encode(summary: LogSummary) -> bytes:
    """Return the bytes of a summary's file: zlib-compressed JSON. Raise ``UnsafeContent`` if they exceed the limit of readers."""
    writers: dict[str, int] = {}
    rows = [
        _Row(
            record.seq,
            record.epoch,
            record.time,
            writers.setdefault(record.writer, len(writers)),
            record.kind,
            _plain(record),
        )
        for record in summary.records
    ]
    file = _File(
        store=summary.store, run=summary.run, upto=summary.upto, hash=summary.hash, counted=summary.counted, trusted=summary.trusted,
        writers=list(writers), records=rows, faults=[(fault.seq, fault.file, fault.reason[:500]) for fault in summary.faults],
        more_faults=summary.more_faults, epoch=summary.epoch, live=list(summary.live), retired=list(summary.retired),
        alone=list(summary.alone), tags=summary.tags, aside=list(summary.aside), skips=list(summary.skips), cuts=summary.cuts,
        best_by=summary.best_by,
        lines=[_Line(name, list(line.parents), list(line.unknown)) for name, line in summary.lines.items()],
    )  # fmt: skip
    plain = msgspec.json.encode(file)
    data = zlib.compress(plain, 1)
    if len(plain) > PLAIN_BYTES_MAX or len(data) > BYTES_MAX:
        raise UnsafeContent(
            f"a summary of {len(plain)} bytes", hint="remove checkpoints that are not needed: relight prune"
        )
    return data


def _plain(record: Record) -> dict[str, Any]:
    plain = plain_body(record.body)
    if isinstance(record.body, CommitBody) and record.body.root == _NO_HASH:
        del plain["root"], plain["root_bytes"], plain["requires"]
    return plain


def decode(data: bytes, where: str) -> LogSummary:
    """Return the summary in ``data``. Raise ``CorruptCheckpoint`` or ``UnsafeContent`` if it is malformed.

    That it describes the log is not checked here: the NOTE with its hash vouches for that.
    """
    plain = _inflated(data, where)
    try:
        file = from_json_bytes(plain, _File)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _why_not(plain, where, error) from None
    if file.version != VERSION:
        check_version({"relight": file.relight, "version": file.version}, "summary", where)
    if not RUN_ID.match(file.store) or not RUN_ID.match(file.run) or not is_hex(file.hash):
        raise UnsafeContent("malformed hash, store or run id", where=where)
    try:
        return _checked(file, where)
    except (KeyError, IndexError, ValueError) as error:
        raise UnsafeContent(f"its parts do not fit together: {str(error)[:80]}", where=where) from None


def _inflated(data: bytes, where: str) -> bytes:
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(data, PLAIN_BYTES_MAX)
    except zlib.error as error:
        raise CorruptCheckpoint(f"not a compressed summary: {str(error)[:80]}", where=where) from None
    if not inflater.eof or inflater.unused_data:
        raise UnsafeContent("a compressed summary is truncated, has trailing bytes, or is too long", where=where)
    return plain


def _why_not(plain: bytes, where: str, error: Exception) -> RelightError:
    """Return the error for bytes that are not a summary of this version. It names a newer version."""
    try:
        value = msgspec.json.decode(plain)
        check_version(
            {name: value.get(name) for name in ("relight", "version")} if isinstance(value, dict) else None,
            "summary",
            where,
        )
    except RelightError as newer:
        return newer
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return CorruptCheckpoint("not JSON", where=where)
    return UnsafeContent(f"not as the format specifies: {str(error)[:120]}", where=where)


def _checked(file: _File, where: str) -> LogSummary:
    records = []
    last = -1
    for row in file.records:
        if not last < row.seq <= file.upto or not 0 <= row.epoch <= epoch_max(row.seq):
            raise UnsafeContent(f"record {row.seq} of epoch {row.epoch} in a summary up to {file.upto}", where=where)
        last = row.seq
        records.append(
            Record(
                seq=row.seq,
                prev="",
                store=file.store,
                run=file.run,
                epoch=row.epoch,
                time=row.time,
                writer=file.writers[row.writer],
                body=_body(row, where),
            )
        )
    bodies: dict[int, Body] = {record.seq: record.body for record in records}
    commits = {seq: body for seq, body in bodies.items() if isinstance(body, CommitBody)}
    live = {commits[seq].id for seq in file.live}
    retired = {commits[seq].id for seq, _, _ in file.retired}
    if len(live) < len(file.live) or len(retired) < len(file.retired) or not live.isdisjoint(retired):
        raise UnsafeContent("a checkpoint is listed twice", where=where)
    if any(
        again and not isinstance(bodies[retire_seq], RetireBody) for _, retire_seq, again in file.retired
    ) or not live.issuperset(file.tags.values()):
        raise UnsafeContent("a tag or a retirement names a missing checkpoint", where=where)
    if file.best_by is not None and file.best_by[1] not in ("min", "max"):
        raise UnsafeContent("the mode of the metric is neither min nor max", where=where)
    if not all(is_tag_name(name) for name in file.tags) or not all(0 <= factor <= 1 for factor in file.cuts.values()):
        raise UnsafeContent("an invalid tag name or learning rate factor", where=where)
    counts = (file.counted, file.more_faults, file.epoch, file.upto)
    if min(counts) < 0 or file.counted > file.upto + 1 or any(not 0 <= seq <= file.upto for seq, _, _ in file.faults):
        raise UnsafeContent("a number out of range", where=where)
    return LogSummary(
        store=file.store, run=file.run, upto=file.upto, hash=file.hash, counted=file.counted, trusted=file.trusted, records=tuple(records),
        faults=tuple(Fault(*each) for each in file.faults), more_faults=file.more_faults, epoch=file.epoch, live=tuple(file.live),
        retired=tuple(file.retired), alone=tuple(file.alone), tags=file.tags, aside=tuple(file.aside), skips=tuple(file.skips),
        cuts=file.cuts, best_by=file.best_by, lines={line.id: Line(tuple(line.parents), tuple(line.unknown)) for line in file.lines},
    )  # fmt: skip


def _body(row: _Row, where: str) -> Body:
    left_out = {"root": _NO_HASH, "root_bytes": 0, "requires": []} if row.kind == COMMIT else {}
    return body_of(row.kind, {**left_out, **row.body}, where)


def vouched(record: Record) -> tuple[int, str, int] | None:
    """Return ``upto``, hash and bytes of the summary that a record vouches for; None if it vouches for none."""
    note = SUMMARY.read(record.body)
    if note is None or not is_hex(note.hash):
        return None
    fits = 0 <= note.upto < record.seq and 0 < note.bytes <= BYTES_MAX
    return (note.upto, note.hash, note.bytes) if fits else None
