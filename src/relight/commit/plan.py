"""Which tensor goes where in which pack: pure and deterministic, so that equal states are laid out equally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from relight.errors import IncompatibleState
from relight.format import Tensor, dtype_named, encode_header
from relight.format.manifest import NAME_BYTES_MAX, check_tensor, header_names, piece_name
from relight.format.names import pack_file
from relight.layout import Box, Bytes, Extent, Item, Source, cut_chunks

LANE_BYTES_MIN = 16 << 20
"""A share of a store's lanes that is smaller than this is not worth a pack of its own: each costs an fsync and an opening."""
_WHOLE = Box((), ())
PACK_BYTES_MAX = 64 << 30
"""A pack is closed once it is this large. A tensor is never split between packs."""


@dataclass(frozen=True, slots=True)
class PackPlan:
    """One pack to be written: its sources, back to back from the header on, and the chunks that tile it."""

    file: str
    size: int
    sources: list[Source]
    chunks: list[int]
    image: memoryview | None = None
    """The whole pack as its file will be, if it lies in memory in one piece: page-aligned, readable up to the next page's end."""
    until: Callable[[int], int] | None = None
    """Waits until so many bytes of ``image`` are there, and gives how many are; None if all of them are. May raise: the save is off."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What a rank writes. ``tensors[i]`` is where the i-th item goes; ``trainable`` lists the items that training should change."""

    packs: list[PackPlan]
    tensors: list[Tensor]
    trainable: frozenset[int]
    proven: set[str] = field(default_factory=set)
    """Holds ``"read"`` once a save of this plan was read back and found to be what any reader takes. ``replace`` hands it on."""
    marked: dict[str, list[list[bool]]] = field(default_factory=dict)
    """What was worked out of it once: under ``"trainable"``, of each pack's chunks, whether they hold tensors that training should change.
    ``replace`` hands it on."""

    @property
    def logical_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.length for tensor in self.tensors)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all packs."""
        return sum(pack.size for pack in self.packs)


def plan_save(items: Sequence[Item], *, id: str, rank: int = 0, lanes: int = 1, pack_bytes_max: int = PACK_BYTES_MAX) -> SavePlan:
    """Lay out ``items``: by element size (so every tensor is aligned for foreign readers), then role and trainability, then name.

    ``lanes``: how many packs are written at once; there are as many, of about one size, or a multiple of it, if there is enough for them.
    Cost: a sort, and one header. ``IncompatibleState`` for what the format cannot hold.
    """
    seen: set[str] = set()
    for item in items:
        name = item.name if item.box is None else piece_name(item.name, item.box)
        if name in seen:
            raise IncompatibleState("two tensors of one name", where=name)
        if len(item.name.encode(errors="surrogatepass")) > NAME_BYTES_MAX:
            raise IncompatibleState(f"a tensor name of more than {NAME_BYTES_MAX} bytes", where=item.name[:80] + "…")
        seen.add(name)

    def order(index: int) -> tuple[int, str, bool, str, Box]:
        item = items[index]
        return (-dtype_named(item.dtype).itemsize, item.role, item.trainable, item.name, item.box or _WHOLE)

    tensors: list[Tensor | None] = [None] * len(items)
    packs: list[PackPlan] = []
    group: list[int] = []
    size = 0
    share = _Share(sum(item.source.length for item in items), lanes, pack_bytes_max)
    for index in sorted(range(len(items)), key=order):
        length = items[index].source.length
        if group and (size + length > pack_bytes_max or share.is_full(size, length)):
            packs.append(_plan_pack(items, group, tensors, len(packs), id, rank))
            share.take(size)
            group, size = [], 0
        group.append(index)
        size += length
    if size:
        packs.append(_plan_pack(items, group, tensors, len(packs), id, rank))
    else:  # nothing but empty tensors left: they need no bytes
        for index in group:
            tensors[index] = _tensor(items[index], 0, 0)
    placed = [tensor for tensor in tensors if tensor is not None]
    for tensor in placed:
        check_tensor(tensor, "the state about to be saved")
    return SavePlan(packs, placed, frozenset(i for i, item in enumerate(items) if item.trainable))


class _Share:
    """What one of several lanes' packs gets: of what is left, as much as each of those to come. Tensors are not split, so it is about."""

    def __init__(self, total: int, lanes: int, pack_bytes_max: int) -> None:
        lanes = max(1, min(lanes, total // LANE_BYTES_MIN))
        self._left = total
        self._packs = lanes * -(-total // (lanes * pack_bytes_max)) if lanes > 1 else 1

    def is_full(self, size: int, length: int) -> bool:
        """Whether a pack of ``size`` bytes is nearer to its share without a tensor of ``length`` than with it."""
        return self._packs > 1 and size > 0 and 2 * size + length > 2 * self._left / self._packs

    def take(self, size: int) -> None:
        """A pack of that size is closed."""
        self._left -= size
        self._packs -= 1


def _plan_pack(items: Sequence[Item], group: list[int], tensors: list[Tensor | None], index: int, id: str, rank: int) -> PackPlan:
    held = [items[i] for i in group]
    names = header_names((item.name, item.box) for item in held)
    shapes = [
        (name, item.dtype, item.shape if item.box is None else item.box.size, item.source.length)
        for name, item in zip(names, held, strict=True)
    ]
    header = encode_header(shapes, {"relight": "pack", "id": id, "rank": str(rank), "pack": str(index)})
    at = len(header)
    for position, item in zip(group, held, strict=True):
        tensors[position] = _tensor(item, index, at)
        at += item.source.length
    extents = [Extent(item.source.length, f"{item.role}{item.trainable}") for item in held]
    sources: list[Source] = [Bytes(header), *(item.source for item in held)]
    return PackPlan(pack_file(rank, index), at, sources, [len(header), *cut_chunks(extents)])


def _tensor(item: Item, pack: int, offset: int) -> Tensor:
    return Tensor(item.name, item.dtype, item.shape, item.role, pack, offset, item.source.length, item.box)
