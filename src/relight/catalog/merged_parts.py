"""A checkpoint that several ranks made, as one: every tensor once, in its global shape, and one tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from relight.catalog.one_writer import OWN, apart
from relight.catalog.opened import Opened
from relight.catalog.read import check_pack
from relight.errors import UnsafeContent
from relight.format import DTYPES, Leaf, Tensor, decode_tree
from relight.layout import Box, whole


class StoredPiece(NamedTuple):
    """Where a piece of a tensor is: which part, which of its tensors, which box of the global shape."""

    part: int
    tensor: int
    box: Box


@dataclass(frozen=True, slots=True)
class MergedCheckpoint:
    """``tensors`` with global shapes; ``pieces[i]`` is where tensor ``i`` lies. Its ``pack`` means nothing but "asked for by this
    number".
    """

    tensors: tuple[Tensor, ...]
    pieces: tuple[tuple[StoredPiece, ...], ...]
    tree: dict[Any, Any]
    """What all ranks have in common."""
    own: tuple[dict[Any, Any], ...]
    """What each rank had besides, by rank."""

    def tree_of(self, rank: int) -> dict[Any, Any]:
        """The tree of a rank: what is common, and its own."""
        return {**self.tree, **self.own[rank % len(self.own)]}


def whole_of(opened: Opened) -> MergedCheckpoint:
    """Put the parts together. Their tensors tile already: that was checked when they were opened."""
    numbers: dict[str, int] = {}
    tensors: list[Tensor] = []
    pieces: list[list[StoredPiece]] = []
    tree: dict[Any, Any] = {}
    own: list[dict[Any, Any]] = []
    for number, part in enumerate(opened.parts):
        mapping = []
        for index, tensor in enumerate(part.tensors):
            home = numbers.get(tensor.name)
            if home is None:
                home = numbers[tensor.name] = len(tensors)
                tensors.append(_global(tensor, home))
                pieces.append([])
            box = tensor.box if tensor.box is not None else whole(tensor.shape)
            if tensor.length and (tensor.shape or not pieces[home]):
                pieces[home].append(StoredPiece(number, index, box))
            mapping.append(home)
        where = f"{opened.prefix}/{opened.root.parts[number].file}"
        decoded = renumber_leaves(decode_tree(part.tree, len(part.tensors), where), mapping)
        if not isinstance(decoded, dict):
            raise UnsafeContent("the stored state is not a dict of components", where=where)
        mine = decoded.pop(OWN, {}) if len(opened.parts) > 1 else {}
        if not isinstance(mine, dict):
            raise UnsafeContent("a rank's own state is not a dict of components", where=where)
        own.append(mine)
        merge(tree, decoded)
    shared, each = apart(opened.root, tree, opened.prefix) if len(opened.parts) == 1 else (tree, tuple(own))
    return MergedCheckpoint(tuple(tensors), tuple(map(tuple, pieces)), shared, each)


def check_pieces(opened: Opened, joined: MergedCheckpoint, index: int, check: Callable[[int, int], None] | None = None) -> None:
    """``CorruptCheckpoint`` if a pack that holds a piece of tensor ``index`` is missing, or not as long as was committed; or what ``check``
    says of it, which is given the part's number and the pack's."""
    for number, pack in {(one.part, opened.parts[one.part].tensors[one.tensor].pack) for one in joined.pieces[index]}:
        if check is not None:
            check(number, pack)
        else:
            check_pack(opened, opened.parts[number], pack)


def _global(tensor: Tensor, number: int) -> Tensor:
    length = math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    return Tensor(tensor.name, tensor.dtype, tensor.shape, tensor.role, number, 0, length)


def renumber_leaves(node: Any, mapping: list[int]) -> Any:
    """The tree with its leaves pointing at the merged tensors."""
    kind = type(node)
    if kind is Leaf:
        return Leaf(node.kind, tuple(mapping[index] for index in node.tensors), node.meta)
    if kind is dict:
        return {key: renumber_leaves(value, mapping) for key, value in node.items()}
    if kind is list or kind is tuple:
        return kind(renumber_leaves(value, mapping) for value in node)
    return node


def merge(tree: dict[Any, Any], other: Mapping[Any, Any]) -> None:
    """Add what ``other`` has besides: stages of a pipeline hold other modules' entries. Where both have something, the lower rank's
    counts.
    """
    for key, value in other.items():
        if key not in tree:
            tree[key] = value
        elif isinstance(tree[key], dict) and isinstance(value, dict):
            if _is_optimizers(tree[key]) and _is_optimizers(value):
                _merge_groups(tree[key]["groups"], value["groups"])
            merge(tree[key], value)


def _is_optimizers(node: Mapping[Any, Any]) -> bool:
    return isinstance(node.get("groups"), list) and isinstance(node.get("state"), dict)


def _merge_groups(groups: list[Any], others: list[Any]) -> None:
    """Stages have the same groups, each with its own parameters."""
    for mine, theirs in zip(groups, others, strict=False):
        if isinstance(mine, dict) and isinstance(theirs, dict):
            held, more = mine.get("params"), theirs.get("params")
            if isinstance(held, (list, tuple)) and isinstance(more, (list, tuple)):
                known = set(map(repr, held))
                mine["params"] = [*held, *(one for one in more if repr(one) not in known)]
    groups.extend(others[len(groups) :])
