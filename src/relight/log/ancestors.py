"""Ancestors of a run's checkpoints, computed from a folded history without I/O.

A run has more than one line of descent once training began again from scratch, or continued from an older checkpoint. Retention must
not delete the other lines: nothing else leads to that training.
"""

from __future__ import annotations

from collections.abc import Mapping

from relight.format.records import FenceBody
from relight.log.history import Checkpoint, History

REBUILT = "rebuilt"
"""Reason of the FENCEs of a rebuilt log: it is unknown what their attempts restored, and what was retired."""
FRESH = "fresh"
"""Reason of the FENCE of an attempt that restored nothing. Its first COMMIT really has no parent."""


def newest_good(
    history: History, known: Mapping[str, bool] | None = None, *, suspect: bool = False
) -> Checkpoint | None:
    """Return the newest checkpoint that is neither rolled back, suspect nor known to be damaged; else the newest; None if there is none.

    ``known``: by id, whether a checkpoint was found to verify. ``suspect``: whether a suspect one counts as good.
    """
    newest_first = history.live[::-1]
    for checkpoint in newest_first:
        if (
            checkpoint.id not in history.rolled_back_ids
            and (suspect or not checkpoint.body.suspect)
            and (known or {}).get(checkpoint.id) is not False
        ):
            return checkpoint
    return newest_first[0] if newest_first else None


def line_of(history: History, head: Checkpoint) -> set[str]:
    """Return the ids of the live checkpoints that are ancestors of ``head``, or may be; ``head`` is one of them.

    If a parent is not in this log (only some checkpoints were copied), every older checkpoint of an earlier step may be an ancestor.
    A checkpoint without a parent is certainly the first of its line only if its attempt restored nothing. In a rebuilt log, only
    parents in the log count as ancestors. Otherwise it would join lines that a lost record kept apart.
    """
    known = {**history.retired, **history.by_id}
    fresh = epochs_of(history, FRESH)
    rebuilt = epochs_of(history, REBUILT)
    line, todo, unknown_before = {head.id}, [head], list[tuple[int, int]]()
    while todo:
        parents, unknown = parents_of(history, known, todo.pop(), fresh, rebuilt)
        unknown_before += unknown
        for parent in parents:
            if parent not in line:
                line.add(parent)
                todo.append(known[parent])
    for checkpoint in history.by_id.values():
        if any(checkpoint.seq < seq and checkpoint.step < step for seq, step in unknown_before):
            line.add(checkpoint.id)
    return line & history.by_id.keys()


def parents_of(
    history: History, known: Mapping[str, Checkpoint], checkpoint: Checkpoint, fresh: set[int], rebuilt: set[int]
) -> tuple[list[str], tuple[tuple[int, int], ...]]:
    """Return the ids of a checkpoint's nearest known ancestors, and record number and step of each ancestor with an unknown parent.

    ``fresh``, ``rebuilt``: epochs of the attempts with a FENCE of the reason ``FRESH`` or ``REBUILT``, from ``epochs_of``.
    """
    line = history.lines.get(checkpoint.id)
    if line is not None:  # the log's summary has left out some of its ancestors
        return [parent for parent in line.parents if parent in known], line.unknown
    parents = [parent for parent in checkpoint.body.parents if parent in known]
    is_unknown = checkpoint.epoch not in rebuilt and (
        len(parents) < len(checkpoint.body.parents) or (not parents and checkpoint.epoch not in fresh)
    )
    return parents, ((checkpoint.seq, checkpoint.step),) if is_unknown else ()


def epochs_of(history: History, reason: str) -> set[int]:
    """Return the epochs of the attempts with a FENCE of that reason."""
    return {
        fence.epoch for fence in history.fences if isinstance(fence.body, FenceBody) and fence.body.reason == reason
    }
