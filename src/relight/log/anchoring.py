"""Compare a run's log with its anchor: detect a rolled-back log, and advance the anchor.

The anchor advances only to a record that is valid for this reader: of this store and run, chained, and signed by a trusted signer if
signers are named. A reader advances it along the unbroken chain. Only the writer of a new record, and a reader that trusts named signers,
advance it past invalid records. Those are remembered as a gap, with the record before them. A record that was valid once must therefore
stay valid: readers and writers compare each changed log with the anchor before they advance it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from relight.errors import CorruptCheckpoint, RelightError, StoreUnavailable
from relight.format import Record
from relight.format.digest import ZERO_HEX
from relight.observe import emit
from relight.store.anchored import Anchor, AnchorMemory, Gap, HighestRecord, RawRecord

if TYPE_CHECKING:
    from relight.log.view import LogView

_SHOWN = 8


class LogMemory(NamedTuple):
    """Remembered state of a run from before its log was listed. The listing must have all of it."""

    known: AnchorMemory
    seen: HighestRecord
    first: bool
    """True until this process has confirmed ``known``."""

    @property
    def top(self) -> int:
        """Number of the highest record that the anchor or this process has seen; −1 if none."""
        return max(self.known.top, self.seen.seq)


def recall(anchor: Anchor, run: str) -> LogMemory:
    """Return what is remembered of a run. Cost: one listing for each run and process."""
    known = anchor.confirmed.get(run)
    return LogMemory(anchor.read(run) if known is None else known, anchor.seen.get(run, HighestRecord()), known is None)


def doubtful(memory: LogMemory, view: LogView) -> list[int]:
    """Return the invalid or missing records that are in no gap. The caller reads those that a listing lacks by name before ``check``."""
    return _uncounted(view, memory.known, view.head)


def check(anchor: Anchor, view: LogView, memory: LogMemory, unread: Collection[int]) -> None:
    """Raise ``CorruptCheckpoint`` if the log lacks remembered records. Advance the anchor to what this reader has seen.

    ``unread``: records that the store failed to return now. Raise ``StoreUnavailable`` if one of them must be valid.
    Cost: the first call reads one record for each pin. If the log has grown, a process that only reads the log reads the new head, and
    writes one small file.
    """
    known, seen, first = memory
    if view.head < memory.top:
        _refuse(anchor, view, f"the log ends at record {view.head}; record {memory.top}, which was seen there, is gone")
    if first and known.pins:
        known = known._replace(newest=_confirm_pins(anchor, view, known))
    hashes = _hashes(view)
    if 0 <= seen.seq < view.base and seen.seq not in hashes:  # a summary replaces it: read the record to compare it
        raw = anchor.raw(view.run, seen.seq)
        hashes[seen.seq] = raw.chain_hash if raw is not None else ""
    missing = _uncounted(view, known, known.top)
    if any(seq in unread for seq in (*missing, seen.seq)):
        raise StoreUnavailable(
            "the log cannot be compared with its anchor: a record cannot be read just now", where=f"{view.run}"
        )
    old = _passed_unrecorded(known, missing) if first else []
    _check_counted(anchor, view, hashes, known, [seq for seq in missing if seq not in old] if old else missing)
    for seq, hash in ((seen.seq, seen.hash), *([(known.top, known.newest.chain_hash)] if known.newest else [])):
        # a pin below a summary was already read
        if seq >= 0 and hashes.get(seq) != hash and (seq >= view.base or seq in hashes):
            _refuse(anchor, view, f"record {seq} is not the one that was seen there")
    adopted = _gaps(view, old[0], old[-1], known.gaps) if old else []
    if first:
        known = known._replace(gaps=tuple(sorted({*known.gaps, *adopted})))
        anchor.confirmed[view.run], anchor.owed[view.run] = known, adopted
    if first or view.run not in anchor.writes:
        _move(anchor, view, known, unread)
    if adopted:
        what = f"anchor of an earlier version accepted for run {view.run}: {len(old)} records before its newest do not count"
        emit("anchor.adopted", what, run=view.run, count=len(old))
    newest = max(hashes.keys() - anchor.untrusted.get(view.run, ()), default=-1)
    if newest > anchor.seen.get(view.run, HighestRecord()).seq:
        anchor.seen[view.run] = HighestRecord(newest, hashes[newest])


def wrote(anchor: Anchor, view: LogView, record: Record) -> None:
    """Advance the anchor to ``record``, which this process appended to ``view``. ``anchor.failed`` reports why it does not advance."""
    anchor.writes.add(view.run)
    try:
        why = _follow(anchor, view, record)
    except RelightError as error:  # the record is committed: its save must not fail
        anchor.failed(view.run, error.kind, str(error))
        return
    if why:
        anchor.failed(view.run, "untrusted", why, once=True)


def _follow(anchor: Anchor, view: LogView, record: Record) -> str:
    """Advance the anchor to an appended record. Return why readers would not trust the record; empty if they would."""
    known = anchor.confirmed.get(view.run, AnchorMemory())
    if record.seq <= known.top:
        return ""
    raw = anchor.raw(view.run, record.seq)
    if raw is None or raw.chain_hash != record.file_hash:
        return f"record {record.seq} is not what was written there"
    if not raw.trusted:
        anchor.untrusted.setdefault(view.run, set()).add(record.seq)
        return "this writer's records have no signature of a trusted signer"
    if known.pins and _uncounted(view, known._replace(gaps=()), known.top, known.top):
        return f"record {known.top}, which was seen there, does not count any more"
    if raw.signature is None:
        below = known.newest if known.pins else anchor.raw(view.run, view.head) if view.head >= 0 else None
        if below is not None and below.signature is not None:
            return "this writer's records are unsigned, and those before them are signed"
    anchor.move(view.run, record.seq, raw, _gaps(view, known.top + 1, record.seq - 1))
    return ""


def _confirm_pins(anchor: Anchor, view: LogView, known: AnchorMemory) -> RawRecord | None:
    """Raise ``CorruptCheckpoint`` unless every pinned record is unchanged. Return the highest one."""
    raw = None
    for pin in known.pins:
        raw = anchor.raw(view.run, pin.seq)
        if raw is None or raw.hash != pin.hash:
            _refuse(anchor, view, f"record {pin.seq} is not the one that was seen there")
    return raw


def _uncounted(view: LogView, known: AnchorMemory, last: int, first: int = 0) -> list[int]:
    """Return the invalid records from ``first`` to ``last`` that are in no gap. Records below a summary are valid, except its faults."""
    counted = {record.seq for record in view.newer if first <= record.seq <= last}
    begin = max(first, view.base + 1)
    doubted = {seq for seq in _faults_below(view) if first <= seq <= last}
    if len(counted) == last + 1 - begin and not doubted:
        return []
    passed = {seq for gap in known.gaps for seq in range(max(first, gap.first), min(gap.last, last) + 1)}
    return sorted((set(range(begin, last + 1)) | doubted) - counted - passed)


def _faults_below(view: LogView) -> set[int]:
    """Return the numbers of the records that the summary lists as faults."""
    return {fault.seq for fault in view.summary.faults} if view.summary is not None else set()


def _hashes(view: LogView) -> dict[int, str]:
    """Return the known chain hashes of the valid records, by number. A summary has only the hash of its last record."""
    hashes = {record.seq: record.file_hash for record in view.newer}
    if view.summary is not None and view.base not in _faults_below(view):
        hashes[view.base] = view.summary.hash
    return hashes


def _passed_unrecorded(known: AnchorMemory, missing: list[int]) -> list[int]:
    """Return those of ``missing`` that an earlier version skipped without a gap: not pinned, and above all pins of this version."""
    bound = max((pin.seq for pin in known.pins if pin.whole), default=-1)
    pinned = {pin.seq for pin in known.pins}
    return [seq for seq in missing if seq > bound and seq not in pinned]


def _check_counted(
    anchor: Anchor, view: LogView, hashes: dict[int, str], known: AnchorMemory, missing: list[int]
) -> None:
    if missing:
        why = {fault.seq: fault.reason for fault in view.faults}
        shown = [f"record {seq}: {why.get(seq, 'the record is missing')}" for seq in missing[:_SHOWN]]
        _refuse(
            anchor,
            view,
            f"{len(missing)} of its records counted once and do not now",
            (*shown, *(["…"] if missing[_SHOWN:] else [])),
        )
    for gap in known.gaps:
        if gap.first and hashes.get(gap.first - 1, gap.below) != gap.below:
            _refuse(anchor, view, f"record {gap.first - 1} is not the one that was seen there")


def _move(anchor: Anchor, view: LogView, known: AnchorMemory, unread: Collection[int]) -> None:
    """Advance the anchor as far as a reader may. The log was compared with ``known``.

    A reader without trusted signers cannot verify a signed log, so it leaves that log's anchor unchanged.
    """
    top, raw = known.top, known.newest
    if anchor.trust is None and raw is not None and raw.signature is not None:
        return
    newest = _furthest(anchor, view, top, unread)
    raw_newest = anchor.raw(view.run, newest) if newest > top else None
    hash = _hashes(view).get(newest, "")
    if (
        raw_newest is not None
        and raw_newest.trusted
        and raw_newest.chain_hash == hash
        and (anchor.trust is not None or raw_newest.signature is None)
    ):
        anchor.move(view.run, newest, raw_newest, _gaps(view, top + 1, newest - 1))
        return
    if raw is not None and (len(known.pins) > 1 or not known.pins[-1].whole):
        anchor.move(view.run, top, raw)


def _furthest(anchor: Anchor, view: LogView, top: int, unread: Collection[int]) -> int:
    """Return the highest record to which a reader may advance the anchor from the valid record ``top``; never past an unread record."""
    end = min((seq for seq in unread if seq > top), default=view.head + 1)
    hashes = {seq: hash for seq, hash in _hashes(view).items() if top <= seq < end}
    if anchor.trust is not None:
        return max(hashes, default=top)
    newest = top
    if top < view.base:  # all records that a summary replaces are chained, except the faults that it lists
        if view.base not in hashes or any(top < seq for seq in _faults_below(view)):
            return top
        newest = view.base
    chained = {record.seq: record.prev for record in view.newer}
    while newest + 1 in hashes and (newest < 0 or chained[newest + 1] == hashes.get(newest)):
        newest += 1
    return newest


def _gaps(view: LogView, first: int, last: int, known: Collection[Gap] = ()) -> list[Gap]:
    """Return the ranges of invalid records from ``first`` to ``last`` that are in no gap of ``known``."""
    hashes, below = _hashes(view), _faults_below(view)
    passed = {seq for gap in known for seq in range(gap.first, gap.last + 1)}
    gaps: list[Gap] = []
    for seq in range(first, last + 1):
        if seq in hashes or seq in passed or (seq <= view.base and seq not in below):
            continue
        if gaps and gaps[-1].last == seq - 1:
            gaps[-1] = gaps[-1]._replace(last=seq)
        else:
            gaps.append(Gap(seq, seq, hashes.get(seq - 1, ZERO_HEX)))
    return gaps


def _refuse(anchor: Anchor, view: LogView, what: str, details: tuple[str, ...] = ()) -> NoReturn:
    raise CorruptCheckpoint(
        f"{what}: it was rolled back, or records were lost",
        where=f"{view.run}",
        details=details,
        hint=f"copy them back; if the loss was meant, delete {anchor.folder(view.run)} of the anchor {anchor.url}",
    )
