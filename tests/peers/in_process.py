"""Agents of the test's own process, for what needs no kill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy

from relight.arena import SharedMapping, allocate
from relight.peers import HeldPartFile, Peer, PeerService, Remote

TOKEN = b"t" * 32
MB = 1_000_000
Told = list[tuple[str, dict[str, object]]]


def part_of(id: str, seq: int, rank: int, size: int, is_there: Callable[[], bool] = lambda: True) -> tuple[HeldPartFile, bytes]:
    """A part of two packs, and its memory's bytes."""
    pages = -(-size // 4096)
    memory = SharedMapping(allocate((pages + 1) * 4096), (pages + 1) * 4096, writable=True)
    memory.view[:] = numpy.random.default_rng([rank, *id.encode()]).bytes(memory.size)
    half = pages // 2 * 4096
    return HeldPartFile(id, seq, rank, 0, memory, (4096, 4096 + half), (half - 100, size - half), is_there), bytes(memory.view)


@contextlib.contextmanager
def several(count: int, told: Told | None = None) -> Iterator[list[PeerService]]:
    """Agents in this process."""
    found = [
        PeerService(
            "127.0.0.1", token=TOKEN, memory=None, tell=lambda name, say, fields: None if told is None else told.append((name, fields))
        )
        for _ in range(count)
    ]
    try:
        yield found
    finally:
        for one in found:
            one.close()


def join(peers: Sequence[PeerService], data: int, parity: int, addresses: Sequence[str] = ()) -> None:
    """All of them, each with its number as rank."""
    addresses = addresses or [one.address for one in peers]
    roster = [Peer(f"a{at}", f"h{at}", "", address, (at,)) for at, address in enumerate(addresses)]
    for at, one in enumerate(peers):
        one.join(roster, f"a{at}", data, parity)


def read_back(remote: Remote, part: HeldPartFile, data: bytes) -> None:
    """All of it, and right."""
    for pack, (start, size) in enumerate(zip(part.starts, part.sizes)):
        reader = remote.reader(part.id, part.rank, pack)
        assert reader is not None and reader.size == size
        room = bytearray(size)
        reader.read_into(0, memoryview(room))
        assert room == data[start : start + size]
