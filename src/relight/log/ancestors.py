"""Which checkpoints a run descends from: pure, over a folded history.

A run has more than one line of descent once training began again from scratch, or continued from an older checkpoint. Retention must
not delete the other lines: nothing else leads to that training.
"""

from __future__ import annotations

from collections.abc import Mapping

from relight.format.records import FenceBody
from relight.log.history import Checkpoint, History

REBUILT = "rebuilt"
"""Reason of the FENCEs of a rebuilt log: what their attempts restored, and what was retired, is not known."""
FRESH = "fresh"
"""Reason of the FENCE of an attempt that restored nothing. Its first COMMIT has no parent, and that is known to be the truth."""


def newest_good(history: History, known: Mapping[str, bool] | None = None, *, suspect: bool = False) -> Checkpoint | None:
    """Return the newest checkpoint that is neither rolled back, suspect nor known to be damaged; else the newest; None if there is none.

    ``known``: by id, whether a checkpoint was found to verify. ``suspect``: whether a suspect one counts as good.
    """
    newest_first = history.live[::-1]
    for one in newest_first:
        if one.id not in history.set_aside and (suspect or not one.body.suspect) and (known or {}).get(one.id) is not False:
            return one
    return newest_first[0] if newest_first else None


def line_of(history: History, head: Checkpoint) -> set[str]:
    """Return the ids of the live checkpoints that are ancestors of ``head``, or may be; ``head`` is one of them.

    Where a parent is not in this log (a copy that was made of some checkpoints only), every older checkpoint of an earlier step may be an
    ancestor. A checkpoint without a parent is known to be the first of its line only if its attempt restored nothing. In a rebuilt log,
    only parents that are there are ancestors: it would else join lines that a lost record kept apart.
    """
    known = {**history.retired, **history.by_id}
    fresh = _epochs(history, FRESH)
    rebuilt = _epochs(history, REBUILT)
    line, todo, unknown_before = {head.id}, [head], list[Checkpoint]()
    while todo:
        one = todo.pop()
        parents = [known[parent] for parent in one.body.parents if parent in known]
        if one.epoch not in rebuilt and (len(parents) < len(one.body.parents) or (not parents and one.epoch not in fresh)):
            unknown_before.append(one)
        for parent in parents:
            if parent.id not in line:
                line.add(parent.id)
                todo.append(parent)
    for one in history.by_id.values():
        if any(one.seq < later.seq and one.step < later.step for later in unknown_before):
            line.add(one.id)
    return line & history.by_id.keys()


def _epochs(history: History, reason: str) -> set[int]:
    return {fence.epoch for fence in history.fences if isinstance(fence.body, FenceBody) and fence.body.reason == reason}
