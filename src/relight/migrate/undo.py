"""Roll back a migration: remove exactly the checkpoints that it imported."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from relight.catalog import Run
from relight.commit import Attempt
from relight.errors import CheckpointNotFound, CorruptCheckpoint, UnsafeContent
from relight.format.records import Body, RetireBody
from relight.format.root_keys import MIGRATED
from relight.log import Checkpoint, Log, LogView, fold
from relight.log.truncated import refuse_truncated
from relight.migrate.journal import MigrationJournal, MigrationState
from relight.migrate.plan import REASON, place_of
from relight.reclaim import execute_sweep, plan_sweep
from relight.reclaim.needs import not_needed
from relight.reclaim.sweep import delete_checkpoints
from relight.run_records.holds import holds_of
from relight.store import ByteStore, open_bytes


@dataclass(slots=True)
class RollBackReport:
    """Ids removed, by run. ``kept``: ``(id, why)`` of checkpoints that are on hold, tagged, or needed now."""

    gone: dict[str, list[str]] = field(default_factory=dict)
    kept: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Directories that the store could not delete yet: ``relight prune --sweep`` tries again."""


def roll_back(old: str, url: str, *, dry_run: bool = False) -> RollBackReport:
    """Retire and delete the checkpoints imported from ``old``, and nothing else.

    A checkpoint that is on hold or tagged is kept, as is one that another checkpoint needs, even if that other one can only be undeleted.
    The runs' logs record the rollback. After an interruption, call it again to continue. Raise ``CheckpointNotFound`` if nothing was
    imported.
    """
    store = open_bytes(url)
    journal = MigrationJournal(store, place_of(old))
    done = MigrationState(journal)
    brought = _brought(store, journal, done)
    if not any(brought.values()):
        raise CheckpointNotFound("nothing was imported from there", where=f"{url}, from {old}")
    session = 0 if dry_run else journal.begin({"old": place_of(old), "back": sum(map(len, brought.values()))})
    report = RollBackReport()
    for number, (run, imported_ids) in enumerate(sorted(brought.items())):
        if not dry_run:
            ours = all(checkpoint.id in imported_ids for checkpoint in fold(Log(store, run).read()).live)
            if ours:  # then unfinished files belong to a killed session
                Attempt.begin(store, run, reason=REASON)
                execute_sweep(plan_sweep(store, run), store)
        log = Log(store, run)
        going: list[str] = []
        kept: dict[str, str] = {}

        def decide(
            view: LogView,
            imported_ids: set[str] = imported_ids,
            going: list[str] = going,
            kept: dict[str, str] = kept,
        ) -> tuple[Body, int] | None:
            history = fold(view)
            holds = holds_of(history)
            free: list[str] = []
            kept.clear()
            for checkpoint in history.live:
                if checkpoint.id in imported_ids:
                    tags = history.tags_of(checkpoint.id)
                    if checkpoint.id in holds:
                        kept[checkpoint.id] = f"on hold: {holds[checkpoint.id]}"
                    elif tags:
                        kept[checkpoint.id] = f"tagged {', '.join(tags)}"
                    else:
                        free.append(checkpoint.id)
            together = not_needed(history, free)
            going[:] = [checkpoint_id for checkpoint_id in free if checkpoint_id in together]
            kept |= {
                checkpoint_id: "a later checkpoint needs it" for checkpoint_id in free if checkpoint_id not in together
            }
            return (
                (RetireBody(ids=list(going), reason="migration taken back"), history.epoch)
                if going and not dry_run
                else None
            )

        if dry_run:
            decide(log.read())
        else:
            refuse_truncated(store, log)
            log.append(decide)
            history = fold(log.read())
            gone = sorted(imported_ids & history.retired.keys())
            report.left += delete_checkpoints(store, run, history, gone)[1]
            journal.write(session, number, {"kind": "back", "run": run, "ids": gone})
        report.kept += kept.items()
        if going:
            report.gone[run] = list(going)
    return report


def _brought(store: ByteStore, journal: MigrationJournal, done: MigrationState) -> dict[str, set[str]]:
    """Return imported ids by run: those in the journal, and those committed by a process that was killed before it wrote the journal."""
    brought: dict[str, set[str]] = {run: set() for run in done.runs}
    for record in done.brought.values():
        brought.setdefault(str(record["run"]), set()).add(str(record["id"]))
    for name, ids in brought.items():
        run = Run(store, name)
        with contextlib.suppress(CheckpointNotFound):
            for checkpoint in run.history().live:
                if (
                    checkpoint.id not in ids
                    and checkpoint.body.save_reason.kind == "import"
                    and _is_ours(run, checkpoint, journal)
                ):
                    ids.add(checkpoint.id)
    return brought


def _is_ours(run: Run, checkpoint: Checkpoint, journal: MigrationJournal) -> bool:
    try:
        mark = MIGRATED.read(run.open(checkpoint).root.user)
    except (CorruptCheckpoint, UnsafeContent):
        return False
    return mark is not None and mark.get("journal") == journal.prefix
