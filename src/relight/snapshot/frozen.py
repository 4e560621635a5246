"""Parameters that are not trained: fingerprints of them at several moments, and which of them have not changed between
two moments.

Version counters, addresses and samples of the bytes are compared, not all bytes. A write through ``.data``, or by a
kernel that moves no version counter, is missed if the samples stay the same. Callers that rely on the result therefore
also compare a few other bytes each time (``FrozenTensors.wrong``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from relight.policy.compact import AUDIT_BYTES
from relight.snapshot.touch_detection import GuardedTensors, TensorFingerprints
from relight.torch_private.tensors import read_version

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class TensorMarks(NamedTuple):
    """Fingerprints of all the tensors at one moment."""

    here: TensorFingerprints
    away: list[int]
    """Versions of the tensors in accelerators' memory."""


class FrozenTensors:
    """Tensors by number. Holds them, and assumes that their addresses do not change."""

    def __init__(self, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        """``tensors``: contiguous, in host memory or on an accelerator."""
        here = [(number, tensor) for number, tensor in tensors if tensor.is_cpu]
        self._here, self._watched = (
            [number for number, _ in here],
            GuardedTensors([(str(number), tensor, 0) for number, tensor in here]),
        )
        self._away = [(number, tensor) for number, tensor in tensors if not tensor.is_cpu]
        self._turn = 0
        self.numbers = frozenset(number for number, _ in tensors)

    def fingerprint(self) -> TensorMarks:
        """Return the tensors' marks now. Half a microsecond for each tensor and each MiB."""
        return TensorMarks(self._watched.begin(), [read_version(tensor) for _, tensor in self._away])

    def same(self, then: TensorMarks, now: TensorMarks) -> frozenset[int]:
        """Return the numbers of the tensors that have the same marks in ``then`` and ``now``."""
        differ = {self._here[number] for number in now.here.differs(then.here)}
        differ |= {number for (number, _), a, b in zip(self._away, then.away, now.away, strict=True) if a != b}
        return self.numbers - differ if differ else self.numbers

    def wrong(self, same: frozenset[int], address_of: Callable[[int], int]) -> int | None:
        """Return the number of a tensor in ``same`` that has changed nevertheless, or None.

        Compares ``AUDIT_BYTES`` of the tensors in host memory with the bytes at ``address_of(number)``, and continues
        at the next call where this one ended.
        """
        slices, left = self._watched.slices, AUDIT_BYTES
        for _ in range(len(slices)):
            part = slices[self._turn % len(slices)]
            self._turn += 1
            number = self._here[part.tensor]
            if number not in same:
                continue
            if _compare(part.source, address_of(number) + part.target, part.length):
                return number
            left -= part.length
            if left <= 0:
                break
        return None
