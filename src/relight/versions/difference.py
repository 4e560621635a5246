"""What differs between two checkpoints: structure, tensors, plain values, what they were made with. Reads no more than it must.

Tensors whose chunks have the same hashes are the same: nothing of them is read. All others are gone through on both sides, slab by slab,
while the numbers of the slab before are worked out: memory is a few slabs, whatever the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from relight.catalog.merged_parts import MergedCheckpoint, whole_of
from relight.catalog.opened import Opened
from relight.catalog.slab_reader import Slab, SlabReader, batches, is_straight, slabs_of
from relight.format import DTYPES, Leaf, Tensor
from relight.format.tree import join_path
from relight.versions.numbers import Apart, compare

Progress = Callable[[int], None]
ONLY_A, ONLY_B, SHAPE, SAME, CHANGED = "only in a", "only in b", "other shape", "same", "changed"
SLAB_BYTES = 32 << 20
_WEIGHTS = ("param", "buffer")
_NUMBERED = re.compile(r"(.*?[./]\d+)(?=[./]|$)")


@dataclass(slots=True)
class TensorChange:
    """One tensor by its name. ``apart`` is None unless both sides have it in one shape, and it is not the same."""

    name: str
    state: str
    a: Tensor | None
    b: Tensor | None
    apart: Apart | None = None

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        sides = {side: one and {"dtype": one.dtype, "shape": list(one.shape)} for side, one in (("a", self.a), ("b", self.b))}
        return {"name": self.name, "state": self.state, **sides, **(self.apart.to_dict() if self.apart is not None else {})}


class ValueChange(NamedTuple):
    """One plain value by its path: what it is on each side, ``None`` with ``there`` False where there is none."""

    path: str
    a: Any
    b: Any
    in_a: bool = True
    in_b: bool = True


@dataclass(slots=True)
class Difference:
    """All of it. ``same`` tensors were not read; ``bytes_read`` of both sides."""

    tensors: list[TensorChange] = field(default_factory=list)
    values: list[ValueChange] = field(default_factory=list)
    facts: list[ValueChange] = field(default_factory=list)
    """Of what the roots say: step, world, metrics, metadata, environment, code."""
    bytes_read: int = 0

    @property
    def is_none(self) -> bool:
        """Whether tensors and values are the same."""
        return all(one.state == SAME for one in self.tensors) and not self.values

    def layers(self) -> dict[str, Apart]:
        """The changes of weights by layer: what is below the same number in a name; without one, what is in front of the last part."""
        found: dict[str, Apart] = {}
        for one in self.tensors:
            if one.state == CHANGED and one.apart is not None and one.a is not None and one.a.role in _WEIGHTS:
                found.setdefault(layer_of(one.name), Apart()).add(one.apart)
        return found


def layer_of(name: str) -> str:
    """Which layer a tensor is of: ``model/h.3.mlp.weight`` is of ``model/h.3``."""
    numbered = _NUMBERED.match(name)
    if numbered:
        return numbered.group(1)
    return name.rpartition(".")[0] or name.rpartition("/")[0] or name


def diff(
    a: Opened,
    b: Opened,
    *,
    only: Sequence[str] = (),
    tensors: bool = True,
    progress: Progress | None = None,
    slab_bytes: int = SLAB_BYTES,
) -> Difference:
    """Compare two checkpoints, of one store or of two. ``only``: patterns of names; ``tensors`` False: nothing of them is read.

    ``CorruptCheckpoint`` if a byte that is read is not what was committed. ``progress``: bytes of both sides. Memory: four times
    ``slab_bytes``, or two rows of a tensor that lies in pieces, and what reading takes.
    """
    left, right = whole_of(a), whole_of(b)
    found = Difference(facts=list(_facts(a, b)))
    found.values = [one for one in _values(left, right) if _wanted(one.path, only)]
    numbers_a, numbers_b = ({one.name: number for number, one in enumerate(side.tensors)} for side in (left, right))
    todo: list[tuple[TensorChange, int, int]] = []
    for name in dict.fromkeys([*numbers_a, *numbers_b]):
        if not _wanted(name, only):
            continue
        one = left.tensors[numbers_a[name]] if name in numbers_a else None
        other = right.tensors[numbers_b[name]] if name in numbers_b else None
        change = TensorChange(name, ONLY_B if one is None else ONLY_A if other is None else SHAPE, one, other)
        if one is not None and other is not None and one.shape == other.shape:
            same = one.dtype == other.dtype and _hashes(a, left, numbers_a[name]) == _hashes(b, right, numbers_b[name])
            change.state = SAME if same else CHANGED
            if not same:
                todo.append((change, numbers_a[name], numbers_b[name]))
        found.tensors.append(change)
    if tensors:
        _go_through(a, left, b, right, todo, found, progress, slab_bytes)
    return found


def bytes_to_read(found: Difference) -> int:
    """What comparing the tensors takes, of a difference that was made without."""
    return sum(
        math.prod(one.a.shape) * (DTYPES[one.a.dtype].itemsize + DTYPES[one.b.dtype].itemsize)
        for one in found.tensors
        if one.state == CHANGED and one.a is not None and one.b is not None
    )


def _hashes(opened: Opened, joined: MergedCheckpoint, number: int) -> object:
    """What two tensors have in common only if they are the same: each piece's box, and the chunks it lies in, from where on."""
    found = []
    for piece in joined.pieces[number]:
        part = opened.parts[piece.part]
        tensor = part.tensors[piece.tensor]
        at, chunks = 0, []
        for length, value in part.packs[tensor.pack].chunks:
            if at < tensor.offset + tensor.length and at + length > tensor.offset:
                chunks.append((at - tensor.offset, length, value))
            at += length
            if at >= tensor.offset + tensor.length:
                break
        found.append((piece.box, chunks))
    return sorted(found)


