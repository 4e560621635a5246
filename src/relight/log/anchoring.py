"""A run's log against its anchor: whether it was rolled back, and how far the anchor may move on.

The anchor moves only to a record that counts for this reader: of this store and run, chained, and signed by a trusted signer where signers
are named. A reader moves it along the unbroken chain. Only the writer of a new record, and a reader that trusts named signers, moves it
past records that do not count; these are remembered as a gap, with the record before them. So all that counted once must count for good.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NoReturn

from relight.errors import CorruptCheckpoint, StoreUnavailable
from relight.format import Record
from relight.format.digest import ZERO_HEX
from relight.store.anchored import Anchor, Gap, Known, Pin

if TYPE_CHECKING:
    from relight.log.chain import View

_SHOWN = 8


def expected_head(anchor: Anchor, run: str) -> int:
    """Return the highest record that the anchor or this process has seen; −1 if none. Cost: one listing for each run and process."""
    return max(_known(anchor, run).top, anchor.seen.get(run, -1))


def check(anchor: Anchor, view: View, unread: Collection[int]) -> None:
    """Raise ``CorruptCheckpoint`` if the log lacks what the anchor remembers. Move the anchor on to what this reader has seen.

    ``unread``: records that the store failed to return just now. Cost: the first look reads one record for each pin. Where the log has
    grown, a reader that does not write reads the new head, and writes one small file.
    """
    known, seen = anchor.confirmed.get(view.run), anchor.seen.get(view.run, -1)
    if known is None:
        _check_first(anchor, view, unread)
    elif view.head < max(known.top, seen):
        gone = max(known.top, seen)
        _refuse(anchor, view, f"the log ends at record {view.head}; record {gone}, which was seen there, is gone")
    elif view.head > seen and view.run not in anchor.writes:
        raw = anchor.raw(view.run, known.top) if known.pins and anchor.trust is None else None
        pin, gaps = _furthest(anchor, view, known, raw is None or raw.signature is None)
        if pin is not None:
            anchor.move(view.run, pin, gaps)
    anchor.seen[view.run] = max(view.head, seen)


def _check_first(anchor: Anchor, view: View, unread: Collection[int]) -> None:
    known = anchor.read(view.run)
    unsigned = _check_pins(anchor, view, known)
    missing = _uncounted(view, known)
    if any(seq in unread for seq in missing):
        raise StoreUnavailable("the log cannot be compared with its anchor: a record cannot be read just now", where=f"{view.run}")
    _check_counted(anchor, view, known, missing)
    anchor.confirmed[view.run] = known
    pin, gaps = _furthest(anchor, view, known, unsigned)
    if pin is not None or len(known.pins) > 1:
        anchor.move(view.run, pin or max(known.pins), gaps)


def wrote(anchor: Anchor, view: View, record: Record) -> None:
    """Move the anchor to ``record``, which this process appended to ``view``. Not if readers would not trust it."""
    anchor.writes.add(view.run)
    known = anchor.confirmed.get(view.run, Known())
    raw = anchor.raw(view.run, record.seq)
    if raw is None or raw.chain_hash != record.file_hash or not raw.trusted or record.seq <= known.top:
        return
    if known.pins and not any(one.seq == known.top for one in reversed(view.records)):
        return  # the record that is remembered no longer counts: what was appended does not chain to it
    below = known.top if known.pins else view.head
    if raw.signature is None and below >= 0:
        last = anchor.raw(view.run, below)
        if last is not None and last.signature is not None:  # readers that trust the signers would not believe this one
            return
    anchor.move(view.run, Pin(record.seq, raw.hash), _gaps(view, known.top + 1, record.seq - 1))


def _known(anchor: Anchor, run: str) -> Known:
    known = anchor.confirmed.get(run)
    return anchor.read(run) if known is None else known


def _check_pins(anchor: Anchor, view: View, known: Known) -> bool:
    """Raise unless every pinned record is there. Return whether the newest of them is unsigned, or none is pinned."""
    unsigned = True
    for pin in known.pins:
        raw = anchor.raw(view.run, pin.seq)
        if raw is None or raw.hash != pin.hash:
            gone = view.head < pin.seq
            _refuse(
                anchor, view,
                f"the log ends at record {view.head}; record {pin.seq}, which was seen there, is gone"
                if gone else f"record {pin.seq} is not the one that was seen there",
            )  # fmt: skip
        unsigned = raw.signature is None
    return unsigned


def _uncounted(view: View, known: Known) -> list[int]:
    """The records up to the anchored one that do not count, and are in no gap."""
    top = known.top
    counted = {record.seq for record in view.records if record.seq <= top}
    if len(counted) == top + 1:
        return []
    return [seq for seq in range(top + 1) if seq not in counted and not any(gap.first <= seq <= gap.last for gap in known.gaps)]


def _check_counted(anchor: Anchor, view: View, known: Known, missing: list[int]) -> None:
    if missing:
        why = {fault.seq: fault.reason for fault in view.faults}
        shown = [f"record {seq}: {why.get(seq, 'the record is missing')}" for seq in missing[:_SHOWN]]
        _refuse(anchor, view, f"{len(missing)} of its records counted once and do not now", (*shown, *(["…"] if missing[_SHOWN:] else [])))
    hashes = {record.seq: record.file_hash for record in view.records} if known.gaps else {}
    for gap in known.gaps:
        if gap.first and hashes.get(gap.first - 1, gap.below) != gap.below:
            _refuse(anchor, view, f"record {gap.first - 1} is not the one that was seen there")


def _furthest(anchor: Anchor, view: View, known: Known, unsigned: bool) -> tuple[Pin | None, list[Gap]]:
    """How far a reader may move the anchor, and past which gaps; None if it may not.

    A reader without trusted signers cannot judge a signed log, so it leaves that log's anchor where it is.
    """
    if anchor.trust is None and not unsigned:
        return None, []
    counted = {record.seq: record for record in view.records}
    if anchor.trust is not None:
        newest = max(counted, default=-1)
    else:
        newest = known.top
        while newest + 1 in counted:
            newest += 1
    if newest <= known.top:
        return None, []
    raw = anchor.raw(view.run, newest)
    if raw is None or raw.chain_hash != counted[newest].file_hash or not raw.trusted:
        return None, []
    if anchor.trust is None and raw.signature is not None:
        return None, []
    return Pin(newest, raw.hash), _gaps(view, known.top + 1, newest - 1)


def _gaps(view: View, first: int, last: int) -> list[Gap]:
    """The runs of records from ``first`` to ``last`` that do not count."""
    hashes = {record.seq: record.file_hash for record in view.records if record.seq >= first - 1}
    found: list[Gap] = []
    for seq in range(first, last + 1):
        if seq in hashes:
            continue
        if found and found[-1].last == seq - 1:
            found[-1] = found[-1]._replace(last=seq)
        else:
            found.append(Gap(seq, seq, hashes.get(seq - 1, ZERO_HEX)))
    return found


def _refuse(anchor: Anchor, view: View, what: str, details: tuple[str, ...] = ()) -> NoReturn:
    raise CorruptCheckpoint(
        f"{what}: it was rolled back, or records were lost",
        where=f"{view.run}",
        details=details,
        hint=f"copy them back; if the loss was meant, delete {anchor.folder(view.run)} of the anchor {anchor.url}",
    )
