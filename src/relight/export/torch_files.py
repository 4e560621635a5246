"""Layouts of files in the formats of ``torch.save`` and ``torch.distributed.checkpoint``. Pure, and without torch."""

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
"""torch's storage classes by dtype. Other dtypes are stored in an untyped storage."""
_HOME = "torch.distributed.checkpoint"
_ORDERED = PickledCall(PickledClass("collections", "OrderedDict"), ())


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(math.prod(max(extent, 1) for extent in shape[dim + 1 :]) for dim in range(len(shape)))


def tensor_value(entry: ExportEntry, key: int) -> PickledCall:
    """Return the pickled form of a tensor that is all of storage ``key``."""
    name = _STORAGES.get(entry.dtype)
    kind = PickledClass("torch", f"{name}Storage") if name else PickledClass("torch.storage", "UntypedStorage")
    storage = PickledStorage(("storage", kind, str(key), "cpu", math.prod(entry.shape) if name else entry.length))
    shape, strides = tuple(entry.shape), strides_of(entry.shape)
    if name:
        return PickledCall(
            PickledClass("torch._utils", "_rebuild_tensor_v2"), (storage, 0, shape, strides, False, _ORDERED)
        )
    return PickledCall(
        PickledClass("torch._utils", "_rebuild_tensor_v3"),
        (storage, 0, shape, strides, False, _ORDERED, PickledClass("torch", entry.dtype)),
    )


def plain(value: Any) -> Any:
    """Convert a plain value or a non-tensor leaf to what torch reads. Raise ``IncompatibleState`` if torch has no such value."""
    if not isinstance(value, Leaf):
        if type(value) in (list, tuple):
            return type(value)(map(plain, value))
        return {key: plain(item) for key, item in value.items()} if type(value) is dict else value
    if value.kind == "torch_dtype" and str(value.meta).replace("torch.", "") in DTYPES:
        return PickledClass("torch", str(value.meta).replace("torch.", ""))
    if value.kind == "torch_device":
        return PickledCall(PickledClass("torch", "device"), (str(value.meta),))
    if value.kind == "torch_size":
        return PickledCall(PickledClass("torch", "Size"), (tuple(value.meta),))
    if value.kind == "numpy_scalar" and np.dtype(str(value.meta[0])[:64]).kind in "biufc":
        return np.frombuffer(value.meta[1], np.dtype(str(value.meta[0])[:64]), 1)[0].item()
    raise IncompatibleState(
        f"a {value.kind.replace('_', ' ')} cannot be stored in a file that torch.load(weights_only=True) reads"
    )


def split_values(chosen: SelectedTensors) -> SelectedTensors:
    """Move the values that torch files cannot hold to ``left_out``."""
    kept, omitted = [], list(chosen.left_out)
    for keys, value in chosen.values:
        try:
            plain(value)
            good = fits(plain(value))
        except IncompatibleState:
            good = False
        if good:
            kept.append((keys, plain(value)))
        else:
            kind_name = value.kind.replace("_", " ") if isinstance(value, Leaf) else type(value).__name__
            omitted.append(
                (".".join(map(str, keys)), f"a {kind_name}, which torch.load(weights_only=True) does not read")
            )
    return chosen._replace(values=kept, left_out=omitted)


def _owners(entries: Sequence[ExportEntry], tied: str) -> list[int]:
    """Return for each entry the index of the entry with its bytes: itself, or the earlier one that it is tied to."""
    by_name = {entry.name: index for index, entry in enumerate(entries)}
    return [
        index if entry.alias is None or tied == "each" else by_name[entry.alias] for index, entry in enumerate(entries)
    ]


def pt_files(
    chosen: SelectedTensors, tied: str, tree: Mapping[Any, Any] | None, rules: Sequence[str], name: str
) -> list[OutputFile]:
    """Return the layout of one file: a dict of names, or ``tree`` unchanged. Tied tensors share a storage."""
    owners = _owners(chosen.entries, tied)
    storages = sorted(set(owners))
    number = {owner: key for key, owner in enumerate(storages)}
    tensor_values = [tensor_value(entry, number[owner]) for entry, owner in zip(chosen.entries, owners, strict=True)]
    pairs = [*zip(chosen.keys, tensor_values, strict=True), *chosen.values]
    if tree is not None:
        value = _rendered(tree, (), dict(pairs))
    else:
        named = [(entry.name, tensor) for entry, tensor in zip(chosen.entries, tensor_values, strict=True)]
        value = dict(
            [*named, *((renamed(".".join(map(str, keys)), rules), exported) for keys, exported in chosen.values)]
        )
    lengths = [chosen.entries[owner].length for owner in storages]
    layout = torch_archive(name.rpartition(".")[0] or "archive", pickled(value), lengths)
    slots = tuple(
        EntryOffset(owner, room.offset, room.sums) for owner, room in zip(storages, layout.rooms, strict=True)
    )
    return [OutputFile(name, layout.size, layout.fixed, slots)]


class _NotExported:
    """Marker for values that are not exported."""


