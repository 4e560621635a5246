"""The store's own record and the records of a run's log."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from relight.errors import CorruptCheckpoint, UnsafeContent
from relight.format import names
from relight.format.digest import hexdigest, is_hex
from relight.format.signed import apart
from relight.format.strict import convert, seal, to_json, unseal
from relight.save_reason import SaveReason, of_record

VERSION = 1
EPOCH_MAX = 10**12 - 1
RUN, FENCE, COMMIT, RETIRE, RECALL, SWEEP, TAG, NOTE = "RUN", "FENCE", "COMMIT", "RETIRE", "RECALL", "SWEEP", "TAG", "NOTE"
UNDO_S_MAX = 10**9
WORDS_MAX = 2000
"""Characters of what is said of a tag."""
Metric = int | float | str


class StoreRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``relight.json``: which store this is."""

    relight: Literal["store"] = "store"
    version: int = VERSION
    id: str
    created: str
    encrypted: bool = False
    """Whether all that is in it is. Left out if not."""


class StripeRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``stripe.json``: which of the places of which stripe a directory is."""

    relight: Literal["stripe"] = "stripe"
    version: int = VERSION
    id: str
    place: int
    places: int


class RunBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of RUN, always record 0."""

    name: str


class FenceBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of FENCE: a new attempt takes charge."""

    attempt: str
    reason: str


class CommitBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of COMMIT: what a listing shows, and the hash of everything else."""

    id: str
    step: int
    dir: str
    root: str
    root_bytes: int
    parents: list[str]
    reason: str
    metrics: dict[str, Metric]
    logical_bytes: int
    stored_bytes: int
    new_bytes: int
    requires: list[str]
    suspect: bool = False
    lossy: float = 0.0
    """Above 0: some values are stored inexactly, and none further off than this, relative to what it was. Left out of the record if 0."""
    origin: str = ""
    """The id it has where it was copied from, if that is another. Left out of the record if it is empty."""
    home: str = ""
    """The run of this store in whose directory it lies, if that is another: this run branched off there. Left out if it is empty."""
    reason_kind: str = ""
    """``SaveReason.kind``. Empty, and left out, in a record of an earlier version: then the text of ``reason`` is mapped."""
    reason_by: str = ""
    """``SaveReason.by``. Left out if it is empty."""

    @property
    def save_reason(self) -> SaveReason:
        """Why the checkpoint was saved."""
        return of_record(self.reason, self.reason_kind, self.reason_by)

    @property
    def alone_bytes(self) -> int:
        """What a copy takes that needs no other's bytes and is not coded; about, if this one does or is."""
        return max(self.stored_bytes, self.logical_bytes)


class RetireBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of RETIRE: these leave the history."""

    ids: list[str]
    reason: str
    undo_s: float = 0.0
    """Above 0, their bytes stay until a SWEEP names them, which is due after so long, and a RECALL may bring them back. Left out if 0."""


class RecallBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of RECALL: what was retired and not swept is back."""

    ids: list[str]
    reason: str


class SweepBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of SWEEP: what was retired and may be recalled goes for good; its bytes may be deleted."""

    ids: list[str]


class TagBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of TAG: ``id`` None takes the tag away. ``by`` whom, and ``why``, if that was said: left out of the record if not."""

    name: str
    id: str | None
    by: str = ""
    why: str = ""


class NoteBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of NOTE."""

    topic: str
    data: dict[str, str | int | float | bool | None]


Body = RunBody | FenceBody | CommitBody | RetireBody | RecallBody | SweepBody | TagBody | NoteBody
_BODIES: dict[str, type[Any]] = {
    RUN: RunBody,
    FENCE: FenceBody,
    COMMIT: CommitBody,
    RETIRE: RetireBody,
    RECALL: RecallBody,
    SWEEP: SweepBody,
    TAG: TagBody,
    NOTE: NoteBody,
}
_LEFT_OUT = {"origin": "", "undo_s": 0.0, "lossy": 0.0, "home": "", "by": "", "why": "", "reason_kind": "", "reason_by": ""}
"""Fields that a record has only if they say something."""
_KINDS = {body: kind for kind, body in _BODIES.items()}


class _Frame(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    relight: Literal["record"]
    version: int
    kind: str
    seq: int
    prev: str
    store: str
    run: str
    epoch: int
    time: str
    writer: str
    body: dict[str, Any]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a run's log. ``file_hash`` is the hash of its file, but for a signature: the next record's ``prev``."""

    seq: int
    prev: str
    store: str
    run: str
    epoch: int
    time: str
    writer: str
    body: Body
    file_hash: str = ""

    @property
    def kind(self) -> str:
        """``RUN``, ``FENCE``, ``COMMIT``, ``RETIRE``, ``RECALL``, ``SWEEP``, ``TAG`` or ``NOTE``."""
        return _KINDS[type(self.body)]


def encode_record(record: Record) -> bytes:
    """The file of ``record``."""
    frame = {
        "relight": "record",
        "version": VERSION,
        "kind": record.kind,
        "seq": record.seq,
        "prev": record.prev,
        "store": record.store,
        "run": record.run,
        "epoch": record.epoch,
        "time": record.time,
        "writer": record.writer,
        "body": plain_body(record.body),
    }
    return seal(to_json(frame))


def plain_body(body: Body) -> dict[str, Any]:
    """The body of a record as plain values, without the fields that are left out if they say nothing."""
    plain: dict[str, Any] = msgspec.to_builtins(body)
    for name, default in _LEFT_OUT.items():
        if plain.get(name) == default:
            del plain[name]
    return plain


