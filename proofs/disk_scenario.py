"""What the engines add to ``relight.testing.scenario``: a simulated disk, a large save, a short log, a lost log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import relight.commit.save as save_module
import relight.format.names as names_module
import relight.log.log as chain_module
import relight.log.summary as summary_module
import relight.reclaim.sweep as sweep_module
from relight.commit import Attempt
from relight.errors import CorruptCheckpoint, RelightError
from relight.log import Log, fold
from relight.log.identity import checkpoint_dirs
from relight.reclaim import execute_rebuild, plan_rebuild
from relight.store import ByteStore
from relight.testing.disks import SimulatedDisk
from relight.testing.scenario import RUN, Fact, KnownFacts, check_restore, log_files, patched, save

ROOT = "/disk/above/store"
"""Path on the simulated disk. ``/disk`` exists and is durable; the run makes the directories below it."""


def fresh_disk() -> SimulatedDisk:
    """Return a simulated disk with one durable directory."""
    disk = SimulatedDisk()
    disk.mkdir("/disk")
    return disk.sync()


def save_large(store: ByteStore, seed: int) -> Iterator[Fact]:
    """Begin an attempt that saves one state, large enough for direct I/O."""
    attempt = Attempt.begin(store, RUN, reason="large")
    yield ("begun", str(attempt.epoch))
    yield from save(attempt, f"{seed}/large", 0)


def check_lost_log(store: ByteStore, acknowledged: Sequence[Fact]) -> list[str]:
    """Delete and rebuild the run's log. Return what is wrong.

    Wrong is: an attempt begins without the log, a file is gone, the rebuilt log lacks a checkpoint that was live, or
    a checkpoint does not restore.
    """
    log, facts = Log(store, RUN), KnownFacts.from_facts(acknowledged)
    try:
        before = {checkpoint.id for checkpoint in fold(log.read()).live}
    except RelightError:
        return []
    for key in log_files(store):
        store.delete(key)
        store.delete_dir(key.rpartition("/")[0])
    directories = checkpoint_dirs(store, RUN)
    files = sorted(f"{name}/{entry.name}" for name in directories for entry in store.list(f"{RUN}/{name}"))
    if not directories:
        return []
    try:
        Attempt.begin(store, RUN)
        return ["I1: an attempt has begun though the log is missing"]
    except CorruptCheckpoint:
        pass
    try:
        execute_rebuild(plan_rebuild(store, RUN), store)
    except CorruptCheckpoint:
        return ["I1: the log could not be rebuilt"] if before else []  # no directory has a root
    view = Log(store, RUN).read()
    history = fold(view)
    problems = [
        f"I1: checkpoint {lost} is not listed by the rebuilt log" for lost in sorted(before - history.by_id.keys())
    ]
    for checkpoint in history.live:
        problems += check_restore(store, view, checkpoint, facts, "I2: a rebuilt")
    now = sorted(
        f"{name}/{entry.name}" for name in checkpoint_dirs(store, RUN) for entry in store.list(f"{RUN}/{name}")
    )
    return problems + ([] if now == files else ["I1: rebuilding the log has removed or added files"])


@contextlib.contextmanager
def short_folders(seed: int) -> Iterator[None]:
    """Within the block, for an odd seed: a summary after each third record, and folders of five records.

    All records have one time, as a summary's name has its hash: a point must have the same calls each time.
    """
    if not seed % 2:
        yield
        return
    clocks: list[dict[str, Any]] = [chain_module.Log.__init__.__kwdefaults__, Attempt.begin.__func__.__kwdefaults__]  # type: ignore[attr-defined, list-item]
    now = clocks[0]["now"]
    short = patched(
        (summary_module, "SUMMARY_EVERY", 3),
        (names_module, "FOLDER_RECORDS", 5),
        (sweep_module, "FOLDERS_SWEPT", 99),
        (save_module, "now_text", lambda: "2026-01-01T00:00:00Z"),
    )
    for defaults in clocks:
        defaults["now"] = lambda: "2026-01-01T00:00:00Z"
    try:
        with short:
            yield
    finally:
        for defaults in clocks:
            defaults["now"] = now
