"""Files of torch's own: what ``torch.save`` makes, and what ``torch.distributed.checkpoint`` does. Pure, and without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relight.errors import IncompatibleState
from relight.export.archive import torch_archive
from relight.export.files import EntryOffset, OutputFile
from relight.export.naming import renamed
from relight.export.pickled import Items, PickledCall, PickledClass, PickledObject, PickledStorage, fits, pickled
from relight.export.selection import At, ExportEntry, SelectedTensors, holds
from relight.format import DTYPES, Leaf

SHARD = "__0_0.distcp"
METADATA = ".metadata"
_STORAGES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int", "int16": "Short",
    "int8": "Char", "uint8": "Byte", "bool": "Bool", "complex128": "ComplexDouble", "complex64": "ComplexFloat",
}  # fmt: skip
"""What torch calls a storage of them; other dtypes lie in one of bytes."""
_HOME = "torch.distributed.checkpoint"
_ORDERED = PickledCall(PickledClass("collections", "OrderedDict"), ())


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    return tuple(math.prod(max(extent, 1) for extent in shape[dim + 1 :]) for dim in range(len(shape)))


def tensor_value(entry: ExportEntry, key: int) -> PickledCall:
    """A tensor that is all of storage ``key``, as torch rebuilds it."""
    name = _STORAGES.get(entry.dtype)
    kind = PickledClass("torch", f"{name}Storage") if name else PickledClass("torch.storage", "UntypedStorage")
    storage = PickledStorage(("storage", kind, str(key), "cpu", math.prod(entry.shape) if name else entry.length))
    shape, strides = tuple(entry.shape), strides_of(entry.shape)
    if name:
        return PickledCall(PickledClass("torch._utils", "_rebuild_tensor_v2"), (storage, 0, shape, strides, False, _ORDERED))
    return PickledCall(
        PickledClass("torch._utils", "_rebuild_tensor_v3"),
        (storage, 0, shape, strides, False, _ORDERED, PickledClass("torch", entry.dtype)),
    )


def plain(value: Any) -> Any:
    """A value of a tree as what torch reads: leaves that are no tensors become what they stand for. ``IncompatibleState`` if that is
    nothing."""
    if not isinstance(value, Leaf):
        if type(value) in (list, tuple):
            return type(value)(map(plain, value))
        return {key: plain(one) for key, one in value.items()} if type(value) is dict else value
    if value.kind == "torch_dtype" and str(value.meta).replace("torch.", "") in DTYPES:
        return PickledClass("torch", str(value.meta).replace("torch.", ""))
    if value.kind == "torch_device":
        return PickledCall(PickledClass("torch", "device"), (str(value.meta),))
    if value.kind == "torch_size":
        return PickledCall(PickledClass("torch", "Size"), (tuple(value.meta),))
    if value.kind == "numpy_scalar" and np.dtype(str(value.meta[0])[:64]).kind in "biufc":
        return np.frombuffer(value.meta[1], np.dtype(str(value.meta[0])[:64]), 1)[0].item()
    raise IncompatibleState(f"a {value.kind.replace('_', ' ')} cannot be in a file that torch reads without running it")


def split_values(chosen: SelectedTensors) -> SelectedTensors:
    """With what cannot be in such a file among what is left out."""
    kept, behind = [], list(chosen.left_out)
    for keys, value in chosen.values:
        try:
            plain(value)
            good = fits(plain(value))
        except IncompatibleState:
            good = False
        if good:
            kept.append((keys, plain(value)))
        else:
            what = value.kind.replace("_", " ") if isinstance(value, Leaf) else type(value).__name__
            behind.append((".".join(map(str, keys)), f"a {what}, which torch does not read without running it"))
    return chosen._replace(values=kept, left_out=behind)


def _owners(entries: Sequence[ExportEntry], tied: str) -> list[int]:
    """For each entry that whose bytes it has: its own, or those of the earlier one that it is tied to."""
    by_name = {entry.name: index for index, entry in enumerate(entries)}
    return [index if entry.alias is None or tied == "each" else by_name[entry.alias] for index, entry in enumerate(entries)]


def pt_files(chosen: SelectedTensors, tied: str, tree: Mapping[Any, Any] | None, rules: Sequence[str], name: str) -> list[OutputFile]:
    """One file: a dict of names, or ``tree`` as it is. Tied tensors share a storage, as they do when torch saves them."""
    owners = _owners(chosen.entries, tied)
    storages = sorted(set(owners))
    number = {owner: key for key, owner in enumerate(storages)}
    made = [tensor_value(entry, number[owner]) for entry, owner in zip(chosen.entries, owners, strict=True)]
    pairs = [*zip(chosen.keys, made, strict=True), *chosen.values]
    if tree is not None:
        value = _rendered(tree, (), dict(pairs))
    else:
        named = [(entry.name, one) for entry, one in zip(chosen.entries, made, strict=True)]
        value = dict([*named, *((renamed(".".join(map(str, keys)), rules), one) for keys, one in chosen.values)])
    lengths = [chosen.entries[owner].length for owner in storages]
    found = torch_archive(name.rpartition(".")[0] or "archive", pickled(value), lengths)
    slots = tuple(EntryOffset(owner, room.offset, room.sums) for owner, room in zip(storages, found.rooms, strict=True))
    return [OutputFile(name, found.size, found.fixed, slots)]


class _NotExported:
    """Stands for what does not go out."""


def _rendered(node: Any, keys: tuple[Any, ...], made: Mapping[tuple[Any, ...], Any]) -> Any:
    """The tree, with what was made in the place of leaves and values. What a list has no value for is None there."""
    if keys in made:
        return made[keys]
    if type(node) is dict and node:
        parts = {key: _rendered(one, (*keys, key), made) for key, one in node.items()}
        kept = {key: one for key, one in parts.items() if one is not _NotExported}
        return kept or _NotExported
    if type(node) in (list, tuple) and holds(node):
        items = [_rendered(one, (*keys, At(place)), made) for place, one in enumerate(node)]
        return type(node)(None if one is _NotExported else one for one in items)
    return _NotExported


def dcp_files(chosen: SelectedTensors, tied: str, rules: Sequence[str]) -> list[OutputFile]:
    """``.metadata``, and one file that has each tensor and each value as a file of ``torch.save`` within it."""
    entries, owners = chosen.entries, _owners(chosen.entries, tied)
    fixed: list[tuple[int, bytes]] = []
    slots: list[EntryOffset] = []
    places: dict[int, tuple[int, int]] = {}
    at = 0
    for index, entry in enumerate(entries):
        if owners[index] != index:
            continue
        at += -at % 64
        found = torch_archive("archive", pickled(tensor_value(entry, 0)), [entry.length])
        fixed += [(at + offset, data) for offset, data in found.fixed]
        (room,) = found.rooms
        slots.append(EntryOffset(index, at + room.offset, (at + room.sums[0], at + room.sums[1])))
        places[index] = (at, found.size)
        at += found.size
    spans = [(entry.name, places[owners[index]], entry) for index, entry in enumerate(entries)]
    values: list[tuple[str, tuple[int, int], None]] = []
    paths = {entry.name: (entry.name,) if rules else _path(keys) for entry, keys in zip(entries, chosen.keys, strict=True)}
    for keys, value in chosen.values:
        name = renamed(".".join(map(str, keys)), rules)
        at += -at % 64
        found = torch_archive("archive", pickled(value), [])
        fixed += [(at + offset, data) for offset, data in found.fixed]
        values.append((name, (at, found.size), None))
        paths[name] = (name,) if rules else _path(keys)
        at += found.size
    data = pickled(_metadata([*spans, *values], paths))
    return [
        OutputFile(SHARD, at, tuple(_padded(fixed, slots, entries, at)), tuple(slots)),
        OutputFile(METADATA, len(data), ((0, data),), ()),
    ]


def _path(keys: Sequence[Any]) -> tuple[str | int, ...]:
    """As DCP has it: places in lists are numbers, keys of dicts texts."""
    return tuple(int(key) if type(key) is At else str(key) for key in keys)


def _padded(fixed: list[tuple[int, bytes]], slots: list[EntryOffset], entries: Sequence[ExportEntry], size: int) -> list[tuple[int, bytes]]:
    """With zeros wherever nothing else lies: every byte of a file is written."""
    taken = sorted([(at, at + len(data)) for at, data in fixed] + [(one.offset, one.offset + entries[one.entry].length) for one in slots])
    gaps, end = [], 0
    for begin, behind in [*taken, (size, size)]:
        if begin > end:
            gaps.append((end, bytes(begin - end)))
        end = max(end, behind)
    return fixed + gaps


def _metadata(spans: Sequence[tuple[str, tuple[int, int], ExportEntry | None]], paths: dict[str, tuple[Any, ...]]) -> PickledObject:
    information = PickledClass(f"{_HOME}.filesystem", "_StorageInfo")
    return PickledObject(PickledClass(f"{_HOME}.metadata", "Metadata"), {
        "state_dict_metadata": {name: _described(entry) for name, _, entry in spans},
        "planner_data": paths,
        "storage_data": Items(tuple(
            (_index(name, entry), PickledObject(information, {"relative_path": SHARD, "offset": offset, "length": length}))
            for name, (offset, length), entry in spans
        )),
        "version": "1.0.0",
    })  # fmt: skip


def _described(entry: ExportEntry | None) -> PickledObject:
    home = f"{_HOME}.metadata"
    if entry is None:
        return PickledObject(PickledClass(home, "BytesStorageMetadata"))
    layout = PickledCall(PickledClass("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = PickledCall(PickledClass(home, "_MEM_FORMAT_ENCODING"), (0,))
    chunk = PickledObject(
        PickledClass(home, "ChunkStorageMetadata"), {"offsets": _size((0,) * len(entry.shape)), "sizes": _size(entry.shape)}
    )
    return PickledObject(PickledClass(home, "TensorStorageMetadata"), {
        "properties": PickledObject(
            PickledClass(home, "TensorProperties"), (PickledClass("torch", entry.dtype), layout, False, contiguous, False)
        ),
        "size": _size(entry.shape),
        "chunks": [chunk],
    })  # fmt: skip


def _index(name: str, entry: ExportEntry | None) -> PickledObject:
    state: dict[str, Any] = {"fqn": name, "index": None if entry is None else 0}
    if entry is not None:
        state["offset"] = _size((0,) * len(entry.shape))
    return PickledObject(PickledClass(f"{_HOME}.metadata", "MetadataIndex"), state)


def _size(shape: Sequence[int]) -> PickledCall:
    return PickledCall(PickledClass("torch", "Size"), (tuple(shape),))
