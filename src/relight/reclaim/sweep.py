"""Sweep: delete the bytes of retired checkpoints, and the files that dead attempts left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from relight.catalog.branches import remove_branch_tag
from relight.commit import delete_directory
from relight.commit.save import delete_announcements
from relight.errors import RelightError, StoreUnavailable
from relight.format.names import READY_DIR, parse_dir, parse_summary_file
from relight.log import History, Log, fold
from relight.log.listing import log_folders
from relight.store import ByteStore, Entry
from relight.store.durable import temporary_of
from relight.store.probe import PROBE_PREFIX

FOLDERS_SWEPT = 2
"""Number of newest log folders searched for leftovers: the sweep after each attempt has searched the older ones."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Directories to delete, each with the reason. ``held``: directories that no live checkpoint has and that must stay, with the reason.

    ``temporaries``: keys of temporary files of records and of the store's own files, if the final name exists already, of leftovers of
    probing a server, and of directories of announcements that killed ranks or nodes left in committed checkpoints.
    """

    run: str
    directories: list[tuple[str, str]]
    held: list[tuple[str, str]]
    temporaries: list[str] = field(default_factory=list)
    homes: list[str] = field(default_factory=list)
    """Runs that this run branched off and from which it needs nothing any more."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Directories and keys that were deleted, and directories that could not be deleted."""

    deleted: list[str]
    left: list[str]


def plan_sweep(store: ByteStore, run: str) -> SweepPlan:
    """Find what no process can need any more. Lists *before* it reads the log, so that a commit in between is known."""
    names = {entry.name for entry in store.list(run) if entry.is_dir}
    # an upload may be all that exists of a directory
    names |= {key.split("/")[1] for key, _ in store.uploads(run) if key.count("/") > 1}
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
    retired = {checkpoint.body.dir: checkpoint.id for checkpoint in history.retired.values()}
    live = {checkpoint.body.dir for checkpoint in history.live}
    whole = live | {name for name, checkpoint_id in retired.items() if checkpoint_id in history.recallable}
    # left by a rank that died while writing the root, or after it, when another rank completed the checkpoint
    for name in sorted(whole.intersection(names)):
        entries = list(store.list(f"{run}/{name}"))
        temporaries += _temporaries_among(entries, f"{run}/{name}")
        parsed = parse_dir(name)
        if parsed is not None and parsed.epoch < history.epoch and READY_DIR in {e.name for e in entries if e.is_dir}:
            temporaries.append(f"{run}/{name}/{READY_DIR}")
    going: list[tuple[str, str]] = []
    kept: list[tuple[str, str]] = []
    for name in sorted(names):
        parsed = parse_dir(name)
        if parsed is None or name in live:
            continue
        if name in retired and retired[name] in history.recallable:
            kept.append((name, "retired, and still recallable"))
        elif name in retired:
            going.append((name, "retired"))
        elif view.damaged:
            kept.append((name, "a record of the log is damaged: it may have been the commit of this one"))
        elif parsed.epoch < history.epoch:
            going.append((name, f"left by attempt {parsed.epoch}, which attempt {history.epoch} has superseded"))
        else:
            kept.append((name, "its attempt may still be writing it"))
    needed_homes = {checkpoint.body.home for checkpoint in history.there}
    homes = {checkpoint.body.home for checkpoint in history.retired.values()} - needed_homes - {""}
    return SweepPlan(run, going, kept, temporaries, sorted(homes))


def _temporaries(store: ByteStore, prefix: str) -> list[str]:
    return _temporaries_among(store.list(prefix), prefix)


def _temporaries_among(entries: Iterable[Entry], prefix: str) -> list[str]:
    names = {entry.name for entry in entries if not entry.is_dir}
    return [f"{prefix}/{name}".lstrip("/") for name in sorted(names) if temporary_of(name) in names]


def _unfinished_summaries(store: ByteStore, folder: str) -> list[tuple[int, str]]:
    """Return temporary files of log summaries, each with the summary's last record. A living writer continues without its summary."""
    summaries = [
        (parse_summary_file(temporary_of(entry.name) or ""), entry.name)
        for entry in store.list(folder)
        if not entry.is_dir
    ]
    return sorted((upto, f"{folder}/{name}") for upto, name in summaries if upto is not None)


def execute_sweep(plan: SweepPlan, store: ByteStore) -> SweepReport:
    """Delete what the plan names. What the store fails to delete is left for the next sweep."""
    deleted: list[str] = []
    left: list[str] = []
    for name, _ in plan.directories:
        with contextlib.suppress(StoreUnavailable):
            for upload in store.uploads(f"{plan.run}/{name}"):
                store.drop_upload(upload)
        _delete(store, plan.run, name, deleted, left)
    for key in plan.temporaries:
        with contextlib.suppress(StoreUnavailable):
            folder, _, name = key.rpartition("/")
            if name != READY_DIR:
                store.delete(key)
            elif not delete_announcements(store, folder):
                continue  # a user's file is in it
            deleted.append(key)
    if plan.homes:
        _remove_unneeded_tags(store, plan.run, plan.homes)
    return SweepReport(deleted, left)


def delete_checkpoints(store: ByteStore, run: str, history: History, ids: Sequence[str]) -> tuple[list[str], list[str]]:
    """Delete the directories of those ``ids`` that are retired for good in ``history``. Return ``(deleted, left)``."""
    deleted: list[str] = []
    left: list[str] = []
    homes: set[str] = set()
    for checkpoint_id in ids:
        retired = history.retired.get(checkpoint_id)
        if retired is not None and checkpoint_id not in history.recallable:
            if retired.body.home:  # its files are in the run that this one branched off
                homes.add(retired.body.home)
            else:
                _delete(store, run, retired.body.dir, deleted, left)
    _remove_unneeded_tags(store, run, homes)
    return deleted, left


def _remove_unneeded_tags(store: ByteStore, run: str, homes: Iterable[str]) -> None:
    """Remove the tags in ``homes`` that this run no longer needs. After an error the tag stays, and the next sweep tries again."""
    for home in homes:
        with contextlib.suppress(RelightError):
            remove_branch_tag(store, home, run)


def _delete(store: ByteStore, run: str, name: str, deleted: list[str], left: list[str]) -> None:
    try:
        gone = delete_directory(store, f"{run}/{name}")
    except StoreUnavailable:
        gone = False
    (deleted if gone else left).append(name)
