"""Parity that this agent holds for other agents: which connection may add to a piece, how many bytes each member has
sent, what is complete.

Always holds: no bytes are added twice, even after a broken connection. A piece is offered only after every member has
confirmed its bytes. A member that sends *void* ends the piece. For each row and lane there are the newest complete
piece, and at most ``PENDING_MAX`` newer, incomplete ones.
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
from relight.peers.messages import (
    GONE,
    LENGTH_MAX,
    OLD,
    ROOM,
    ROSTER,
    VOID,
    Contribute,
    Parity,
    PeerRefusal,
    ReadRequest,
    Segment,
)
from relight.peers.parts import blob_length, cut
from relight.peers.rings import PeerRing
from relight.peers.wire import PeerLost
from relight.units import size_text

PENDING_MAX = 2
"""A member may already send the next checkpoint while others still send this one: both can be completed."""
_VOIDED_MAX = 8


class Refusal(Exception):  # caught before it leaves this package: it becomes an answer
    """A request is refused."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.answer = PeerRefusal(code, why)


class _Member:
    """Progress of one member of a piece."""

    def __init__(self, segment: Segment, life: bytes) -> None:
        self.segment, self.life = segment, life
        self.got = 0
        self.whole = False
        self.turn: object = None
        """Marks the connection that may add bytes.

        Bytes of an earlier connection, which may still arrive, are refused.
        """


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
        """Return the piece's bytes, in whole blocks.

        A member that ends within its last block counts as padded with zeros.
        """
        return 0 if self.memory is None else self.memory.size

    def let_go(self) -> None:
        """Free the memory. A thread that still sends from it keeps it mapped until it has finished."""
        with self.lock:
            self.dropped = True
            if self.memory is not None:
                self.memory.close()
                self.memory = None

    def described(self) -> Parity:
        members = [
            self.members[number].segment if number in self.members else self.absent[number]
            for number in range(self.data)
        ]
        return Parity(
            self.id, self.seq, self.lane, self.ring, self.stripe, self.row, self.of, self.size, tuple(members)
        )


class Turn(NamedTuple):
    """One connection's right to continue one contribution."""

    piece: _ParityPiece
    member: _Member
    mark: object
    factor: int


class _StripeRow:
    """The pieces of one row and lane that this agent holds."""

    def __init__(self) -> None:
        self.complete: _ParityPiece | None = None
        self.pending: list[_ParityPiece] = []
        self.voided: deque[str] = deque(maxlen=_VOIDED_MAX)


