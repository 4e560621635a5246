"""Execute an export: verify every chunk while reading, in bounded memory, and name the files when all of them are durable."""

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
from relight.export.atomic_output import Landing
from relight.export.average import read_average, readers_of
from relight.export.outfile import ExportBuffers, OutFile
from relight.export.plan import ExportPlan
from relight.export.writing import Outgoing, Straight, TensorOffset
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


def execute_export(plan: ExportPlan, progress: Progress | None = None) -> ExportReport:
    """Read, verify, convert, write, and move to the target.

    Raise ``CorruptCheckpoint`` if a byte is not what was committed; the target then does not exist. Memory: as ``read_tensors``, and
    ``BLOCKS_MAX`` blocks; a slab for tensors in non-contiguous pieces and for averages. If ``RELIGHT_AUDIT`` names an audit log, the export
    is recorded there before anything is written.
    """
    with recorded("export", f"{plan.opened.store.url}/{plan.opened.prefix}", _facts(plan)):
        return _execute(plan, progress)


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


def _execute(plan: ExportPlan, progress: Progress | None) -> ExportReport:
    begun = time.monotonic()
    with Landing(plan.path, folder=plan.folder, overwrite=plan.options.overwrite) as landing:
        files: list[OutFile] = []
        blocks = ExportBuffers()
        with ExitStack() as failing:
            for output in plan.files:
                files.append(OutFile(os.path.join(landing.staging, output.name), output.size, blocks))
                failing.callback(files[-1].abort)
            tensors = _tensors(plan, files)
            _pour(plan, tensors, progress)
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


def _tensors(plan: ExportPlan, files: list[OutFile]) -> dict[int, Outgoing]:
    """Return the tensors to write, by entry number. Fixed bytes after all tensors of a file are written here."""
    targets: dict[int, list[TensorOffset]] = {}
    for file, output_file in zip(files, plan.files, strict=True):
        slots = sorted(output_file.slots, key=lambda slot: slot.offset)
        offsets = [slot.offset for slot in slots]
        heads: list[list[tuple[int, bytes]]] = [[] for _ in slots]
        for offset, data in output_file.fixed:
            following = bisect_right(offsets, offset)
            if following < len(slots):
                heads[following].append((offset, data))
            else:
                file.write_at(offset, memoryview(data))
        for slot, head in zip(slots, heads, strict=True):
            targets.setdefault(slot.entry, []).append(TensorOffset(file, slot.offset, slot.sums, tuple(head)))
    stored = plan.whole.tensors
    return {
        index: Outgoing(stored[plan.entries[index].tensor].dtype, plan.entries[index].dtype, offsets_of)
        for index, offsets_of in targets.items()
    }


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
                _put(tensors[index], slab.first, data, whole.tensors[slab.tensor].shape, plan.entries[index].shape)


def _slabs(whole: MergedCheckpoint, numbers: Sequence[int], undivided: Collection[int]) -> Iterator[Slab]:
    for number in numbers:
        shape = whole.tensors[number].shape
        at_most = max(1, math.prod(shape)) if number in undivided else SLAB_ELEMENTS
        yield from slabs_of(shape, number, by_rows=not is_straight(whole, number), at_most=at_most)


def _put(
    tensor: Outgoing,
    first: int,
    data: memoryview | np.ndarray[Any, Any],
    source_shape: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:
    """Write a slab. If ``shape`` differs, the slab is the whole tensor and is broadcast to it."""
    values = data if isinstance(data, np.ndarray) else None
    if source_shape != shape:
        size = (tensor.itemsize,) if values is None else ()
        array = np.frombuffer(data, np.uint8) if values is None else values
        array = np.ascontiguousarray(np.broadcast_to(array.reshape(*source_shape, *size), (*shape, *size))).reshape(-1)
        values, data = (array, data) if values is not None else (None, array.data)
    if values is not None:
        tensor.put_values(first, values)
    else:
        assert isinstance(data, memoryview)
        tensor.put(first, data)
