"""Each rank reads the stores itself; ranks of one node share what they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from relight.capture import only_needed, sinks_by_part
from relight.catalog.tiers import TierCopy
from relight.format import Tensor, decode_tree
from relight.layout import Sink
from relight.ranks.collective_errors import read_on_all_ranks
from relight.reader.merged_parts import MergedCheckpoint, check_pieces, whole_of
from relight.reader.one_writer import apart, saved_by, with_own
from relight.reader.opened import Opened
from relight.restore.find import Places, agreed, read_places
from relight.restore.memory_sources import MemorySources
from relight.restore.reader import RestoreReader
from relight.restore.request import RestoreRequest
from relight.restore.result import Resumed
from relight.restore.transport import CheckpointView, CopiesToTry


class ReadByEveryRank:
    """A ``RestoreTransport`` of a rank that reads the stores itself, and the memory of this node and its peers."""

    reads = True

    def __init__(self, request: RestoreRequest, *, waits: bool = True) -> None:
        """``waits``: see ``MemorySources``."""
        self._request, self._ranks = request, request.ranks
        self._near = MemorySources(request.store, request.run, request.remote, waits=waits)
        self._places: Places | None = None
        self._opened: tuple[Opened, MergedCheckpoint | None] | None = None

    def find(self, result: Resumed) -> CopiesToTry:
        """See ``RestoreTransport``. Rank 0 reads first: other ranks then read at least the records that it read."""
        for leads in (True, False) if self._ranks.several else (True,):
            with read_on_all_ranks(self._ranks, "reading the log"):
                if not self._ranks.several or leads == (self._ranks.world.rank == 0):
                    self._places = read_places(self._request, result)
        places = self._places
        assert places is not None
        # with several ranks, rank 0's log decides whether the run exists
        return CopiesToTry(agreed(self._request, places), [tier.name for tier in places.tiers], places.silent)

    def open(self, copy: TierCopy) -> CheckpointView:
        """See ``RestoreTransport``."""
        assert self._places is not None
        checkpoint, rank = copy.checkpoint, self._ranks.world.rank
        # No rank may continue to the collective exchange while another rank aborts.
        with read_on_all_ranks(self._ranks, f"opening checkpoint {checkpoint.id}"):
            opened = self._places.open(copy)
            part, check = opened.parts[0], self._near.check(opened)
            tensors: Sequence[Tensor]
            if len(opened.parts) > 1:
                joined = whole_of(opened)
                tensors, tree, own = joined.tensors, joined.tree_of(rank), joined.own
                check_tensor = partial(check_pieces, opened, joined, check=check)
            else:
                joined, tensors = None, part.tensors
                common, own = apart(opened.root, decode_tree(part.tree, len(tensors), opened.prefix), opened.prefix)
                tree, check_tensor = with_own(common, own, rank), partial(check, 0)
        self._opened, root = (opened, joined), opened.root
        return CheckpointView(
            tensors, tree, own, saved_by(root), opened.prefix, root.environment, root.exact, root.user, check_tensor
        )  # fmt: skip

    def read(self, sinks: Mapping[int, Sink]) -> tuple[int, str]:
        """See ``RestoreTransport``. Each stored byte is read once per node."""
        return self._read(*self._assigned(sinks))

    def _assigned(self, sinks: Mapping[int, Sink]) -> tuple[Opened, list[Mapping[int, Sink]]]:
        """Return the opened checkpoint, and the sinks by its parts."""
        assert self._opened is not None
        (opened, joined), self._opened = self._opened, None
        if joined is None:
            return opened, [only_needed(sinks)]
        return opened, [*sinks_by_part(sinks, joined.tensors, joined.pieces, len(opened.parts))]

    def _read(self, opened: Opened, by_part: Sequence[Mapping[int, Sink]]) -> tuple[int, str]:
        reading = RestoreReader(opened, by_part, self._near, self._ranks)
        with read_on_all_ranks(self._ranks, f"restoring checkpoint {opened.checkpoint.id} from memory"):
            reading.from_memory()
        # Ranks of one node that share a damaged chunk fail together. Ranks of other nodes, or with chunks of their own, do not.
        with read_on_all_ranks(self._ranks, f"restoring checkpoint {opened.checkpoint.id} from the store"):
            reading.from_store()
        return reading.bytes_read, reading.source

    def close(self, error: BaseException | None) -> None:
        """See ``RestoreTransport``."""
        self._near.close()