def body_of(kind: str, value: dict[str, Any], where: str) -> Body:
    """The body of a record of that kind, checked, from plain values. ``UnsafeContent`` if no writer of ours makes it."""
    body_type = _BODIES.get(kind)
    if body_type is None:
        raise UnsafeContent(f"unknown kind of record {kind[:40]!r}", where=where)
    body: Body = convert(value, body_type, where)
    _check_body(body, where)
    return body


def decode_record(data: bytes, seq: int, where: str) -> Record:
    """The record in ``data``, which was found under number ``seq``. Chain, store and run are the log's to check."""
    record = apart(data, where)[0]
    value = unseal(record, where)
    check_version(value, "record", where)
    frame = convert(value, _Frame, where)
    if frame.seq != seq:
        raise CorruptCheckpoint(f"holds record {frame.seq}, not {seq}", where=where, hint="a file was moved or copied")
    body = body_of(frame.kind, frame.body, where)
    if not is_hex(frame.prev) or not names.RUN_ID.match(frame.store) or not names.RUN_ID.match(frame.run):
        raise UnsafeContent("malformed hash, store or run id", where=where)
    if not 0 <= frame.epoch <= epoch_max(seq):
        raise UnsafeContent(f"epoch {frame.epoch} at number {seq}", where=where)
    if (frame.kind == RUN) != (seq == 0):
        raise UnsafeContent(f"a {frame.kind} record at number {seq}", where=where)
    return Record(
        seq=seq,
        prev=frame.prev,
        store=frame.store,
        run=frame.run,
        epoch=frame.epoch,
        time=frame.time,
        writer=frame.writer,
        body=body,
        file_hash=hexdigest(record),
    )


def epoch_max(seq: int) -> int:
    """The highest epoch that record ``seq`` may have. A FENCE raises it by one, and by one for each record before it that cannot be
    read: without a bound, one record could take the last epoch there is, and nobody could take charge any more."""
    return min((seq + 1) ** 2, EPOCH_MAX)


def _check_body(body: Body, where: str) -> None:
    if isinstance(body, CommitBody):
        parsed = names.parse_dir(body.dir)
        if parsed is None or parsed.id != body.id or parsed.step != body.step:
            raise UnsafeContent(f"directory {body.dir[:80]!r} does not belong to {body.id[:20]!r} at {body.step}", where=where)
        if not is_hex(body.root):
            raise UnsafeContent("malformed root hash", where=where)
        if body.home and not names.is_run_name(body.home):
            raise UnsafeContent(f"{body.home[:80]!r} cannot be a run", where=where)
        sizes = (body.root_bytes, body.logical_bytes, body.stored_bytes, body.new_bytes)
        if not 0 <= body.lossy <= 1:
            raise UnsafeContent("an error out of range", where=where)
        if any(not 0 <= size < 2**63 for size in sizes):
            raise UnsafeContent("a size out of range", where=where)
        _check_ids([*body.parents, *body.requires, *([body.origin] if body.origin else [])], where)
        check_metrics(body.metrics, where)
    elif isinstance(body, (RetireBody, RecallBody, SweepBody)):
        _check_ids(body.ids, where)
        if isinstance(body, RetireBody) and not 0 <= body.undo_s <= UNDO_S_MAX:
            raise UnsafeContent("a time out of range", where=where)
    elif isinstance(body, TagBody):
        if not names.is_tag_name(body.name):
            raise UnsafeContent(f"{body.name[:80]!r} cannot be a tag", where=where)
        if len(body.by) > WORDS_MAX or len(body.why) > WORDS_MAX:
            raise UnsafeContent("more words than a tag may have", where=where)
        _check_ids([] if body.id is None else [body.id], where)


def _check_ids(ids: list[str], where: str) -> None:
    for one in ids:
        if not names.is_id(one):
            raise UnsafeContent(f"malformed checkpoint id {one[:40]!r}", where=where)


def check_metrics(metrics: dict[str, Metric], where: str) -> None:
    """Refuse texts other than the three that stand for numbers JSON lacks."""
    for name, value in metrics.items():
        if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
            raise UnsafeContent(f"metric {name[:40]!r} is not a number", where=where)


def check_version(value: Any, kind: str, where: str) -> None:
    """Refuse, by name, what a newer Relight wrote, before its unknown fields confuse anybody."""
    if not isinstance(value, dict) or value.get("relight") != kind:
        raise UnsafeContent(f"not a Relight {kind}", where=where)
    version = value.get("version")
    if type(version) is not int or version < 1:
        raise UnsafeContent("no usable format version", where=where)
    if version > VERSION:
        raise UnsafeContent(f"format version {version}; this Relight reads up to {VERSION}", where=where, hint="upgrade relight")


def encode_store(record: StoreRecord) -> bytes:
    """The bytes of ``relight.json``."""
    value = msgspec.to_builtins(record)
    if not record.encrypted:
        del value["encrypted"]
    return seal(to_json(value))


def decode_store(data: bytes, where: str = names.STORE_FILE) -> StoreRecord:
    """``relight.json`` read back."""
    value = unseal(data, where)
    check_version(value, "store", where)
    record = convert(value, StoreRecord, where)
    if not names.RUN_ID.match(record.id):
        raise UnsafeContent("malformed store id", where=where)
    return record


def encode_stripe(record: StripeRecord) -> bytes:
    """The bytes of ``stripe.json``."""
    return seal(to_json(msgspec.to_builtins(record)))


def decode_stripe(data: bytes, where: str = names.STRIPE_FILE) -> StripeRecord:
    """``stripe.json`` read back."""
    value = unseal(data, where)
    check_version(value, "stripe", where)
    record = convert(value, StripeRecord, where)
    if not names.RUN_ID.match(record.id) or not 0 <= record.place < record.places:
        raise UnsafeContent("malformed stripe", where=where)
    return record
