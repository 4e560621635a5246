"""Merge the parts of a checkpoint that several ranks saved: every tensor once, in its global shape, and one tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from relight.errors import UnsafeContent
from relight.format import DTYPES, Leaf, Tensor, decode_tree
from relight.layout import Box, whole
from relight.reader.chunk_reader import check_pack
from relight.reader.one_writer import OWN, apart
from relight.reader.opened import Opened


class StoredPiece(NamedTuple):
    """Location of a piece of a tensor: index of the part, index of the tensor in it, box in the global shape."""

    part: int
    tensor: int
    box: Box


@dataclass(frozen=True, slots=True)
class MergedCheckpoint:
    """``tensors`` have global shapes. ``pieces[i]`` are the locations of tensor ``i``. A tensor's ``pack`` is only its index here."""

    tensors: tuple[Tensor, ...]
    pieces: tuple[tuple[StoredPiece, ...], ...]
    tree: dict[Any, Any]
    """State that all ranks have in common."""
    own: tuple[dict[Any, Any], ...]
    """State that only one rank had, by rank."""

    def tree_of(self, rank: int) -> dict[Any, Any]:
        """Return the tree of a rank: the common state and its own."""
        return {**self.tree, **self.own[rank % len(self.own)]}


def whole_of(opened: Opened) -> MergedCheckpoint:
    """Merge the parts. ``open_checkpoint`` has checked that their pieces cover every tensor."""
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
        own_state = decoded.pop(OWN, {}) if len(opened.parts) > 1 else {}
        if not isinstance(own_state, dict):
            raise UnsafeContent("a rank's own state is not a dict of components", where=where)
        own.append(own_state)
        merge(tree, decoded)
    shared, each = apart(opened.root, tree, opened.prefix) if len(opened.parts) == 1 else (tree, tuple(own))
    return MergedCheckpoint(tuple(tensors), tuple(map(tuple, pieces)), shared, each)


def check_pieces(
    opened: Opened, joined: MergedCheckpoint, index: int, check: Callable[[int, int], None] | None = None
) -> None:
    """Raise ``CorruptCheckpoint`` if a pack with a piece of tensor ``index`` is missing or has another length than was committed.

    ``check``: called instead, with the part's number and the pack's number; it raises for a bad pack.
    """
    for number, pack in {
        (piece.part, opened.parts[piece.part].tensors[piece.tensor].pack) for piece in joined.pieces[index]
    }:
        if check is not None:
            check(number, pack)
        else:
            check_pack(opened, opened.parts[number], pack)


def _global(tensor: Tensor, number: int) -> Tensor:
    length = math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    return Tensor(tensor.name, tensor.dtype, tensor.shape, tensor.role, number, 0, length)


def renumber_leaves(node: Any, mapping: list[int]) -> Any:
    """Return the tree with its leaves pointing at the merged tensors."""
    kind = type(node)
    if kind is Leaf:
        return Leaf(node.kind, tuple(mapping[index] for index in node.tensors), node.meta)
    if kind is dict:
        return {key: renumber_leaves(value, mapping) for key, value in node.items()}
    if kind is list or kind is tuple:
        return kind(renumber_leaves(value, mapping) for value in node)
    return node


def merge(tree: dict[Any, Any], other: Mapping[Any, Any]) -> None:
    """Add the entries of ``other`` that ``tree`` lacks: stages of a pipeline hold different modules. The lower rank's entry wins."""
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
    """Add the parameters of each group. Pipeline stages have the same groups, each with its own parameters."""
    for group, other_group in zip(groups, others, strict=False):
        if isinstance(group, dict) and isinstance(other_group, dict):
            params, more = group.get("params"), other_group.get("params")
            if isinstance(params, (list, tuple)) and isinstance(more, (list, tuple)):
                present = set(map(repr, params))
                group["params"] = [*params, *(param for param in more if repr(param) not in present)]
    groups.extend(others[len(groups) :])