def _go_through(
    a: Opened,
    left: MergedCheckpoint,
    b: Opened,
    right: MergedCheckpoint,
    todo: Sequence[tuple[TensorChange, int, int]],
    found: Difference,
    progress: Progress | None,
    slab_bytes: int,
) -> None:
    """Read both sides, slab by slab; the numbers are worked out by another thread."""
    sizes = [0] * len(left.tensors)
    changes: dict[int, tuple[TensorChange, int]] = {}

    def slabs() -> Iterator[Slab]:
        for change, mine, theirs in todo:
            shape, size = left.tensors[mine].shape, DTYPES[left.tensors[mine].dtype].itemsize
            sizes[mine] = max(size, DTYPES[right.tensors[theirs].dtype].itemsize)
            changes[mine] = change, theirs
            change.apart = Apart()
            by_rows = not (is_straight(left, mine) and is_straight(right, theirs))
            yield from slabs_of(shape, mine, by_rows=by_rows, at_most=max(1, slab_bytes // sizes[mine]))

    reads_a, reads_b = SlabReader(a, left, batch_bytes=slab_bytes), SlabReader(b, right, batch_bytes=slab_bytes)
    with ThreadPoolExecutor(2) as pool:
        working: Future[None] | None = None
        for batch in batches(slabs(), sizes, slab_bytes):
            ahead = pool.submit(reads_a.read, batch)
            theirs = reads_b.read([one._replace(tensor=changes[one.tensor][1]) for one in batch])
            mine = ahead.result()
            if working is not None:
                working.result()
            working = pool.submit(_count, [(changes[one.tensor][0], x, y) for one, x, y in zip(batch, mine, theirs, strict=True)])
            read = sum(map(len, mine)) + sum(map(len, theirs))
            found.bytes_read += read
            if progress is not None:
                progress(read)
        if working is not None:
            working.result()
    for change, _, _ in todo:  # its neighbours in a chunk differed, or it lies elsewhere
        if change.apart is not None and not change.apart.changed and change.a is not None and change.b is not None:
            change.state = SAME if change.a.dtype == change.b.dtype else CHANGED


def _count(pairs: list[tuple[TensorChange, memoryview, memoryview]]) -> None:
    for change, x, y in pairs:
        assert change.apart is not None and change.a is not None and change.b is not None
        change.apart.add(compare(x, change.a.dtype, y, change.b.dtype))


def _facts(a: Opened, b: Opened) -> Iterator[ValueChange]:
    """What the roots say differently."""
    one, other = a.root, b.root
    for name in ("step", "world", "reason"):
        if getattr(one, name) != getattr(other, name):
            yield ValueChange(name, getattr(one, name), getattr(other, name))
    pairs = (
        ("metrics", one.metrics, other.metrics),
        ("metadata", one.user, other.user),
        ("environment", one.environment, other.environment),
        ("components", one.components, other.components),
    )
    for name, mine, theirs in pairs:
        yield from _apart({name: mine}, {name: theirs})


def _values(left: MergedCheckpoint, right: MergedCheckpoint) -> list[ValueChange]:
    return list(_apart(_all_of(left), _all_of(right)))


def _all_of(joined: MergedCheckpoint) -> dict[Any, Any]:
    """The tree that all ranks have in common, and what each has besides."""
    own = [{key: value for key, value in mine.items() if key not in joined.tree} for mine in joined.own]
    return {**joined.tree, **({"rank": dict(enumerate(own))} if any(own) else {})}


def _apart(mine: Any, theirs: Any) -> Iterator[ValueChange]:
    one, other = dict(_flat(mine, "")), dict(_flat(theirs, ""))
    for path in dict.fromkeys([*one, *other]):
        if path not in one or path not in other or not _equal(one[path], other[path]):
            yield ValueChange(path, one.get(path), other.get(path), path in one, path in other)


def _flat(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Plain values by their paths. Tensors are compared as such; of other leaves, what is kept with them."""
    if type(node) is Leaf:
        if node.meta:
            yield path, node.meta
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _flat(value, join_path(path, key))
    elif isinstance(node, (list, tuple)) and any(isinstance(one, (Mapping, list, tuple, Leaf)) for one in node):
        for number, value in enumerate(node):
            yield from _flat(value, join_path(path, number, sequence=True))
    else:
        yield path, node


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return type(one) is type(other) and bool(one == other)


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*") for pattern in only)
