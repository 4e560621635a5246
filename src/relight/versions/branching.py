"""Branch a run: make a run that begins with another run's checkpoint, without copying its bytes."""

from __future__ import annotations

import contextlib
from shlex import quote
from typing import NamedTuple

import msgspec

from relight.catalog.branches import BRANCH, PREFIX, held_in, lent_by, remove_branch_tag, set_tag
from relight.catalog.run import Run
from relight.errors import CheckpointNotFound, ConfigError
from relight.format.names import check_run_name
from relight.format.records import Body, CommitBody
from relight.log import Checkpoint, Log, LogView, fold
from relight.run_records.best_by import record_best_by


class Branch(NamedTuple):
    """A branch: its name, the run that stores its first checkpoint (``home``), and that checkpoint."""

    name: str
    home: str
    checkpoint: Checkpoint
    made: bool = True
    """True if this call made the branch; False if it existed."""


def branch(run: Run, checkpoint: Checkpoint, name: str, *, by: str = "", why: str = "") -> Branch:
    """Make the run ``name`` in the same store, which continues from ``checkpoint`` of ``run``. Idempotent.

    The checkpoint stays where it is, and retention keeps it there as long as the branch has it. Cost: at most four records, whatever its
    size. Raise ``ConfigError`` if another run of a file of this name exists already.
    """
    name = check_run_name(name)
    home = checkpoint.body.home or run.name
    if name in (run.name, home):
        raise ConfigError(f"a branch of {run.name!r} needs a name of its own")
    target = Log(run.store, name)
    with contextlib.suppress(CheckpointNotFound):  # the usual case: there is no such run yet
        if _is_there(target.read(), checkpoint, home):
            return Branch(name, home, checkpoint, made=False)
    set_tag(Log(run.store, home), f"{PREFIX}{name}", checkpoint.id, by, why, kind=BRANCH)
    target.start()

    def decide(view: LogView) -> tuple[Body, int] | None:
        if _is_there(view, checkpoint, home):
            return None
        return msgspec.structs.replace(
            checkpoint.body,
            home=home,
            new_bytes=0,
            reason=f"branched off {run.name}",
            reason_kind="branch",
            reason_by="",
        ), 0

    target.append(decide)
    record_best_by(target, run.history().best_by, over=False)
    return Branch(name, home, checkpoint)


def branches_of(run: Run) -> list[Branch]:
    """Return the branches that need a checkpoint of this run, sorted by name."""
    return [Branch(name, run.name, checkpoint) for name, checkpoint in lent_by(run.history())]


def drop(run: Run, name: str) -> Branch:
    """Release the checkpoint that ``run`` keeps for a branch that is gone or no longer needs it.

    Raise ``ConfigError`` if the branch still has the checkpoint: it would lose its bytes.
    """
    name = check_run_name(name)
    dropped = next((candidate for candidate in branches_of(run) if candidate.name == name), None)
    if dropped is None:
        raise CheckpointNotFound(f"{run.name} has no branch {name!r}", where=run.name)
    if not remove_branch_tag(run.store, run.name, name):
        has = ", ".join(checkpoint.id for checkpoint in held_in(Run(run.store, name).history(), run.name))
        raise ConfigError(
            f"the run {name} still has {has}, which is stored in {run.name}",
            hint=f"relight prune {quote(f'{run.store.url}/{name}')}, or remove that run",
        )
    return dropped


def _is_there(view: LogView, checkpoint: Checkpoint, home: str) -> bool:
    """Return whether the run is this very branch already. Raise ``ConfigError`` if it is another run."""
    history = fold(view)
    first = next((record.body for record in view.records if isinstance(record.body, CommitBody)), None)
    if first is None and not history.fences:
        return False
    if first is not None and (first.id, first.root, first.home) == (checkpoint.id, checkpoint.body.root, home):
        return True
    raise ConfigError(
        f"there is a run {view.run!r} already",
        where=view.run,
        hint="a branch is a run of its own: give it another name",
    )
