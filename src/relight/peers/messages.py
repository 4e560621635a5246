"""Messages between agents, and from a restoring trainer to agents. MessagePack after the handshake; both ends have the
same version.

Three conversations, over any connection, one after the other. To contribute to a parity piece: ``Contribute``, then
``SegmentPiece`` with its bytes until all are sent, then ``SegmentEnd`` or ``Void``. To list what an agent has:
``StatusRequest``. To read: ``ReadRequest``, several before the answers.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

HEADER_BYTES_MAX = 1 << 18
"""Largest request."""
ANSWER_BYTES_MAX = 16 << 20
"""Largest answer. An inventory is the longest answer."""
PIECE_BYTES = 4 << 20
"""Most bytes that follow one header."""
LENGTH_MAX = 1 << 46
"""Longest part of a rank."""
Count = Annotated[int, msgspec.Meta(ge=0, le=LENGTH_MAX)]
Packs = Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of a stripe's member: ``length`` bytes from ``offset`` of the blob of rank ``rank`` on the agent
    ``owner``.

    Rank −1: that agent has no such lane, and counts as zeros. A *blob* is a rank's part in memory, from the start of
    its first pack to the end of its last one. ``starts`` and ``sizes`` are those of its packs, in the owner's slot.
    """

    owner: str
    rank: int
    number: Count
    offset: Count
    length: Count
    starts: Packs = ()
    sizes: Packs = ()


class Contribute(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Begin or continue a contribution: the sender is a member of that stripe, the receiver holds its parity row.

    ``life`` is new each time an agent starts, so no process continues the contribution of another one.
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
    """The next ``length`` bytes of the segment, from ``offset`` on, follow this message."""

    offset: Count
    length: Count


class SegmentEnd(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All bytes of the segment were sent, and their memory did not change meanwhile."""


class Void(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The sender's memory changed: discard the bytes that it sent of that checkpoint."""


class StatusRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Request the agent's inventory."""


class ReadRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Request ``length`` bytes from ``offset`` on of the blob of ``rank``; with ``row`` ≥ 0, of that piece of parity
    instead."""

    id: str
    rank: int
    offset: Count
    length: Count
    ring: bytes = b""
    lane: Count = 0
    stripe: Count = 0
    row: int = -1


class Going(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Continue the contribution from byte ``got`` of the segment."""

    got: Count


class PeerRefusal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request was refused. ``code`` is one of the codes below, for programs."""

    code: str
    why: str


ROSTER, ROOM, VOID, OLD, GONE = "roster", "room", "void", "old", "gone"
"""Another ring is joined here · no memory is free · a member's memory changed · a newer checkpoint is complete · it
does not exist."""


class Acknowledged(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The end of a contribution was accepted. ``complete``: all members have confirmed their bytes."""

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
    """A complete piece of parity, ``length`` bytes in whole blocks. ``members[i]`` is member i of its stripe."""

    id: str
    seq: Count
    lane: Count
    ring: bytes
    stripe: Count
    row: int
    of: Count
    """How many agents a stripe of the ring is on: data and parity together."""
    length: Count
    members: tuple[Segment, ...]


class Inventory(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The parts and parity pieces that this agent has."""

    agent: str
    own: list[Own]
    pieces: list[Parity]


class Data(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """``length`` bytes follow, then one byte: 1 if their memory did not change meanwhile; 0 if it did, and the bytes
    are invalid."""

    length: Count


Request = Contribute | SegmentPiece | SegmentEnd | Void | StatusRequest | ReadRequest
Answer = Going | PeerRefusal | Acknowledged | Inventory | Data
