"""Encode, decode and check the store's own record, and the records of a run's log."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from relight.errors import CorruptCheckpoint, NewerFormat, UnsafeContent
from relight.format import names
from relight.format.digest import hexdigest, is_hex
from relight.format.signed import apart
from relight.format.strict import convert, seal, to_json, unseal
from relight.save_reason import SaveReason, of_record
from relight.version import FORMAT

VERSION = FORMAT
EPOCH_MAX = 10**12 - 1
RUN, FENCE, COMMIT, RETIRE, RECALL, SWEEP, TAG, NOTE = (
    "RUN",
    "FENCE",
    "COMMIT",
    "RETIRE",
    "RECALL",
    "SWEEP",
    "TAG",
    "NOTE",
)
UNDO_S_MAX = 10**9
WORDS_MAX = 2000
"""Largest number of characters of a tag's owner and of its reason."""
Metric = int | float | str


class StoreRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``relight.json``: the identity of a store."""

    relight: Literal["store"] = "store"
    version: int = VERSION
    id: str
    created: str
    encrypted: bool = False
    """Whether all files of the store are encrypted. Left out of the record if False."""


class StripeRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``stripe.json``: the stripe that a directory belongs to, and the directory's place in it."""

    relight: Literal["stripe"] = "stripe"
    version: int = VERSION
    id: str
    place: int
    places: int
    mirrors: int = 1
    """Number of places that have each file. Left out of the record if 1."""


class DriveRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place of a mirrored store that does not count as whole: ``away`` is neither read nor written, ``doubted`` is read last."""

    place: int
    status: Literal["away", "doubted"]
    since: str
    why: str


class MirrorsRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``mirrors-NUMBER.json``: which places of a mirrored store are not whole. The highest number counts."""

    relight: Literal["mirrors"] = "mirrors"
    version: int = VERSION
    id: str
    number: int
    drives: tuple[DriveRecord, ...]


class RunBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of RUN, always record 0."""

    name: str


class FenceBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of FENCE: a new attempt takes over the run."""

    attempt: str
    reason: str


class CommitBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of COMMIT: the fields that a listing shows, and the hash of everything else."""

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
    """Largest relative error of the values that are stored inexactly; 0 if all are exact. Left out of the record if 0."""
    origin: str = ""
    """Id of the original of this copy, if the copy has another id. Left out of the record if empty."""
    home: str = ""
    """Run of this store that has the checkpoint's files, if this run branched from it. Left out of the record if empty."""
    reason_kind: str = ""
    """``SaveReason.kind``. Empty, and left out, in a record of an earlier version: its kind is derived from the text of ``reason``."""
    reason_by: str = ""
    """``SaveReason.by``. Left out of the record if empty."""
    first_step: int = 0
    """The number of the run's first step: 1 if ``step`` counts finished steps, as frameworks count. Left out of the record if 0."""

    @property
    def steps_done(self) -> int:
        """Steps of training that the checkpoint has, with the one that it was saved in."""
        return self.step + 1 - self.first_step

    @property
    def save_reason(self) -> SaveReason:
        """Return the reason for which the checkpoint was saved."""
        return of_record(self.reason, self.reason_kind, self.reason_by)

    @property
    def alone_bytes(self) -> int:
        """Bytes of an uncoded copy without donors. An estimate if this checkpoint is coded or has donors."""
        return max(self.stored_bytes, self.logical_bytes)


class RetireBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of RETIRE: these checkpoints leave the history."""

    ids: list[str]
    reason: str
    undo_s: float = 0.0
    """Seconds for which their bytes are kept: a RECALL may bring them back until a SWEEP names them. Left out of the record if 0."""


class RecallBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of RECALL: these checkpoints were retired and not swept, and are live again."""

    ids: list[str]
    reason: str


class SweepBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of SWEEP: these retired checkpoints can no longer be recalled, and their bytes may be deleted."""

    ids: list[str]


class TagBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of TAG: sets the tag, or removes it if ``id`` is None. ``by``: its owner. ``why``: the reason. Both are left out if empty."""

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
_LEFT_OUT = {
    "origin": "",
    "undo_s": 0.0,
    "lossy": 0.0,
    "home": "",
    "by": "",
    "why": "",
    "reason_kind": "",
    "reason_by": "",
    "first_step": 0,
}
"""Fields that are left out of a record if they have these defaults."""
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
    """One record of a run's log. ``file_hash`` is the hash of its file without a signature, and the next record's ``prev``."""

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
    """Return the bytes of the file of ``record``."""
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
    """Return the body of a record as plain values, without fields that have their default and are left out."""
    plain: dict[str, Any] = msgspec.to_builtins(body)
    for name, default in _LEFT_OUT.items():
        if plain.get(name) == default:
            del plain[name]
    return plain


def body_of(kind: str, value: dict[str, Any], where: str) -> Body:
    """Decode and check the body of a record of this kind from plain values. Raise ``UnsafeContent`` if it is invalid."""
    body_type = _BODIES.get(kind)
    if body_type is None:
        raise UnsafeContent(f"unknown kind of record {kind[:40]!r}", where=where)
    body: Body = convert(value, body_type, where)
    _check_body(body, where)
    return body


