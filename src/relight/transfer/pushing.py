"""One run made to have all that another has: its checkpoints, and the tags on them. What ``relight push`` and ``relight pull`` do.

The copying is ``copying``'s: verified, resumable, nobody is fenced. Tags follow the checkpoints they are on; a tag that the other side has
on another checkpoint stays where it is, unless it is said that it is to be moved. Stages do not follow: ``relight promote`` moves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from relight.catalog import Run
from relight.catalog.branches import PREFIX
from relight.errors import CheckpointNotFound
from relight.format.names import STAGES
from relight.log import History
from relight.store import ByteStore
from relight.transfer.copying import CopyPlan, CopyReport, Progress, execute_copy, plan_copy


class TagMove(NamedTuple):
    """Tag ``name``, which is on ``id`` here, and on ``there`` at the other side: None if there is none of that name."""

    name: str
    id: str
    there: str | None


@dataclass(frozen=True, slots=True)
class PushPlan:
    """``copy`` is what the other side lacks, ``tags`` those that it lacks or has elsewhere."""

    copy: CopyPlan
    tags: list[TagMove]
    force: bool

    @property
    def refused(self) -> list[TagMove]:
        """Tags that stay where they are at the other side."""
        return [] if self.force else [one for one in self.tags if one.there is not None]


@dataclass(slots=True)
class PushReport:
    """What was copied, which tags were set: ``(name, id there)``, and which were not."""

    copy: CopyReport
    tagged: list[tuple[str, str]] = field(default_factory=list)
    refused: list[TagMove] = field(default_factory=list)


def plan_push(source: Run, destination: ByteStore, run: str, *, force: bool = False) -> PushPlan:
    """Everything that is live in ``source``, and neither is nor was there. ``ConfigError`` if the other side has gone its own way, or holds
    another run: it would resume from what is copied. ``force``: copy and move tags all the same."""
    history = source.history()
    copy = plan_copy(source, history.live, destination, run, as_newest=force, again=False)
    there = _history(destination, run)
    known = dict(copy.there)
    tags = [
        TagMove(name, held, there.tags.get(name))
        for name, held in sorted(history.tags.items())
        if not name.startswith(PREFIX)
        and name not in STAGES
        and history.find(held) is not None
        and (name not in there.tags or there.tags[name] != known.get(held))
    ]
    return PushPlan(copy, tags, force)


def execute_push(plan: PushPlan, *, progress: Progress | None = None) -> PushReport:
    """Copy, oldest first, then set the tags. Said again after an interruption, it goes on where it was."""
    report = PushReport(execute_copy(plan.copy, progress=progress), refused=plan.refused)
    ids: Mapping[str, str] = {**dict(plan.copy.there), **dict(report.copy.copied)}
    target = Run(plan.copy.destination, plan.copy.run)
    for one in plan.tags:
        if one not in report.refused and one.id in ids:
            target.tag(one.name, ids[one.id])
            report.tagged.append((one.name, ids[one.id]))
    return report


def _history(store: ByteStore, run: str) -> History:
    try:
        return Run(store, run).history()
    except CheckpointNotFound:
        return History()
