"""Read the planned bytes: first from the memory of this node and its peers, the rest from the store, once per node for
several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter

from relight.comm import this_node
from relight.errors import CorruptCheckpoint, StoreUnavailable
from relight.layout import Sink
from relight.observe import emit
from relight.observe.progress_bar import Meter, progress_bar
from relight.ranks.group import RankGroup
from relight.reader import read_tensors
from relight.reader.chunk_reader import plan_wants
from relight.reader.node_shared_read import read_together
from relight.reader.opened import Opened
from relight.restore.memory_sources import MEMORY, PEERS, MemorySources

_length = attrgetter("length")


class RestoreReader:
    """Reads a checkpoint into sinks, which are given for each of its parts."""

    def __init__(
        self, opened: Opened, sinks: Sequence[Mapping[int, Sink]], near: MemorySources, ranks: RankGroup
    ) -> None:
        self._opened, self._near, self._ranks = opened, near, ranks
        self._sinks = {number: by_tensor for number, by_tensor in enumerate(sinks) if by_tensor or len(sinks) == 1}
        self.bytes_read = 0
        self.source = MEMORY
        self._label = f"restoring step {opened.checkpoint.step}"
        self._bytes = {number: sum(map(_length, by_tensor.values())) for number, by_tensor in self._sinks.items()}

    def from_memory(self) -> None:
        """Read the parts that this node or its peers have in memory, if the bytes are the committed ones. Plan the reads of the others."""
        with self._bar() as meter:
            self._read_from_memory(meter)
        if self._ranks.several:
            parts = self._opened.parts
            self._wanted = {number: plan_wants(parts[number], by_tensor) for number, by_tensor in self._sinks.items()}

    def _read_from_memory(self, meter: Meter) -> None:
        for number in list(self._sinks):
            for source, nearer in self._near.views(self._opened, number):
                try:
                    sinks = self._sinks[number]
                    self.bytes_read += read_tensors(nearer, nearer.parts[number], sinks, progress=meter)
                except (CorruptCheckpoint, StoreUnavailable) as error:
                    checkpoint_id = self._opened.checkpoint.id
                    emit(
                        "restore.skipped",
                        f"the copy in {source} is not used: {error}",
                        id=checkpoint_id,
                        kind=error.kind,
                    )
                    continue
                del self._sinks[number]
                self.source = source if source == PEERS else self.source
                break

    def from_store(self) -> None:
        """Read the remaining parts from the store. Collective: every rank must call it, even if it needs nothing
        more."""
        if self._sinks:
            self.source = "store"
        world, opened = self._ranks.world, self._opened
        with self._bar() as meter:
            if self._ranks.several:
                self.bytes_read += read_together(
                    world.gather, world.rank, this_node(), opened, self._wanted, progress=meter
                )
                return
            for number, by_tensor in self._sinks.items():
                self.bytes_read += read_tensors(opened, opened.parts[number], by_tensor, progress=meter)

    def _bar(self) -> AbstractContextManager[Meter]:
        """Show the bytes that this rank still needs. Rank 0 shows its own for all ranks."""
        total = sum(map(self._bytes.__getitem__, self._sinks))
        return progress_bar(self._label, total, leads=self._ranks.world.rank == 0)
