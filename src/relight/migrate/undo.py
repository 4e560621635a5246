"""Taking back what a migration brought: exactly that."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from relight.catalog import Run
from relight.commit import Attempt
from relight.errors import CheckpointNotFound, CorruptCheckpoint, UnsafeContent
from relight.format.records import Body, RetireBody
from relight.log import Checkpoint, Log, LogView, fold
from relight.log.truncated import refuse_truncated
from relight.migrate.journal import MigrationJournal, MigrationState
from relight.migrate.plan import REASON, place_of
from relight.migrate.work import MIGRATED
from relight.reclaim import execute_sweep, plan_sweep
from relight.reclaim.sweep import delete_checkpoints
from relight.store import ByteStore, open_bytes


@dataclass(slots=True)
class RollBackReport:
    """Ids by run; ``kept`` are those that something needs now: ``(id, why)``."""

    gone: dict[str, list[str]] = field(default_factory=dict)
    kept: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Directories that the store would not delete yet: ``relight prune --sweep`` tries again."""


def roll_back(old: str, url: str, *, dry_run: bool = False) -> RollBackReport:
    """Retire and delete what was brought from ``old``, and nothing else. A tag, or a later checkpoint that needs it, keeps one; the logs of
    the runs stay, and say so. Said again, it goes on where it was. ``CheckpointNotFound`` if nothing was brought."""
    store = open_bytes(url)
    journal = MigrationJournal(store, place_of(old))
    done = MigrationState(journal)
    brought = _brought(store, journal, done)
    if not any(brought.values()):
        raise CheckpointNotFound("nothing was brought here from there", where=f"{url}, from {old}")
    session = 0 if dry_run else journal.begin({"old": place_of(old), "back": sum(map(len, brought.values()))})
    report = RollBackReport()
    for number, (run, mine) in enumerate(sorted(brought.items())):
        if not dry_run:
            ours = all(one.id in mine for one in fold(Log(store, run).read()).live)
            if ours:  # what a killed session left is nobody's then
                Attempt.begin(store, run, reason=REASON)
                execute_sweep(plan_sweep(store, run), store)
        log = Log(store, run)
        going: list[str] = []

        def decide(
            view: LogView, mine: set[str] = mine, going: list[str] = going, report: RollBackReport = report
        ) -> tuple[Body, int] | None:
            history = fold(view)
            needed = {donor for one in history.live if one.id not in mine for donor in one.requires}
            going.clear()
            for one in history.live:
                if one.id in mine:
                    tags = history.tags_of(one.id)
                    if tags or one.id in needed:
                        report.kept.append((one.id, f"tagged {', '.join(tags)}" if tags else "a later checkpoint needs it"))
                    else:
                        going.append(one.id)
            return (RetireBody(ids=list(going), reason="migration taken back"), history.epoch) if going and not dry_run else None

        if dry_run:
            decide(log.read())
        else:
            refuse_truncated(store, log)
            log.append(decide)
            history = fold(log.read())
            gone = sorted(mine & history.retired.keys())
            report.left += delete_checkpoints(store, run, history, gone)[1]
            journal.write(session, number, {"kind": "back", "run": run, "ids": gone})
        if going:
            report.gone[run] = list(going)
    return report


def _brought(store: ByteStore, journal: MigrationJournal, done: MigrationState) -> dict[str, set[str]]:
    """Ids by run: what the journal says, and what was committed by somebody who was killed before the journal had it."""
    found: dict[str, set[str]] = {run: set() for run in done.runs}
    for one in done.brought.values():
        found.setdefault(str(one["run"]), set()).add(str(one["id"]))
    for name, ids in found.items():
        run = Run(store, name)
        with contextlib.suppress(CheckpointNotFound):
            for checkpoint in run.history().live:
                if checkpoint.id not in ids and checkpoint.body.reason == "import" and _is_ours(run, checkpoint, journal):
                    ids.add(checkpoint.id)
    return found


def _is_ours(run: Run, checkpoint: Checkpoint, journal: MigrationJournal) -> bool:
    try:
        said = run.open(checkpoint).root.user.get(MIGRATED)
    except (CorruptCheckpoint, UnsafeContent):
        return False
    return isinstance(said, dict) and said.get("journal") == journal.prefix
