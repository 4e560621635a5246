"""Checkpoint directories that are newer than their log: its newest records were lost, for example by a copy of the log."""

from __future__ import annotations

from relight.errors import CorruptCheckpoint
from relight.format.names import parse_dir
from relight.format.records import CommitBody, NoteBody
from relight.log.chain import NAMES_SHOWN, View
from relight.log.history import fold
from relight.log.identity import checkpoint_dirs, peek_root
from relight.store import ByteStore

REBUILDING, REBUILT = "rebuilding", "rebuilt"
"""Topics of the NOTEs between which ``relight recover`` appends what a log lacks."""


def unlogged(store: ByteStore, view: View, names: list[str]) -> list[str]:
    """Return those of the directories ``names`` that prove that records of the log were lost.

    Either the log does not know the directory's attempt, though a FENCE precedes an attempt's first directory. Or the directory is
    of the newest attempt, and no record commits its parent, though an attempt names only committed parents. A log with damaged
    records proves nothing. Cost: one read for each directory of the newest attempt that no record commits.
    """
    if view.faults or view.head < 0:
        return []
    committed = {record.body.id for record in view.records if isinstance(record.body, CommitBody)}
    epoch = fold(view).epoch
    found = []
    for name in names:
        parsed = parse_dir(name)
        if parsed is None or parsed.id in committed or parsed.epoch < epoch:
            continue
        root = peek_root(store, f"{view.run}/{name}")
        if root is None or root["run"] != view.run_id or root["store"] != view.store_id:
            continue
        if parsed.epoch > epoch or any(parent not in committed for parent in root["parents"]):
            found.append(name)
    return found


def is_being_rebuilt(view: View) -> bool:
    """Return whether ``relight recover`` began to append what the log lacks, and did not get to its end."""
    topics = [record.body.topic for record in view.records if isinstance(record.body, NoteBody)]
    return next((topic == REBUILDING for topic in reversed(topics) if topic in (REBUILDING, REBUILT)), False)


def refuse_truncated(store: ByteStore, view: View, where: str) -> None:
    """Raise ``CorruptCheckpoint`` if the log's newest records were lost: an attempt would hide, and later delete, what they commit.

    Cost: one listing of the run's directory, and what ``unlogged`` costs.
    """
    lost = unlogged(store, view, checkpoint_dirs(store, view.run))
    if not lost and not is_being_rebuilt(view):
        return
    raise CorruptCheckpoint(
        f"the newest records of this run's log are missing: {len(lost)} checkpoint directories are newer than it"
        if lost
        else "this run's log is being rebuilt, or that was interrupted",
        where=where,
        details=[*lost[:NAMES_SHOWN], *(["…"] if len(lost) > NAMES_SHOWN else [])],
        hint=f"copy the directory log/ again from where the run came from; or add what it lacks: relight recover {where}",
    )