def decode_record(data: bytes, seq: int, where: str) -> Record:
    """Decode and check the record in ``data``, the file with number ``seq``. The caller checks the chain, the store and the run."""
    record = apart(data, where)[0]
    value = unseal(record, where)
    check_version(value, "record", where)
    frame = convert(value, _Frame, where)
    if frame.seq != seq:
        raise CorruptCheckpoint(
            f"has record {frame.seq} instead of {seq}", where=where, hint="a file was moved or copied"
        )
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
    """Return the highest epoch that record ``seq`` may have.

    A FENCE raises the epoch by one, and by one for each unreadable record before it. Without a bound, one record could use the last epoch,
    and no later attempt could take over the run.
    """
    return min((seq + 1) ** 2, EPOCH_MAX)


def _check_body(body: Body, where: str) -> None:
    if isinstance(body, CommitBody):
        parsed = names.parse_dir(body.dir)
        if parsed is None or parsed.id != body.id or parsed.step != body.step:
            raise UnsafeContent(
                f"directory {body.dir[:80]!r} does not belong to {body.id[:20]!r} at {body.step}", where=where
            )
        if not is_hex(body.root):
            raise UnsafeContent("malformed root hash", where=where)
        if body.home and not names.is_run_name(body.home):
            raise UnsafeContent(f"{body.home[:80]!r} is not a valid run name", where=where)
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
            raise UnsafeContent(f"{body.name[:80]!r} is not a valid tag", where=where)
        if len(body.by) > WORDS_MAX or len(body.why) > WORDS_MAX:
            raise UnsafeContent(f"the tag's owner or reason has more than {WORDS_MAX} characters", where=where)
        _check_ids([] if body.id is None else [body.id], where)


def _check_ids(ids: list[str], where: str) -> None:
    for checkpoint_id in ids:
        if not names.is_id(checkpoint_id):
            raise UnsafeContent(f"malformed checkpoint id {checkpoint_id[:40]!r}", where=where)


def metric_of(value: float) -> Metric:
    """Return a number as records hold it: NaN and infinities, which JSON lacks, are texts."""
    if isinstance(value, int) or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def check_metrics(metrics: dict[str, Metric], where: str) -> None:
    """Raise ``UnsafeContent`` for a text that is not ``nan``, ``inf`` or ``-inf``, which stand for numbers that JSON lacks."""
    for name, value in metrics.items():
        if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
            raise UnsafeContent(f"metric {name[:40]!r} is not a number", where=where)


def check_version(value: Any, kind: str, where: str) -> None:
    """Raise ``UnsafeContent`` for another kind of file, or a newer version: its unknown fields would give a less clear error."""
    if not isinstance(value, dict) or value.get("relight") != kind:
        raise UnsafeContent(f"not a Relight {kind}", where=where)
    version = value.get("version")
    if type(version) is not int or version < 1:
        raise UnsafeContent("no usable format version", where=where)
    if version > VERSION:
        raise NewerFormat(
            f"format version {version}; this Relight reads up to {VERSION}", where=where, hint="upgrade relight"
        )


def encode_store(record: StoreRecord) -> bytes:
    """Return the bytes of ``relight.json``."""
    value = msgspec.to_builtins(record)
    if not record.encrypted:
        del value["encrypted"]
    return seal(to_json(value))


def decode_store(data: bytes, where: str = names.STORE_FILE) -> StoreRecord:
    """Decode and check ``relight.json``."""
    value = unseal(data, where)
    check_version(value, "store", where)
    record = convert(value, StoreRecord, where)
    if not names.RUN_ID.match(record.id):
        raise UnsafeContent("malformed store id", where=where)
    return record


def encode_stripe(record: StripeRecord) -> bytes:
    """Return the bytes of ``stripe.json``."""
    value = msgspec.to_builtins(record)
    if record.mirrors == 1:
        del value["mirrors"]
    return seal(to_json(value))


def decode_stripe(data: bytes, where: str = names.STRIPE_FILE) -> StripeRecord:
    """Decode and check ``stripe.json``."""
    value = unseal(data, where)
    check_version(value, "stripe", where)
    record = convert(value, StripeRecord, where)
    if not names.RUN_ID.match(record.id) or not 0 <= record.place < record.places or record.mirrors not in (1, 2):
        raise UnsafeContent("malformed stripe", where=where)
    return record


def encode_mirrors(record: MirrorsRecord) -> bytes:
    """Return the bytes of a state of a mirrored store's drives."""
    return seal(to_json(msgspec.to_builtins(record)))


def decode_mirrors(data: bytes, where: str) -> MirrorsRecord:
    """Decode and check a state of a mirrored store's drives."""
    value = unseal(data, where)
    check_version(value, "mirrors", where)
    record = convert(value, MirrorsRecord, where)
    places = [drive.place for drive in record.drives]
    if not names.RUN_ID.match(record.id) or record.number < 1 or places != sorted(set(places)):
        raise UnsafeContent("malformed state of mirrors", where=where)
    return record
