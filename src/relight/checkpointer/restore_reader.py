"""Reading what was planned: from this node's memory and its peers' what is there; the rest from the store, once a node if several ranks
need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relight.catalog import read_tensors
from relight.catalog.node_shared_read import read_together
from relight.catalog.opened import Opened
from relight.catalog.read import plan_wants
from relight.checkpointer.memory_sources import MEMORY, PEERS, MemorySources
from relight.checkpointer.ranks import Ranks
from relight.comm import this_node
from relight.errors import CorruptCheckpoint, StoreUnavailable
from relight.layout import Sink
from relight.observe import emit


class RestoreReader:
    """What is to be read of a checkpoint: sinks for each of its parts."""

    def __init__(self, opened: Opened, sinks: Sequence[Mapping[int, Sink]], near: MemorySources) -> None:
        self._opened, self._near = opened, near
        self._sinks = {number: held for number, held in enumerate(sinks) if held or len(sinks) == 1}
        self.bytes_read = 0
        self.source = MEMORY

    def from_memory(self) -> None:
        """What this node has in memory, or its peers have, if it is what was committed."""
        for number in list(self._sinks):
            for source, nearer in self._near.views(self._opened, number):
                try:
                    self.bytes_read += read_tensors(nearer, nearer.parts[number], self._sinks[number])
                except (CorruptCheckpoint, StoreUnavailable) as error:
                    checkpoint_id = self._opened.checkpoint.id
                    emit("restore.skipped", f"the copy in {source} is not used: {error}", id=checkpoint_id, kind=error.kind)
                    continue
                del self._sinks[number]
                self.source = source if source == PEERS else self.source
                break

    def from_store(self, ranks: Ranks | None) -> None:
        """The rest. All ranks call it, those that want nothing more as well."""
        if self._sinks:
            self.source = "store"
        parts = self._opened.parts
        if ranks is None:
            self.bytes_read += sum(read_tensors(self._opened, parts[number], held) for number, held in self._sinks.items())
            return
        wanted = {number: plan_wants(parts[number], held) for number, held in self._sinks.items()}
        self.bytes_read += read_together(ranks.world.gather, ranks.world.rank, this_node(), self._opened, wanted)
