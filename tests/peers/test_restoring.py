"""A restore from peers: every byte is verified, so wrong bytes do no harm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import MB, TOKEN, committed, join, part_of, restore, several

from relight.errors import CorruptCheckpoint
from relight.peers import HeldPartFile, PeerService, Remote
from relight.reader.opened import Opened


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Opened, dict[str, bytes], HeldPartFile]:
    """Return a committed checkpoint, its tensors' bytes, and its packs as in the slot of rank 0."""
    return committed(tmp_path)


@contextlib.contextmanager
def protected(part: HeldPartFile, tls: bool = False) -> Iterator[tuple[list[PeerService], Remote]]:
    """Yield three agents with data 2 and parity 1. The agent that had the part is gone."""
    with several(3, tls=tls) as peers:
        join(peers, 2, 1)
        others = [part_of(part.id, 1, rank, 3 * MB)[0] for rank in (1, 2)]
        for peer, offered in zip(peers, [part, *others]):
            peer.offer(offered)
        assert all(peer.wait(30) for peer in peers)
        peers[0].close()
        with contextlib.closing(Remote([peer.address for peer in peers[1:]], TOKEN, 20.0, tls=tls)) as remote:
            yield peers, remote


def test_a_checkpoint_is_restored_without_its_node_and_its_files(
    saved: tuple[Opened, dict[str, bytes], HeldPartFile], tls: bool
) -> None:
    """Root and part from the store, every pack rebuilt from two peers: the tensors are what was saved."""
    opened, contents, part = saved
    with protected(part, tls) as (_, remote):
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
