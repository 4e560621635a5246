"""Summaries of a log: the records that still matter up to one of them, in one file. Pure.

A reader that begins at a summary folds to the same live checkpoints, tags, lines of descent and state as one that reads every record. A
summary grows with what is live, not with the number of records. Retired checkpoints that nothing needs are left out. Their place in the
lines of descent is kept: each checkpoint that is kept names its nearest ancestors that are kept.
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
)  # fmt: skip
from relight.log.ancestors import FRESH, REBUILT, epochs_of, parents_of
from relight.log.history import REPEATED_WITHIN, Checkpoint, History, fold
from relight.log.view import Fault, Line, LogSummary, LogView

SUMMARY_EVERY = 64
"""Records after which the process that appends writes a new summary."""
TOPIC = "summary"
"""Topic of the NOTE that vouches for a summary: ``upto``, ``hash`` and ``bytes`` of its file."""
BYTES_MAX = 64 << 20
"""Bytes of a summary's file."""
PLAIN_BYTES_MAX = 256 << 20
"""Bytes of a summary before its compression."""
FAULTS_MAX = 128
FIRST_FENCES = 8
"""Oldest FENCEs that are kept: by their attempts two tiers are known to be of one run."""
FENCES_MAX = 64
"""Newest FENCEs that are kept, besides those of checkpoints that are kept."""
OF_A_TOPIC = 32
"""Newest NOTEs of a topic that are kept, besides those about checkpoints that are kept."""
OF_AN_ID = 8
"""Newest NOTEs of a topic that are kept about one checkpoint."""
SHAPES_MAX = 256
"""Different sets of fields among NOTEs: the newest NOTE with each is kept."""
TAGS_OF_A_STAGE = 32
WRITTEN_NOTES = "note"
"""Topic of the notes that people write about a checkpoint: all of these are kept as long as the checkpoint is there."""
_NO_HASH = "0" * 64


def condense(view: LogView, *, trusted: bool) -> LogSummary:
    """Summarize all records of a view. ``trusted``: whether only records of named signers were counted."""
    history = fold(view)
    full, stubs = _kept(history, view.head)
    notes = _notes(history.notes, full)
    for name in {word for note in notes for word in _words(note)}.intersection(history.retired).difference(full):
        stubs[name] = history.retired[name]  # what a NOTE tells of it, such as that a tier has it, is kept
    kept = {**full, **stubs}
    fences = _fences(history, full.values())
    records = _records(view, history, full, [*fences, *notes])
    less = {one.seq: _stub(one.body) for one in stubs.values()}
    records.update({one.seq: msgspec.structs.replace(one, body=less[one.seq]) for one in view.records if one.seq in less})
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
        live=tuple(one.seq for one in history.live),
        retired=tuple(
            (one.seq, history.retired_at[one.id], int(one.id in history.recallable)) for one in history.retired.values() if one.id in kept
        ),
        alone=tuple(sorted(one.seq for one in kept.values() if one.self_contained)),
        tags=dict(history.tags),
        aside=tuple(sorted(history.rolled_back_ids & kept.keys())),
        skips=tuple(history.skips),
        cuts={one: factor for one, factor in history.lr_factors.items() if not one or one in kept},
        best_by=history.best_by,
        lines=_lines(history, kept, {fence.epoch for fence in fences}),
    )


def _kept(history: History, head: int) -> tuple[dict[str, Checkpoint], dict[str, Checkpoint]]:
    """The checkpoints that are kept with all that their COMMIT records, and those of which less is kept, by id.

    Less is kept of checkpoints that were retired lately, whose COMMIT may come again, and of the last one of each of the newest attempts.
    """
    full = {one.id: one for one in history.there}
    for one in list(full.values()):
        full.update({donor: history.retired[donor] for donor in one.requires if donor in history.retired})
    stubs = {one: found for one, found in history.retired.items() if one not in full and head - history.retired_at[one] <= REPEATED_WITHIN}
    last: dict[int, Checkpoint] = {}
    for found in (*history.live, *history.retired.values()):
        if found.epoch not in last or last[found.epoch].seq < found.seq:
            last[found.epoch] = found
    for epoch in [fence.epoch for fence in history.fences[-FENCES_MAX:]]:
        if epoch in last and last[epoch].id not in full:
            stubs[last[epoch].id] = last[epoch]
    return full, stubs


def _fences(history: History, kept: Iterable[Checkpoint]) -> list[Record]:
    epochs = {one.epoch for one in kept}
    newest = history.fences[-FENCES_MAX:]
    older = history.fences[: len(history.fences) - len(newest)]
    return [*(fence for at, fence in enumerate(older) if at < FIRST_FENCES or fence.epoch in epochs), *newest]


