"""Where a tensor's bytes come from on save and go to on load. Torch-free: rooms below ``capture`` see only this."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

from relight.layout.boxes import Box

_GIL_FREE_FROM = 64 << 10


class Source(Protocol):
    """The bytes of one tensor (or piece): elements in row-major order, little-endian."""

    length: int
    """Bytes in all."""

    def view(self) -> memoryview | None:
        """The bytes where they lie, if they lie in host memory in order; else None. Valid as long as the source is."""

    def fill(self, start: int, into: memoryview) -> None:
        """Copy ``len(into)`` bytes from ``start`` on. ``start`` and length are multiples of the element's size. Any thread."""


class Sink(Protocol):
    """Where one tensor's bytes go."""

    length: int

    def view(self) -> memoryview | None:
        """Writable memory for all the bytes in order, if there is such; else None, and ``absorb`` is used."""

    def absorb(self, start: int, data: memoryview) -> None:
        """Take the bytes from ``start`` on. Multiples of the element's size; any order, any thread, each byte once."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One tensor to be saved. ``shape`` is global; ``box`` is the piece that ``source`` holds, None for all of it.

    ``trainable`` marks what an optimizer is supposed to change between two saves.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    source: Source
    box: Box | None = None
    trainable: bool = False


class Bytes:
    """A source that is a buffer, and a sink that is a writable one. Keeps the buffer alive."""

    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(buffer).cast("B") if len(memoryview(buffer)) else memoryview(b"")
        self.length = len(self._view)

    def view(self) -> memoryview | None:
        """The buffer itself."""
        return self._view

    def fill(self, start: int, into: memoryview) -> None:
        """Copy out."""
        into[:] = self._view[start : start + len(into)]

    def absorb(self, start: int, data: memoryview) -> None:
        """Copy in."""
        self._view[start : start + len(data)] = data


def copy_from(source: Source, start: int, into: memoryview) -> None:
    """Copy bytes of ``source``, from ``start`` on, until ``into`` is full; large runs without holding the GIL."""
    view = source.view()
    if view is None:
        source.fill(start, into)
    else:
        copy_bytes(view[start : start + len(into)], into)


def copy_bytes(data: memoryview, into: memoryview) -> None:
    """Copy ``data`` to ``into``, which is as long. Large runs without the GIL, which a plain slice assignment would hold."""
    if len(into) < _GIL_FREE_FROM or data.readonly or len(data) != len(into):
        into[:] = data
    else:
        ctypes.memmove(
            ctypes.addressof(ctypes.c_char.from_buffer(into)), ctypes.addressof(ctypes.c_char.from_buffer(data)), len(into)
        )
