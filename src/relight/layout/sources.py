"""Where a tensor's bytes come from on save and go to on load. Torch-free: rooms below ``capture`` see only this."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from relight.layout.boxes import Box

_GIL_FREE_FROM = 64 << 10
move_small = ctypes.PyDLL(None).memmove
"""Holds the GIL: giving it up and waiting for it costs more than a small copy."""
move_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
move_small.restype = None


class Source(Protocol):
    """The bytes of one tensor (or piece): elements in row-major order, little-endian."""

    length: int
    """Bytes in all."""

    def view(self) -> memoryview | None:
        """Return the bytes in place, without a copy; None if they are not contiguous host memory.

        Valid as long as the source.
        """

    def fill(self, start: int, into: memoryview) -> None:
        """Copy ``len(into)`` bytes from ``start`` on. ``start`` and length are multiples of the element's size. Any thread."""


class Sink(Protocol):
    """Destination of one tensor's bytes."""

    @property
    def length(self) -> int:
        """Bytes in all."""

    def view(self) -> memoryview | None:
        """Writable memory for all the bytes in order, if there is such; else None, and ``absorb`` is used."""

    def absorb(self, start: int, data: memoryview) -> None:
        """Take the bytes from ``start`` on. Multiples of the element's size; any order, any thread, each byte once."""


@runtime_checkable
class LandingSink(Protocol):
    """A sink without a view. Its ``absorb`` copies bytes into memory of its own first, unless they are there already."""

    def landing(self, start: int, length: int) -> memoryview | None:
        """Return memory for the bytes from ``start`` on; None if ``absorb`` takes them from any memory.

        Only the calling thread may fill it and give it to ``absorb``. It is valid until this thread's next call.
        """


class RangeSink:
    """Base class of sinks that take only a range of a stored tensor: ``length`` bytes, from its byte ``skip`` on."""

    skip: int

    def needs(self, start: int, end: int) -> bool:
        """Return whether the sink uses any of its bytes ``start`` to ``end``. Chunks that it does not need are not read."""
        return True


def skip_of(sink: Sink) -> int:
    """Return the stored tensor's first byte that ``sink`` takes."""
    return sink.skip if isinstance(sink, RangeSink) else 0


class Item(msgspec.Struct, frozen=True, eq=False):
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


class HostMemorySink(msgspec.Struct, frozen=True, gc=False):
    """A sink that is host memory, by its address: what small tensors get, as a buffer object for each would cost more than the copy.

    ``length`` bytes from ``address`` on belong to ``owner``, which is kept alive, and are writable.
    """

    address: int
    length: int
    owner: object

    def view(self) -> memoryview | None:
        """The memory. Not kept alive by the view: hold on to this."""
        if not self.length:
            return memoryview(bytearray())
        return memoryview((ctypes.c_ubyte * self.length).from_address(self.address)).cast("B")

    def absorb(self, start: int, data: memoryview) -> None:
        """Copy in."""
        if start < 0 or start + len(data) > self.length:
            raise ValueError(f"{len(data)} bytes from {start} on, of {self.length}")
        view = self.view()
        assert view is not None
        copy_bytes(data, view[start : start + len(data)])


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
            ctypes.addressof(ctypes.c_char.from_buffer(into)),
            ctypes.addressof(ctypes.c_char.from_buffer(data)),
            len(into),
        )


def address_of(memory: memoryview) -> int:
    """Return the address of contiguous bytes.

    0 if there are none, or if they are read-only: ctypes then gives no address.
    """
    return 0 if memory.readonly or not len(memory) else ctypes.addressof(ctypes.c_char.from_buffer(memory))


def move(to: int, source: int, length: int) -> None:
    """Copy ``length`` bytes from one address to another. The caller answers for both."""
    if length < _GIL_FREE_FROM:
        move_small(to, source, length)
    else:
        ctypes.memmove(to, source, length)


def move_all(to: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> None:
    """``move`` for many that are small: 0.3 µs each beyond the copying, and all of it without letting other threads at the interpreter."""
    deque(map(move_small, to, sources, lengths), 0)
