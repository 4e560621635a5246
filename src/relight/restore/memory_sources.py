"""Restore sources nearer than the store: bytes in the memory of this node or its peers. The log alone decides which
checkpoints exist."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from relight.agent import Agent, HeldPart, reach
from relight.errors import CorruptCheckpoint, RelightError, StoreUnavailable, known
from relight.observe import emit
from relight.peers import Remote
from relight.reader import check_pack
from relight.reader.chunk_reader import cpu_threads
from relight.reader.opened import Opened
from relight.store import ByteStore, Properties, Reader
from relight.store.wrapper import StoreWrapper

ASK_S = 150.0
"""Seconds to wait for the agent's answer: longer than the agent waits for its own running save."""


PEER_S = 20.0
"""Seconds for each operation on a connection to a peer of this node's agent."""
PEERS_AT_ONCE = 4
"""Reads from peers at the same time."""
MEMORY, PEERS = "memory", "peers"
"""Names of the sources that are nearer than any store."""


class MemorySources:
    """The snapshots in the memory of the run's agent, if there is one, and in that of its peers (``remote``).

    ``waits``: until the agent has written the previous trainer's saves.
    """

    def __init__(
        self, store: ByteStore, run: str, remote: Callable[[], Remote | None] = lambda: None, *, waits: bool = True
    ) -> None:
        self._remote = remote
        self._agents_remote: Remote | None = None
        self._asked = False
        self._held: dict[tuple[str, int], HeldPart] = {}
        self._agent: Agent | None = None
        try:
            self._agent = reach(store.url, run, ASK_S)
            if self._agent is not None:
                self._held = {(part.id, part.rank): part for part in self._agent.held(ASK_S, waits=waits)}
        except (RelightError, OSError) as error:  # such as no descriptor or memory left: the store has everything
            emit("agent.lost", f"nothing is restored from memory: {error}", kind=known(error).kind)

    def views(self, opened: Opened, number: int = 0) -> Iterator[tuple[str, Opened]]:
        """Yield ``opened`` with the packs of that part read from ``MEMORY``, then from ``PEERS``, if they have them."""
        in_memory = self._in_memory(opened, number)
        if in_memory is not None:
            yield MEMORY, in_memory
        remote, part = self._remote() or self._agents_peers(), opened.parts[number]
        if remote is not None and part.packs and remote.has(opened.checkpoint.id, part.rank) is not None:
            keys = [f"{opened.prefix}/{pack.file}" for pack in part.packs]
            openers = {
                key: partial(_at_peers, remote, opened.checkpoint.id, part.rank, index, key)
                for index, key in enumerate(keys)
            }
            view = replace(opened, store=_OverlayStore(opened.store, openers, PEERS_AT_ONCE), spares=(), nearer=())
            yield PEERS, view
            # the caller wants another view: if the bytes were read by RDMA, the same ones over TCP may be correct
            if remote.leave_rdma("bytes that were read by RDMA are not the committed ones"):
                yield PEERS, view

    def _agents_peers(self) -> Remote | None:
        """Return access to the peers of this node's agent; None if it has none. The agent is asked once."""
        if not self._asked and self._agent is not None:
            self._asked = True
            with contextlib.suppress(RelightError, OSError):  # the store has everything
                peers = self._agent.find_peers(ASK_S)
                if peers.token:
                    self._agents_remote = Remote(peers.others, peers.token, PEER_S, tls=peers.tls, plane=peers.plane)
        return self._agents_remote

    def check(self, opened: Opened) -> Callable[[int, int], None]:
        """Return a function that raises ``CorruptCheckpoint`` if pack ``index`` of part ``number`` is missing in
        memory, peers and store.

        It is called before memory is allocated for each tensor, and checks each pack once.
        """

        @functools.cache
        def check_once(number: int, index: int) -> None:
            for _, view in self.views(opened, number):  # peers are read only if this node's memory lacks the pack
                # the pack in the store may still be intact
                with contextlib.suppress(CorruptCheckpoint, StoreUnavailable):
                    check_pack(view, view.parts[number], index)
                    return
            check_pack(opened, opened.parts[number], index)

        return check_once

    def _in_memory(self, opened: Opened, number: int) -> Opened | None:
        part = opened.parts[number]
        snapshot = self._held.get((opened.checkpoint.id, part.rank))
        if snapshot is None or len(part.packs) != len(snapshot.starts):
            return None
        places = zip(part.packs, snapshot.starts, strict=True)
        openers = {
            f"{opened.prefix}/{pack.file}": partial(_OverlayReader, snapshot, start, pack.size)
            for pack, start in places
        }
        return replace(
            opened,
            store=_OverlayStore(opened.store, openers, max(opened.store.properties().parallel_reads, cpu_threads())),
            spares=(),
            nearer=(),
        )

    def close(self) -> None:
        """Disconnect from the agent and unmap its memory."""
        if self._agent is not None:
            self._agent.close()
        if self._agents_remote is not None:
            self._agents_remote.close()
        for part in self._held.values():
            with contextlib.suppress(
                BufferError
            ):  # an interrupted read's frames hold views: the last of them releases the memory
                part.memory.close()
        self._held = {}


class _OverlayStore(StoreWrapper):
    """Wrapper of a store that opens some files from a nearer source, with ``openers``."""

    def __init__(self, inner: ByteStore, openers: Mapping[str, Callable[[], Reader]], parallel_reads: int) -> None:
        super().__init__(inner)
        self._openers, self._parallel_reads = openers, parallel_reads

    def properties(self) -> Properties:
        """See ``ByteStore``."""
        return replace(self.inner.properties(), parallel_reads=self._parallel_reads)

    def open(self, key: str) -> Reader:
        """Open the file from its nearest source."""
        opener = self._openers.get(key)
        return self.inner.open(key) if opener is None else opener()


def _at_peers(remote: Remote, checkpoint_id: str, rank: int, index: int, key: str) -> Reader:
    reader = remote.reader(checkpoint_id, rank, index)
    if reader is None:
        raise CorruptCheckpoint("the peers do not have it any more", where=key)
    return reader


class _OverlayReader:
    def __init__(self, held: HeldPart, start: int, size: int) -> None:
        if start + size > held.memory.size:
            raise CorruptCheckpoint("the copy in memory is shorter than the checkpoint", where="shared memory")
        self._fd, self._start, self.size = held.memory.fd, start, size

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        return None

    def read_into(self, offset: int, into: memoryview) -> None:
        if offset + len(into) > self.size:
            raise CorruptCheckpoint("the copy in memory is truncated", where="shared memory")
        while into:  # by descriptor: reading through the mapping would fault its pages in, one after the other
            got = os.preadv(self._fd, [into], self._start + offset)
            if got <= 0:
                raise CorruptCheckpoint("the copy in memory is truncated", where="shared memory")
            into, offset = into[got:], offset + got

    def close(self) -> None:
        pass
