"""Sweeping: deleting the bytes of what is retired, and what dead attempts left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from relight.catalog.branches import let_go
from relight.commit import delete_directory
from relight.errors import RelightError, StoreUnavailable
from relight.format.names import parse_dir, parse_summary_file
from relight.log import History, Log, fold
from relight.log.listing import log_folders
from relight.store import ByteStore
from relight.store.durable import temporary_of
from relight.store.probe import PROBE_PREFIX

FOLDERS_SWEPT = 2
"""Newest folders of the log in which leftovers are searched: a sweep after each attempt has searched the others."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Directories that may be deleted, each with the reason; ``held`` are those that may not be, although nothing names them.

    ``temporaries`` are keys of files that were to become a record, or the store's own, and never can: that name is taken; and what trying
    a server has left.
    """

    run: str
    directories: list[tuple[str, str]]
    held: list[tuple[str, str]]
    temporaries: list[str] = field(default_factory=list)
    homes: list[str] = field(default_factory=list)
    """Runs that this one branched off, and of which it has given up all that it had."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What was deleted, and what could not be."""

    deleted: list[str]
    left: list[str]


def plan_sweep(store: ByteStore, run: str) -> SweepPlan:
    """Find what nobody can need any more. The listing is taken *before* the log is read: what is committed in between is then seen."""
    names = {entry.name for entry in store.list(run) if entry.is_dir}
    names |= {key.split("/")[1] for key, _ in store.uploads(run) if key.count("/") > 1}  # there may be nothing else
    probes = [entry.name for entry in store.list("") if entry.name.startswith(PROBE_PREFIX) and not entry.is_dir]
    temporaries = [*probes, *_temporaries(store, "")]
    unfinished: list[tuple[int, str]] = []
    log, *folders = log_folders(store, run)
    for folder in (log, *folders[-FOLDERS_SWEPT:]):
        temporaries += _temporaries(store, folder)
        unfinished += _unfinished_summaries(store, folder)
    view = Log(store, run).read()
    temporaries += [key for upto, key in unfinished if upto < view.head and key not in temporaries]
    history = fold(view)
    retired = {one.body.dir: one.id for one in history.retired.values()}
    live = {one.body.dir for one in history.live}
    whole = live | {name for name, checkpoint_id in retired.items() if checkpoint_id in history.recallable}
    for name in sorted(whole.intersection(names)):  # a rank that died while it made the root of a checkpoint that another completed
        temporaries += _temporaries(store, f"{run}/{name}")
    going: list[tuple[str, str]] = []
    held: list[tuple[str, str]] = []
    for name in sorted(names):
        parsed = parse_dir(name)
        if parsed is None or name in live:
            continue
        if name in retired and retired[name] in history.recallable:
            held.append((name, "retired, and may be recalled still"))
        elif name in retired:
            going.append((name, "retired"))
        elif view.damaged:
            held.append((name, "a record of the log is damaged: it may have been the commit of this one"))
        elif parsed.epoch < history.epoch:
            going.append((name, f"left by attempt {parsed.epoch}, which attempt {history.epoch} has superseded"))
        else:
            held.append((name, "its attempt may still be writing it"))
    there = {one.body.home for one in history.there}
    homes = {one.body.home for one in history.retired.values()} - there - {""}
    return SweepPlan(run, going, held, temporaries, sorted(homes))


def _temporaries(store: ByteStore, prefix: str) -> list[str]:
    names = {entry.name for entry in store.list(prefix) if not entry.is_dir}
    return [f"{prefix}/{name}".lstrip("/") for name in sorted(names) if temporary_of(name) in names]


def _unfinished_summaries(store: ByteStore, folder: str) -> list[tuple[int, str]]:
    """Files that were to become a summary of the log, and its last record. If its writer still lives, it goes on without that summary."""
    found = [(parse_summary_file(temporary_of(entry.name) or ""), entry.name) for entry in store.list(folder) if not entry.is_dir]
    return sorted((upto, f"{folder}/{name}") for upto, name in found if upto is not None)


def execute_sweep(plan: SweepPlan, store: ByteStore) -> SweepReport:
    """Delete what the plan names. What the store will not delete now is left for the next sweep."""
    deleted: list[str] = []
    left: list[str] = []
    for name, _ in plan.directories:
        with contextlib.suppress(StoreUnavailable):
            for upload in store.uploads(f"{plan.run}/{name}"):
                store.drop_upload(upload)
        _delete(store, plan.run, name, deleted, left)
    for key in plan.temporaries:
        with contextlib.suppress(StoreUnavailable):
            store.delete(key)
            deleted.append(key)
    if plan.homes:
        _let_go(store, plan.run, plan.homes)
    return SweepReport(deleted, left)


def delete_checkpoints(store: ByteStore, run: str, history: History, ids: Sequence[str]) -> tuple[list[str], list[str]]:
    """Delete the directories of ``ids``, which ``history`` says are retired for good: ``(deleted, left)``."""
    deleted: list[str] = []
    left: list[str] = []
    homes: set[str] = set()
    for checkpoint_id in ids:
        found = history.retired.get(checkpoint_id)
        if found is not None and checkpoint_id not in history.recallable:
            if found.body.home:  # it lies in the run that this one branched off
                homes.add(found.body.home)
            else:
                _delete(store, run, found.body.dir, deleted, left)
    _let_go(store, run, homes)
    return deleted, left


def _let_go(store: ByteStore, run: str, homes: Iterable[str]) -> None:
    """What cannot be let go now keeps what it kept; the next sweep tries again."""
    for home in homes:
        with contextlib.suppress(RelightError):
            let_go(store, home, run)


def _delete(store: ByteStore, run: str, name: str, deleted: list[str], left: list[str]) -> None:
    try:
        gone = delete_directory(store, f"{run}/{name}")
    except StoreUnavailable:
        gone = False
    (deleted if gone else left).append(name)
