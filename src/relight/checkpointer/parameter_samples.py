"""Samples of parameters, to detect writes that move no version counter: through ``.data``, through NumPy, by a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at
from weakref import ref

import torch

from relight.capture.sharded import local_of
from relight.capture.tensors import USUAL, why_not
from relight.snapshot.touch_detection import SAMPLE

SAMPLED_MAX = 32
"""Largest number of tensors that are sampled."""


class ParameterSamples:
    """The first and last bytes of some of ``tensors``, evenly distributed. Does not keep the tensors alive.

    Only host memory is read. Cost: 1 µs a tensor. A write that changes none of these bytes is not detected.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        local = [tensor for tensor in map(local_of, tensors) if _is_readable(tensor)]
        distance = max(1, -(-len(local) // SAMPLED_MAX))
        self._places = [_place_of(tensor) for tensor in local[::distance]]

    def read(self) -> list[bytes]:
        """Return the present bytes. A tensor with other memory than at the call of the constructor gives none."""
        samples: list[bytes] = []
        for reference, first, last, width in self._places:
            tensor = reference()
            if tensor is None or tensor.data_ptr() != first:
                samples.append(b"")
            else:
                samples += string_at(first, width), string_at(last, width)
        return samples


def _is_readable(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in USUAL and tensor.is_cpu and tensor.layout == torch.strided and not tensor.is_quantized
    return is_plain and tensor.numel() > 0 and why_not(tensor) is None


def _place_of(tensor: torch.Tensor) -> tuple[ref[torch.Tensor], int, int, int]:
    """Return a reference, the addresses of the first and last sampled bytes, and the bytes at each."""
    length = tensor.nbytes if tensor.is_contiguous() else tensor.element_size()
    width, first = min(SAMPLE, length), tensor.data_ptr()
    return ref(tensor), first, first + length - width, width
