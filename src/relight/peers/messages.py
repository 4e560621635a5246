"""Messages between agents, and from a restoring trainer to agents. MessagePack after the handshake; both ends have the
same version.

Three conversations, over any connection, one after the other. To contribute to a parity piece: ``Contribute``, then
``SegmentPiece`` with its bytes until all are sent, then ``SegmentEnd`` or ``Void``. To list what an agent has:
``StatusRequest``. To read: ``ReadRequest``, several before the answers.

With an RDMA plane (``peers.rdma``) the bytes take another way. ``SegmentFetch`` lets the holder read them from the
sender's memory, and is answered by ``Going`` after that. ``Locate`` returns where the bytes of a ``ReadRequest`` are;
after it has read them, the caller sends a ``ReadRequest`` for no bytes, which is answered only if they are still there.
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
FETCH_BYTES = 16 * PIECE_BYTES
"""Most bytes that the holder reads directly for one request."""
Count = Annotated[int, msgspec.Meta(ge=0, le=LENGTH_MAX)]
Packs = Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]
Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
Description = Annotated[bytes, msgspec.Meta(max_length=1 << 16)]
"""NIXL's description of a process and of memory in it."""


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


class SegmentFetch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read the next ``length`` bytes of the segment, from ``offset`` on, at ``address`` of the sender's memory.

    ``checksums``: the CRC-32 of each ``PIECE_BYTES``, because no hash is compared before parity is needed. ``plane``: as
    in ``Going``.
    """

    offset: Count
    length: Count
    address: Address
    description: Description
    plane: str
    checksums: Annotated[tuple[int, ...], msgspec.Meta(max_length=FETCH_BYTES // PIECE_BYTES)]


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


class Locate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Request where the bytes of ``read`` are in the agent's memory, from its ``offset`` on. Its ``length`` does not count."""

    read: ReadRequest


class Located(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first byte is at ``address`` in the agent's memory."""

    address: Address
    description: Description


class Going(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Continue the contribution from byte ``got`` of the segment. ``plane``: as in ``Inventory``."""

    got: Count
    plane: str = ""
    without: str = ""


class PeerRefusal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request was refused. ``code`` is one of the codes below, for programs."""

    code: str
    why: str


ROSTER, ROOM, VOID, OLD, GONE, PLANE = "roster", "room", "void", "old", "gone", "plane"
"""Another ring is joined here · no memory is free · a member's memory changed · a newer checkpoint is complete · it
does not exist · direct reads do not work."""


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
    """The parts and parity pieces that this agent has.

    ``plane``: its RDMA plane, which must equal the caller's; empty if it has none, because of ``without``.
    """

    agent: str
    own: list[Own]
    pieces: list[Parity]
    plane: str = ""
    without: str = ""


class Data(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """``length`` bytes follow, then one byte: 1 if their memory did not change meanwhile; 0 if it did, and the bytes
    are invalid."""

    length: Count


Request = Contribute | SegmentPiece | SegmentFetch | SegmentEnd | Void | StatusRequest | ReadRequest | Locate
Answer = Going | PeerRefusal | Acknowledged | Inventory | Data | Located