def _records(view: LogView, history: History, full: dict[str, Checkpoint], others: list[Record]) -> dict[int, Record]:
    """The records that are kept, by number, without the COMMITs of which less is kept."""
    commits = {one.seq for one in full.values()} | {record.seq for record in history.recallable.values()}
    found = {record.seq: record for record in others}
    void = {record.seq for record, _ in history.void}
    tagged: dict[str, list[Record]] = {}
    for record in view.records:
        if record.seq in commits or isinstance(record.body, RunBody):
            found[record.seq] = record
        elif isinstance(record.body, TagBody) and record.seq not in void:
            tagged.setdefault(record.body.name, []).append(record)
    for name, moves in tagged.items():
        for record in moves[-TAGS_OF_A_STAGE:] if name in STAGES else moves[-1:] if name in history.tags else ():
            found[record.seq] = record
    return found


def _notes(notes: Sequence[Record], full: dict[str, Checkpoint]) -> list[Record]:
    """The NOTEs that are kept: the newest of each topic, the newest with each set of fields, and those about a checkpoint that is kept."""
    found = []
    of_topic, of_id = Counter[str](), Counter[tuple[str, str]]()
    shapes: set[tuple[str, ...]] = set()
    for record in reversed(notes):
        body = record.body
        assert isinstance(body, NoteBody)
        if body.topic == TOPIC:
            continue
        of_topic[body.topic] += 1
        shape = (body.topic, str(body.data.get("tier", "")), *sorted(body.data))  # of each tier what was copied there last
        is_kept = of_topic[body.topic] <= OF_A_TOPIC
        if shape not in shapes and len(shapes) < SHAPES_MAX:
            shapes.add(shape)
            is_kept = True
        for word in _words(record):
            if word in full:
                of_id[body.topic, word] += 1
                is_kept |= body.topic == WRITTEN_NOTES or of_id[body.topic, word] <= OF_AN_ID
        if is_kept:
            found.append(record)
    return found


def _words(note: Record) -> list[str]:
    """The words of a NOTE's values: ids of checkpoints are among them."""
    assert isinstance(note.body, NoteBody)
    return [word for value in note.body.data.values() if isinstance(value, str) for word in value.split()]


def _lines(history: History, kept: dict[str, Checkpoint], epochs: set[int]) -> dict[str, Line]:
    """For each checkpoint that is kept and has a parent that is not: its nearest ancestors that are kept.

    ``epochs``: of the FENCEs that are kept. A checkpoint whose FENCE is left out needs its line as well: the FENCE has the reason.
    """
    known = {**history.retired, **history.by_id}
    fresh, rebuilt = epochs_of(history, FRESH), epochs_of(history, REBUILT)
    lines = {}
    for one in kept.values():
        parents, unknown = parents_of(history, known, one, fresh, rebuilt)
        has_reason = one.epoch in epochs or one.epoch not in fresh | rebuilt
        if one.id not in history.lines and has_reason and all(parent in kept for parent in parents):
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
        lines[one.id] = Line(tuple(nearest), _greatest(front))
    return lines


