"""What a run lends to those that branched off it: a tag in its log, for as long as any of them has a checkpoint that lies here.

The order is what makes it safe. The tag comes first, then the branch's COMMIT; and the tag goes last. Whoever dies in between leaves a tag
that keeps too much, never a branch that is kept too little. Pruning a run looks at nothing but its own log.
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
"""Kinds of tags, by who may move them."""
PREFIX = BRANCH_TAGS
"""Of tags that hold what branches need; nobody else may give such a name."""


class Lent(NamedTuple):
    """What a branch holds of this run."""

    branch: str
    """The name of that run."""
    checkpoint: Checkpoint


def set_tag(log: Log, name: str, checkpoint_id: str | None, by: str = "", why: str = "", *, kind: str = TAG) -> None:
    """Point tag ``name`` at a checkpoint, or take it away with None. Cost: one record.

    ``kind``: what the caller may move, a plain tag, a stage or a branch's tag; ``ConfigError`` if ``name`` is of another kind. Every TAG
    record is made here, so a stage cannot be moved as a tag. ``CheckpointNotFound`` if there is no such live checkpoint, or no such tag.
    """
    if kind == TAG:
        check_free(name)
    elif check_tag_name(name) not in STAGES if kind == STAGE else not name.startswith(PREFIX):
        raise ConfigError(f"{name[:80]!r} is not a {kind}'s tag", where=log.run)
    if max(len(by), len(why)) > WORDS_MAX:
        raise ConfigError(f"what is said of a tag is at most {WORDS_MAX} characters long")

    def decide(view: LogView) -> tuple[Body, int]:
        history = fold(view)
        if checkpoint_id is not None and history.find(checkpoint_id) is None:
            raise CheckpointNotFound(f"no checkpoint {checkpoint_id}", where=log.run)
        if checkpoint_id is None and name not in history.tags:
            raise CheckpointNotFound(f"no tag {name!r}", where=log.run)
        return TagBody(name=name, id=checkpoint_id, by=by, why=why), history.epoch

    log.read()
    log.append(decide)


def tag_if_possible(log: Log, name: str, checkpoint_id: str) -> None:
    """Tag a checkpoint; what is committed is no less so if its tag cannot be written: that is told. ``Fenced`` is the caller's."""
    try:
        set_tag(log, name, checkpoint_id)
    except Fenced:
        raise
    except RelightError as error:
        emit("save.failed", f"checkpoint {checkpoint_id} is saved, but not tagged {name!r}: {error}", id=checkpoint_id, kind=error.kind)


def check_free(name: str) -> str:
    """Return ``name``. ``ConfigError`` if it cannot be a tag, is a stage, or holds what a branch needs."""
    check_tag_name(name)
    if name.startswith(PREFIX):
        raise ConfigError(f"tags that begin with {PREFIX} hold what branches need", hint="relight branch makes and drops them")
    if name in STAGES:
        raise ConfigError(f"{name!r} is a stage, and a tag cannot move it", hint=f"relight promote RUN@WHICH {name}; --back, --clear")
    return name


def lent_by(history: History) -> list[Lent]:
    """What branches hold, by their names."""
    names = sorted(name for name in history.tags if name.startswith(PREFIX))
    found = [(name.removeprefix(PREFIX), history.find(history.tags[name])) for name in names]
    return [Lent(name, one) for name, one in found if one is not None]


def needs_of(history: History, one: Checkpoint) -> list[str]:
    """Whose bytes a checkpoint needs. What is lent to a branch needs what it always has, also if it was repacked: the branch may make use
    of that where it lies."""
    lent = any(target == one.id and name.startswith(PREFIX) for name, target in history.tags.items()) if one.self_contained else True
    return one.body.requires if lent else one.requires


def held_in(history: History, home: str) -> list[Checkpoint]:
    """What a branch has, or may recall, that lies in run ``home``."""
    return [one for one in history.there if one.body.home == home]


def let_go(store: ByteStore, home: str, branch: str) -> bool:
    """Take the tag of ``branch`` in run ``home`` away, if the branch has nothing left that lies there, or is gone. Whether it did.

    Not if a record of the branch is damaged: it may be what says that it has.
    """
    with contextlib.suppress(CheckpointNotFound):
        view = Log(store, branch).read()
        if view.faults or held_in(fold(view), home):
            return False
    with contextlib.suppress(CheckpointNotFound):
        set_tag(Log(store, home), f"{PREFIX}{branch}", None, why="the branch has let it go", kind=BRANCH)
        return True
    return False
