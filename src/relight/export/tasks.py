"""Tasks of an export that several processes share. Each writes ranges of the same new files, which the commanding process has created.

The processes see one file system. Everything that a task writes follows from the checkpoint, the options and the task, so it may run twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from relight.export.average import Mixture, read_average, readers_of, weighted
from relight.export.plan import ExportPlan, plan_export
from relight.export.selection import Options
from relight.export.writing import Outgoing, put_slab, targets_of
from relight.format import DTYPES
from relight.reader.by_reference import TASK_BYTES, CheckpointReference, open_reference, reference_to
from relight.reader.slab_reader import Slab, SlabReader, batches, is_straight, slabs_of
from relight.store.durable import JoinedFile

AVERAGE_ELEMENTS = 4 << 20
"""Elements of a task of an average, which holds them in double precision."""


class ExportSource(NamedTuple):
    """What a process plans the same export from. ``weights``: of an average; else None."""

    checkpoints: tuple[CheckpointReference, ...]
    weights: tuple[float, ...] | None
    path: str
    options: Options


class ExportTask(NamedTuple):
    """Slabs to write to the files in ``staging``. ``bytes``: what is read for them."""

    source: ExportSource
    staging: str
    slabs: list[Slab]
    bytes: int


class Exported(NamedTuple):
    """Result of a task, by entry number: CRC32s of runs, as ``Outgoing`` has them, and values that overflowed."""

    sums: dict[int, list[tuple[int, int, int]]]
    overflowed: dict[int, int]
    from_last: list[str]


def source_of(plan: ExportPlan) -> ExportSource:
    """Return what another process needs to plan the same export."""
    options = replace(plan.options, overwrite=True)
    if plan.mixed is None:
        return ExportSource((reference_to(plan.opened),), None, plan.path, options)
    parts = plan.mixed.parts
    references = tuple(reference_to(part.opened) for part in parts)
    return ExportSource(references, tuple(part.weight for part in parts), plan.path, options)


def export_tasks(plan: ExportPlan, staging: str) -> Iterator[ExportTask]:
    """Yield tasks for all tensors of an export, in the order of the entries."""
    whole, source = plan.whole, source_of(plan)
    itemsize = [DTYPES[tensor.dtype].itemsize for tensor in whole.tensors]
    times = 1 if plan.mixed is None else len(plan.mixed.parts)
    undivided = {entry.tensor for entry in plan.entries if entry.shape != whole.tensors[entry.tensor].shape}

    def slabs() -> Iterator[Slab]:
        for number in dict.fromkeys(entry.tensor for entry in plan.entries):
            tensor = whole.tensors[number]
            most = AVERAGE_ELEMENTS if plan.mixed is not None else TASK_BYTES // itemsize[number]
            most = max(1, math.prod(tensor.shape)) if number in undivided else most
            yield from slabs_of(tensor.shape, number, by_rows=not is_straight(whole, number), at_most=most)

    weights, limit = (itemsize, TASK_BYTES) if plan.mixed is None else ([1] * len(itemsize), AVERAGE_ELEMENTS)
    for batch in batches(slabs(), weights, limit):
        size = sum(slab.length * itemsize[slab.tensor] for slab in batch)
        yield ExportTask(source, staging, batch, times * size)


class _Export:
    """An export as one process sees it."""

    def __init__(self, source: ExportSource, staging: str) -> None:
        opened = [open_reference(reference) for reference in source.checkpoints]
        mixed = None if source.weights is None else Mixture(tuple(map(weighted, opened, source.weights)))
        self.plan = plan_export(mixed or opened[0], source.path, source.options)
        self.files = [JoinedFile(os.path.join(staging, file.name)) for file in self.plan.files]
        targets = targets_of(self.plan.files, self.files)
        # the fixed bytes include the CRC32s, which the commanding process writes after all tasks
        self.targets = {index: [place._replace(head=()) for place in places] for index, places in targets.items()}
        self.entries: dict[int, list[int]] = {}
        for index in self.targets:
            self.entries.setdefault(self.plan.entries[index].tensor, []).append(index)
        self.readers: Sequence[SlabReader] = (
            [SlabReader(self.plan.opened, self.plan.whole, batch_bytes=TASK_BYTES)]
            if mixed is None
            else readers_of(mixed)
        )


@lru_cache(maxsize=1)
def _export(source: ExportSource, staging: str) -> _Export:
    return _Export(source, staging)


def export_slabs(task: ExportTask) -> Exported:
    """Do a task, in any process. Its bytes are durable when it returns."""
    export = _export(task.source, task.staging)
    plan = export.plan
    tensors: dict[int, Outgoing] = {}
    try:
        values = (
            export.readers[0].read(task.slabs)
            if plan.mixed is None
            else read_average(plan.mixed, export.readers, task.slabs)
        )
        for slab, data in zip(task.slabs, values, strict=True):
            for index in export.entries.get(slab.tensor, ()):
                stored, entry = plan.whole.tensors[slab.tensor], plan.entries[index]
                tensor = tensors.setdefault(index, Outgoing(stored.dtype, entry.dtype, export.targets[index]))
                put_slab(tensor, slab.first, data, stored.shape, entry.shape)
    finally:
        for file in export.files:
            file.finish()
    return Exported(
        {index: tensor.sums for index, tensor in tensors.items() if tensor.sums},
        {index: tensor.overflowed for index, tensor in tensors.items() if tensor.overflowed},
        sorted(plan.mixed.from_last) if plan.mixed is not None else [],
    )
