"""Telling whether a tensor was touched between the call and its copy.

Three traces are looked at, since none of them is always left: the version counter (in-place operations move it; writes through ``.data``
and fused kernels do not), the storage's address (``resize_``), and samples of the bytes themselves, taken at the call at both ends of every
slice and compared with what was copied. Holding the tensor keeps its memory: a parameter that is given other memory meanwhile
(``p.data = …``) is copied from the old one, which is the one wanted.
"""

from __future__ import annotations

import ctypes

import torch

SAMPLE = 16
SLICE_BYTES = 1 << 20


class Guard:
    """One contiguous host tensor, as it is at the call."""

    __slots__ = ("_address", "_samples", "_tensor", "_version", "length", "name")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self._tensor = tensor
        self._version = _version(tensor)
        self._address = tensor.data_ptr()
        self.length = tensor.numel() * tensor.element_size()
        read, address = ctypes.string_at, self._address
        samples = []
        for start in range(0, self.length, SLICE_BYTES):
            end = min(start + SLICE_BYTES, self.length)
            width = min(SAMPLE, end - start)
            samples.append(read(address + start, width) + read(address + end - width, width))
        self._samples = samples

    def source(self, start: int) -> int | None:
        """The address to copy from; None if the memory has been taken away."""
        return self._address + start if self._tensor.data_ptr() == self._address else None

    def fits(self, copied: int, start: int, length: int) -> bool:
        """Whether what was copied to the address ``copied`` begins and ends as the slice did at the call."""
        width = min(SAMPLE, length)
        return ctypes.string_at(copied, width) + ctypes.string_at(copied + length - width, width) == self._samples[start // SLICE_BYTES]

    def untouched(self) -> bool:
        """Whether neither version nor address has changed since the call."""
        return _version(self._tensor) == self._version and self._tensor.data_ptr() == self._address


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
