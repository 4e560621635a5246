"""Reading what was planned: from this node's memory what is there, the rest from the store, once a node if several ranks need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relight.catalog import read_tensors
from relight.catalog.lending import read_together
from relight.catalog.opened import Opened
from relight.catalog.read import plan_wants
from relight.checkpointer.near import Near
from relight.checkpointer.ranks import Ranks
from relight.errors import CorruptCheckpoint
from relight.layout import Sink
from relight.observe import emit
from relight.world import this_node


class Reading:
    """What is to be read of a checkpoint: sinks for each of its parts."""

    def __init__(self, opened: Opened, sinks: Sequence[Mapping[int, Sink]], near: Near) -> None:
        self._opened, self._near = opened, near
        self._sinks = {number: held for number, held in enumerate(sinks) if held or len(sinks) == 1}
        self.bytes_read = 0
        self.source = "memory"

    def from_memory(self) -> None:
        """What this node has in memory, if it is what was committed."""
        for number in list(self._sinks):
            nearer = self._near.view(self._opened, number)
            if nearer is not None:
                try:
                    self.bytes_read += read_tensors(nearer, nearer.parts[number], self._sinks[number])
                    del self._sinks[number]
                except CorruptCheckpoint as error:
                    emit("restore.skipped", f"the copy in memory is not used: {error}", id=self._opened.checkpoint.id, kind=error.kind)

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
