"""Agents in the test's own process, for tests that kill no process."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from relight.arena import SharedMapping, allocate, lay_out
from relight.catalog import Run
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.format import Leaf, encode_tree
from relight.layout import Bytes, Item
from relight.peers import HeldPartFile, Peer, PeerService, Remote
from relight.reader import open_checkpoint, read_tensors
from relight.reader.opened import Opened
from relight.store import LocalStore

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
def several(
    count: int, events: Events | None = None, tls: bool = False, plane: str = "tcp"
) -> Iterator[list[PeerService]]:
    """Start ``count`` agents in this process. ``events`` receives theirs."""
    peers = [
        PeerService(
            "127.0.0.1",
            token=TOKEN,
            memory=None,
            notify=lambda name, message, fields: None if events is None else events.append((name, fields)),
            tls=tls,
            plane=plane,
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


def until(true: Callable[[], object], seconds: float = 20.0) -> bool:
    """Wait until ``true()`` is true. Return whether it is."""
    ends = time.monotonic() + seconds
    while not true() and time.monotonic() < ends:
        time.sleep(0.01)
    return bool(true())


class FromPeers:
    """A store that reads packs from peers."""

    def __init__(self, store: Any, readers: dict[str, Any]) -> None:
        self._store, self._readers = store, readers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open(self, key: str) -> Any:
        return self._readers[key]


def committed(folder: Path, prefix: str = "t") -> tuple[Opened, dict[str, bytes], HeldPartFile]:
    """Return a committed checkpoint, its tensors' bytes, and its packs as in the slot of rank 0. The files are
    deleted. ``prefix``: begin of the tensors' names."""
    attempt, rng = Attempt.begin(LocalStore(folder), "run"), random.Random(3)
    contents = {f"{prefix}{number}": rng.randbytes(rng.randrange(1, 900_000)) for number in range(20)}
    items = [Item(name, "uint8", (len(data),), "param", Bytes(data), None, True) for name, data in contents.items()]
    attempt.save(
        SaveRequest(
            SaveInfo(step=0),
            tree=encode_tree({item.name: Leaf("tensor", (number,)) for number, item in enumerate(items)}),
            items=items,
        )
    )
    run = Run(attempt.store, "run")
    view, checkpoint = run.view(), run.history().live[-1]
    opened = open_checkpoint(run.store, "run", checkpoint, store_id=view.store_id, run_id=view.run_id)
    packs = [folder / opened.prefix / pack.file for pack in opened.parts[0].packs]
    layout = lay_out([pack.stat().st_size for pack in packs], 0)
    memory = SharedMapping(allocate(layout.size), layout.size, writable=True)
    for start, pack in zip(layout.packs, packs):
        memory.view[start : start + pack.stat().st_size] = pack.read_bytes()
    sizes = tuple(pack.stat().st_size for pack in packs)
    for pack in packs:
        pack.unlink()
    return opened, contents, HeldPartFile(checkpoint.id, 1, 0, 0, memory, layout.packs, sizes, lambda: True)


def restore(opened: Opened, part: HeldPartFile, remote: Remote) -> dict[str, bytes]:
    """All tensors, read and verified as a restore does."""
    table = opened.parts[0]
    readers = {
        f"{opened.prefix}/{pack.file}": remote.reader(part.id, 0, number) for number, pack in enumerate(table.packs)
    }
    rooms = [bytearray(tensor.length) for tensor in table.tensors]
    nearer = replace(opened, store=FromPeers(opened.store, readers))
    read_tensors(nearer, table, {index: Bytes(room) for index, room in enumerate(rooms)})
    return {tensor.name: bytes(room) for tensor, room in zip(table.tensors, rooms)}
