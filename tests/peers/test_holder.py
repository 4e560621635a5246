"""Pieces that an agent holds for peers: no byte is added twice, no piece is shown early, and none is kept for ever."""

from __future__ import annotations

import random

import numpy
import pytest

from relight.peers import Peer, PeerRing
from relight.peers.galois import BLOCK, accumulate, coefficient
from relight.peers.holder import PENDING_MAX, Holder, Refusal, Turn
from relight.peers.messages import Contribute, Parity, ReadRequest, Segment
from relight.peers.parts import blob_length, cut
from relight.peers.wire import PeerLost

K, M, N = 3, 2, 5
RING = PeerRing(tuple(Peer(f"a{number}", f"h{number}", "", f"x:{number + 1}", (number,)) for number in range(N)), K, M)
ME = 1
SIZES = [2 * BLOCK * K - 5000, 0, BLOCK * K, 100, 3 * BLOCK]


def blob(id: str, rank: int) -> bytes:
    return numpy.random.default_rng([rank, *id.encode()]).bytes(SIZES[rank])


def contribution(
    id: str, seq: int, row: int, member: int, *, life: bytes = b"l" * 8, ring: PeerRing = RING, lane: int = 0
) -> Contribute:
    """Return the contribution of a member of the stripe that ``ME`` holds a row of."""
    stripe = (ME - row) % len(ring.peers)
    rank = ring.member(stripe, member).ranks[lane]
    starts, sizes = ((4096,), (SIZES[rank],)) if SIZES[rank] else ((), ())
    offset, length = cut(blob_length(starts, sizes), K)[member]
    segment = Segment(ring.member(stripe, member).id, rank, member, offset, length, starts, sizes)
    return Contribute(id, seq, lane, ring.fingerprint(), stripe, row, life, segment)


def data_of(asked: Contribute) -> bytes:
    segment = asked.segment
    return blob(asked.id, segment.rank)[segment.offset :][: segment.length]


def send(holder: Holder, asked: Contribute) -> bool:
    """Add a whole contribution at once."""
    turn, got = holder.begin(asked)
    if got < asked.segment.length:
        holder.add(turn, got, memoryview(data_of(asked)[got:]))
    return holder.end(turn)


