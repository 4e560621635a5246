"""Compare two checkpoints: structure, tensors, plain values, environment. Reads as little as possible.

Tensors with equal chunk hashes are equal and are not read. All other tensors are read on both sides, slab by slab, while the previous slab
is compared. So memory is a few slabs, whatever the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

from relight.engines import IN_PROCESS, Engine
from relight.format import DTYPES, Leaf, Tensor
from relight.format.tree import join_path
from relight.reader.by_reference import CheckpointReference, open_reference, reference_to
from relight.reader.merged_parts import MergedCheckpoint, whole_of
from relight.reader.opened import Opened
from relight.reader.slab_reader import Slab, SlabReader, batches, is_straight, slabs_of
from relight.versions.numbers import Apart, compare

Progress = Callable[[int], None]
ONLY_A, ONLY_B, SHAPE, SAME, CHANGED = "only in a", "only in b", "other shape", "same", "changed"
SLAB_BYTES = 32 << 20
_WEIGHTS = ("param", "buffer")
_NUMBERED = re.compile(r"(.*?[./]\d+)(?=[./]|$)")


@dataclass(slots=True)
class TensorChange:
    """One tensor, by name. ``apart`` is None unless both sides have the tensor in the same shape with different values."""

    name: str
    state: str
    a: Tensor | None
    b: Tensor | None
    apart: Apart | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        sides = {
            side: tensor and {"dtype": tensor.dtype, "shape": list(tensor.shape)}
            for side, tensor in (("a", self.a), ("b", self.b))
        }
        return {
            "name": self.name,
            "state": self.state,
            **sides,
            **(self.apart.to_dict() if self.apart is not None else {}),
        }


class ValueChange(NamedTuple):
    """One plain value, by path, on each side. If a side lacks it, its value is None and ``in_a`` or ``in_b`` is False."""

    path: str
    a: Any
    b: Any
    in_a: bool = True
    in_b: bool = True


@dataclass(slots=True)
class Difference:
    """Result of a comparison. ``bytes_read`` counts both sides."""

    tensors: list[TensorChange] = field(default_factory=list)
    values: list[ValueChange] = field(default_factory=list)
    facts: list[ValueChange] = field(default_factory=list)
    """Differences between the roots: step, world, metrics, metadata, environment, code."""
    bytes_read: int = 0

    @property
    def is_none(self) -> bool:
        """Whether all tensors and plain values are equal."""
        return all(change.state == SAME for change in self.tensors) and not self.values

    def layers(self) -> dict[str, Apart]:
        """Return the changes of weights, summed by layer (see ``layer_of``)."""
        layers: dict[str, Apart] = {}
        for change in self.tensors:
            if (
                change.state == CHANGED
                and change.apart is not None
                and change.a is not None
                and change.a.role in _WEIGHTS
            ):
                layers.setdefault(layer_of(change.name), Apart()).add(change.apart)
        return layers


def layer_of(name: str) -> str:
    """Return a tensor's layer: its name up to the first number, else up to its last part. ``model/h.3.mlp.weight`` → ``model/h.3``."""
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
    engine: Engine = IN_PROCESS,
) -> Difference:
    """Compare two checkpoints of one store or of two. ``only``: patterns of names. ``tensors=False``: read no tensor.

    The engine's processes read and compare the tensors. The result does not depend on the engine, to the bit.

    Raise ``CorruptCheckpoint`` if a byte that is read is not what was committed. ``progress``: called with bytes of both sides. Memory:
    four times ``slab_bytes``, or two rows of a tensor in pieces, and what reading takes.
    """
    left, right = whole_of(a), whole_of(b)
    difference = Difference(facts=list(_facts(a, b)))
    difference.values = [change for change in _values(left, right) if _wanted(change.path, only)]
    numbers_a, numbers_b = (
        {tensor.name: number for number, tensor in enumerate(side.tensors)} for side in (left, right)
    )
    todo: list[tuple[TensorChange, int, int]] = []
    for name in dict.fromkeys([*numbers_a, *numbers_b]):
        if not _wanted(name, only):
            continue
        tensor_a = left.tensors[numbers_a[name]] if name in numbers_a else None
        tensor_b = right.tensors[numbers_b[name]] if name in numbers_b else None
        change = TensorChange(
            name, ONLY_B if tensor_a is None else ONLY_A if tensor_b is None else SHAPE, tensor_a, tensor_b
        )
        if tensor_a is not None and tensor_b is not None and tensor_a.shape == tensor_b.shape:
            same = tensor_a.dtype == tensor_b.dtype and _hashes(a, left, numbers_a[name]) == _hashes(
                b, right, numbers_b[name]
            )
            change.state = SAME if same else CHANGED
            if not same:
                todo.append((change, numbers_a[name], numbers_b[name]))
        difference.tensors.append(change)
    if tensors:
        _go_through(a, left, b, right, todo, difference, progress, slab_bytes, engine)
    return difference