class Holder:
    """All pieces held here.

    ``memory``: most bytes for them; None: no limit. ``completed`` is called with each complete piece.
    """

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
        """Return the bytes of memory that pieces take."""
        with self._lock:
            return self._used

    def join(self, ring: PeerRing | None, me: str) -> None:
        """Accept contributions of that ring's members. Drop incomplete pieces of another ring; keep complete ones."""
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

    def begin(self, request: Contribute) -> tuple[Turn, int]:
        """Give the caller's connection the right to continue a contribution. Return it, and the next byte of the
        segment.

        An earlier connection loses the right. ``Refusal`` if the contribution is not accepted.
        """
        with self._lock:
            ring = self._ring
            if ring is None or request.ring != self._fingerprint:
                raise Refusal(ROSTER, "another ring is joined here, or none yet")
            self._check(ring, request)
            place = self._places.setdefault((request.lane, request.row), _StripeRow())
            if request.id in place.voided:
                raise Refusal(VOID, "a member's memory changed while it was sent")
            piece = self._find_or_make(place, request, ring)
            member = self._member(place, piece, request)
            with piece.lock:
                member.turn = mark = object()
                return Turn(piece, member, mark, coefficient(request.row, request.segment.number)), member.got

    def add(self, turn: Turn, offset: int, data: memoryview) -> None:
        """Add the next bytes.

        The caller may reuse ``data`` afterwards. ``PeerLost`` if another connection has the right.
        """
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
            if whole < len(data):  # the end of the segment: pad with zeros
                accumulate(
                    room[whole:], memoryview(bytes(data[whole:]) + bytes(BLOCK - len(data) + whole)), turn.factor
                )
            member.got += len(data)

    def end(self, turn: Turn) -> bool:
        """Record that the member has confirmed its bytes. Return whether the piece is complete now."""
        piece, member = turn.piece, turn.member
        with self._lock:
            with piece.lock:
                self._check_turn(turn)
                if member.got != member.segment.length:
                    raise PeerLost(f"whole, with {member.got} of {member.segment.length} bytes")
                member.whole = True
                wanted = piece.data - len(piece.absent)
                newly = (
                    not piece.complete
                    and len(piece.members) == wanted
                    and all(member.whole for member in piece.members.values())
                )
                piece.complete = piece.complete or newly
            if newly:
                place = self._places[piece.lane, piece.row]
                older = [pending for pending in place.pending if pending.seq < piece.seq]
                former = [place.complete] if place.complete is not None else []
                place.pending.remove(piece)
                place.complete = piece
                self._drop(place, older + former)
        if newly:
            self._completed(piece.described())
        return piece.complete

    def void(self, turn: Turn) -> None:
        """Drop the piece, because the member's memory changed.

        A member that was complete before only missed the answer: keep the piece.
        """
        piece = turn.piece
        with self._lock:
            if turn.member.whole or piece.dropped:
                return
            self._drop(self._places[piece.lane, piece.row], [piece])

    def inventory(self) -> list[Parity]:
        """Return the descriptions of the complete pieces."""
        with self._lock:
            return [place.complete.described() for place in self._places.values() if place.complete is not None]

    def read(self, request: ReadRequest) -> memoryview:
        """Return a view of those bytes of a complete piece; they do not change while the view exists.

        ``Refusal`` if it is gone.
        """
        with self._lock:
            piece = self._complete(request)
            if request.offset + request.length > piece.size:
                raise Refusal(GONE, f"the piece ends at byte {piece.size}")
            return (
                memoryview(b"")
                if piece.memory is None
                else piece.memory.view[request.offset : request.offset + request.length].toreadonly()
            )

    def locate(self, read: ReadRequest) -> tuple[SharedMapping, int]:
        """Return the memory of a complete piece, and where its bytes begin. ``Refusal`` if it is gone."""
        with self._lock:
            memory = self._complete(read).memory
            if memory is None:
                raise Refusal(GONE, "the piece is empty")
            return memory, 0

    def _complete(self, request: ReadRequest) -> _ParityPiece:
        place = self._places.get((request.lane, request.row))
        piece = None if place is None else place.complete
        if piece is None or (piece.id, piece.ring, piece.stripe) != (request.id, request.ring, request.stripe):
            raise Refusal(GONE, "that piece is not here any more")
        return piece

    def close(self) -> None:
        """Drop all pieces."""
        with self._lock:
            self._ring, self._fingerprint = None, b""
            for place in self._places.values():
                self._drop(place, [*place.pending, *([place.complete] if place.complete is not None else [])])

    def _check(self, ring: PeerRing, request: Contribute) -> None:
        """Raise ``PeerLost`` if the roster has no such member, or if its description is impossible."""
        segment, stripes = request.segment, len(ring.peers)
        if not (0 <= request.row < ring.parity and request.stripe < stripes and segment.number < ring.data):
            raise PeerLost("there is no such piece")
        peer = ring.member(request.stripe, segment.number)
        ranks = peer.ranks
        if ring.holder(request.stripe, request.row) is not ring.peers[self._me] or peer.id != segment.owner:
            raise PeerLost("that piece is not held here for that member")
        if request.lane >= len(ranks) or ranks[request.lane] != segment.rank:
            raise PeerLost(f"agent {peer.id!r} has no rank {segment.rank} in lane {request.lane}")
        length = blob_length(segment.starts, segment.sizes)
        if len(segment.starts) != len(segment.sizes) or not 0 <= length <= LENGTH_MAX:
            raise PeerLost("its packs have impossible places")
        if cut(length, ring.data)[segment.number] != (segment.offset, segment.length):
            raise PeerLost("this is not how a segment is cut")

    def _find_or_make(self, place: _StripeRow, request: Contribute, ring: PeerRing) -> _ParityPiece:
        complete = place.complete
        if complete is not None and (complete.id, complete.ring) == (request.id, request.ring):
            return complete
        pending = next((piece for piece in place.pending if piece.id == request.id), None)
        if pending is not None:
            return pending
        if complete is not None and complete.seq > request.seq:
            raise Refusal(OLD, "a newer checkpoint is complete")
        if len(place.pending) >= PENDING_MAX:
            oldest = min(place.pending, key=lambda piece: piece.seq)
            if oldest.seq > request.seq:
                raise Refusal(OLD, "newer checkpoints are being sent")
            self._drop(place, [oldest])
        absent = {}
        for number in range(ring.data):
            peer = ring.member(request.stripe, number)
            if request.lane >= len(peer.ranks):
                absent[number] = Segment(peer.id, -1, number, 0, 0)
        piece = _ParityPiece(request, absent, ring)
        place.pending.append(piece)
        return piece

    def _member(self, place: _StripeRow, piece: _ParityPiece, request: Contribute) -> _Member:
        known = piece.members.get(request.segment.number)
        if known is not None:
            if (known.segment, known.life) == (request.segment, request.life):
                return known
            if piece.complete:
                raise Refusal(OLD, "it is complete, from another process")
            self._drop(place, [piece])  # the bytes of the earlier process cannot be removed from the sum
            raise Refusal(VOID, "another process began this")
        self._make_room(place, piece, request.segment.length)
        member = piece.members[request.segment.number] = _Member(request.segment, request.life)
        return member

    def _make_room(self, place: _StripeRow, piece: _ParityPiece, length: int) -> None:
        """Extend the piece to at least ``length`` bytes with zeros.

        Without memory for that, drop the piece: ``Refusal``.
        """
        size = -(-length // BLOCK) * BLOCK
        former = piece.memory
        if size <= piece.size:
            return
        try:
            while (why := self._lack(size - piece.size)) is not None:
                older = [pending for pending in place.pending if pending.seq < piece.seq]
                if not older:
                    raise NoSpace(why)
                self._drop(place, older)
            grown = SharedMapping(
                allocate(size, "relight-parity") if former is None else _extended(former, size), size, writable=True
            )
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
            return f"{size_text(size)} more of parity are wanted, {size_text(self._used)} of {size_text(self._budget)} are in use"
        return room_for(size)

    def _drop(self, place: _StripeRow, pieces: list[_ParityPiece]) -> None:
        """Drop these pieces.

        An incomplete one can never be completed later: members that were complete do not send again.
        """
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
            raise PeerLost("the piece is dropped, or another connection continues it")


def _extended(memory: SharedMapping, size: int) -> int:
    """Extend that memory to ``size`` bytes. Return another descriptor of it."""
    fd = os.dup(memory.fd)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, memory.size)
        os.close(fd)
        raise
    return fd
