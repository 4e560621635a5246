"""nvCOMP's Python interface, as far as Relight speaks to it (6.0), over memory and zstd of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from relight.format.entropy import zstd

CODED: list[int] = []
"""Lengths of what was coded."""


class BitstreamKind:
    """The kind of bitstream that Relight uses."""

    RAW = "raw"


class Array:
    """``there``: whether it is on the device, where NumPy cannot read."""

    def __init__(self, data: np.ndarray, there: bool = False) -> None:
        self.data, self.there = data, there

    def cuda(self) -> Array:
        """A copy on the device."""
        return Array(self.data.copy(), True)

    @property
    def __array_interface__(self) -> Any:
        if self.there:
            raise AttributeError("this memory is the device's")
        return self.data.__array_interface__


class BatchArray:
    """Several of them."""

    def __init__(self, held: list[Array]) -> None:
        self.held = held

    def cpu(self) -> BatchArray:
        """Copies here."""
        return BatchArray([Array(array.data.copy()) for array in self.held])

    def __iter__(self) -> Iterator[Array]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def as_array(source: np.ndarray) -> Array:
    """Memory of this machine, without a copy."""
    return Array(source)


def as_arrays(buffer: Array, offsets: list[int], sizes: list[int]) -> BatchArray:
    """Pieces of a buffer on the device."""
    assert buffer.there, "coding begins on the device"
    return BatchArray(
        [Array(buffer.data[offset : offset + size], True) for offset, size in zip(offsets, sizes, strict=True)]
    )


class Codec:
    """Raw frames of zstd."""

    def __init__(self, **asked: Any) -> None:
        assert asked["algorithm"] == "Zstd" and asked["bitstream_kind"] == BitstreamKind.RAW

    def encode(self, batch: BatchArray) -> BatchArray:
        """A frame each."""
        CODED.append(sum(len(chunk.data) for chunk in batch))
        return BatchArray(
            [Array(np.frombuffer(zstd.compress(chunk.data.tobytes(), 1), np.uint8), True) for chunk in batch]
        )

    def decode(self, batch: BatchArray) -> BatchArray:
        """Decompress each chunk."""
        return BatchArray(
            [Array(np.frombuffer(zstd.decompress(chunk.data.tobytes()), np.uint8), True) for chunk in batch]
        )
