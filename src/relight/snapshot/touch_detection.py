"""Tensors that are copied while training continues, and detection of a write between the call and the copy.

Three traces are compared, since a write may leave only one of them: the version counter (in-place operations move it;
writes through ``.data`` and fused kernels do not), the storage's address (``resize_``), and samples of the bytes.
Samples are taken at the call, at both ends of every slice, and compared with the copied bytes. Holding the tensor
keeps its memory: if a parameter is given other memory meanwhile (``p.data = …``), the old memory is copied, which is
the state at the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from relight.layout.sources import move_all
from relight.snapshot.sample_reader import SampleReader
from relight.torch_private.tensors import read_version, version_counter

SAMPLE = 16
SLICE_BYTES = 1 << 20


class Slice(NamedTuple):
    """A contiguous range of one tensor's bytes: source address, length, and offset in the slot."""

    tensor: int
    source: int
    length: int
    target: int


class GuardedTensors:
    """Contiguous host tensors with places in a slot: everything that all snapshots of them share."""

    def __init__(self, placed: Sequence[tuple[str, torch.Tensor, int]]) -> None:
        """``placed``: name, tensor, offset in the slot. The tensors are kept alive."""
        self.names = [name for name, _, _ in placed]
        self.tensors = [tensor for _, tensor, _ in placed]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        self.placed = list(placed)
        self.slices: list[Slice] = []
        for number, (_, tensor, target) in enumerate(placed):
            length, source = tensor.numel() * tensor.element_size(), self.addresses[number]
            for start in range(0, length, SLICE_BYTES):
                size = min(SLICE_BYTES, length - start)
                self.slices.append(Slice(number, source + start, size, target + start))
        self.widths = [min(SAMPLE, part.length) for part in self.slices] * 2
        ends = [part.source + part.length - min(SAMPLE, part.length) for part in self.slices]
        self.sampled = SampleReader([part.source for part in self.slices] + ends, self.widths, SAMPLE)
        self._inference = [tensor.is_inference() for tensor in self.tensors]

    def versions(self) -> list[int]:
        """Return each tensor's version counter; 0 for inference tensors, which have none."""
        if any(self._inference):
            return list(map(version_counter, self.tensors))
        return list(map(read_version, self.tensors))

    def sample(self) -> bytes:
        """Return both ends of every slice: ``SAMPLE`` bytes each, all heads first. The memory must be mapped."""
        return self.sampled.read()

    def begin(self) -> TensorFingerprints:
        """Return fingerprints of the tensors now. Half a microsecond for each slice
        and each tensor."""
        return TensorFingerprints(self)


class TensorFingerprints:
    """Versions and samples of ``GuardedTensors`` at a call."""

    __slots__ = ("_samples", "_versions", "watched")

    def __init__(self, watched: GuardedTensors) -> None:
        self.watched = watched
        self._versions = watched.versions()
        self._samples = watched.sample()

    def is_there(self, number: int) -> bool:
        """Return whether the tensor still has the memory it had."""
        return self.watched.tensors[number].data_ptr() == self.watched.addresses[number]

    def differs(self, other: TensorFingerprints) -> set[int]:
        """Return the numbers of the tensors with other versions or samples in ``other``."""
        slices = self.watched.slices
        changed = _where_they_differ(self._versions, other._versions)
        if self._samples != other._samples:
            for number in range(len(self.watched.widths)):
                place = slice(number * SAMPLE, number * SAMPLE + SAMPLE)
                if self._samples[place] != other._samples[place]:
                    changed.add(slices[number % len(slices)].tensor)
        return changed

    def fits(self, index: int, copied: int) -> bool:
        """Return whether slice ``index``, copied to the address ``copied``, has the same first and last bytes as at
        the call."""
        watched = self.watched
        end = copied + watched.slices[index].length - watched.widths[index]
        return self._is_sample(index, copied) and self._is_sample(len(watched.slices) + index, end)

    def _is_sample(self, number: int, copied: int) -> bool:
        width = self.watched.widths[number]
        return ctypes.string_at(copied, width) == self._samples[number * SAMPLE : number * SAMPLE + width]

    def touched(self) -> set[str]:
        """Return the names of the tensors with a version, address or samples that have changed since the call.

        Samples are taken again: a write that began in the middle of a slice during its copy has reached one of the
        slice's ends by now.
        """
        watched = self.watched
        gone = {number for number in range(len(watched.tensors)) if not self.is_there(number)}
        changed = (
            _where_they_differ(self._versions, watched.versions())
            if gone
            else self.differs(TensorFingerprints(watched))
        )
        return {watched.names[number] for number in gone | changed}


def _where_they_differ(then: Sequence[int], now: Sequence[int]) -> set[int]:
    return {number for number, (a, b) in enumerate(zip(then, now, strict=True)) if a != b}


class SmallCopies:
    """Small host tensors with places in a slot, copied at once: detecting writes to them would cost more than the
    copy."""

    def __init__(self, placed: Sequence[tuple[int, int, int]]) -> None:
        """``placed``: address, length, offset in the slot. The caller keeps the memory alive."""
        self._sources = [source for source, _, _ in placed]
        self._lengths = [length for _, length, _ in placed]
        self._targets = [target for _, _, target in placed]
        self._absolute: dict[int, list[int]] = {}

    def copy(self, base: int) -> None:
        """Copy everything to the slot at the address ``base``. Half a microsecond for each tensor."""
        targets = self._absolute.get(base)
        if targets is None:
            targets = self._absolute[base] = [base + target for target in self._targets]
        move_all(targets, self._sources, self._lengths)
