"""Lay out tensors in packs. Pure and deterministic, so that equal states have equal layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from relight.errors import IncompatibleState
from relight.format import Tensor, dtype_named, encode_header
from relight.format.collector import collector_paused
from relight.format.manifest import NAME_BYTES_MAX, check_tensors, header_names, piece_name
from relight.format.names import pack_file
from relight.layout import Box, Bytes, Extent, Item, Source, cut_chunks

LANE_BYTES_MIN = 16 << 20
"""Least bytes for which a lane gets a pack of its own, as each pack costs an open and an fsync."""
_WHOLE = Box((), ())
PACK_BYTES_MAX = 64 << 30
"""A pack is closed once it is this large. A tensor is never split between packs."""


@dataclass(frozen=True, slots=True)
class PackPlan:
    """A planned pack: its sources, contiguous and beginning with the header, and the lengths of its chunks."""

    file: str
    size: int
    sources: list[Source]
    chunks: list[int]
    image: memoryview | None = None
    """The whole pack in the layout of its file, if in memory: page-aligned, readable up to the end of the last page."""
    until: Callable[[int], int] | None = None
    """Waits until this many bytes of ``image`` are available, and returns how many are. None: all are. An exception aborts the save."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Layout of the files that a rank writes. ``tensors[i]`` is the place of the i-th item.

    ``trainable`` lists the items that training should change.
    """

    packs: list[PackPlan]
    tensors: list[Tensor]
    trainable: frozenset[int]
    proven: set[str] = field(default_factory=set)
    """Contains ``"read"`` after a save of this plan was read back and verified. ``replace`` keeps it."""
    marked: dict[str, list[list[bool]]] = field(default_factory=dict)
    """Cached results. ``"trainable"``: for each pack's chunks, whether they have bytes of a trainable tensor. ``replace`` keeps it."""

    @property
    def logical_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.length for tensor in self.tensors)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all packs."""
        return sum(pack.size for pack in self.packs)


def plan_save(
    items: Sequence[Item], *, id: str, rank: int = 0, lanes: int = 1, pack_bytes_max: int = PACK_BYTES_MAX
) -> SavePlan:
    """Lay out ``items``: by element size (so every tensor is aligned for foreign readers), then role and trainability, then name.

    ``lanes``: packs written in parallel. There are that many packs of about equal size, or a multiple, if there are enough bytes.
    Cost: a sort, and one header. Raise ``IncompatibleState`` for a state that the format cannot store.
    """
    with collector_paused():
        return _plan(items, id, rank, lanes, pack_bytes_max)


def _plan(items: Sequence[Item], id: str, rank: int, lanes: int, pack_bytes_max: int) -> SavePlan:
    _check_names(items)
    lengths = [item.source.length for item in items]
    tensors: list[Tensor | None] = [None] * len(items)
    packs: list[PackPlan] = []
    group: list[int] = []
    size = 0
    share = _Share(sum(lengths), lanes, pack_bytes_max)
    order = [
        (-dtype_named(item.dtype).itemsize, item.role, item.trainable, item.name, item.box or _WHOLE) for item in items
    ]
    for index in sorted(range(len(items)), key=order.__getitem__):
        length = lengths[index]
        if group and (size + length > pack_bytes_max or share.is_full(size, length)):
            packs.append(_plan_pack(items, group, tensors, len(packs), id, rank))
            share.take(size)
            group, size = [], 0
        group.append(index)
        size += length
    if size:
        packs.append(_plan_pack(items, group, tensors, len(packs), id, rank))
    else:  # only empty tensors are left: they need no bytes
        for index in group:
            tensors[index] = _tensor(items[index], 0, 0)
    placed = [tensor for tensor in tensors if tensor is not None]
    check_tensors(placed, "the state about to be saved")
    return SavePlan(packs, placed, frozenset(i for i, item in enumerate(items) if item.trainable))


def _check_names(items: Sequence[Item]) -> None:
    names = [item.name if item.box is None else piece_name(item.name, item.box) for item in items]
    if len(set(names)) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise IncompatibleState("two tensors have the same name", where=twice)
    for item in items if max(map(len, names), default=0) * 4 > NAME_BYTES_MAX else ():
        if len(item.name.encode(errors="surrogatepass")) > NAME_BYTES_MAX:
            raise IncompatibleState(f"a tensor name of more than {NAME_BYTES_MAX} bytes", where=item.name[:80] + "…")


class _Share:
    """Target size of each lane's pack: the remaining bytes divided by the remaining packs. Approximate, as tensors are not split."""

    def __init__(self, total: int, lanes: int, pack_bytes_max: int) -> None:
        lanes = max(1, min(lanes, total // LANE_BYTES_MIN))
        self._left = total
        self._packs = lanes * -(-total // (lanes * pack_bytes_max)) if lanes > 1 else 1

    def is_full(self, size: int, length: int) -> bool:
        """Return whether a pack of ``size`` bytes is closer to its share without a tensor of ``length`` bytes than with it."""
        return self._packs > 1 and size > 0 and 2 * size + length > 2 * self._left / self._packs

    def take(self, size: int) -> None:
        """Record that a pack of ``size`` bytes was closed."""
        self._left -= size
        self._packs -= 1


def _plan_pack(
    items: Sequence[Item], group: list[int], tensors: list[Tensor | None], index: int, id: str, rank: int
) -> PackPlan:
    pack_items = [items[i] for i in group]
    names = header_names((item.name, item.box) for item in pack_items)
    shapes = [
        (name, item.dtype, item.shape if item.box is None else item.box.size, item.source.length)
        for name, item in zip(names, pack_items, strict=True)
    ]
    header = encode_header(shapes, {"relight": "pack", "id": id, "rank": str(rank), "pack": str(index)})
    offset = len(header)
    for position, item in zip(group, pack_items, strict=True):
        tensors[position] = _tensor(item, index, offset)
        offset += item.source.length
    extents = [Extent(item.source.length, f"{item.role}{item.trainable}") for item in pack_items]
    sources: list[Source] = [Bytes(header), *(item.source for item in pack_items)]
    return PackPlan(pack_file(rank, index), offset, sources, [len(header), *cut_chunks(extents)])


def _tensor(item: Item, pack: int, offset: int) -> Tensor:
    return Tensor(item.name, item.dtype, item.shape, item.role, pack, offset, item.source.length, item.box)
