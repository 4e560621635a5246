"""The nearest tiers: checkpoints whose bytes are still in this node's memory, or its peers'. Only the bytes: what counts, the log says."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from relight.agent import Agent, HeldPart, reach
from relight.catalog import check_pack
from relight.catalog.opened import Opened
from relight.errors import CorruptCheckpoint, RelightError, StoreUnavailable, known
from relight.observe import emit
from relight.peers import Remote
from relight.store import ByteStore, Reader

ASK_S = 150.0
"""Longer than the agent waits for what it is writing."""


PEERS_AT_ONCE = 4
"""Reads from peers at once."""
MEMORY, PEERS = "memory", "peers"
"""Where bytes may be found that are nearer than any store."""


class MemorySources:
    """What the run's agent, if there is one, has in memory, and what ``remote`` gives: its peers'. Waits until the agent has written what
    the trainer before this one left."""

    def __init__(self, store: ByteStore, run: str, remote: Callable[[], Remote | None] = lambda: None) -> None:
        self._remote = remote
        self._held: dict[tuple[str, int], HeldPart] = {}
        self._agent: Agent | None = None
        try:
            self._agent = reach(store.url, run, ASK_S)
            if self._agent is not None:
                self._held = {(one.id, one.rank): one for one in self._agent.held(ASK_S)}
        except (RelightError, OSError) as error:  # no descriptor may be left, or no memory: the store has it all
            emit("agent.lost", f"nothing is restored from memory: {error}", kind=known(error).kind)

    def views(self, opened: Opened, number: int = 0) -> Iterator[tuple[str, Opened]]:
        """``opened`` with the packs of that part read from ``MEMORY``, and from ``PEERS``, of what there is."""
        found = self._in_memory(opened, number)
        if found is not None:
            yield MEMORY, found
        remote, part = self._remote(), opened.parts[number]
        if remote is not None and part.packs and remote.has(opened.checkpoint.id, part.rank) is not None:
            keys = [f"{opened.prefix}/{pack.file}" for pack in part.packs]
            openers = {key: partial(_at_peers, remote, opened.checkpoint.id, part.rank, index, key) for index, key in enumerate(keys)}
            yield PEERS, replace(opened, store=_OverlayStore(opened.store, openers, PEERS_AT_ONCE), spares=())

    def check(self, opened: Opened) -> Callable[[int, int], None]:
        """Tells of a part's pack, by their numbers, whether it is there, nearer or in the store: raises ``CorruptCheckpoint`` if not.
        Asked before memory is made for its tensors, of each of them, and looks once."""

        @functools.cache
        def look(number: int, index: int) -> None:
            for _, found in self.views(opened, number):  # peers are asked only if memory has not got it
                with contextlib.suppress(CorruptCheckpoint, StoreUnavailable):  # what is in the store may still be whole
                    check_pack(found, found.parts[number], index)
                    return
            check_pack(opened, opened.parts[number], index)

        return look

    def _in_memory(self, opened: Opened, number: int) -> Opened | None:
        part = opened.parts[number]
        held = self._held.get((opened.checkpoint.id, part.rank))
        if held is None or len(part.packs) != len(held.starts):
            return None
        places = zip(part.packs, held.starts, strict=True)
        openers = {f"{opened.prefix}/{pack.file}": partial(_OverlayReader, held, start, pack.size) for pack, start in places}
        return replace(opened, store=_OverlayStore(opened.store, openers, opened.store.parallel_reads), spares=())

    def close(self) -> None:
        """Let go of agent and memory."""
        if self._agent is not None:
            self._agent.close()
        for one in self._held.values():
            one.memory.close()
        self._held = {}


class _OverlayStore:
    """A store of which some files are opened nearer by, each as ``openers`` say."""

    def __init__(self, store: ByteStore, openers: Mapping[str, Callable[[], Reader]], parallel_reads: int) -> None:
        self._store, self._openers, self.parallel_reads = store, openers, parallel_reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open(self, key: str) -> Reader:
        """From where it is nearest."""
        opener = self._openers.get(key)
        return self._store.open(key) if opener is None else opener()


def _at_peers(remote: Remote, checkpoint_id: str, rank: int, index: int, key: str) -> Reader:
    found = remote.reader(checkpoint_id, rank, index)
    if found is None:
        raise CorruptCheckpoint("the peers do not have it any more", where=key)
    return found


class _OverlayReader:
    def __init__(self, held: HeldPart, start: int, size: int) -> None:
        if start + size > held.memory.size:
            raise CorruptCheckpoint("the memory is shorter than the checkpoint", where="shared memory")
        self._fd, self._start, self.size = held.memory.fd, start, size

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        return None

    def read_into(self, offset: int, into: memoryview) -> None:
        if offset + len(into) > self.size:
            raise CorruptCheckpoint("the memory ends sooner than it should", where="shared memory")
        while into:  # by descriptor: reading through the mapping would fault its pages in, one after the other
            got = os.preadv(self._fd, [into], self._start + offset)
            if got <= 0:
                raise CorruptCheckpoint("the memory ends sooner than it should", where="shared memory")
            into, offset = into[got:], offset + got

    def close(self) -> None:
        pass