def bytes_to_read(found: Difference) -> int:
    """Return the bytes that comparing the tensors will read, for a difference made with ``tensors=False``."""
    return sum(
        math.prod(change.a.shape) * (DTYPES[change.a.dtype].itemsize + DTYPES[change.b.dtype].itemsize)
        for change in found.tensors
        if change.state == CHANGED and change.a is not None and change.b is not None
    )


def _hashes(opened: Opened, joined: MergedCheckpoint, number: int) -> object:
    """Return a value that is equal only for equal tensors: each piece's box, and the hashes and offsets of its chunks."""
    pieces = []
    for piece in joined.pieces[number]:
        part = opened.parts[piece.part]
        tensor = part.tensors[piece.tensor]
        offset, chunks = 0, []
        for length, value in part.packs[tensor.pack].chunks:
            if offset < tensor.offset + tensor.length and offset + length > tensor.offset:
                chunks.append((offset - tensor.offset, length, value))
            offset += length
            if offset >= tensor.offset + tensor.length:
                break
        pieces.append((piece.box, chunks))
    return sorted(pieces)


def _go_through(
    a: Opened,
    left: MergedCheckpoint,
    b: Opened,
    right: MergedCheckpoint,
    todo: Sequence[tuple[TensorChange, int, int]],
    found: Difference,
    progress: Progress | None,
    slab_bytes: int,
    engine: Engine,
) -> None:
    """Read both sides, batch by batch of slabs, and add up the distances in the batches' order."""
    sizes = [0] * len(left.tensors)
    changes: dict[int, TensorChange] = {}
    theirs: dict[int, int] = {}

    def slabs() -> Iterator[Slab]:
        for change, mine, other in todo:
            shape, size = left.tensors[mine].shape, DTYPES[left.tensors[mine].dtype].itemsize
            sizes[mine] = max(size, DTYPES[right.tensors[other].dtype].itemsize)
            changes[mine], theirs[mine] = change, other
            change.apart = Apart()
            by_rows = not (is_straight(left, mine) and is_straight(right, other))
            yield from slabs_of(shape, mine, by_rows=by_rows, at_most=max(1, slab_bytes // sizes[mine]))

    pairs = (
        [(slab, slab._replace(tensor=theirs[slab.tensor])) for slab in batch]
        for batch in batches(slabs(), sizes, slab_bytes)
    )
    if engine.is_local:
        compared = _Comparing(a, left, b, right, slab_bytes).in_order(pairs)
    else:
        compared = _by_processes(engine, (reference_to(a), reference_to(b)), pairs, slab_bytes)
    for batch, distances, read in compared:
        for (slab, _), distance in zip(batch, distances, strict=True):
            apart = changes[slab.tensor].apart
            assert apart is not None
            apart.add(distance)
        found.bytes_read += read
        if progress is not None:
            progress(read)
    for change, _, _ in todo:  # only its neighbours in a chunk differed, or its chunks begin elsewhere
        if change.apart is not None and not change.apart.changed and change.a is not None and change.b is not None:
            change.state = SAME if change.a.dtype == change.b.dtype else CHANGED


_Pairs = list[tuple[Slab, Slab]]
"""The same slabs of both sides."""
_Compared = tuple[_Pairs, list[Apart], int]
"""Slabs, their distances, and the bytes read."""


class _Comparing:
    """Reads slabs of both sides and compares them."""

    def __init__(self, a: Opened, left: MergedCheckpoint, b: Opened, right: MergedCheckpoint, slab_bytes: int) -> None:
        self._left, self._right = left, right
        self._reads_a, self._reads_b = (
            SlabReader(a, left, batch_bytes=slab_bytes),
            SlabReader(b, right, batch_bytes=slab_bytes),
        )

    def in_order(self, batches_of_pairs: Iterable[_Pairs]) -> Iterator[_Compared]:
        """Read batch after batch. Another thread compares the previous one."""
        with ThreadPoolExecutor(2) as pool:
            working: Future[_Compared] | None = None
            for pairs in batches_of_pairs:
                ahead = pool.submit(self._reads_a.read, [slab for slab, _ in pairs])
                theirs = self._reads_b.read([slab for _, slab in pairs])
                mine = ahead.result()
                if working is not None:
                    yield working.result()
                working = pool.submit(self._compare, pairs, mine, theirs)
            if working is not None:
                yield working.result()

    def _compare(self, pairs: _Pairs, mine: list[memoryview], theirs: list[memoryview]) -> _Compared:
        distances = [
            compare(x, self._left.tensors[slab.tensor].dtype, y, self._right.tensors[other.tensor].dtype)
            for (slab, other), x, y in zip(pairs, mine, theirs, strict=True)
        ]
        return pairs, distances, sum(map(len, mine)) + sum(map(len, theirs))


class _DiffTask(NamedTuple):
    number: int
    sides: tuple[CheckpointReference, CheckpointReference]
    pairs: _Pairs
    slab_bytes: int


def _by_processes(
    engine: Engine,
    sides: tuple[CheckpointReference, CheckpointReference],
    batches_of_pairs: Iterable[_Pairs],
    slab_bytes: int,
) -> Iterator[_Compared]:
    """Yield the batches' results in order, as sums of doubles depend on it."""
    tasks = (_DiffTask(number, sides, pairs, slab_bytes) for number, pairs in enumerate(batches_of_pairs))
    early: dict[int, _Compared] = {}
    given = 0
    for task, result in engine.run(_compare_batch, tasks):
        early[task.number] = result
        while given in early:
            yield early.pop(given)
            given += 1


@lru_cache(maxsize=1)
def _comparing(sides: tuple[CheckpointReference, CheckpointReference], slab_bytes: int) -> _Comparing:
    a, b = (open_reference(side) for side in sides)
    return _Comparing(a, whole_of(a), b, whole_of(b), slab_bytes)


def _compare_batch(task: _DiffTask) -> _Compared:
    """Compare one batch, in any process."""
    (result,) = _comparing(task.sides, task.slab_bytes).in_order([task.pairs])
    return result


def _facts(a: Opened, b: Opened) -> Iterator[ValueChange]:
    """Yield the differences between the roots."""
    root_a, root_b = a.root, b.root
    for name in ("step", "world", "reason"):
        if getattr(root_a, name) != getattr(root_b, name):
            yield ValueChange(name, getattr(root_a, name), getattr(root_b, name))
    pairs = (
        ("metrics", a.checkpoint.metrics, b.checkpoint.metrics),
        ("metadata", root_a.user, root_b.user),
        ("environment", root_a.environment, root_b.environment),
        ("components", root_a.components, root_b.components),
    )
    for name, mine, theirs in pairs:
        yield from _apart({name: mine}, {name: theirs})


def _values(left: MergedCheckpoint, right: MergedCheckpoint) -> list[ValueChange]:
    return list(_apart(_all_of(left), _all_of(right)))


def _all_of(joined: MergedCheckpoint) -> dict[Any, Any]:
    """Return the tree that all ranks have in common, with each rank's own state under ``rank``."""
    own = [{key: value for key, value in mine.items() if key not in joined.tree} for mine in joined.own]
    return {**joined.tree, **({"rank": dict(enumerate(own))} if any(own) else {})}


def _apart(mine: Any, theirs: Any) -> Iterator[ValueChange]:
    values_a, values_b = dict(_flat(mine, "")), dict(_flat(theirs, ""))
    for path in dict.fromkeys([*values_a, *values_b]):
        if path not in values_a or path not in values_b or not _equal(values_a[path], values_b[path]):
            yield ValueChange(path, values_a.get(path), values_b.get(path), path in values_a, path in values_b)


def _flat(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield plain values by path. Tensors are compared elsewhere; of other leaves, their metadata."""
    if type(node) is Leaf:
        if node.meta:
            yield path, node.meta
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _flat(value, join_path(path, key))
    elif isinstance(node, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple, Leaf)) for item in node):
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
