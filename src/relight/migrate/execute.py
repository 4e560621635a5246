"""Doing a migration: take charge of the runs, bring what is missing, check some or all of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from relight.commit import Attempt
from relight.errors import LeaseHeld
from relight.format import hexdigest
from relight.migrate.engines import outcomes
from relight.migrate.finding import MigrationSource
from relight.migrate.journal import MigrationJournal, MigrationState
from relight.migrate.plan import REASON, MigratePlan
from relight.migrate.work import MigrationTask
from relight.reclaim import execute_sweep, plan_sweep
from relight.store import open_bytes

Progress = Callable[[int], None]


@dataclass(slots=True)
class MigrateReport:
    """What was done. ``failed``: ``(source, error, what, hint)``; ``wrong``: ``(source, id, what)`` of what was checked and is not
    right."""

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
        """Whether all that was found is there, and right as far as it was checked."""
        return not (self.failed or self.unreadable or self.wrong)


def execute_migration(
    plan: MigratePlan, *, engine: str = "local", jobs: int | None = None, progress: Progress | None = None
) -> MigrateReport:
    """Bring, then check. Said again after whatever ended it, it goes on where it was.

    First a session is begun, then each run is taken charge of: whoever is left of an earlier session cannot commit any more, so what it was
    at may be swept, and nothing comes twice. ``LeaseHeld`` if another session begins meanwhile.
    """
    started, store = time.monotonic(), open_bytes(plan.url)
    journal = MigrationJournal(store, plan.old)
    report = MigrateReport(there=len(plan.there), unreadable=list(plan.unreadable))
    if not plan.todo and not any(_to_check(plan, journal, 0)):
        return report
    session = journal.begin(
        {"old": plan.old, "runs": plan.runs, "sources": len(plan.todo), "engine": engine, "host": os.uname().nodename, "pid": os.getpid()}
    )
    for run in plan.runs:
        Attempt.begin(store, run, reason=REASON)
        execute_sweep(plan_sweep(store, run), store)
    jobs = jobs or max(1, len(os.sched_getaffinity(0)))
    for task, said in _run(engine, jobs, list(_to_bring(plan, session))):
        _take(report, task, said)
        if progress is not None:
            progress(task.bytes)
    tasks = list(_to_check(plan, journal, session))
    for task, said in _run(engine, jobs, tasks):
        report.checked += 1
        if not said["ok"]:
            report.wrong.append((task.source, task.id, str(said["what"])))
        if progress is not None:
            progress(task.bytes)
    report.seconds = round(time.monotonic() - started, 3)
    return report


def _run(engine: str, jobs: int, tasks: Sequence[MigrationTask]) -> Iterator[tuple[MigrationTask, dict[str, Any]]]:
    with closing(outcomes(engine, jobs, tasks)) as found:  # type: ignore[type-var]
        for task, said in found:
            if said.get("error") == LeaseHeld.kind:
                raise LeaseHeld(str(said["what"]), where=str(said["where"]), hint=str(said["hint"]))
            yield task, said


def _take(report: MigrateReport, task: MigrationTask, said: dict[str, Any]) -> None:
    if said["ok"]:
        report.brought.append(said)
        report.bytes += task.bytes
    else:
        report.failed.append((task.source, str(said["error"]), str(said["what"]), str(said["hint"])))


def _to_bring(plan: MigratePlan, session: int) -> Iterator[MigrationTask]:
    last: dict[str, int] = {}
    for number, one in enumerate(plan.todo):
        facts = (plan.url, plan.old, session, number, one.name, one.path, one.run, one.step, one.bytes)
        yield MigrationTask("bring", *facts, after=last.get(one.run), compress=plan.compress)
        last[one.run] = number


def _to_check(plan: MigratePlan, journal: MigrationJournal, session: int) -> Iterator[MigrationTask]:
    """Of all that was ever brought: those that fall to the lot, which is the same each time, and of each run the newest."""
    if not plan.check:
        return
    done = MigrationState(journal)
    found = [one for one in [*plan.there, *plan.todo] if one.name in done.brought]
    newest: dict[str, MigrationSource] = {}
    for one in found:
        if one.run not in newest or one.step >= newest[one.run].step:
            newest[one.run] = one
    number = len(plan.todo)
    for one in found:
        checkpoint_id = str(done.brought[one.name]["id"])
        drawn = int(hexdigest(one.name.encode())[:8], 16) < plan.check * 2**32 or newest[one.run] is one
        if drawn and checkpoint_id not in done.checked:
            yield MigrationTask(
                "check", plan.url, plan.old, session, number, one.name, one.path, one.run, one.step, one.bytes, None, checkpoint_id
            )
            number += 1
