"""Tags that protect the checkpoints which branches need: one tag in the home run's log for each branch that uses a checkpoint stored there.

The order makes it safe. The tag is written before the branch's COMMIT, and removed last. A process that dies in between leaves a tag that
keeps too much, never a branch that lacks bytes. Pruning a run reads only that run's own log.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from relight.errors import CheckpointNotFound, ConfigError, Fenced, RelightError
from relight.format.names import BRANCH_TAGS, STAGES, check_tag_name
from relight.format.records import WORDS_MAX, Body, TagBody
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.observe import emit
from relight.store import ByteStore

TAG, STAGE, BRANCH = "tag", "stage", "branch"
"""Kinds of tags, by the command that may move them."""
PREFIX = BRANCH_TAGS
"""Prefix of the tags that protect what branches need. Reserved: other tags cannot have such a name."""


class Lent(NamedTuple):
    """A checkpoint of this run that a branch needs."""

    branch: str
    """Name of the branch's run."""
    checkpoint: Checkpoint


def set_tag(log: Log, name: str, checkpoint_id: str | None, by: str = "", why: str = "", *, kind: str = TAG) -> None:
    """Point tag ``name`` at a checkpoint, or remove it if ``checkpoint_id`` is None. Cost: one record.

    ``kind``: what the caller may move, a plain tag, a stage or a branch's tag. Raise ``ConfigError`` if ``name`` is of another kind.
    Every TAG record is made here, so a stage cannot be moved as a tag. Raise ``CheckpointNotFound`` if there is no such live checkpoint
    or no such tag, and ``ConfigError`` if no trusted signer signs records of this process.
    """
    if kind == TAG:
        check_free(name)
    elif check_tag_name(name) not in STAGES if kind == STAGE else not name.startswith(PREFIX):
        raise ConfigError(f"{name[:80]!r} is not a {kind}'s tag", where=log.run)
    if max(len(by), len(why)) > WORDS_MAX:
        raise ConfigError(f"a tag's author and reason are at most {WORDS_MAX} characters long")
    log.check_recordable()

    def decide(view: LogView) -> tuple[Body, int]:
        history = fold(view)
        if checkpoint_id is not None and history.find(checkpoint_id) is None:
            raise CheckpointNotFound(f"no checkpoint {checkpoint_id}", where=log.run)
        if checkpoint_id is None and name not in history.tags:
            raise CheckpointNotFound(f"no tag {name!r}", where=log.run)
        if checkpoint_id is not None and history.find(name) is not None:
            raise ConfigError(f"{name!r} cannot be a tag: it is the id of a checkpoint", where=log.run)
        return TagBody(name=name, id=checkpoint_id, by=by, why=why), history.epoch

    log.read()
    log.append(decide)


def tag_if_possible(log: Log, name: str, checkpoint_id: str) -> None:
    """Tag a checkpoint. If the tag cannot be written, emit ``save.failed``: the checkpoint is committed all the same. Raise ``Fenced``."""
    try:
        set_tag(log, name, checkpoint_id)
    except Fenced:
        raise
    except RelightError as error:
        emit(
            "save.failed",
            f"checkpoint {checkpoint_id} is saved, but not tagged {name!r}: {error}",
            id=checkpoint_id,
            kind=error.kind,
        )


def check_free(name: str) -> str:
    """Return ``name``. Raise ``ConfigError`` if it is an invalid tag name, a stage, or reserved for branches."""
    check_tag_name(name)
    if name.startswith(PREFIX):
        raise ConfigError(
            f"tags that begin with {PREFIX} hold what branches need", hint="relight branch makes and drops them"
        )
    if name in STAGES:
        raise ConfigError(
            f"{name!r} is a stage, and a tag cannot move it",
            hint=f"relight tag RUN@WHICH --stage {name}; --back, --clear",
        )
    return name


def lent_by(history: History) -> list[Lent]:
    """Return the checkpoints that branches need, sorted by the branches' names."""
    names = sorted(name for name in history.tags if name.startswith(PREFIX))
    tagged = [(name.removeprefix(PREFIX), history.find(history.tags[name])) for name in names]
    return [Lent(name, checkpoint) for name, checkpoint in tagged if checkpoint is not None]


def needs_of(history: History, checkpoint: Checkpoint) -> list[str]:
    """Return the ids of the checkpoints that hold chunks of this one.

    A checkpoint that a branch uses keeps its original donors even after a repack: the branch may read the chunks from there.
    """
    lent = not checkpoint.self_contained or any(
        target == checkpoint.id and name.startswith(PREFIX) for name, target in history.tags.items()
    )
    return checkpoint.body.requires if lent else checkpoint.requires


def held_in(history: History, home: str) -> list[Checkpoint]:
    """Return a branch's checkpoints, live or recallable, that are stored in run ``home``."""
    return [checkpoint for checkpoint in history.there if checkpoint.body.home == home]


def remove_branch_tag(store: ByteStore, home: str, branch: str) -> bool:
    """Remove the tag of ``branch`` in run ``home`` if the branch is gone or has no checkpoint left there. Return True if it was removed.

    If a record of the branch is damaged, the tag stays: that record may name a checkpoint there.
    """
    with contextlib.suppress(CheckpointNotFound):
        view = Log(store, branch).read()
        if view.faults or held_in(fold(view), home):
            return False
    with contextlib.suppress(CheckpointNotFound):
        set_tag(Log(store, home), f"{PREFIX}{branch}", None, why="the branch has let it go", kind=BRANCH)
        return True
    return False
