"""Parity that this agent holds for others: who may add to it, how far each has got, what is complete.

Always holds: nothing is added twice, whatever breaks; a piece is shown only when every member said that its bytes were whole; a member that
said *void* ends the piece. Of each row and lane there are: the newest complete piece, and at most ``PENDING_MAX`` newer ones on their way.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from relight.arena import SharedMapping, allocate, room_for
from relight.errors import NoSpace
from relight.peers.galois import BLOCK, accumulate, coefficient
from relight.peers.messages import GONE, LENGTH_MAX, OLD, ROOM, ROSTER, VOID, Contribute, Parity, PeerRefusal, ReadRequest, Segment
from relight.peers.parts import blob_length, cut
from relight.peers.rings import PeerRing
from relight.peers.wire import PeerLost

PENDING_MAX = 2
"""A member may have gone on to the next checkpoint while others still send this one: both may be completed."""
_VOIDED_MAX = 8


class Refusal(Exception):  # caught before it leaves this room: it becomes an answer
    """What was asked for is refused."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.answer = PeerRefusal(code, why)


class _Member:
    """How far one member of a piece is."""

    def __init__(self, segment: Segment, life: bytes) -> None:
        self.segment, self.life = segment, life
        self.got = 0
        self.whole = False
        self.turn: object = None
        """Whose connection goes on with it: a former one, whose bytes may still be under way here, adds nothing any more."""


class _ParityPiece:
    """One piece of parity."""

    def __init__(self, first: Contribute, absent: dict[int, Segment], ring: PeerRing) -> None:
        self.id, self.seq, self.lane = first.id, first.seq, first.lane
        self.ring, self.stripe, self.row = first.ring, first.stripe, first.row
        self.absent, self.data, self.of = absent, ring.data, ring.data + ring.parity
        self.members: dict[int, _Member] = {}
        self.memory: SharedMapping | None = None
        self.complete = self.dropped = False
        self.lock = threading.Lock()

    @property
    def size(self) -> int:
        """Whole blocks: the last one of a member that ends within it has parity up to its end."""
        return 0 if self.memory is None else self.memory.size

    def let_go(self) -> None:
        """Its memory is free again; who still sends from it keeps that mapped until he is done."""
        with self.lock:
            self.dropped = True
            if self.memory is not None:
                self.memory.close()
                self.memory = None

    def described(self) -> Parity:
        members = [self.members[at].segment if at in self.members else self.absent[at] for at in range(self.data)]
        return Parity(self.id, self.seq, self.lane, self.ring, self.stripe, self.row, self.of, self.size, tuple(members))


class Turn(NamedTuple):
    """One connection's right to go on with one contribution."""

    piece: _ParityPiece
    member: _Member
    mark: object
    factor: int


class _StripeRow:
    """A row of a lane: every agent holds one piece of each at a time."""

    def __init__(self) -> None:
        self.complete: _ParityPiece | None = None
        self.pending: list[_ParityPiece] = []
        self.voided: deque[str] = deque(maxlen=_VOIDED_MAX)


