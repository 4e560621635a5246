"""Doing an export: every chunk verified while it is read, in bounded memory, to files that have their names when all is durable."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from relight.audit import recorded
from relight.audit.facts import ActionFacts
from relight.catalog.merged_parts import MergedCheckpoint
from relight.catalog.read import read_tensors
from relight.catalog.slab_reader import Slab, SlabReader, batches, is_straight, slabs_of, straight_run
from relight.export.atomic_output import Landing
from relight.export.average import read_average, readers_of
from relight.export.outfile import ExportBuffers, OutFile
from relight.export.plan import ExportPlan
from relight.export.writing import Outgoing, Straight, TensorOffset
from relight.layout import Sink

Progress = Callable[[int], None]
SLAB_ELEMENTS = 4 << 20
"""In a slab, or in several of small tensors that are read together."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written. ``overflowed``: how many finite values of which tensor are infinite in the dtype that was asked for.
    ``from_last``: what could not be averaged, is not the same in all, and is the last one's."""

    path: str
    files: list[str]
    tensors: int
    bytes: int
    overflowed: dict[str, int]
    from_last: list[str]
    seconds: float


def execute_export(plan: ExportPlan, progress: Progress | None = None) -> ExportReport:
    """Read, check, convert, write, and put in place. ``CorruptCheckpoint`` if a byte is not what was committed: nothing is there then.

    Memory: what ``read_tensors`` takes, and ``BLOCKS_MAX`` blocks; of tensors that several ranks hold across,
    or that are averaged, a slab. In the audit log, if ``RELIGHT_AUDIT`` names one, before anything is written.
    """
    with recorded("export", f"{plan.opened.store.url}/{plan.opened.prefix}", _facts(plan)):
        return _execute(plan, progress)


def _facts(plan: ExportPlan) -> ActionFacts:
    """Fields of the export's audit record."""
    one = plan.opened.checkpoint
    names = ", ".join(entry.name for entry in plan.entries)
    return ActionFacts(plan.opened.prefix.partition("/")[0], one.id, after=plan.path, given={"target": plan.path, "names": names})


def _execute(plan: ExportPlan, progress: Progress | None) -> ExportReport:
    begun = time.monotonic()
    with Landing(plan.path, folder=plan.folder, overwrite=plan.options.overwrite) as landing:
        files: list[OutFile] = []
        blocks = ExportBuffers()
        with ExitStack() as failing:
            for one in plan.files:
                files.append(OutFile(os.path.join(landing.beside, one.name), one.size, blocks))
                failing.callback(files[-1].abort)
            tensors = _tensors(plan, files)
            _pour(plan, tensors, progress)
            for tensor in tensors.values():
                tensor.finish()
            for file in files:
                file.finish()
            failing.pop_all()
        landing.put([one.name for one in plan.files])
    from_last = sorted(plan.mixed.from_last) if plan.mixed is not None else []
    over = {plan.entries[index].name: one.overflowed for index, one in tensors.items() if one.overflowed}
    return ExportReport(
        landing.path, [one.name for one in plan.files], len(plan.entries), plan.bytes_written, over, from_last, time.monotonic() - begun
    )


def _tensors(plan: ExportPlan, files: list[OutFile]) -> dict[int, Outgoing]:
    """What is written, by the number of its entry. What lies behind all tensors of a file is written at once."""
    targets: dict[int, list[TensorOffset]] = {}
    for file, one in zip(files, plan.files, strict=True):
        slots = sorted(one.slots, key=lambda slot: slot.offset)
        offsets = [slot.offset for slot in slots]
        heads: list[list[tuple[int, bytes]]] = [[] for _ in slots]
        for offset, data in one.fixed:
            behind = bisect_right(offsets, offset)
            if behind < len(slots):
                heads[behind].append((offset, data))
            else:
                file.write_at(offset, memoryview(data))
        for slot, head in zip(slots, heads, strict=True):
            targets.setdefault(slot.entry, []).append(TensorOffset(file, slot.offset, slot.sums, tuple(head)))
    held = plan.whole.tensors
    return {index: Outgoing(held[plan.entries[index].tensor].dtype, plan.entries[index].dtype, found) for index, found in targets.items()}


def _pour(plan: ExportPlan, tensors: dict[int, Outgoing], progress: Progress | None) -> None:
    by_tensor: dict[int, list[int]] = {}
    for index in tensors:
        by_tensor.setdefault(plan.entries[index].tensor, []).append(index)
    whole = plan.whole
    direct: list[int] = []
    others: list[int] = []
    for number, indices in by_tensor.items():
        plain = plan.mixed is None and len(indices) == 1 and plan.entries[indices[0]].shape == whole.tensors[number].shape
        (direct if plain and is_straight(whole, number) else others).append(number)
    sinks: list[dict[int, Sink]] = [{} for _ in plan.opened.parts]
    for number in direct:
        for piece in whole.pieces[number]:
            first = straight_run(piece.box, whole.tensors[number].shape)
            assert first is not None
            sinks[piece.part][piece.tensor] = Straight(tensors[by_tensor[number][0]], first, piece.box.elements)
    for part, held in zip(plan.opened.parts, sinks, strict=True):
        if held:
            read_tensors(plan.opened, part, held, progress=progress)
    undivided = {one.tensor for one in plan.entries if one.shape != whole.tensors[one.tensor].shape}
    reader = SlabReader(plan.opened, whole)
    several = readers_of(plan.mixed) if plan.mixed is not None else []
    for batch in batches(_slabs(whole, others, undivided), [1] * len(whole.tensors), SLAB_ELEMENTS):
        values = reader.read(batch, progress) if plan.mixed is None else read_average(plan.mixed, several, batch, progress)
        for slab, data in zip(batch, values, strict=True):
            for index in by_tensor[slab.tensor]:
                _put(tensors[index], slab.first, data, whole.tensors[slab.tensor].shape, plan.entries[index].shape)


def _slabs(whole: MergedCheckpoint, numbers: Sequence[int], undivided: Collection[int]) -> Iterator[Slab]:
    for number in numbers:
        shape = whole.tensors[number].shape
        at_most = max(1, math.prod(shape)) if number in undivided else SLAB_ELEMENTS
        yield from slabs_of(shape, number, by_rows=not is_straight(whole, number), at_most=at_most)


def _put(tensor: Outgoing, first: int, data: memoryview | np.ndarray[Any, Any], held: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """A slab; all of a tensor if it is to be repeated to another ``shape``."""
    values = data if isinstance(data, np.ndarray) else None
    if held != shape:
        size = (tensor.itemsize,) if values is None else ()
        array = np.frombuffer(data, np.uint8) if values is None else values
        array = np.ascontiguousarray(np.broadcast_to(array.reshape(*held, *size), (*shape, *size))).reshape(-1)
        values, data = (array, data) if values is not None else (None, array.data)
    if values is not None:
        tensor.put_values(first, values)
    else:
        assert isinstance(data, memoryview)
        tensor.put(first, data)
