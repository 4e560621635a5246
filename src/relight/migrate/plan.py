"""Plan a migration: what was found, what is imported already, what is left to import."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from relight.catalog import Run
from relight.errors import CheckpointNotFound, ConfigError
from relight.importers.bucket import is_bucket
from relight.migrate.finding import MigrationSource, find
from relight.migrate.journal import MigrationJournal, MigrationState
from relight.store import open_bytes
from relight.store.urls import absolute

REASON = "migrate"
"""Reason of the attempts that a migration begins."""


@dataclass(frozen=True, slots=True)
class MigratePlan:
    """Sources to import (``todo``), by run and step, imported before (``there``), and ``unreadable``, with the reason.

    ``check``: share of the checkpoints that is read again and compared. ``compress``: store coded chunks.
    """

    old: str
    url: str
    todo: list[MigrationSource]
    there: list[MigrationSource]
    unreadable: list[tuple[str, str]]
    check: float
    compress: bool = False

    @property
    def bytes(self) -> int:
        """Bytes to import."""
        return sum(source.bytes for source in self.todo)

    @property
    def runs(self) -> list[str]:
        """Runs to import to."""
        return sorted({source.run for source in self.todo})


def plan_migration(
    old: str,
    url: str,
    *,
    run: str | None = None,
    check: float = 0.1,
    compress: bool = False,
    exclude: Sequence[str] = (),
) -> MigratePlan:
    """Search ``old``, and read the journal in ``url``.

    ``run``: name of the run for checkpoints directly in ``old``. ``exclude``: patterns of paths to skip. Raise ``ConfigError``
    if a run of the same name was not made by this migration, ``CheckpointNotFound`` if no checkpoint was found.
    """
    if not 0 <= check <= 1:
        raise ConfigError(f"a part of {check:g}", hint="--check 10%, full or none")
    store = open_bytes(url)
    done = MigrationState(MigrationJournal(store, place_of(old)))
    findings = find(old, run, skip=place_of(url), exclude=exclude)
    if not findings.sources and not findings.unreadable:
        left = f"; {findings.excluded} excluded" if findings.excluded else ""
        hint = "check the path; relight import takes one file"
        raise CheckpointNotFound(f"no checkpoint was found below this place{left}", where=old, hint=hint)
    for name in sorted({source.run for source in findings.sources} - done.runs):
        _check_free(url, name)
    todo = [source for source in findings.sources if source.name not in done.brought]
    present = [source for source in findings.sources if source.name in done.brought]
    return MigratePlan(place_of(old), url, todo, present, findings.unreadable, check, compress)


def place_of(old: str) -> str:
    """Return the absolute path or URL by which the journal identifies ``old``."""
    return absolute(old) if is_bucket(old) else os.path.realpath(old)


def _check_free(url: str, name: str) -> None:
    try:
        history = Run(open_bytes(url), name).history()
    except CheckpointNotFound:
        return
    if history.live or history.retired or history.fences:
        raise ConfigError(
            f"run {name!r} is there already, and was not made by this migration",
            where=url,
            hint="name another store, or another run: --run",
        )
