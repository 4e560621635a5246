"""Verified bytes that wait in memory until the follower switches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relight.followers.chunk_map import ChunkMap, UnchangedRanges, chunk_map, key_of
from relight.layout import Sink
from relight.layout.sources import RangeSink, copy_bytes, skip_of
from relight.reader.opened import Opened


class StagedSink(RangeSink):
    """Keeps the changed bytes that are meant for ``inner``, a sink of live memory, until ``deliver``. Thread-safe while it is filled."""

    def __init__(self, inner: Sink, unchanged: UnchangedRanges | None) -> None:
        """``unchanged``: ranges of the stored tensor that the live memory has already; None: it has nothing."""
        self._inner, self._unchanged = inner, unchanged
        self.is_changed = False
        """Whether bytes were read for the live memory."""
        self.skip, self.length = skip_of(inner), inner.length
        self._pieces: list[tuple[int, bytes]] = []

    def needs(self, start: int, end: int) -> bool:
        """See ``RangeSink``."""
        if isinstance(self._inner, RangeSink) and not self._inner.needs(start, end):
            return False
        return self._unchanged is None or not self._unchanged.cover(start + self.skip, end + self.skip)

    def view(self) -> memoryview | None:
        """Return None: the bytes do not go to their memory yet."""
        return None

    def absorb(self, offset: int, data: memoryview) -> None:
        """Keep verified bytes."""
        self._pieces.append((offset, bytes(data)))

    @property
    def wanted_bytes(self) -> int:
        """The most bytes that are kept until ``deliver``."""
        return 0 if self.length and not self.needs(0, self.length) else self.length

    def deliver(self) -> None:
        """Copy the bytes into the live memory, and drop them."""
        pieces, self._pieces = self._pieces, []
        self.is_changed = self.is_changed or bool(pieces)
        view = self._inner.view()
        for offset, data in pieces:
            if view is not None:
                copy_bytes(memoryview(data), view[offset : offset + len(data)])
            else:
                self._inner.absorb(offset, memoryview(data))


class StagedState:
    """The changed bytes of one checkpoint, and the chunks that the live tensors have once they are delivered."""

    def __init__(self, opened: Opened, by_part: Sequence[Mapping[int, Sink]], held: ChunkMap) -> None:
        """``by_part``: the live sinks of each part's tensors. ``held``: chunks of the checkpoint that the live tensors have."""
        self._parts = opened.parts
        self.chunks: ChunkMap = {}
        self.sinks: list[dict[int, StagedSink]] = []
        for part, sinks in zip(opened.parts, by_part, strict=True):
            chunks = chunk_map(part, sinks)
            staged: dict[int, StagedSink] = {}
            for index, sink in sinks.items():
                tensor = part.tensors[index]
                key = key_of(tensor)
                before = held.get(key)
                unchanged = UnchangedRanges(tensor, chunks[key], before) if before and tensor.length else None
                staged[index] = StagedSink(sink, unchanged)
            self.chunks |= chunks
            self.sinks.append(staged)

    def deliver(self) -> None:
        """Copy all bytes into the live tensors."""
        for sinks in self.sinks:
            for sink in sinks.values():
                sink.deliver()

    @property
    def changed(self) -> tuple[str, ...]:
        """Stored names of the tensors that the delivery has changed, in the order of the checkpoint."""
        names = (
            part.tensors[index].name
            for part, sinks in zip(self._parts, self.sinks, strict=True)
            for index, sink in sinks.items()
            if sink.is_changed
        )
        return tuple(dict.fromkeys(names))
