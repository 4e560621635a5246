"""A restore from peers: every byte is verified, so wrong bytes do no harm."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_process import MB, TOKEN, join, part_of, several

from relight.arena import SharedMapping, allocate, lay_out
from relight.catalog import Run
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import CorruptCheckpoint
from relight.format import Leaf, encode_tree
from relight.layout import Bytes, Item
from relight.peers import HeldPartFile, PeerService, Remote
from relight.reader import open_checkpoint, read_tensors
from relight.reader.opened import Opened
from relight.store import LocalStore


class FromPeers:
    """A store that reads packs from peers."""

    def __init__(self, store: Any, readers: dict[str, Any]) -> None:
        self._store, self._readers = store, readers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open(self, key: str) -> Any:
        return self._readers[key]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Opened, dict[str, bytes], HeldPartFile]:
    """Return a committed checkpoint, its tensors' bytes, and its packs as in the slot of rank 0. The files are
    deleted."""
    attempt, rng = Attempt.begin(LocalStore(tmp_path), "run"), random.Random(3)
    contents = {f"t{number}": rng.randbytes(rng.randrange(1, 900_000)) for number in range(20)}
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
    packs = [tmp_path / opened.prefix / pack.file for pack in opened.parts[0].packs]
    layout = lay_out([pack.stat().st_size for pack in packs], 0)
    memory = SharedMapping(allocate(layout.size), layout.size, writable=True)
    for start, pack in zip(layout.packs, packs):
        memory.view[start : start + pack.stat().st_size] = pack.read_bytes()
    sizes = tuple(pack.stat().st_size for pack in packs)
    for pack in packs:
        pack.unlink()
    return opened, contents, HeldPartFile(checkpoint.id, 1, 0, 0, memory, layout.packs, sizes, lambda: True)


@contextlib.contextmanager
def protected(part: HeldPartFile) -> Iterator[tuple[list[PeerService], Remote]]:
    """Yield three agents with data 2 and parity 1. The agent that had the part is gone."""
    with several(3) as peers:
        join(peers, 2, 1)
        others = [part_of(part.id, 1, rank, 3 * MB)[0] for rank in (1, 2)]
        for peer, offered in zip(peers, [part, *others]):
            peer.offer(offered)
        assert all(peer.wait(30) for peer in peers)
        peers[0].close()
        with contextlib.closing(Remote([peer.address for peer in peers[1:]], TOKEN, 20.0)) as remote:
            yield peers, remote


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


def test_a_checkpoint_is_restored_without_its_node_and_its_files(
    saved: tuple[Opened, dict[str, bytes], HeldPartFile],
) -> None:
    """Root and part from the store, every pack rebuilt from two peers: the tensors are what was saved."""
    opened, contents, part = saved
    with protected(part) as (_, remote):
        assert restore(opened, part, remote) == contents


def test_wrong_bytes_of_a_peer_are_found_out(saved: tuple[Opened, dict[str, bytes], HeldPartFile]) -> None:
    """A flipped bit of parity in a peer's memory makes that read fail. It never makes a wrong tensor."""
    opened, _, part = saved
    with protected(part) as (peers, remote):
        for peer in peers[1:]:
            for place in peer._holder._places.values():
                if place.complete is not None and place.complete.memory is not None:
                    for offset in range(0, place.complete.size, 50_000):
                        place.complete.memory.view[offset] ^= 1
        with pytest.raises(CorruptCheckpoint):
            restore(opened, part, remote)
