"""Detect a truncated log: checkpoint directories are newer than its last record, for example after an incomplete copy of the log."""

from __future__ import annotations

import shlex

from relight.errors import CorruptCheckpoint
from relight.format.names import parse_dir
from relight.format.records import CommitBody
from relight.format.topics import REBUILDING, REBUILT, RESTORED_ELSEWHERE
from relight.log.history import fold
from relight.log.identity import checkpoint_dirs, peek_root
from relight.log.log import NAMES_SHOWN, Log
from relight.log.view import LogView
from relight.store import ByteStore
from relight.store.retry import sleep

PAUSES_S = (0.05, 0.2, 0.5)
"""Seconds between reads of a log that seems to lack records, before it counts as truncated."""


def unlogged(store: ByteStore, view: LogView, names: list[str]) -> list[str]:
    """Return those of the directories ``names`` that prove that records of the log were lost.

    Either the log lacks the directory's attempt, although a FENCE precedes an attempt's first directory. Or the directory is of the
    newest attempt and the log lacks its parent, although an attempt names only parents that were committed or recorded in a NOTE before.
    Each unreadable record may be such a FENCE or COMMIT, so more must be missing than are unreadable. Cost: one read for each
    uncommitted directory of the newest attempts.
    """
    if view.head < 0:
        return []
    # all that a summary has kept
    committed = {record.body.id for record in view.records if isinstance(record.body, CommitBody)}
    known = committed | {note.checkpoint for _, note in RESTORED_ELSEWHERE.among(view.records)}
    epoch = fold(view).epoch
    unlogged_names = []
    missing: set[int | str] = set()
    for name in names:
        parsed = parse_dir(name)
        if parsed is None or parsed.id in committed or parsed.epoch < epoch:
            continue
        root = peek_root(store, f"{view.run}/{name}")
        if root is None or root["run"] != view.run_id or root["store"] != view.store_id:
            continue
        lost: set[int | str] = {parent for parent in root["parents"] if parent not in known}
        if parsed.epoch > epoch:
            lost.add(parsed.epoch)
        if lost:
            unlogged_names.append(name)
            missing |= lost
    return unlogged_names if len(missing) > view.head + 1 - view.counted else []


def is_being_rebuilt(view: LogView) -> bool:
    """Return whether ``relight log --rebuild`` is appending missing records, or was interrupted while it did."""
    for record in reversed(view.records):
        for topic in (REBUILDING, REBUILT):
            if topic.read(record.body) is not None:
                return topic is REBUILDING
    return False


def refuse_truncated(store: ByteStore, log: Log, view: LogView | None = None) -> None:
    """Raise ``CorruptCheckpoint`` if the log's newest records were lost: an attempt would hide, and later delete, their checkpoints.

    ``view``: the log, read by the caller just before. If other writers have appended since, or records could not be read for a moment,
    the log is read again before the decision. Cost: one listing of the run's directory, and the cost of ``unlogged``.
    """
    view = log.read() if view is None else view
    whole: Log | None = None
    for pause_s in (*PAUSES_S, None):
        names = checkpoint_dirs(store, view.run)
        lost = unlogged(store, view, names)
        if lost and view.summary is not None:  # a summary leaves out old retired checkpoints: read all records
            whole = whole or Log(store, view.run, whole=True)
            view = whole.read()
            lost = unlogged(store, view, names)
        if not lost and not is_being_rebuilt(view) and not (view.faults and pause_s and _some_newer(view, names)):
            return
        if pause_s is not None:
            sleep(pause_s)
            view = log.read()
    where = f"{store.url.rstrip('/')}/{view.run}"
    rebuild = f"relight log {shlex.quote(where)} --rebuild"
    raise CorruptCheckpoint(
        f"the newest records of this run's log are missing: {len(lost)} checkpoint directories are newer than it"
        if lost
        else "this run's log is being rebuilt, or that was interrupted",
        where=where,
        details=[*lost[:NAMES_SHOWN], *(["…"] if len(lost) > NAMES_SHOWN else [])],
        hint=f"copy the directory log/ again from where the run came from; or add what it lacks: {rebuild}",
    )


def whole_log(store: ByteStore, run: str) -> LogView:
    """Return the log of ``run``. Raise ``CorruptCheckpoint`` if its newest records were lost. Cost: one listing more than a read."""
    log = Log(store, run)
    view = log.read()
    refuse_truncated(store, log, view)
    return view


def _some_newer(view: LogView, names: list[str]) -> bool:
    epoch = fold(view).epoch
    return any((parsed := parse_dir(name)) is not None and parsed.epoch > epoch for name in names)
