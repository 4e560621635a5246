"""Execute an export: verify every chunk while reading, in bounded memory, and name the files when all of them are durable."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from relight.audit import recorded
from relight.audit.facts import ActionFacts
from relight.engines import IN_PROCESS, Engine
from relight.export.atomic_output import Landing
from relight.export.average import read_average, readers_of
from relight.export.outfile import ExportBuffers, OutFile
from relight.export.plan import ExportPlan
from relight.export.tasks import export_slabs, export_tasks
from relight.export.writing import Outgoing, Straight, put_slab, targets_of, write_trailing
from relight.layout import Sink
from relight.reader.chunk_reader import read_tensors
from relight.reader.merged_parts import MergedCheckpoint
from relight.reader.slab_reader import Slab, SlabReader, batches, is_straight, slabs_of, straight_run

Progress = Callable[[int], None]
SLAB_ELEMENTS = 4 << 20
"""Elements of a slab, or of several slabs of small tensors that are read together."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Result of an export. ``overflowed``: by tensor, the number of finite values that are infinite in the target dtype.

    ``from_last``: tensors that cannot be averaged and differ, so that the last checkpoint's values were taken.
    """

    path: str
    files: list[str]
    tensors: int
    bytes: int
    overflowed: dict[str, int]
    from_last: list[str]
    seconds: float


def execute_export(plan: ExportPlan, progress: Progress | None = None, *, engine: Engine = IN_PROCESS) -> ExportReport:
    """Read, verify, convert, write, and move to the target. The engine's processes must see the target's directory.

    Raise ``CorruptCheckpoint`` if a byte is not what was committed; the target then does not exist. Memory: as ``read_tensors``, and
    ``BLOCKS_MAX`` blocks; a slab for tensors in non-contiguous pieces and for averages. If ``RELIGHT_AUDIT`` names an audit log, the export
    is recorded there before anything is written.
    """
    with recorded("export", f"{plan.opened.store.url}/{plan.opened.prefix}", _facts(plan)):
        return _execute(plan, progress, engine)


def _facts(plan: ExportPlan) -> ActionFacts:
    """Return the fields of the export's audit record."""
    checkpoint = plan.opened.checkpoint
    names = ", ".join(entry.name for entry in plan.entries)
    return ActionFacts(
        plan.opened.prefix.partition("/")[0],
        checkpoint.id,
        after=plan.path,
        given={"target": plan.path, "names": names},
    )


def _execute(plan: ExportPlan, progress: Progress | None, engine: Engine) -> ExportReport:
    begun = time.monotonic()
    with Landing(plan.path, folder=plan.folder, overwrite=plan.options.overwrite) as landing:
        files: list[OutFile] = []
        blocks = ExportBuffers()
        with ExitStack() as failing:
            for output in plan.files:
                files.append(OutFile(os.path.join(landing.staging, output.name), output.size, blocks))
                failing.callback(files[-1].abort)
            targets = targets_of(plan.files, files)
            write_trailing(plan.files, files)
            tensors = {
                index: Outgoing(
                    plan.whole.tensors[plan.entries[index].tensor].dtype, plan.entries[index].dtype, offsets
                )
                for index, offsets in targets.items()
            }
            if engine.is_local:
                _pour(plan, tensors, progress)
            else:
                _share_out(plan, tensors, landing.staging, engine, progress)
            for tensor in tensors.values():
                tensor.finish()
            for file in files:
                file.finish()
            failing.pop_all()
        landing.put([file.name for file in plan.files])
    from_last = sorted(plan.mixed.from_last) if plan.mixed is not None else []
    over = {plan.entries[index].name: tensor.overflowed for index, tensor in tensors.items() if tensor.overflowed}
    return ExportReport(
        landing.path,
        [output.name for output in plan.files],
        len(plan.entries),
        plan.bytes_written,
        over,
        from_last,
        time.monotonic() - begun,
    )


def _share_out(
    plan: ExportPlan, tensors: dict[int, Outgoing], staging: str, engine: Engine, progress: Progress | None
) -> None:
    """Have the engine's processes write the tensors, and take over their sums."""
    for tensor in tensors.values():
        tensor.write_heads()
    for task, exported in engine.run(export_slabs, export_tasks(plan, staging)):
        for index, sums in exported.sums.items():
            tensors[index].sums += sums
        for index, count in exported.overflowed.items():
            tensors[index].overflowed += count
        if plan.mixed is not None:
            plan.mixed.from_last.update(exported.from_last)
        if progress is not None:
            progress(task.bytes)


def _pour(plan: ExportPlan, tensors: dict[int, Outgoing], progress: Progress | None) -> None:
    by_tensor: dict[int, list[int]] = {}
    for index in tensors:
        by_tensor.setdefault(plan.entries[index].tensor, []).append(index)
    whole = plan.whole
    direct: list[int] = []
    other_files: list[int] = []
    for number, indices in by_tensor.items():
        plain = (
            plan.mixed is None and len(indices) == 1 and plan.entries[indices[0]].shape == whole.tensors[number].shape
        )
        (direct if plain and is_straight(whole, number) else other_files).append(number)
    sinks: list[dict[int, Sink]] = [{} for _ in plan.opened.parts]
    for number in direct:
        for piece in whole.pieces[number]:
            first = straight_run(piece.box, whole.tensors[number].shape)
            assert first is not None
            sinks[piece.part][piece.tensor] = Straight(tensors[by_tensor[number][0]], first, piece.box.elements)
    for part, part_sinks in zip(plan.opened.parts, sinks, strict=True):
        if part_sinks:
            read_tensors(plan.opened, part, part_sinks, progress=progress)
    undivided = {entry.tensor for entry in plan.entries if entry.shape != whole.tensors[entry.tensor].shape}
    reader = SlabReader(plan.opened, whole)
    several = readers_of(plan.mixed) if plan.mixed is not None else []
    for batch in batches(_slabs(whole, other_files, undivided), [1] * len(whole.tensors), SLAB_ELEMENTS):
        values = (
            reader.read(batch, progress) if plan.mixed is None else read_average(plan.mixed, several, batch, progress)
        )
        for slab, data in zip(batch, values, strict=True):
            for index in by_tensor[slab.tensor]:
                put_slab(tensors[index], slab.first, data, whole.tensors[slab.tensor].shape, plan.entries[index].shape)


def _slabs(whole: MergedCheckpoint, numbers: Sequence[int], undivided: Collection[int]) -> Iterator[Slab]:
    for number in numbers:
        shape = whole.tensors[number].shape
        at_most = max(1, math.prod(shape)) if number in undivided else SLAB_ELEMENTS
        yield from slabs_of(shape, number, by_rows=not is_straight(whole, number), at_most=at_most)
