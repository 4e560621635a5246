"""What agents say to each other, and who restores to agents. MessagePack behind the handshake; all ends are of one version.

Three conversations, over any connection, one after the other: to contribute to a parity piece (``Contribute``, then ``Piece`` with its
bytes until all are there, then ``Whole`` or ``Void``), to ask what there is (``Ask``), to read (``Read``, several before the answers).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

HEADER_BYTES_MAX = 1 << 18
"""Of a request."""
ANSWER_BYTES_MAX = 16 << 20
"""Of an answer: an inventory is the longest."""
PIECE_BYTES = 4 << 20
"""How many bytes follow one header at most."""
LENGTH_MAX = 1 << 46
"""No rank's part is longer."""
Count = Annotated[int, msgspec.Meta(ge=0, le=LENGTH_MAX)]
Packs = Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Which bytes a member of a stripe is: ``length`` from ``offset`` on of what rank ``rank`` of ``owner`` has of a checkpoint.

    Rank −1: that agent has no such lane, and counts as zeros. A *blob* is a rank's part as it lies in memory: from the beginning of its
    first pack to the end of its last. ``starts`` and ``sizes`` are its packs', in the owner's slot.
    """

    owner: str
    rank: int
    number: Count
    offset: Count
    length: Count
    starts: Packs = ()
    sizes: Packs = ()


class Contribute(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """I am a member of that stripe, and you hold its parity row. How far am I?

    ``life`` is new each time an agent starts: nobody goes on with what another process began.
    """

    id: str
    seq: Count
    lane: Count
    ring: bytes
    stripe: Count
    row: int
    life: bytes
    segment: Segment


class SegmentPiece(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The next ``length`` bytes of the segment, behind this message; they begin at ``offset`` of it."""

    offset: Count
    length: Count


class SegmentEnd(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """That was all of it, and the memory it came from did not change meanwhile."""


class Void(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The memory changed: what I sent of that checkpoint counts for nothing."""


class StatusRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What have you?"""


class ReadRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """``length`` bytes from ``offset`` on of the blob of ``rank``; with ``row`` ≥ 0, of that piece of parity instead."""

    id: str
    rank: int
    offset: Count
    length: Count
    ring: bytes = b""
    lane: Count = 0
    stripe: Count = 0
    row: int = -1


class Going(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Go on from byte ``got`` of the segment."""

    got: Count


class PeerRefusal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No. ``code`` is for programs: one of those below."""

    code: str
    why: str


ROSTER, ROOM, VOID, OLD, GONE = "roster", "room", "void", "old", "gone"
"""Another ring is joined here · there is no memory · a member's memory changed · something newer is complete · it is not there."""


class Acknowledged(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Understood. ``complete``: all members are whole."""

    complete: bool


class Own(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part that is in this agent's memory."""

    id: str
    seq: Count
    rank: int
    lane: Count
    starts: Packs
    sizes: Packs


class Parity(msgspec.Struct, frozen=True, array_like=True):
    """A complete piece of parity, ``length`` bytes in whole blocks, and what it is made of: member i of the stripe is ``members[i]``."""

    id: str
    seq: Count
    lane: Count
    ring: bytes
    stripe: Count
    row: int
    of: Count
    """How many agents are on the ring's stripes: data and parity together."""
    length: Count
    members: tuple[Segment, ...]


class Inventory(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All that this agent has to give."""

    agent: str
    own: list[Own]
    pieces: list[Parity]


class Data(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """``length`` bytes follow, then one more: 1 if their memory was the same all the time, else 0, and they count for nothing."""

    length: Count


Request = Contribute | SegmentPiece | SegmentEnd | Void | StatusRequest | ReadRequest
Answer = Going | PeerRefusal | Acknowledged | Inventory | Data
