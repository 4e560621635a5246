"""The nearest tier: checkpoints whose bytes are still in this node's memory. Only the bytes: what counts, the log says, as always."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relight.agent import Held, reach
from relight.catalog.opened import Opened
from relight.errors import CorruptCheckpoint, RelightError
from relight.observe import emit
from relight.store import ByteStore, Reader

ASK_S = 150.0
"""Longer than the agent waits for what it is writing."""


class Near:
    """What the run's agent, if there is one, has in memory. Waits until it has written what the trainer before this one left."""

    def __init__(self, store: ByteStore, run: str) -> None:
        self._held: dict[tuple[str, int], Held] = {}
        self._agent = reach(store.url, run)
        if self._agent is not None:
            try:
                self._held = {(one.id, one.rank): one for one in self._agent.held(ASK_S)}
            except RelightError as error:
                emit("agent.lost", f"nothing is restored from memory: {error}", kind=error.kind)

    def view(self, opened: Opened, number: int = 0) -> Opened | None:
        """``opened`` with the packs of that part read from memory; None if they are not there."""
        part = opened.parts[number]
        held = self._held.get((opened.checkpoint.id, part.rank))
        if held is None or len(part.packs) != len(held.starts):
            return None
        places = {f"{opened.prefix}/{pack.file}": (start, pack.size) for pack, start in zip(part.packs, held.starts, strict=True)}
        return replace(opened, store=_Nearer(opened.store, held, places), spares=())

    def close(self) -> None:
        """Let go of agent and memory."""
        if self._agent is not None:
            self._agent.close()
        for one in self._held.values():
            one.memory.close()
        self._held = {}


class _Nearer:
    """A store whose packs are in memory."""

    def __init__(self, store: ByteStore, held: Held, places: Mapping[str, tuple[int, int]]) -> None:
        self._store, self._held, self._places = store, held, places

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open(self, key: str) -> Reader:
        """From memory what is there."""
        if key not in self._places:
            return self._store.open(key)
        return _Reader(self._held, *self._places[key])


class _Reader:
    def __init__(self, held: Held, start: int, size: int) -> None:
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
