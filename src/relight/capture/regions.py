"""Read stored boxes of a tensor into the boxes that are live here, however the two are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from relight.capture.sharded import Flat, LiveSlice, own_rank, part, spread_of
from relight.capture.tensors import TORCH_DTYPES, FanOut, TensorSink, as_integers, memory_of, sink_for
from relight.errors import IncompatibleState
from relight.format import Tensor
from relight.layout import Box, RangeSink, Sink, whole
from relight.layout.shards import boxes_of_run, intersection, placed, relative, run_of
from relight.layout.sources import HostMemorySink, address_of


class Region(NamedTuple):
    """``tensor`` holds ``box`` of a tensor's global shape, and has the box's size."""

    box: Box
    tensor: torch.Tensor


class Regions:
    """A sink for all bytes of a tensor of ``shape``. ``regions``: the live parts of it. ``dtype``: the stored one."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, regions: Sequence[Region]) -> None:
        self.shape, self.dtype, self.regions = tuple(shape), dtype, list(regions)
        self._all = _BoxSlice(whole(self.shape), self.dtype, self.regions, 0)
        self.length = self._all.length

    def view(self) -> memoryview | None:
        """Return None: there are several memories."""
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        """Write the bytes that are live here into their regions."""
        self._all.absorb(start, data)


class _BoxSlice(RangeSink):
    """A sink for a range of the bytes of a stored box, from ``skip`` on."""

    def __init__(
        self, box: Box, dtype: torch.dtype, regions: Sequence[Region], skip: int, length: int | None = None
    ) -> None:
        self._box, self._dtype, self._regions = box, dtype, regions
        self.skip = skip
        self.length = box.elements * dtype.itemsize - skip if length is None else length

    def view(self) -> memoryview | None:
        """Return None: there are several memories."""
        return None

    def needs(self, start: int, end: int) -> bool:
        """Return whether some of these elements are live here: a box of columns leaves out others of the same rows."""
        size = self._dtype.itemsize
        runs = boxes_of_run(self._box.size, (self.skip + start) // size, (self.skip + end) // size)
        return any(intersection(placed(run, self._box), region.box) for run in runs for region in self._regions)

    def absorb(self, start: int, data: memoryview) -> None:
        """Write a range of elements into the regions, box by box."""
        size = self._dtype.itemsize
        first = (self.skip + start) // size
        offset = 0
        for run in boxes_of_run(self._box.size, first, first + len(data) // size):
            box = placed(run, self._box)
            length = box.elements * size
            self._copy_box(box, data[offset : offset + length])
            offset += length

    def _copy_box(self, box: Box, data: memoryview) -> None:
        flat: torch.Tensor | None = None
        for region in self._regions:
            shared = intersection(box, region.box)
            if shared is None:
                continue
            if flat is None:
                flat = _elements(data, self._dtype).view(box.size)
            source = part(flat, relative(shared, box))
            target = part(region.tensor.detach(), relative(shared, region.box))
            if target.dtype == self._dtype:
                source, target = as_integers(source), as_integers(target)
            with torch.inference_mode() if target.is_inference() else torch.no_grad():
                target.copy_(source)


def _elements(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes as elements: in place if they are aligned, otherwise a copy. Valid as long as ``data``."""
    address = address_of(data)
    if address and address % dtype.itemsize == 0:
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype)
    flat = torch.empty(len(data) // dtype.itemsize, dtype=dtype, device="cpu")
    memory = memory_of(flat)
    assert memory is not None
    memory[:] = data
    return flat


def regions_for(tensor: torch.Tensor | Flat | LiveSlice, dtype: torch.dtype) -> Regions:
    """Return a sink for this rank's part of a sharded tensor. Raise ``IncompatibleState`` if its sharding is unknown."""
    if isinstance(tensor, LiveSlice):
        return Regions(tensor.shape, dtype, [Region(tensor.box, tensor.local)])
    spread = spread_of(tensor)
    if isinstance(spread, str):
        raise IncompatibleState(spread)
    shape = tuple(tensor.shape)
    regions = [Region(piece.box, spread.held(piece)) for piece in spread.pieces(shape, own_rank())]
    return Regions(shape, dtype, regions)


def sink_of_piece(sink: Sink, shape: Sequence[int], dtype: torch.dtype, box: Box) -> Sink | None:
    """Return the sink for ``box`` of a tensor, given the sink for all of it; None if nothing of that box is wanted."""
    regions = [region for region in regions_of(sink, shape) if intersection(region.box, box) is not None]
    if not regions:
        return None
    if len(regions) == 1 and intersection(regions[0].box, box) == box:
        return sink_for(part(regions[0].tensor.detach(), relative(box, regions[0].box)), dtype)
    spans = [
        run_of(relative(shared, box), box.size)
        for region in regions
        if (shared := intersection(region.box, box)) is not None
    ]
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    return _BoxSlice(box, dtype, regions, first * dtype.itemsize, (last - first) * dtype.itemsize)


def sinks_by_part(
    sinks: Mapping[int, Sink], tensors: Sequence[Tensor], pieces: Sequence[Sequence[tuple[int, int, Box]]], parts: int
) -> list[dict[int, Sink]]:
    """Return sinks for each part's own tensors, given sinks for whole ``tensors``.

    ``pieces``: for each tensor, ``(part, tensor of that part, box)``.
    """
    by_part: list[dict[int, Sink]] = [{} for _ in range(parts)]
    for index, sink in sinks.items():
        tensor = tensors[index]
        for part_number, number, box in pieces[index]:
            piece_sink = sink_of_piece(sink, tensor.shape, TORCH_DTYPES[tensor.dtype], box)
            if piece_sink is not None:
                by_part[part_number][number] = piece_sink
    return by_part


def only_needed(sinks: Mapping[int, Sink]) -> Mapping[int, Sink]:
    """Return the sinks for a single part that holds every tensor whole.

    Of tensors that are sharded here, only the bytes that this rank needs are read.
    """
    if Regions not in set(map(type, sinks.values())):
        return sinks
    needed: dict[int, Sink] = {}
    for index, sink in sinks.items():
        piece_sink: Sink | None = sink
        if type(sink) is Regions:
            piece_sink = sink_of_piece(sink, sink.shape, sink.dtype, whole(sink.shape))
        if piece_sink is not None:
            needed[index] = piece_sink
    return needed


def regions_of(sink: Sink, shape: Sequence[int]) -> list[Region]:
    """Return the live regions into which a sink for a whole tensor writes."""
    if isinstance(sink, Regions):
        return sink.regions
    if isinstance(sink, FanOut):
        return [region for inner in sink.sinks for region in regions_of(inner, shape)]
    if isinstance(sink, HostMemorySink) and isinstance(sink.owner, torch.Tensor):
        return [Region(whole(shape), sink.owner.detach().view(tuple(shape)))]
    assert isinstance(sink, TensorSink)
    return [Region(whole(shape), sink.tensor.view(tuple(shape)) if sink.tensor.is_contiguous() else sink.tensor)]