def right(id: str, row: int) -> bytes:
    """Return the right bytes of the piece."""
    asked = [contribution(id, 0, row, member) for member in range(K)]
    total = bytearray(-(-max(piece.segment.length for piece in asked) // BLOCK) * BLOCK)
    for member, piece in enumerate(asked):
        padded = data_of(piece) + bytes(len(total) - piece.segment.length)
        accumulate(memoryview(total), memoryview(padded), coefficient(row, member))
    return bytes(total)


def read(holder: Holder, piece: Parity) -> bytes:
    return bytes(
        holder.read(ReadRequest(piece.id, -1, 0, piece.length, piece.ring, piece.lane, piece.stripe, piece.row))
    )


@pytest.fixture
def holder() -> Holder:
    """Make a holder that has joined as agent 1."""
    holder_ = Holder(None)
    holder_.join(RING, "a1")
    return holder_


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_added_twice_whichever_connection_continues(holder: Holder, seed: int) -> None:
    """Contributions are interleaved and their connections replaced at random.

    Bytes from a former connection are refused, and the piece is right.
    """
    rng = random.Random(seed)
    completed: list[Parity] = []
    holder._completed = completed.append
    asked = [contribution("c1", 1, row, member) for row in range(M) for member in range(K)]
    turns: dict[int, tuple[Turn, int]] = {
        number: holder.begin(contribution_) for number, contribution_ in enumerate(asked)
    }
    stale: list[tuple[Turn, int, bytes]] = []
    while turns:
        turn_number = rng.choice(list(turns))
        turn, got = turns[turn_number]
        data = data_of(asked[turn_number])
        if rng.random() < 0.3:
            if got < len(data):
                stale.append((turn, got, data[got : got + BLOCK]))
            turns[turn_number] = holder.begin(asked[turn_number])
            assert turns[turn_number][1] == got
        elif got < len(data):
            holder.add(turn, got, memoryview(data[got : got + BLOCK]))
            turns[turn_number] = (turn, min(len(data), got + BLOCK))
        else:
            holder.end(turn)
            del turns[turn_number]
        if stale and rng.random() < 0.5:
            old, offset, piece = stale.pop()
            with pytest.raises(PeerLost):
                holder.add(old, offset, memoryview(piece))
    assert [(piece.row, piece.id) for piece in sorted(completed, key=lambda piece: piece.row)] == [(0, "c1"), (1, "c1")]
    for piece in holder.inventory():
        assert read(holder, piece) == right("c1", piece.row)


def test_a_piece_is_shown_when_all_members_are_whole_and_not_before(holder: Holder) -> None:
    """A piece with all bytes is not complete before every member has sent its end. A repeated end changes nothing."""
    last = contribution("c1", 1, 0, 2)
    turn, _ = holder.begin(last)
    assert not send(holder, contribution("c1", 1, 0, 0)) and not send(holder, contribution("c1", 1, 0, 1))
    assert holder.inventory() == []
    holder.add(turn, 0, memoryview(data_of(last)))
    assert holder.inventory() == []
    assert holder.end(turn)
    assert send(holder, last)
    (piece,) = holder.inventory()
    assert read(holder, piece) == right("c1", 0)
    assert [member.rank for member in piece.members] == [3, 4, 0]


def test_whole_with_bytes_missing_is_refused(holder: Holder) -> None:
    """An early end, bytes out of order, too many bytes and incomplete blocks in the middle are refused."""
    asked = contribution("c1", 1, 0, 2)
    assert asked.segment.length > BLOCK
    for offset, length in ((BLOCK, BLOCK), (0, asked.segment.length + 1), (0, 100)):
        turn, _ = holder.begin(asked)
        with pytest.raises(PeerLost):
            holder.add(turn, offset, memoryview(bytes(length)))
    turn, got = holder.begin(asked)
    assert got == 0
    with pytest.raises(PeerLost):
        holder.end(turn)


def test_void_ends_the_piece_for_all_senders(holder: Holder) -> None:
    """If a member's memory changed, the piece is freed and other members are refused.

    The next checkpoint is accepted.
    """
    send(holder, contribution("c1", 1, 0, 0))
    turn, _ = holder.begin(contribution("c1", 1, 0, 2))
    holder.void(turn)
    assert holder.used == 0 and holder.inventory() == []
    with pytest.raises(Refusal, match="changed"):
        holder.begin(contribution("c1", 1, 0, 1))
    with pytest.raises(PeerLost):
        holder.end(turn)
    assert [send(holder, contribution("c2", 2, 0, member)) for member in range(K)] == [False, False, True]


def test_void_after_whole_takes_nothing_back(holder: Holder) -> None:
    """A complete piece stays complete if the answer was lost and the slot was refilled before the sender asked
    again."""
    send(holder, contribution("c1", 1, 0, 2))
    turn, got = holder.begin(contribution("c1", 1, 0, 2))
    assert got == turn.member.segment.length
    holder.void(turn)
    assert [send(holder, contribution("c1", 1, 0, member)) for member in range(2)] == [False, True]
    assert read(holder, holder.inventory()[0]) == right("c1", 0)


def test_another_process_does_not_continue_a_piece(holder: Holder) -> None:
    """A restarted agent may have other bytes, so the piece is dropped instead of mixed."""
    asked = contribution("c1", 1, 0, 2)
    turn, _ = holder.begin(asked)
    holder.add(turn, 0, memoryview(data_of(asked)[:BLOCK]))
    with pytest.raises(Refusal, match="another process"):
        holder.begin(contribution("c1", 1, 0, 2, life=b"m" * 8))
    assert holder.used == 0


def test_the_newest_complete_and_few_newer_are_kept(holder: Holder) -> None:
    """A complete piece drops older ones, which are refused from then on. Too many incomplete pieces drop the oldest."""
    for seq in (1, 2):
        for member in range(K):
            send(holder, contribution(f"c{seq}", seq, 0, member))
        assert [piece.id for piece in holder.inventory()] == [f"c{seq}"]
    used = holder.used
    with pytest.raises(Refusal, match="newer"):
        holder.begin(contribution("c1", 1, 0, 0))
    for seq in range(3, 4 + PENDING_MAX):
        send(holder, contribution(f"c{seq}", seq, 0, 2))
    assert holder.used == used + PENDING_MAX * used
    with pytest.raises(Refusal):  # it was dropped to make way
        holder.begin(contribution("c3", 3, 0, 0))
    assert [piece.id for piece in holder.inventory()] == ["c2"]


def test_a_new_roster_keeps_what_is_complete_and_drops_the_rest(holder: Holder) -> None:
    """A new roster drops incomplete pieces of former members. Complete pieces stay until a newer one is complete."""
    for member in range(K):
        send(holder, contribution("c1", 1, 0, member))
        send(holder, contribution("c1", 1, 1, member))
    used = holder.used
    (stale, _), first = holder.begin(contribution("c2", 2, 0, 2)), holder.inventory()
    other = PeerRing((RING.peers[1], RING.peers[0], *RING.peers[2:]), K, M)
    moved = PeerRing(tuple(peer._replace(address=f"y:{number + 1}") for number, peer in enumerate(RING.peers)), K, M)
    for ring in (other, moved):
        holder.join(ring, "a1")
        assert holder.used == used
        with pytest.raises(PeerLost):
            holder.end(stale)
        with pytest.raises(Refusal, match="ring"):
            holder.begin(contribution("c2", 2, 0, 2))
        assert holder.inventory() == first
        assert read(holder, first[0]) == right("c1", 0)
    for member in range(K):
        send(holder, contribution("c3", 3, 0, member, ring=moved))
    assert sorted(piece.id for piece in holder.inventory()) == ["c1", "c3"]


def test_memory_is_bounded_and_no_room_is_reported() -> None:
    """Within the limit older incomplete pieces are dropped.

    A piece beyond it is refused for all members and not kept.
    """
    need = len(right("c1", 0))
    holder = Holder(need)
    holder.join(RING, "a1")
    send(holder, contribution("c1", 1, 0, 2))
    send(holder, contribution("c2", 2, 0, 2))
    assert holder.used == need
    with pytest.raises(Refusal, match="of parity are wanted"):
        holder.begin(contribution("c2", 2, 1, 0))
    with pytest.raises(Refusal):
        holder.begin(contribution("c2", 2, 1, 1))
    assert holder.used == need
    assert [send(holder, contribution("c2", 2, 0, member)) for member in range(2)] == [False, True]
    holder.close()
    assert holder.used == 0


def test_what_makes_no_sense_is_refused(holder: Holder) -> None:
    """A wrong sender, cut, rank, stripe, lane or row ends the connection."""
    good = contribution("c1", 1, 0, 0)
    for bad in (
        {"stripe": 0}, {"stripe": 99}, {"row": 2}, {"row": -1}, {"lane": 1},
        *({"segment": Segment(*fields)} for fields in (
            ("a0", 3, 0, 0, good.segment.length, good.segment.starts, good.segment.sizes),
            ("a3", 2, 0, 0, good.segment.length, good.segment.starts, good.segment.sizes),
            ("a3", 3, 0, 0, good.segment.length + 1, good.segment.starts, good.segment.sizes),
            ("a3", 3, 5, 0, good.segment.length, good.segment.starts, good.segment.sizes),
            ("a3", 3, 0, 0, 1 << 45, (4096,), (1 << 46,)),
            ("a3", 3, 0, 0, good.segment.length, (), good.segment.sizes),
        )),
    ):  # fmt: skip
        fields = {name: getattr(good, name) for name in good.__struct_fields__} | bad
        with pytest.raises((PeerLost, Refusal)):
            holder.begin(Contribute(**fields))
    assert holder.used == 0


def test_a_view_that_is_being_sent_outlives_its_piece(holder: Holder) -> None:
    """A reader's bytes do not change when the piece is dropped."""
    for member in range(K):
        send(holder, contribution("c1", 1, 0, member))
    (piece,) = holder.inventory()
    view = holder.read(ReadRequest("c1", -1, 0, piece.length, piece.ring, 0, piece.stripe, 0))
    holder.close()
    assert view == right("c1", 0)
