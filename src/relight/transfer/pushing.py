"""Copy a run's missing checkpoints and their tags to another run, for ``relight cp`` of a whole run.

``copying`` copies: verified, resumable, without fencing. Tags are copied with their checkpoints. A tag that the destination has on another
checkpoint stays there, unless ``force``. Stages are not copied: ``relight tag --stage`` moves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from relight.catalog import Run
from relight.catalog.branches import PREFIX
from relight.engines import IN_PROCESS, Engine
from relight.errors import CheckpointNotFound
from relight.format.names import STAGES
from relight.log import History
from relight.store import ByteStore
from relight.transfer.copying import CopyPlan, CopyReport, Progress, plan_copy
from relight.transfer.shared_copy import execute_copy


class TagMove(NamedTuple):
    """Tag ``name``, which is on ``id`` here and on ``there`` at the destination; None if the destination lacks it."""

    name: str
    id: str
    there: str | None


@dataclass(frozen=True, slots=True)
class PushPlan:
    """``copy``: checkpoints that the destination lacks. ``tags``: tags that it lacks or has on another checkpoint."""

    copy: CopyPlan
    tags: list[TagMove]
    force: bool

    @property
    def refused(self) -> list[TagMove]:
        """Tags that stay unchanged at the destination."""
        return [] if self.force else [move for move in self.tags if move.there is not None]


@dataclass(slots=True)
class PushReport:
    """What was copied, the tags that were set, as ``(name, id there)``, and the tags that were not."""

    copy: CopyReport
    tagged: list[tuple[str, str]] = field(default_factory=list)
    refused: list[TagMove] = field(default_factory=list)


def plan_push(source: Run, destination: ByteStore, run: str, *, force: bool = False) -> PushPlan:
    """Plan to copy every live checkpoint of ``source`` that the destination does not have and never had.

    Raise ``ConfigError`` if the destination has diverged or holds another run: it would resume from the copies. ``force``: copy and move
    tags all the same.
    """
    history = source.history()
    copy = plan_copy(source, history.live, destination, run, as_newest=force, again=False)
    remote = _history(destination, run)
    known = dict(copy.there)
    tags = [
        TagMove(name, checkpoint_id, remote.tags.get(name))
        for name, checkpoint_id in sorted(history.tags.items())
        if not name.startswith(PREFIX)
        and name not in STAGES
        and history.find(checkpoint_id) is not None
        and (name not in remote.tags or remote.tags[name] != known.get(checkpoint_id))
    ]
    return PushPlan(copy, tags, force)


def execute_push(plan: PushPlan, *, progress: Progress | None = None, engine: Engine = IN_PROCESS) -> PushReport:
    """Copy, oldest first, then set the tags. After an interruption, plan and execute again to continue."""
    report = PushReport(execute_copy(plan.copy, progress=progress, engine=engine), refused=plan.refused)
    ids: Mapping[str, str] = {**dict(plan.copy.there), **dict(report.copy.copied)}
    target = Run(plan.copy.destination, plan.copy.run)
    for move in plan.tags:
        if move not in report.refused and move.id in ids:
            target.tag(move.name, ids[move.id])
            report.tagged.append((move.name, ids[move.id]))
    return report


def _history(store: ByteStore, run: str) -> History:
    try:
        return Run(store, run).history()
    except CheckpointNotFound:
        return History()
