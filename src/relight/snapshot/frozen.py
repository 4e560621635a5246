"""Parameters that nothing trains: what they looked like at some moments, and which of them look so still.

Version counters, addresses and samples of the bytes are looked at, not the bytes. A write through ``.data``, or by a kernel that tells
nobody, that leaves the samples as they are is not seen by that; so whoever relies on it compares a little of the rest each time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from relight.policy.compact import AUDIT_BYTES
from relight.snapshot.touch_detection import GuardedTensors, TensorFingerprints

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class TensorMarks(NamedTuple):
    """How they all looked at a moment."""

    here: TensorFingerprints
    away: list[int]
    """Versions of those in accelerators' memory."""


class FrozenTensors:
    """Tensors by their numbers; held, and taken to stay where they are."""

    def __init__(self, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Contiguous ones, in host memory or elsewhere."""
        here = [(number, tensor) for number, tensor in tensors if tensor.is_cpu]
        self._here, self._watched = [number for number, _ in here], GuardedTensors([(str(number), tensor, 0) for number, tensor in here])
        self._away = [(number, tensor) for number, tensor in tensors if not tensor.is_cpu]
        self._turn = 0
        self.numbers = frozenset(number for number, _ in tensors)

    def fingerprint(self) -> TensorMarks:
        """Now. Half a microsecond a tensor, and a MiB."""
        return TensorMarks(self._watched.begin(), [tensor._version for _, tensor in self._away])

    def same(self, then: TensorMarks, now: TensorMarks) -> frozenset[int]:
        """Which look the same both times."""
        differ = {self._here[number] for number in now.here.differs(then.here)}
        differ |= {number for (number, _), a, b in zip(self._away, then.away, now.away, strict=True) if a != b}
        return self.numbers - differ if differ else self.numbers

    def wrong(self, same: frozenset[int], address_of: Callable[[int], int]) -> int | None:
        """Compare ``AUDIT_BYTES`` of those in host memory with what lies at the addresses that ``address_of`` tells, others each time: one
        that differs, though it is said to be the ``same``."""
        slices, left = self._watched.slices, AUDIT_BYTES
        for _ in range(len(slices)):
            one = slices[self._turn % len(slices)]
            self._turn += 1
            number = self._here[one.tensor]
            if number not in same:
                continue
            if _compare(one.source, address_of(number) + one.target, one.length):
                return number
            left -= one.length
            if left <= 0:
                break
        return None
