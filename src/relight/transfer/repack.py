"""Repack checkpoints that need other checkpoints' bytes, so that they are self-contained: delta chains end, and donors may be deleted.

A pack with chunks in several places is written as one plain file next to its stored chunks. Readers prefer that file, as after a repair.
Then a NOTE records that the checkpoint needs no donors. Its own stored chunks stay, as other checkpoints may need them. They are deleted
with the checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from relight.catalog.branches import needs_of
from relight.catalog.run import Run
from relight.engines import IN_PROCESS, Engine
from relight.errors import CheckpointNotFound
from relight.format import Digest
from relight.format.manifest import Pack
from relight.format.records import Body
from relight.format.topics import REPACKED, RepackNote
from relight.log import Checkpoint, Log, LogView, fold
from relight.reader.by_reference import CheckpointReference, open_reference, reference_to
from relight.reader.opened import Opened
from relight.store.base import rewrites
from relight.transfer.copying import sound_chunks, write_pack_from


@dataclass(frozen=True, slots=True)
class RepackPlan:
    """Checkpoints to repack, oldest first, and the largest number of bytes to write."""

    run: Run
    chosen: list[Checkpoint]
    bytes: int


@dataclass(slots=True)
class RepackReport:
    """Result of a repack. ``freed``: ids of former donors that no live checkpoint needs any more."""

    repacked: list[str] = field(default_factory=list)
    bytes: int = 0
    freed: list[str] = field(default_factory=list)


def plan_repack(run: Run, ids: Collection[str] | None = None) -> RepackPlan:
    """Plan to repack the live checkpoints that need donors, or those in ``ids``. Skips checkpoints stored in the run's branch origin."""
    chosen = [
        checkpoint
        for checkpoint in run.history().live
        if checkpoint.requires and not checkpoint.body.home and (ids is None or checkpoint.id in ids)
    ]
    return RepackPlan(run, chosen, sum(checkpoint.body.logical_bytes for checkpoint in chosen))


def execute_repack(
    plan: RepackPlan, progress: Callable[[int], None] | None = None, *, engine: Engine = IN_PROCESS
) -> RepackReport:
    """Write each checkpoint's packs, read them back, and record it in the log; one checkpoint after the other.

    The engine's processes write packs.
    An interruption leaves whole files, with which the next call continues. Cost: reads, writes and reads back each pack once.
    """
    report, before = RepackReport(), {donor for checkpoint in plan.chosen for donor in checkpoint.requires}
    for checkpoint in plan.chosen:
        opened = plan.run.open(checkpoint)
        if engine.is_local:
            packs = (pack for part in opened.parts for pack in part.packs if pack.stored is not None)
            report.bytes += sum(_write(opened, pack, progress) for pack in packs)
        else:
            for (_, part, pack), written in engine.run(_write_one, _tasks(opened)):
                report.bytes += written
                if progress is not None:
                    progress(opened.parts[part].packs[pack].size)
        opened.store.sync(opened.prefix)
        _record_repacked(Log(plan.run.store, plan.run.name), checkpoint.id)
        report.repacked.append(checkpoint.id)
    history = plan.run.history()
    needed = {donor for checkpoint in history.live for donor in needs_of(history, checkpoint)}
    report.freed = sorted(before - needed)
    return report


def _tasks(opened: Opened) -> Iterator[tuple[CheckpointReference, int, int]]:
    """Yield the packs to write, by the numbers of part and pack."""
    reference = reference_to(opened)
    for number, part in enumerate(opened.parts):
        yield from ((reference, number, index) for index, pack in enumerate(part.packs) if pack.stored is not None)


def _write_one(task: tuple[CheckpointReference, int, int]) -> int:
    """Write one pack, in any process. Return the bytes written."""
    reference, part, pack = task
    opened = open_reference(reference)
    return _write(opened, opened.parts[part].packs[pack], None)


def _write(opened: Opened, pack: Pack, progress: Callable[[int], None] | None) -> int:
    """Write a pack as one file, unless a whole one exists. Return the bytes written."""
    key = f"{opened.prefix}/{pack.file}"
    if _is_whole(opened, pack, key):
        return 0
    with contextlib.closing(sound_chunks(opened, pack, progress)) as chunks:
        write_pack_from(rewrites(opened.store).rewrite(key, pack.size), chunks, pack.size, key)
    if not _is_whole(opened, pack, key):
        raise CheckpointNotFound(
            "the file just written reads back differently", where=key, hint="check the disk; nothing else was changed"
        )
    return pack.size


def _is_whole(opened: Opened, pack: Pack, key: str) -> bool:
    try:
        reader = opened.store.open(key)
    except CheckpointNotFound:
        return False
    try:
        if reader.size != pack.size:
            return False
        offset = 0
        for length, value in pack.chunks:
            chunk = memoryview(bytearray(length))
            reader.read_into(offset, chunk)
            if Digest(chunk).digest() != value:
                return False
            offset += length
        return True
    finally:
        reader.close()


def _record_repacked(log: Log, checkpoint_id: str) -> None:
    def decide(view: LogView) -> tuple[Body, int] | None:
        history = fold(view)
        checkpoint = history.find(checkpoint_id)
        if checkpoint is None:
            raise CheckpointNotFound(f"checkpoint {checkpoint_id} was retired meanwhile", where=view.run)
        return (REPACKED.note(RepackNote(id=checkpoint_id)), history.epoch) if checkpoint.requires else None

    log.read()
    log.append(decide)
