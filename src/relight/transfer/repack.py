"""Checkpoints that need others' bytes, made to stand by themselves: chains end, and donors may go.

A pack whose chunks lie here and there is written as the file it would have been, beside what there is: whoever reads takes that file, as
it takes one that a repair has made. Then a NOTE says that the checkpoint needs no donors. What it stored of its own stays, as others
may need it; it goes when the checkpoint goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from relight.catalog.branches import needs_of
from relight.catalog.opened import Opened
from relight.catalog.run import Run
from relight.errors import CheckpointNotFound
from relight.format import Digest
from relight.format.manifest import Pack
from relight.format.records import Body, NoteBody
from relight.log import Checkpoint, Log, LogView, fold
from relight.log.history import REPACKED
from relight.store.wrapper import rewrites
from relight.transfer.copying import sound_chunks, write_pack_from


@dataclass(frozen=True, slots=True)
class RepackPlan:
    """Those that are to stand by themselves, oldest first, and at most how many bytes that writes."""

    run: Run
    chosen: list[Checkpoint]
    bytes: int


@dataclass(slots=True)
class RepackReport:
    """What was done. ``freed``: ids that nobody needs any more, as far as these did."""

    repacked: list[str] = field(default_factory=list)
    bytes: int = 0
    freed: list[str] = field(default_factory=list)


def plan_repack(run: Run, ids: Collection[str] | None = None) -> RepackPlan:
    """Of the live ones, or those of ``ids``: all that need others' bytes, but for such as lie in the run that this one branched off."""
    chosen = [one for one in run.history().live if one.requires and not one.body.home and (ids is None or one.id in ids)]
    return RepackPlan(run, chosen, sum(one.body.logical_bytes for one in chosen))


def execute_repack(plan: RepackPlan, progress: Callable[[int], None] | None = None) -> RepackReport:
    """Write their packs, read them back, and tell the log; one after the other. Whoever is killed leaves whole files that the next one
    goes on with. Cost: each is read, written and read once."""
    report, before = RepackReport(), {donor for one in plan.chosen for donor in one.requires}
    for one in plan.chosen:
        opened = plan.run.open(one)
        for part in opened.parts:
            for pack in part.packs:
                if pack.stored is not None:
                    report.bytes += _write(opened, pack, progress)
        opened.store.sync(opened.prefix)
        _record_repacked(Log(plan.run.store, plan.run.name), one.id)
        report.repacked.append(one.id)
    history = plan.run.history()
    needed = {donor for one in history.live for donor in needs_of(history, one)}
    report.freed = sorted(before - needed)
    return report


def _write(opened: Opened, pack: Pack, progress: Callable[[int], None] | None) -> int:
    """The pack as a file, unless there is one that is whole; how many bytes were written."""
    key = f"{opened.prefix}/{pack.file}"
    if _is_whole(opened, pack, key):
        return 0
    with contextlib.closing(sound_chunks(opened, pack, progress)) as chunks:
        write_pack_from(rewrites(opened.store).rewrite(key, pack.size), chunks)
    if not _is_whole(opened, pack, key):
        raise CheckpointNotFound("what was just written reads back otherwise", where=key, hint="check the disk; nothing else was changed")
    return pack.size


def _is_whole(opened: Opened, pack: Pack, key: str) -> bool:
    try:
        reader = opened.store.open(key)
    except CheckpointNotFound:
        return False
    try:
        if reader.size != pack.size:
            return False
        at = 0
        for length, value in pack.chunks:
            held = memoryview(bytearray(length))
            reader.read_into(at, held)
            if Digest(held).digest() != value:
                return False
            at += length
        return True
    finally:
        reader.close()


def _record_repacked(log: Log, checkpoint_id: str) -> None:
    def decide(view: LogView) -> tuple[Body, int] | None:
        history = fold(view)
        one = history.find(checkpoint_id)
        if one is None:
            raise CheckpointNotFound(f"checkpoint {checkpoint_id} was retired meanwhile", where=view.run)
        return (NoteBody(topic=REPACKED, data={"id": checkpoint_id}), history.epoch) if one.requires else None

    log.read()
    log.append(decide)
