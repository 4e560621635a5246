"""Tags and holds of the nearest tier, which also count on each further tier that has a copy of their checkpoint.

A NOTE in the nearest tier's log comes before each carried mark, so only marks that came from there are removed again.
"""

from __future__ import annotations

from functools import partial

import msgspec

from relight.catalog.branches import PREFIX
from relight.format.records import Body, TagBody
from relight.format.topics import CARRIED, HOLD, RELEASE, CarriedNote, HoldNote
from relight.log import History, Log, LogView, fold
from relight.log.superseded import superseded
from relight.run_records.holds import holds_of

MARKED = "tagged or on hold in the nearest tier"
"""Why a further tier keeps such a checkpoint."""
_HELD = "hold "
"""Prefix of a hold's name among the marks, before the checkpoint's id. No tag has a space in its name."""


def marked_in(near: History) -> dict[str, str]:
    """Return the ids of the live checkpoints that users have tagged or put on hold, by mark. A branch's tag is no mark."""
    tags = {name: target for name, target in near.tags.items() if not name.startswith(PREFIX)}
    return {**tags, **{f"{_HELD}{target}": target for target in holds_of(near) if near.find(target) is not None}}


def marked_there(near: History, far: History) -> set[str]:
    """Return the ids, on a further tier, of the copies of checkpoints that are marked in the nearest tier."""
    copies, known = _copies(far), {**near.retired, **near.by_id}
    return {copies[key] for target in marked_in(near).values() if (key := known[target].original_id) in copies}


def carry_marks(near_view: LogView, far: History, tier: str, near_log: Log, far_log: Log, epoch: int) -> None:
    """Give a further tier the tags and holds of the nearest tier, and remove those that were removed there.

    A tag of the same name that a user gave another checkpoint on that tier stays. With damaged records in the nearest
    log, nothing is removed: one of them may be a mark. Cost: a record in both logs for each change, else none.
    Raise ``Fenced`` if a later attempt owns the tier.
    """
    near = fold(near_view)
    copies, known, far_marks = _copies(far), {**near.retired, **near.by_id}, marked_in(far)
    tags = {record.body.name: record.body for record in near_view.records if isinstance(record.body, TagBody)}
    reasons = holds_of(near)

    def copy_of(target: str | None) -> str | None:
        return copies.get(known[target].original_id if target in known else target or "")

    def record(mark: str, target: str) -> None:
        note = CARRIED.note(CarriedNote(tier=tier, mark=mark, id=target))
        near_log.append(lambda view: (note, fold(view).epoch))

    def write(body: Body) -> None:
        far_log.append(partial(_by_owner, body, epoch, far_log.run))

    carried, ever = _carried(near, tier)

    def is_carried(mark: str, present: str) -> bool:
        """Return whether the far mark came from here. A write that failed may have left it on an earlier checkpoint."""
        return any(copy_of(target) == present for target in ever.get(mark, ()))

    wanted = {mark: target for mark, target in marked_in(near).items() if copy_of(target) is not None}
    for mark, target in {} if near_view.faults else {**carried}.items():
        if mark in wanted:
            continue
        copy = copy_of(target)
        if mark.startswith(_HELD):
            if copy in holds_of(far) and _is_carried_hold(near, target, far, copy):
                write(RELEASE.note(HoldNote(id=copy)))
        elif mark in far_marks and is_carried(mark, far_marks[mark]):
            last = tags.get(mark, TagBody(name=mark, id=None))
            write(msgspec.structs.replace(last, id=None))
        record(mark, "")
    for mark, target in wanted.items():
        copy = copy_of(target)
        assert copy is not None
        is_hold = mark.startswith(_HELD)
        present = (copy if copy in holds_of(far) else None) if is_hold else far_marks.get(mark)
        if present == copy or (present is not None and not is_carried(mark, present)):
            continue  # a user's own tag or hold on that tier is not taken over, and so never removed from here
        if carried.get(mark) != target:
            record(mark, target)
        hold, last = HoldNote(id=copy, why=reasons.get(target, "")), tags.get(mark, TagBody(name=mark, id=copy))
        write(HOLD.note(hold) if is_hold else msgspec.structs.replace(last, id=copy))


def _copies(far: History) -> dict[str, str]:
    return {copy.original_id: copy.id for copy in far.live}


def _carried(near: History, tier: str) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Return the ids of the checkpoints with marks that were carried to a tier, by mark, as the nearest log records them.

    The second dict has all ids that each mark ever had there.
    """
    carried: dict[str, str] = {}
    ever: dict[str, set[str]] = {}
    for _, note in CARRIED.among(near.notes):
        if note.tier == tier:
            carried[note.mark] = note.id
            if note.id:
                ever.setdefault(note.mark, set()).add(note.id)
    return {mark: target for mark, target in carried.items() if target}, ever


def _holds_since_release(history: History, id_: str) -> list[str]:
    """Return the reasons of a checkpoint's holds since its last release."""
    reasons: list[str] = []
    for record in history.notes:
        if (note := HOLD.read(record.body)) is not None and note.id == id_:
            reasons.append(note.why)
        elif (note := RELEASE.read(record.body)) is not None and note.id == id_:
            reasons = []
    return reasons


def _is_carried_hold(near: History, target: str, far: History, copy: str) -> bool:
    """Return whether the hold of a far copy was only carried there.

    A carried hold is placed once, with a reason of the nearest tier. A second hold, or one for another reason, is a user's.
    A summary of the nearest log may lack the holds of a retired checkpoint: then any single hold counts as carried.
    """
    reasons = {note.why for record, note in HOLD.among(near.notes) if note.id == target}
    placed = _holds_since_release(far, copy)
    return len(placed) == 1 and (not reasons or placed[0] in reasons)


def _by_owner(body: Body, epoch: int, run: str, view: LogView) -> tuple[Body, int] | None:
    """Return the record to append; None for a hold that another process has carried meanwhile: a second one counts as a user's."""
    if (history := fold(view)).epoch > epoch:
        raise superseded(history, epoch, run)
    hold = HOLD.read(body)
    return None if hold is not None and hold.id in holds_of(history) else (body, epoch)
