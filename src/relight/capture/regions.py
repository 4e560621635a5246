"""Reading pieces into regions: a stored box of a tensor goes into those boxes of it that live here, whatever the two have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from relight.capture.sharded import Flat, own_rank, part, spread_of
from relight.capture.tensors import TORCH_DTYPES, FanOut, TensorSink, as_integers, memory_of, sink_for
from relight.errors import IncompatibleState
from relight.format import Tensor
from relight.layout import Box, Sink, whole
from relight.layout.shards import boxes_of_run, intersection, placed, relative, run_of
from relight.layout.sources import HostMemorySink, address_of


class Region(NamedTuple):
    """``box`` of a tensor's global shape lives in ``tensor``, which is as large as that."""

    box: Box
    tensor: torch.Tensor


class Regions:
    """A sink for all bytes of a tensor of ``shape``, of which some, or all, live in ``regions``. ``dtype`` is the stored one."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, regions: Sequence[Region]) -> None:
        self.shape, self.dtype, self.regions = tuple(shape), dtype, list(regions)
        self._all = _BoxSlice(whole(self.shape), self.dtype, self.regions, 0)
        self.length = self._all.length

    def view(self) -> memoryview | None:
        """There is no one memory."""
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        """What of it lives here goes there."""
        self._all.absorb(start, data)


class _BoxSlice:
    """A sink for a run of the bytes of a stored box, from ``skip`` on."""

    def __init__(self, box: Box, dtype: torch.dtype, regions: Sequence[Region], skip: int, length: int | None = None) -> None:
        self._box, self._dtype, self._regions = box, dtype, regions
        self.skip = skip
        self.length = box.elements * dtype.itemsize - skip if length is None else length

    def view(self) -> memoryview | None:
        """There is none."""
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        """Deal a run of elements out, box by box."""
        size = self._dtype.itemsize
        first = (self.skip + start) // size
        at = 0
        for run in boxes_of_run(self._box.size, first, first + len(data) // size):
            box = placed(run, self._box)
            length = box.elements * size
            self._deal(box, data[at : at + length])
            at += length

    def _deal(self, box: Box, data: memoryview) -> None:
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
    """The bytes as elements: where they lie if they may lie there, else a copy. Valid as long as they are."""
    address = address_of(data)
    if address and address % dtype.itemsize == 0:
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype)
    flat = torch.empty(len(data) // dtype.itemsize, dtype=dtype, device="cpu")
    memory = memory_of(flat)
    assert memory is not None
    memory[:] = data
    return flat


def regions_for(tensor: torch.Tensor | Flat, dtype: torch.dtype) -> Regions:
    """A sink for a tensor that is spread over ranks: what is here of it. ``IncompatibleState`` if that cannot be told."""
    spread = spread_of(tensor)
    if isinstance(spread, str):
        raise IncompatibleState(spread)
    shape = tuple(tensor.shape)
    regions = [Region(piece.box, spread.held(piece)) for piece in spread.pieces(shape, own_rank())]
    return Regions(shape, dtype, regions)


def sink_of_piece(sink: Sink, shape: Sequence[int], dtype: torch.dtype, box: Box) -> Sink | None:
    """Of a sink for all of a tensor, the sink for ``box`` of it; None if nothing of that box is wanted."""
    regions = [region for region in regions_of(sink, shape) if intersection(region.box, box) is not None]
    if not regions:
        return None
    if len(regions) == 1 and intersection(regions[0].box, box) == box:
        return sink_for(part(regions[0].tensor.detach(), relative(box, regions[0].box)), dtype)
    spans = [run_of(relative(shared, box), box.size) for one in regions if (shared := intersection(one.box, box)) is not None]
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    return _BoxSlice(box, dtype, regions, first * dtype.itemsize, (last - first) * dtype.itemsize)


def sinks_by_part(
    sinks: Mapping[int, Sink], tensors: Sequence[Tensor], pieces: Sequence[Sequence[tuple[int, int, Box]]], parts: int
) -> list[dict[int, Sink]]:
    """Sinks for each part's own tensors, from sinks for all of each of ``tensors``. ``pieces``: part, tensor of that part, box."""
    found: list[dict[int, Sink]] = [{} for _ in range(parts)]
    for index, sink in sinks.items():
        tensor = tensors[index]
        for part_number, number, box in pieces[index]:
            one = sink_of_piece(sink, tensor.shape, TORCH_DTYPES[tensor.dtype], box)
            if one is not None:
                found[part_number][number] = one
    return found


def only_needed(sinks: Mapping[int, Sink]) -> Mapping[int, Sink]:
    """Of one part that holds everything whole: the same, but of tensors that are spread over ranks here only what this one needs."""
    if not any(type(sink) is Regions for sink in sinks.values()):
        return sinks
    found: dict[int, Sink] = {}
    for index, sink in sinks.items():
        one: Sink | None = sink
        if type(sink) is Regions:
            one = sink_of_piece(sink, sink.shape, sink.dtype, whole(sink.shape))
        if one is not None:
            found[index] = one
    return found


def regions_of(sink: Sink, shape: Sequence[int]) -> list[Region]:
    """Where a sink for all of a tensor puts it."""
    if isinstance(sink, Regions):
        return sink.regions
    if isinstance(sink, FanOut):
        return [region for one in sink.sinks for region in regions_of(one, shape)]
    if isinstance(sink, HostMemorySink) and isinstance(sink.owner, torch.Tensor):
        return [Region(whole(shape), sink.owner.detach().view(tuple(shape)))]
    assert isinstance(sink, TensorSink)
    return [Region(whole(shape), sink.tensor.view(tuple(shape)) if sink.tensor.is_contiguous() else sink.tensor)]
