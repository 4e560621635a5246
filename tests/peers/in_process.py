"""Agents in the test's own process, for tests that kill no process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy

from relight.arena import SharedMapping, allocate
from relight.peers import HeldPartFile, Peer, PeerService, Remote

TOKEN = b"t" * 32
MB = 1_000_000
Events = list[tuple[str, dict[str, object]]]


def part_of(
    id: str, seq: int, rank: int, size: int, is_there: Callable[[], bool] = lambda: True
) -> tuple[HeldPartFile, bytes]:
    """Return a part of two packs, and the bytes of its memory."""
    pages = -(-size // 4096)
    memory = SharedMapping(allocate((pages + 1) * 4096), (pages + 1) * 4096, writable=True)
    memory.view[:] = numpy.random.default_rng([rank, *id.encode()]).bytes(memory.size)
    half = pages // 2 * 4096
    return HeldPartFile(id, seq, rank, 0, memory, (4096, 4096 + half), (half - 100, size - half), is_there), bytes(
        memory.view
    )


@contextlib.contextmanager
def several(count: int, events: Events | None = None) -> Iterator[list[PeerService]]:
    """Start ``count`` agents in this process."""
    peers = [
        PeerService(
            "127.0.0.1",
            token=TOKEN,
            memory=None,
            notify=lambda name, message, fields: None if events is None else events.append((name, fields)),
        )
        for _ in range(count)
    ]
    try:
        yield peers
    finally:
        for peer in peers:
            peer.close()


def join(peers: Sequence[PeerService], data: int, parity: int, addresses: Sequence[str] = ()) -> None:
    """Let all agents join one roster, each with its number as rank."""
    addresses = addresses or [peer.address for peer in peers]
    roster = [Peer(f"a{rank}", f"h{rank}", "", address, (rank,)) for rank, address in enumerate(addresses)]
    for rank, peer in enumerate(peers):
        peer.join(roster, f"a{rank}", data, parity)


def read_back(remote: Remote, part: HeldPartFile, data: bytes) -> None:
    """Read the whole part and check its bytes."""
    for pack, (start, size) in enumerate(zip(part.starts, part.sizes)):
        reader = remote.reader(part.id, part.rank, pack)
        assert reader is not None and reader.size == size
        room = bytearray(size)
        reader.read_into(0, memoryview(room))
        assert room == data[start : start + size]
