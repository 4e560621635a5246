"""What trainer and agent say to each other, and what lies in a sealed slot. Encoded as MessagePack; both ends are of one version."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from relight.commit.save import Participant
from relight.errors import known
from relight.layout import Box

PROTOCOL = 4
MESSAGE_BYTES_MAX = 1 << 30


class OpenRun(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Whose saves these are: the run, and the attempt in charge of it. The first message of every trainer."""

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
    """Whether it is for this trainer's writer to see to them."""
    held_s: float = 0.0
    """How long a save may be held back for want of room."""
    compact: bytes = b""
    """The rules by which saves are made smaller, encoded; empty for none."""
    guard: dict[str, Any] | None = None
    """How the store is guarded, as ``Guard.told`` says it; None if it is not. It holds keys: not to be written down anywhere."""
    read_bytes_per_second: float | None = None


class AllocateSlots(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The trainer needs ``count`` slots of ``size`` bytes, at most ``memory`` bytes in all."""

    size: int
    count: int
    memory: int | None = None


class SlotsAllocated(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These are they; their descriptors come with this message, in order. None if there is no room, and ``why``."""

    sizes: list[int]
    why: str = ""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the state, as ``layout.Item`` but for its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    length: int
    trainable: bool
    box: Box | None = None


class TensorLayout(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The tensors of all saves that follow, until another layout comes, as that rank's part has them."""

    items: list[TensorSpec]
    rank: int = 0
    lanes: int = 1
    """How many packs at once the rank writes: see ``plan_save``."""


class SlotFilling(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Slot ``slot`` is being filled with save ``number``; the request is there. What is filled may be written; ``Save`` makes it count."""

    slot: int
    number: int


class SlotSealed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Slot ``slot`` is sealed with save ``number``: write it."""

    slot: int
    number: int


class Request(msgspec.Struct, frozen=True, array_like=True):
    """What a sealed slot holds behind its packs: all of a save but the tensors."""

    number: int
    id: str
    step: int
    reason: str
    tree: bytes
    metrics: dict[str, float]
    user: dict[str, Any]
    environment: dict[str, Any]
    components: dict[str, str]
    exact: list[str]
    parent: str | None
    tag: str | None = None
    seat: Participant | None = None
    """The rank's, where several save together."""
    patient: bool = True
    """Whether it may be held back for want of room, or made smaller; False if it is urgent."""
    same: bytes = b""
    """The numbers, as bits, of tensors that have not changed since save ``since``, as far as the trainer can tell."""
    since: int = 0


class SaveResult(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Save ``number`` became a checkpoint (``error`` is None), or did not."""

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
    """Return an error as a report holds it. A fault in code keeps its kind and traceback: it must not look like a store's failure."""
    found = known(error, where)
    return found.kind, found.what, found.where, found.hint, found.retryable, list(found.details)


class ForwardedEvent(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An event that happened in the agent: retention, mostly."""

    name: str
    say: str
    fields: dict[str, Any]


class ListHeld(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Which checkpoints of this run are in memory?"""


class HeldList(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These: ``(id, rank, where its packs begin)``; the descriptors come with this message, in order."""

    held: list[tuple[str, int, list[int]]]


class ListenForPeers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Be there for agents of other nodes that know this token: at ``host``, if it is given; with so much memory for what is theirs.

    One that is there already keeps its own token, unless it is told to ``change`` it.
    """

    token: bytes
    change: bool = False
    host: str = ""
    memory: int | None = None
    bytes_per_second: float | None = None


class PeerAddress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This agent's id, and where others reach it; no address, and ``why``, if they cannot. ``token`` and ``others``, their addresses, are
    of the roster that it has joined, if it has."""

    id: str
    address: str
    why: str = ""
    token: bytes = b""
    others: list[str] = []


class JoinPeers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Protect, and be protected by, these agents: ``(id, host, rack, address, ranks)`` each; ``me`` is this one."""

    roster: list[tuple[str, str, str, str, list[int]]]
    me: str
    data: int
    parity: int


class LeavePeers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The run comes to its end: protect nothing more; what is held for others stays."""


class Flush(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Somebody waits for save ``number``: it, and those before it, are held back no longer."""

    number: int


class EndRun(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The run ends here as it should: finish what is sealed, keep nothing."""


@lru_cache(maxsize=4)
def to_bits(numbers: frozenset[int]) -> bytes:
    """The numbers as bits, the lowest first."""
    found = bytearray(max(numbers, default=-1) // 8 + 1)
    for number in numbers:
        found[number // 8] |= 1 << number % 8
    return bytes(found)


@lru_cache(maxsize=4)
def from_bits(data: bytes) -> frozenset[int]:
    """What ``to_bits`` was given."""
    return frozenset(8 * at + bit for at, byte in enumerate(data) if byte for bit in range(8) if byte >> bit & 1)


ToAgent = (
    OpenRun | AllocateSlots | TensorLayout | SlotFilling | SlotSealed | Flush | ListHeld | ListenForPeers | JoinPeers | LeavePeers | EndRun
)
ToTrainer = SlotsAllocated | SaveResult | ForwardedEvent | HeldList | PeerAddress
