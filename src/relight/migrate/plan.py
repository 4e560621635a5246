"""What a migration will do: what there is, what of that is there already, what is left."""

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
"""Why an attempt took charge of a run."""


@dataclass(frozen=True, slots=True)
class MigratePlan:
    """``todo`` are to be brought, by run and step; ``there`` were; ``unreadable`` cannot be, with why. ``check`` is the part of
    them that is read again and compared, ``compress`` whether what is stored is coded."""

    old: str
    url: str
    todo: list[MigrationSource]
    there: list[MigrationSource]
    unreadable: list[tuple[str, str]]
    check: float
    compress: bool = False

    @property
    def bytes(self) -> int:
        """To be brought."""
        return sum(one.bytes for one in self.todo)

    @property
    def runs(self) -> list[str]:
        """That something is to be brought to."""
        return sorted({one.run for one in self.todo})


def plan_migration(
    old: str, url: str, *, run: str | None = None, check: float = 0.1, compress: bool = False, exclude: Sequence[str] = ()
) -> MigratePlan:  # fmt: skip
    """Look at everything below ``old``, and at what the journal in ``url`` says. ``ConfigError`` if a run of that name is somebody else's.

    ``run``: the name of that run whose checkpoints lie in ``old`` itself. ``exclude``: patterns of paths below ``old`` to leave alone.
    ``CheckpointNotFound`` if there is nothing to bring, nothing brought before and nothing that looks like a checkpoint.
    """
    if not 0 <= check <= 1:
        raise ConfigError(f"a part of {check:g}", hint="--check 10%, full or none")
    store = open_bytes(url)
    done = MigrationState(MigrationJournal(store, place_of(old)))
    found = find(old, run, skip=place_of(url), exclude=exclude)
    if not found.sources and not found.unreadable:
        left = f"; {found.excluded} excluded" if found.excluded else ""
        hint = "check the path; relight import takes one file"
        raise CheckpointNotFound(f"no checkpoint was found below this place{left}", where=old, hint=hint)
    for name in sorted({one.run for one in found.sources} - done.runs):
        _check_free(url, name)
    todo = [one for one in found.sources if one.name not in done.brought]
    there = [one for one in found.sources if one.name in done.brought]
    return MigratePlan(place_of(old), url, todo, there, found.unreadable, check, compress)


def place_of(old: str) -> str:
    """How a journal knows it."""
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