class Holder:
    """All pieces held here. ``memory``: bytes for them at most, None for what there is. ``completed`` is told of each complete one."""

    def __init__(self, memory: int | None, completed: Callable[[Parity], None] = lambda piece: None) -> None:
        self._budget, self._completed = memory, completed
        self._places: dict[tuple[int, int], _StripeRow] = {}
        self._ring: PeerRing | None = None
        self._fingerprint = b""
        self._me = -1
        self._used = 0
        self._lock = threading.RLock()

    @property
    def used(self) -> int:
        """Bytes of memory that pieces take."""
        with self._lock:
            return self._used

    def join(self, ring: PeerRing | None, me: str) -> None:
        """Take contributions of that ring's members. What is on its way from another ring's is dropped; what is complete stays."""
        position = None if ring is None else ring.position(me)
        with self._lock:
            fingerprint = b"" if ring is None or position is None else ring.fingerprint()
            if fingerprint == self._fingerprint:
                return
            self._ring, self._fingerprint = (ring, fingerprint) if fingerprint else (None, b"")
            self._me = -1 if position is None else position
            for place in self._places.values():
                self._drop(place, list(place.pending))
                place.voided.clear()

    def begin(self, asked: Contribute) -> tuple[Turn, int]:
        """The right to go on with that contribution, taken from whoever had it, and from which byte of the segment. ``Refusal``."""
        with self._lock:
            ring = self._ring
            if ring is None or asked.ring != self._fingerprint:
                raise Refusal(ROSTER, "another ring is joined here, or none yet")
            self._check(ring, asked)
            place = self._places.setdefault((asked.lane, asked.row), _StripeRow())
            if asked.id in place.voided:
                raise Refusal(VOID, "a member's memory changed while it was sent")
            piece = self._find_or_make(place, asked, ring)
            member = self._member(place, piece, asked)
            with piece.lock:
                member.turn = mark = object()
                return Turn(piece, member, mark, coefficient(asked.row, asked.segment.number)), member.got

    def add(self, turn: Turn, offset: int, data: memoryview) -> None:
        """Add the next bytes; ``data`` is the caller's again. ``Gone`` if it is another's turn."""
        piece, member = turn.piece, turn.member
        with piece.lock:
            self._check_turn(turn)
            if offset != member.got or offset + len(data) > member.segment.length or member.whole:
                raise PeerLost(f"byte {offset} came when byte {member.got} of {member.segment.length} was next")
            assert piece.memory is not None
            if len(data) % BLOCK and offset + len(data) < member.segment.length:
                raise PeerLost(f"{len(data)} bytes in the middle are not whole blocks")
            whole = len(data) - len(data) % BLOCK
            room = piece.memory.view[offset : offset + whole + BLOCK]
            accumulate(room[:whole], data[:whole], turn.factor)
            if whole < len(data):  # the end of the segment: zeros are behind it
                accumulate(room[whole:], memoryview(bytes(data[whole:]) + bytes(BLOCK - len(data) + whole)), turn.factor)
            member.got += len(data)

    def end(self, turn: Turn) -> bool:
        """The member is whole; whether the piece is complete now."""
        piece, member = turn.piece, turn.member
        with self._lock:
            with piece.lock:
                self._check_turn(turn)
                if member.got != member.segment.length:
                    raise PeerLost(f"whole, with {member.got} of {member.segment.length} bytes")
                member.whole = True
                wanted = piece.data - len(piece.absent)
                newly = not piece.complete and len(piece.members) == wanted and all(one.whole for one in piece.members.values())
                piece.complete = piece.complete or newly
            if newly:
                place = self._places[piece.lane, piece.row]
                older = [one for one in place.pending if one.seq < piece.seq]
                former = [place.complete] if place.complete is not None else []
                place.pending.remove(piece)
                place.complete = piece
                self._drop(place, older + former)
        if newly:
            self._completed(piece.described())
        return piece.complete

    def void(self, turn: Turn) -> None:
        """The member's memory changed: the piece is nothing, unless this member was whole before, and only the answer was lost."""
        piece = turn.piece
        with self._lock:
            if turn.member.whole or piece.dropped:
                return
            self._drop(self._places[piece.lane, piece.row], [piece])

    def inventory(self) -> list[Parity]:
        """What is complete."""
        with self._lock:
            return [place.complete.described() for place in self._places.values() if place.complete is not None]

    def read(self, asked: ReadRequest) -> memoryview:
        """A view of those bytes of a complete piece, which stay what they are as long as the view lives. ``Refusal``."""
        with self._lock:
            place = self._places.get((asked.lane, asked.row))
            piece = None if place is None else place.complete
            if piece is None or (piece.id, piece.ring, piece.stripe) != (asked.id, asked.ring, asked.stripe):
                raise Refusal(GONE, "that piece is not here any more")
            if asked.offset + asked.length > piece.size:
                raise Refusal(GONE, f"the piece ends at byte {piece.size}")
            return memoryview(b"") if piece.memory is None else piece.memory.view[asked.offset : asked.offset + asked.length].toreadonly()

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._ring, self._fingerprint = None, b""
            for place in self._places.values():
                self._drop(place, [*place.pending, *([place.complete] if place.complete is not None else [])])

    def _check(self, ring: PeerRing, asked: Contribute) -> None:
        """That the roster has such a member, and that what it says of itself can be."""
        segment, stripes = asked.segment, len(ring.peers)
        if not (0 <= asked.row < ring.parity and asked.stripe < stripes and segment.number < ring.data):
            raise PeerLost("there is no such piece")
        peer = ring.member(asked.stripe, segment.number)
        ranks = peer.ranks
        if ring.holder(asked.stripe, asked.row) is not ring.peers[self._me] or peer.id != segment.owner:
            raise PeerLost("that piece is not held here for that member")
        if asked.lane >= len(ranks) or ranks[asked.lane] != segment.rank:
            raise PeerLost(f"agent {peer.id!r} has no rank {segment.rank} in lane {asked.lane}")
        length = blob_length(segment.starts, segment.sizes)
        if len(segment.starts) != len(segment.sizes) or not 0 <= length <= LENGTH_MAX:
            raise PeerLost("packs that cannot be")
        if cut(length, ring.data)[segment.number] != (segment.offset, segment.length):
            raise PeerLost("this is not how a segment is cut")

    def _find_or_make(self, place: _StripeRow, asked: Contribute, ring: PeerRing) -> _ParityPiece:
        complete = place.complete
        if complete is not None and (complete.id, complete.ring) == (asked.id, asked.ring):
            return complete
        found = next((one for one in place.pending if one.id == asked.id), None)
        if found is not None:
            return found
        if complete is not None and complete.seq > asked.seq:
            raise Refusal(OLD, "a newer checkpoint is complete")
        if len(place.pending) >= PENDING_MAX:
            oldest = min(place.pending, key=lambda one: one.seq)
            if oldest.seq > asked.seq:
                raise Refusal(OLD, "newer checkpoints are on their way")
            self._drop(place, [oldest])
        absent = {}
        for number in range(ring.data):
            peer = ring.member(asked.stripe, number)
            if asked.lane >= len(peer.ranks):
                absent[number] = Segment(peer.id, -1, number, 0, 0)
        piece = _ParityPiece(asked, absent, ring)
        place.pending.append(piece)
        return piece

    def _member(self, place: _StripeRow, piece: _ParityPiece, asked: Contribute) -> _Member:
        known = piece.members.get(asked.segment.number)
        if known is not None:
            if (known.segment, known.life) == (asked.segment, asked.life):
                return known
            if piece.complete:
                raise Refusal(OLD, "it is complete, as another process had it")
            self._drop(place, [piece])  # what the former process sent cannot be taken out again
            raise Refusal(VOID, "another process began this")
        self._make_room(place, piece, asked.segment.length)
        member = piece.members[asked.segment.number] = _Member(asked.segment, asked.life)
        return member

    def _make_room(self, place: _StripeRow, piece: _ParityPiece, length: int) -> None:
        """Have the piece be at least that long: what is there stays, what is added is zero. Without room all of it is given up."""
        size = -(-length // BLOCK) * BLOCK
        former = piece.memory
        if size <= piece.size:
            return
        try:
            while (why := self._lack(size - piece.size)) is not None:
                older = [one for one in place.pending if one.seq < piece.seq]
                if not older:
                    raise NoSpace(why)
                self._drop(place, older)
            grown = SharedMapping(allocate(size, "relight-parity") if former is None else _extended(former, size), size, writable=True)
        except (NoSpace, OSError) as error:
            self._drop(place, [piece])
            raise Refusal(ROOM, error.what if isinstance(error, NoSpace) else str(error)) from error
        grown.populate(piece.size)
        self._used += size - piece.size
        with piece.lock:
            piece.memory = grown
            if former is not None:
                former.close()

    def _lack(self, size: int) -> str | None:
        if self._budget is not None and self._used + size > self._budget:
            return f"{size >> 20} MiB more of parity are wanted, {self._used >> 20} of {self._budget >> 20} MiB are in use"
        return room_for(size)

    def _drop(self, place: _StripeRow, pieces: list[_ParityPiece]) -> None:
        """Let them go. One that was on its way can never be complete any more: members that were whole do not send again."""
        for piece in pieces:
            self._used -= piece.size
            piece.let_go()
            if piece in place.pending:
                place.pending.remove(piece)
                place.voided.append(piece.id)
            if place.complete is piece:
                place.complete = None

    @staticmethod
    def _check_turn(turn: Turn) -> None:
        if turn.piece.dropped or turn.member.turn is not turn.mark:
            raise PeerLost("the piece is dropped, or another connection goes on with it")


def _extended(memory: SharedMapping, size: int) -> int:
    """Another descriptor of that memory, which is ``size`` bytes long from now on."""
    fd = os.dup(memory.fd)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, memory.size)
        os.close(fd)
        raise
    return fd
