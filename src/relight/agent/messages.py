"""Messages between trainer and agent, and the request in a sealed slot. Encoded as MessagePack; both ends have the
same version."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from relight.commit.save import Participant, SaveInfo
from relight.errors import known
from relight.layout import Box

PROTOCOL = 5
MESSAGE_BYTES_MAX = 1 << 30


class OpenRun(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The run of the following saves, and the attempt that owns it. The first message of every trainer."""

    url: str
    run: str
    store_id: str
    run_id: str
    epoch: int
    threads: int
    nice: int
    bytes_per_second: float | None = None
    keep: bytes = b""
    """The retention rules, encoded; empty for none."""
    leads: bool = True
    """Whether this trainer's writer applies the retention rules."""
    held_s: float = 0.0
    """Seconds that a save may wait for storage space."""
    compact: bytes = b""
    """The rules for making saves smaller, encoded; empty for none."""
    guard: dict[str, Any] | None = None
    """The store's security settings, as ``StoreSecurity.to_wire`` encodes them, or None. They contain keys: never
    write them to a file or log."""
    read_bytes_per_second: float | None = None


class AllocateSlots(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Request for ``count`` slots of ``size`` bytes, at most ``memory`` bytes in total. ``more``: in addition to this trainer's."""

    size: int
    count: int
    memory: int | None = None
    more: bool = False


class SlotsAllocated(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The allocated slots; their descriptors come with this message, in order. If there is no memory, ``sizes`` is
    empty and ``why`` has the reason."""

    sizes: list[int]
    why: str = ""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the state: a ``layout.Item`` without its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    length: int
    trainable: bool
    box: Box | None = None


class TensorLayout(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The tensors of this rank's part in all following saves, until another layout is sent."""

    items: list[TensorSpec]
    rank: int = 0
    lanes: int = 1
    """Number of packs that the rank writes at once: see ``plan_save``."""


class SlotFilling(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Slot ``slot`` is being filled with save ``number``, and has its request. The agent may write the filled bytes;
    ``SlotSealed`` makes the save count."""

    slot: int
    number: int


class SlotSealed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Slot ``slot`` is sealed with save ``number``: write it."""

    slot: int
    number: int


class Request(msgspec.Struct, frozen=True, array_like=True):
    """The part of a save that a slot holds after its packs: everything but the tensors."""

    number: int
    id: str
    info: SaveInfo
    tree: bytes
    seat: Participant | None = None
    """The rank's place among the ranks that save together, if there are several."""
    patient: bool = True
    """Whether the save may wait for space, or be made smaller; False if it is urgent."""
    same: bytes = b""
    """Numbers, as bits, of the tensors that have not changed since save ``since``, as far as the trainer knows."""
    since: int = 0


class SaveResult(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The result of save ``number``: a checkpoint if ``error`` is None."""

    number: int
    id: str
    stored_bytes: int = 0
    logical_bytes: int = 0
    timings: dict[str, float] = {}
    trainable_digest: bytes = b""
    seq: int = -1
    """The COMMIT's number in the log."""
    error: tuple[str, str, str, str, bool, list[str]] | None = None
    """``(kind, what, where, hint, retryable, details)``, as ``words_of`` makes it."""


def words_of(error: BaseException, where: str = "") -> tuple[str, str, str, str, bool, list[str]]:
    """Encode an error for a ``SaveResult``. A programming error keeps its kind and traceback, so that it is not taken
    for a store's failure."""
    described = known(error, where)
    return described.kind, described.what, described.where, described.hint, described.retryable, list(described.details)


class ForwardedEvent(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An event that happened in the agent, mostly of retention."""

    name: str
    message: str
    fields: dict[str, Any]


class ListHeld(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Request for the checkpoints of this run that are in memory."""

    waits: bool = True
    """Whether the answer comes after the saves of the previous trainer are written."""


class HeldList(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Parts in memory: ``(checkpoint id, rank, offsets of its packs)``; the descriptors come with this message, in
    order."""

    held: list[tuple[str, int, list[int]]]


class ListenForPeers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Request to listen for agents of other nodes that know ``token``.

    ``host``: the address to listen at, if given. ``memory``: bytes for their data. ``tls``: encrypt all connections, and
    call no agent without a certificate. ``plane``: as in ``Peers``. An agent that listens already keeps its token unless
    ``change`` is set.
    """

    token: bytes
    change: bool = False
    host: str = ""
    memory: int | None = None
    bytes_per_second: float | None = None
    tls: bool = False
    plane: str = "tcp"


class PeerAddress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Id of this agent, and the address at which peers reach it, with the fingerprint of its certificate.

    If they cannot, ``address`` is empty and ``why`` has the reason. If the agent has joined a roster, ``token`` and
    ``others``, the peers' addresses, are that roster's.
    """

    id: str
    address: str
    why: str = ""
    token: bytes = b""
    others: list[str] = []
    tls: bool = False
    plane: str = "tcp"


class FindPeers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A reader on this node asks for the agents of other nodes. The answer is a ``PeerAddress``: without ``token`` if there are none."""


class JoinPeers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Protect, and be protected by, these agents. Each entry is ``(id, host, rack, address, ranks)``; ``me`` is this
    agent's id."""

    roster: list[tuple[str, str, str, str, list[int]]]
    me: str
    data: int
    parity: int


class LeavePeers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The run ends: protect nothing more. Data held for other nodes stays."""


class Flush(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A caller waits for save ``number``: do not delay it, or the saves before it, any longer."""

    number: int


class EndRun(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The run ended normally: finish the sealed saves, keep nothing."""


@lru_cache(maxsize=4)
def to_bits(numbers: frozenset[int]) -> bytes:
    """Return the numbers as a bit set, lowest bit first."""
    bits = bytearray(max(numbers, default=-1) // 8 + 1)
    for number in numbers:
        bits[number // 8] |= 1 << number % 8
    return bytes(bits)


@lru_cache(maxsize=4)
def from_bits(data: bytes) -> frozenset[int]:
    """Return the numbers in a bit set that ``to_bits`` made."""
    return frozenset(8 * index + bit for index, byte in enumerate(data) if byte for bit in range(8) if byte >> bit & 1)


ToAgent = (
    OpenRun
    | AllocateSlots
    | TensorLayout
    | SlotFilling
    | SlotSealed
    | Flush
    | ListHeld
    | ListenForPeers
    | FindPeers
    | JoinPeers
    | LeavePeers
    | EndRun
)
ToTrainer = SlotsAllocated | SaveResult | ForwardedEvent | HeldList | PeerAddress
