"""Execute a migration: take charge of the runs, import what is missing, check a sample or all of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from relight.commit import Attempt
from relight.engines import IN_PROCESS, Engine
from relight.errors import LeaseHeld
from relight.format import hexdigest
from relight.log.identity import require_store
from relight.migrate.finding import MigrationSource
from relight.migrate.journal import MigrationJournal, MigrationState
from relight.migrate.plan import REASON, MigratePlan
from relight.migrate.work import MigrationTask, work
from relight.reclaim import execute_sweep, plan_sweep
from relight.store import open_bytes

Progress = Callable[[int], None]


@dataclass(slots=True)
class MigrateReport:
    """Result of a migration. ``failed``: ``(source, error, what, hint)``; ``wrong``: ``(source, id, what)`` of failed checks."""

    brought: list[dict[str, Any]] = field(default_factory=list)
    there: int = 0
    failed: list[tuple[str, str, str, str]] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    checked: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything found was imported, and all checks passed."""
        return not (self.failed or self.unreadable or self.wrong)


def execute_migration(
    plan: MigratePlan, *, engine: Engine = IN_PROCESS, progress: Progress | None = None
) -> MigrateReport:
    """Import, then check. After an interruption, plan and execute again to continue.

    First a session is begun, then an attempt in each run. So processes of an earlier session cannot commit any more: their unfinished files
    may be swept, and nothing is imported twice. Raise ``LeaseHeld`` if another session begins meanwhile.
    """
    started, store = time.monotonic(), open_bytes(plan.url)
    journal = MigrationJournal(store, plan.old)
    report = MigrateReport(there=len(plan.there), unreadable=list(plan.unreadable))
    if not plan.todo and not any(_to_check(plan, journal, 0)):
        return report
    require_store(
        store
    )  # first: without relight.json, a process that dies here leaves a directory that no start accepts
    session = journal.begin(
        {
            "old": plan.old,
            "runs": plan.runs,
            "sources": len(plan.todo),
            "engine": engine.name,
            "host": os.uname().nodename,
            "pid": os.getpid(),
        }
    )
    for run in plan.runs:
        Attempt.begin(store, run, reason=REASON)
        execute_sweep(plan_sweep(store, run), store)
    for task, result in _run(engine, list(_to_bring(plan, session))):
        _take(report, task, result)
        if progress is not None:
            progress(task.bytes)
    tasks = list(_to_check(plan, journal, session))
    for task, result in _run(engine, tasks):
        report.checked += 1
        if not result["ok"]:
            report.wrong.append((task.source, task.id, str(result["what"])))
        if progress is not None:
            progress(task.bytes)
    report.seconds = round(time.monotonic() - started, 3)
    return report


def _run(engine: Engine, tasks: Sequence[MigrationTask]) -> Iterator[tuple[MigrationTask, dict[str, Any]]]:
    # a lost task is not run again here: it may have committed. The next session finds out.
    with closing(engine.run(work, tasks, tries=1)) as results:
        for task, result in results:
            if result.get("error") == LeaseHeld.kind:
                raise LeaseHeld(str(result["what"]), where=str(result["where"]), hint=str(result["hint"]))
            yield task, result


def _take(report: MigrateReport, task: MigrationTask, result: dict[str, Any]) -> None:
    if result["ok"]:
        report.brought.append(result)
        report.bytes += task.bytes
    else:
        report.failed.append((task.source, str(result["error"]), str(result["what"]), str(result["hint"])))


def _to_bring(plan: MigratePlan, session: int) -> Iterator[MigrationTask]:
    last: dict[str, int] = {}
    for number, source in enumerate(plan.todo):
        facts = (plan.url, plan.old, session, number, source.name, source.path, source.run, source.step, source.bytes)
        yield MigrationTask("bring", *facts, after=last.get(source.run), compress=plan.compress)
        last[source.run] = number


def _to_check(plan: MigratePlan, journal: MigrationJournal, session: int) -> Iterator[MigrationTask]:
    """Yield check tasks for a sample of everything imported so far, and for the newest checkpoint of each run.

    The sample depends only on the names, so it is the same each time.
    """
    if not plan.check:
        return
    done = MigrationState(journal)
    candidates = [source for source in [*plan.there, *plan.todo] if source.name in done.brought]
    newest: dict[str, MigrationSource] = {}
    for source in candidates:
        if source.run not in newest or source.step >= newest[source.run].step:
            newest[source.run] = source
    number = len(plan.todo)
    for source in candidates:
        checkpoint_id = str(done.brought[source.name]["id"])
        drawn = int(hexdigest(source.name.encode())[:8], 16) < plan.check * 2**32 or newest[source.run] is source
        if drawn and checkpoint_id not in done.checked:
            yield MigrationTask(
                "check",
                plan.url,
                plan.old,
                session,
                number,
                source.name,
                source.path,
                source.run,
                source.step,
                source.bytes,
                None,
                checkpoint_id,
            )
            number += 1
