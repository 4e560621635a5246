"""One checkpoint on its way into live tensors: read ahead into memory of its own, or, where that is short, read in the switch itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from relight.capture import plan_restore
from relight.capture.restore_plan import RestorePlan
from relight.catalog.tiers import TierCopy
from relight.errors import CheckpointNotFound, CorruptCheckpoint, IncompatibleState, StoreUnavailable, UnsafeContent
from relight.followers.chunk_map import ChunkMap
from relight.followers.live_memory import memory_by_name, places_of
from relight.followers.staged import StagedSink, StagedState
from relight.format.class_names import recorded_classes
from relight.log import Checkpoint
from relight.reader.opened import Opened
from relight.restore.every_rank import ReadByEveryRank
from relight.restore.find import Places
from relight.restore.request import RestoreRequest
from relight.restore.result import Resumed
from relight.restore.transport import CheckpointView, CopiesToTry


class StagedSwitch(ReadByEveryRank):
    """Reads one checkpoint as a restore does, for a later switch. ``prepare`` first, then ``deliver`` or ``close``.

    Without ``limit``, ``prepare`` reads and verifies all changed bytes. With ``limit``, ``deliver`` reads them, in batches of that many
    bytes or of one tensor, so the live tensors are a mixture if it fails.
    """

    checkpoint: Checkpoint
    stored: CheckpointView
    plan: RestorePlan
    memory: Mapping[str, object]
    """By the stored name: the live memory that takes the tensor. Without those that are read into new memory."""
    staged: StagedState
    _reads: Opened
    """The checkpoint from which ``staged`` is read."""
    bytes_read: int = 0
    source: str = ""

    def __init__(
        self,
        request: RestoreRequest,
        chunks: ChunkMap,
        memory: Mapping[str, object],
        base: int,
        limit: int | None,
        places: Places | None,
    ) -> None:
        """``request``: names the checkpoint by its id. ``chunks``: what the live tensors have. ``memory``: where, by the stored name.

        ``base``: the number of switches so far; the staged bytes are the differences from the live checkpoint then.
        ``places``: the logs, if they were read just now.
        """
        super().__init__(request, waits=False)
        self.base, self._chunks, self._live_memory, self._limit = base, chunks, memory, limit
        self._places = places

    def find(self, result: Resumed) -> CopiesToTry:
        """See ``RestoreTransport``."""
        if self._places is None:
            return super().find(result)
        checkpoint = self._places.merged.history.find(str(self._request.which))
        copies = self._places.copies_of([checkpoint] if checkpoint is not None else [])
        return CopiesToTry(copies, [tier.name for tier in self._places.tiers], self._places.silent)

    def prepare(self) -> None:
        """Open the checkpoint, plan the switch, and read what may be read ahead. Raise what a restore raises; then ``close``."""
        places = self.find(Resumed())
        for copy in places.copies:
            try:
                self._prepare(copy)
            except (CorruptCheckpoint, UnsafeContent, StoreUnavailable):
                if not copy.has_next:
                    raise
            else:
                if copy.place and self.source == "store":
                    self.source = places.tiers[copy.place]
                return
        raise CheckpointNotFound(f"no checkpoint {self._request.which}", where=self._request.where)

    def _prepare(self, copy: TierCopy) -> None:
        self.checkpoint = copy.checkpoint
        self.stored = self.open(copy)
        self.plan = planned(self._request, self.stored)
        # what a second plan has elsewhere is new memory of each plan
        again = memory_by_name(planned(self._request, self.stored), self.stored.tensors)
        first = memory_by_name(self.plan, self.stored.tensors)
        if not self.plan.sinks and self.stored.tensors and not self._request.strict:
            raise IncompatibleState(
                "no tensor of the checkpoint fits the live ones",
                where=self.stored.prefix,
                details=self.plan.notes,
                hint="relight show RUN --tensors lists the stored names; map={'old/*': 'new/*'} renames",
            )
        self.memory = {name: place for name, place in first.items() if again.get(name) == place}
        self._places_before = places_of(self._request.components)
        same = {name for name, place in self.memory.items() if self._live_memory.get(name) == place}
        unchanged = {key: chunks for key, chunks in self._chunks.items() if key[0] in same}
        self._reads, by_part = self._assigned(self.plan.sinks)
        self.staged = StagedState(self._reads, by_part, unchanged)
        if self._limit is None:
            self.bytes_read, self.source = self._read(self._reads, self.staged.sinks)
            self.close(None)

    def has_moved(self) -> bool:
        """Return whether the live tensors have other memory than when this was planned."""
        places_now = places_of(self._request.components)
        if places_now is not None:
            return places_now != self._places_before
        places = memory_by_name(planned(self._request, self.stored), self.stored.tensors)
        return any(places.get(name) != place for name, place in self.memory.items())

    def deliver(self) -> None:
        """Change the live tensors, and close."""
        with torch.no_grad():
            if self._limit is None:
                self.staged.deliver()
            else:
                for batch in _batches(self.staged.sinks, self._limit):
                    count, self.source = self._read(self._reads, batch)
                    self.bytes_read += count
                    for sink in (sink for by_tensor in batch for sink in by_tensor.values()):
                        sink.deliver()
                self.close(None)
            self.plan.finish()


def planned(request: RestoreRequest, stored: CheckpointView) -> RestorePlan:
    """Return the plan of a restore into the live components."""
    return plan_restore(
        request.components, stored.tensors, stored.tree, only=request.only, strict=request.strict, rename=request.rename,
        where=stored.prefix, check=stored.check, classes=recorded_classes(stored.user), casts=True,
    )  # fmt: skip


def _batches(sinks: Sequence[Mapping[int, StagedSink]], limit: int) -> Iterator[list[dict[int, StagedSink]]]:
    """Yield the sinks of each part in batches, by the bytes that they may take."""
    batch: list[dict[int, StagedSink]] = [{} for _ in sinks]
    size = 0
    for part, by_tensor in enumerate(sinks):
        for index, sink in by_tensor.items():
            if size and size + sink.wanted_bytes > limit:
                yield batch
                batch, size = [{} for _ in sinks], 0
            batch[part][index] = sink
            size += sink.wanted_bytes
    yield batch