def _greatest(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Those of the pairs that no other pair exceeds in both numbers: what is below one of the others is below one of these."""
    found: list[tuple[int, int]] = []
    for seq, step in sorted(pairs, reverse=True):
        if not found or step > found[-1][1]:
            found.append((seq, step))
    return tuple(found)


def _stub(body: CommitBody) -> CommitBody:
    return msgspec.structs.replace(body, root=_NO_HASH, root_bytes=0, requires=[])


def _bare(record: Record) -> Record:
    return record if not record.prev and not record.file_hash else msgspec.structs.replace(record, prev="", file_hash="")


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
    """The bytes of a summary's file: JSON, compressed with zlib. ``UnsafeContent`` if they are more than any reader takes."""
    writers: dict[str, int] = {}
    rows = [
        _Row(one.seq, one.epoch, one.time, writers.setdefault(one.writer, len(writers)), one.kind, _plain(one)) for one in summary.records
    ]
    file = _File(
        store=summary.store, run=summary.run, upto=summary.upto, hash=summary.hash, counted=summary.counted, trusted=summary.trusted,
        writers=list(writers), records=rows, faults=[(one.seq, one.file, one.reason[:500]) for one in summary.faults],
        more_faults=summary.more_faults, epoch=summary.epoch, live=list(summary.live), retired=list(summary.retired),
        alone=list(summary.alone), tags=summary.tags, aside=list(summary.aside), skips=list(summary.skips), cuts=summary.cuts,
        best_by=summary.best_by, lines=[_Line(one, list(line.parents), list(line.unknown)) for one, line in summary.lines.items()],
    )  # fmt: skip
    plain = msgspec.json.encode(file)
    data = zlib.compress(plain, 1)
    if len(plain) > PLAIN_BYTES_MAX or len(data) > BYTES_MAX:
        raise UnsafeContent(f"a summary of {len(plain)} bytes", hint="remove checkpoints that are not needed: relight prune")
    return data


def _plain(record: Record) -> dict[str, Any]:
    plain = plain_body(record.body)
    if isinstance(record.body, CommitBody) and record.body.root == _NO_HASH:
        del plain["root"], plain["root_bytes"], plain["requires"]
    return plain


def decode(data: bytes, where: str) -> LogSummary:
    """The summary in ``data``. ``CorruptCheckpoint`` or ``UnsafeContent`` if it is not one that a writer of ours makes.

    That it describes the log, the NOTE with its hash vouches for.
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
        raise UnsafeContent("a compressed summary that is cut short, or longer than any that is written", where=where)
    return plain


def _why_not(plain: bytes, where: str, error: Exception) -> RelightError:
    """The error of bytes that are not a summary of this version: a newer version is named as such."""
    try:
        value = msgspec.json.decode(plain)
        check_version({name: value.get(name) for name in ("relight", "version")} if isinstance(value, dict) else None, "summary", where)
    except RelightError as newer:
        return newer
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return CorruptCheckpoint("not JSON", where=where)
    return UnsafeContent(f"not as the format says: {str(error)[:120]}", where=where)


def _checked(file: _File, where: str) -> LogSummary:
    records = []
    last = -1
    for row in file.records:
        if not last < row.seq <= file.upto or not 0 <= row.epoch <= epoch_max(row.seq):
            raise UnsafeContent(f"record {row.seq} of epoch {row.epoch} in a summary up to {file.upto}", where=where)
        last = row.seq
        records.append(
            Record(
                seq=row.seq, prev="", store=file.store, run=file.run, epoch=row.epoch, time=row.time, writer=file.writers[row.writer],
                body=_body(row, where),
            )
        )  # fmt: skip
    bodies: dict[int, Body] = {record.seq: record.body for record in records}
    commits = {seq: body for seq, body in bodies.items() if isinstance(body, CommitBody)}
    live = {commits[seq].id for seq in file.live}
    retired = {commits[seq].id for seq, _, _ in file.retired}
    if len(live) < len(file.live) or len(retired) < len(file.retired) or not live.isdisjoint(retired):
        raise UnsafeContent("a checkpoint that is listed twice", where=where)
    if any(again and not isinstance(bodies[at], RetireBody) for _, at, again in file.retired) or not live.issuperset(file.tags.values()):
        raise UnsafeContent("a tag or a retirement of a checkpoint that is not there", where=where)
    if file.best_by is not None and file.best_by[1] not in ("min", "max"):
        raise UnsafeContent("neither min nor max", where=where)
    if not all(is_tag_name(name) for name in file.tags) or not all(0 <= factor <= 1 for factor in file.cuts.values()):
        raise UnsafeContent("a tag's name, or a factor of learning rates, that is not written", where=where)
    counts = (file.counted, file.more_faults, file.epoch, file.upto)
    if min(counts) < 0 or file.counted > file.upto + 1 or any(not 0 <= seq <= file.upto for seq, _, _ in file.faults):
        raise UnsafeContent("a number out of range", where=where)
    return LogSummary(
        store=file.store, run=file.run, upto=file.upto, hash=file.hash, counted=file.counted, trusted=file.trusted, records=tuple(records),
        faults=tuple(Fault(*each) for each in file.faults), more_faults=file.more_faults, epoch=file.epoch, live=tuple(file.live),
        retired=tuple(file.retired), alone=tuple(file.alone), tags=file.tags, aside=tuple(file.aside), skips=tuple(file.skips),
        cuts=file.cuts, best_by=file.best_by, lines={one.id: Line(tuple(one.parents), tuple(one.unknown)) for one in file.lines},
    )  # fmt: skip


def _body(row: _Row, where: str) -> Body:
    left_out = {"root": _NO_HASH, "root_bytes": 0, "requires": []} if row.kind == COMMIT else {}
    return body_of(row.kind, {**left_out, **row.body}, where)


def vouched(record: Record) -> tuple[int, str, int] | None:
    """``upto``, hash and bytes of the summary that a record vouches for; None if it vouches for none."""
    body = record.body
    if not isinstance(body, NoteBody) or body.topic != TOPIC:
        return None
    upto, hash, size = body.data.get("upto"), body.data.get("hash"), body.data.get("bytes")
    if type(upto) is not int or type(size) is not int or not isinstance(hash, str) or not is_hex(hash):
        return None
    return (upto, hash, size) if 0 <= upto < record.seq and 0 < size <= BYTES_MAX else None