def _rendered(node: Any, keys: tuple[Any, ...], made: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return the tree with leaves and values replaced by their pickled forms. List items that are not exported become None."""
    if keys in made:
        return made[keys]
    if type(node) is dict and node:
        parts = {key: _rendered(item, (*keys, key), made) for key, item in node.items()}
        exported = {key: part for key, part in parts.items() if part is not _NotExported}
        return exported or _NotExported
    if type(node) in (list, tuple) and holds(node):
        items = [_rendered(item, (*keys, At(place)), made) for place, item in enumerate(node)]
        return type(node)(None if item is _NotExported else item for item in items)
    return _NotExported


def dcp_files(chosen: SelectedTensors, tied: str, rules: Sequence[str]) -> list[OutputFile]:
    """Return the layouts of ``.metadata`` and of one data file, which has a ``torch.save`` file for each tensor and value."""
    entries, owners = chosen.entries, _owners(chosen.entries, tied)
    fixed: list[tuple[int, bytes]] = []
    slots: list[EntryOffset] = []
    places: dict[int, tuple[int, int]] = {}
    offset = 0
    for index, entry in enumerate(entries):
        if owners[index] != index:
            continue
        offset += -offset % 64
        layout = torch_archive("archive", pickled(tensor_value(entry, 0)), [entry.length])
        fixed += [(offset + inner, data) for inner, data in layout.fixed]
        (room,) = layout.rooms
        slots.append(EntryOffset(index, offset + room.offset, (offset + room.sums[0], offset + room.sums[1])))
        places[index] = (offset, layout.size)
        offset += layout.size
    spans = [(entry.name, places[owners[index]], entry) for index, entry in enumerate(entries)]
    values: list[tuple[str, tuple[int, int], None]] = []
    paths = {
        entry.name: (entry.name,) if rules else _path(keys) for entry, keys in zip(entries, chosen.keys, strict=True)
    }
    for keys, value in chosen.values:
        name = renamed(".".join(map(str, keys)), rules)
        offset += -offset % 64
        layout = torch_archive("archive", pickled(value), [])
        fixed += [(offset + inner, data) for inner, data in layout.fixed]
        values.append((name, (offset, layout.size), None))
        paths[name] = (name,) if rules else _path(keys)
        offset += layout.size
    data = pickled(_metadata([*spans, *values], paths))
    return [
        OutputFile(SHARD, offset, tuple(_padded(fixed, slots, entries, offset)), tuple(slots)),
        OutputFile(METADATA, len(data), ((0, data),), ()),
    ]


def _path(keys: Sequence[Any]) -> tuple[str | int, ...]:
    """Return keys in DCP's form: list indices are integers, dict keys are strings."""
    return tuple(int(key) if type(key) is At else str(key) for key in keys)


def _padded(
    fixed: list[tuple[int, bytes]], slots: list[EntryOffset], entries: Sequence[ExportEntry], size: int
) -> list[tuple[int, bytes]]:
    """Fill the gaps with zeros, so that every byte of a file is written."""
    chosen = sorted(
        [(begin_, begin_ + len(data)) for begin_, data in fixed]
        + [(slot.offset, slot.offset + entries[slot.entry].length) for slot in slots]
    )
    gaps, end = [], 0
    for begin, stop in [*chosen, (size, size)]:
        if begin > end:
            gaps.append((end, bytes(begin - end)))
        end = max(end, stop)
    return fixed + gaps


def _metadata(
    spans: Sequence[tuple[str, tuple[int, int], ExportEntry | None]], paths: dict[str, tuple[Any, ...]]
) -> PickledObject:
    information = PickledClass(f"{_HOME}.filesystem", "_StorageInfo")
    return PickledObject(
        PickledClass(f"{_HOME}.metadata", "Metadata"),
        {
            "state_dict_metadata": {name: _described(entry) for name, _, entry in spans},
            "planner_data": paths,
            "storage_data": Items(
                tuple(
                    (
                        _index(name, entry),
                        PickledObject(information, {"relative_path": SHARD, "offset": offset, "length": length}),
                    )
                    for name, (offset, length), entry in spans
                )
            ),
            "version": "1.0.0",
        },
    )


def _described(entry: ExportEntry | None) -> PickledObject:
    home = f"{_HOME}.metadata"
    if entry is None:
        return PickledObject(PickledClass(home, "BytesStorageMetadata"))
    layout = PickledCall(PickledClass("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = PickledCall(PickledClass(home, "_MEM_FORMAT_ENCODING"), (0,))
    chunk = PickledObject(
        PickledClass(home, "ChunkStorageMetadata"),
        {"offsets": _size((0,) * len(entry.shape)), "sizes": _size(entry.shape)},
    )
    return PickledObject(
        PickledClass(home, "TensorStorageMetadata"),
        {
            "properties": PickledObject(
                PickledClass(home, "TensorProperties"),
                (PickledClass("torch", entry.dtype), layout, False, contiguous, False),
            ),
            "size": _size(entry.shape),
            "chunks": [chunk],
        },
    )


def _index(name: str, entry: ExportEntry | None) -> PickledObject:
    state: dict[str, Any] = {"fqn": name, "index": None if entry is None else 0}
    if entry is not None:
        state["offset"] = _size((0,) * len(entry.shape))
    return PickledObject(PickledClass(f"{_HOME}.metadata", "MetadataIndex"), state)


def _size(shape: Sequence[int]) -> PickledCall:
    return PickledCall(PickledClass("torch", "Size"), (tuple(shape),))
