"""Import a folder of ``torchsnapshot``: its JSON manifest, and raw buffers; objects are files of ``torch.save``."""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Any

from relight.errors import CorruptCheckpoint, IncompatibleState, RelightError, UnsafeContent
from relight.format import DTYPES
from relight.importers.archive import DTYPE_LEAVES
from relight.importers.content import Content
from relight.importers.dcp_content import take_tree
from relight.importers.files import Files
from relight.importers.tensors import AssembledTensor, FileRange, Home, Spec, Tiled, row_major
from relight.importers.torch_file import read_torch
from relight.layout import Box, Source
from relight.units import count_text

METADATA = ".snapshot_metadata"
_CONTAINERS = ("dict", "OrderedDict", "list")
LEVELS_MAX = 64


def detect_snapshot(files: Files) -> Content | None:
    """Return the content of such a folder; None for others. With several ranks, takes rank 0's entries, and all
    shards."""
    if not files.has(METADATA) and METADATA not in files.others:
        return None
    where = files.where(METADATA)
    try:
        metadata = files.json(METADATA)
    except CorruptCheckpoint as error:
        raise IncompatibleState(
            "a manifest that is not JSON: an early torchsnapshot's, or damaged", where=where
        ) from error
    manifest = metadata.get("manifest") if isinstance(metadata, dict) else None
    if (
        not isinstance(metadata, dict)
        or not isinstance(manifest, dict)
        or not all(isinstance(entry, dict) for entry in manifest.values())
    ):
        raise UnsafeContent("a manifest without entries", where=where)
    version, world = str(metadata.get("version"))[:20], metadata.get("world_size")
    content = Content(
        "torchsnapshot",
        f"torchsnapshot {version}, {count_text(world, 'rank') if type(world) is int else '? ranks'}",
    )
    tree = _Tree(files, manifest).all()
    take_tree(content, tree, files)
    content.notes.append("torchsnapshot saves generators only if it is asked to")
    other_ranks = {path.split("/")[0] for path in manifest if not path.startswith("0/")}
    if other_ranks:
        content.left_out.append(
            (
                f"{len(other_ranks)} further ranks",
                "the state that only one rank has; shards of tensors of all ranks are imported",
            )
        )
    _step(content)
    return content


def _step(content: Content) -> None:
    """Take the step from a script's own progress."""
    for value in content.kept.values():
        if isinstance(value, dict) and content.step is None:
            content.step = next(
                (
                    value[key]
                    for key in ("step", "global_step", "steps")
                    if type(value.get(key)) is int and 0 <= value[key] < 10**15
                ),
                None,
            )


class _Tree:
    """Rank 0's entries, as their original values."""

    def __init__(self, files: Files, manifest: dict[str, Any]) -> None:
        self._files, self._manifest, self._where = files, manifest, files.where(METADATA)
        self._below: dict[str, list[str]] = {}
        for path in manifest:
            parent, _, last = path.rpartition("/")
            self._below.setdefault(parent, []).append(last)

    def all(self) -> dict[str, Any]:
        """Return all of rank 0's components. Raise ``UnsafeContent`` for an invalid manifest."""
        try:
            return {_unquoted(last): self._value(f"0/{last}", 0) for last in self._below.get("0", [])}
        except RelightError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, struct.error) as error:
            raise UnsafeContent(
                f"not torchsnapshot's manifest: {type(error).__name__}: {str(error)[:80]}", where=self._where
            ) from None

    def _value(self, path: str, level: int) -> Any:
        entry = self._manifest[path]
        kind = entry["type"]
        if level > LEVELS_MAX:
            raise UnsafeContent("entries nested too deeply", where=self._where)
        if kind in _CONTAINERS:
            below = self._below.get(path, [])
            if kind == "list":
                return [self._value(f"{path}/{last}", level + 1) for last in sorted(below, key=int)]
            present = set(below)
            keys = {key: _quoted(key) for key in entry["keys"]}
            missing = [key for key, last in keys.items() if last not in present]
            if missing:
                raise CorruptCheckpoint(f"{path[:80]} has no {str(missing[0])[:40]!r}", where=self._where)
            return {key: self._value(f"{path}/{last}", level + 1) for key, last in keys.items()}
        if kind == "Tensor":
            return self._tensor(entry)
        if kind in ("ShardedTensor", "ChunkedTensor"):
            return self._pieces(path, entry)
        if kind == "object":
            return read_torch(self._files, self._files.inside(entry["location"], self._where))
        return _primitive(kind, entry["serialized_value"])

    def _tensor(self, entry: dict[str, Any]) -> Any:
        name = self._files.inside(entry["location"], self._where)
        if entry["serializer"] == "torch_save":
            return read_torch(self._files, name)
        if entry["serializer"] != "buffer_protocol":
            raise IncompatibleState(
                f"a tensor written by {str(entry['serializer'])[:40]}", where=self._files.where(name)
            )
        dtype, shape = self._dtype(entry["dtype"]), _numbers(entry["shape"])
        length = DTYPES[dtype].itemsize
        for extent in shape:
            length *= extent
        begin, end = (
            _numbers(entry["byte_range"]) if entry.get("byte_range") is not None else (0, self._files.size(name))
        )
        if end - begin != length or end > self._files.size(name):
            raise CorruptCheckpoint(f"{end - begin} bytes instead of {length}", where=self._files.where(name))
        return Spec(dtype, shape, row_major(shape), 0, FileRange(begin, length), Home(self._files, name))

    def _pieces(self, path: str, entry: dict[str, Any]) -> AssembledTensor:
        """Return a tensor from the shards of all ranks: each rank's entry lists its own."""
        inner = path.partition("/")[2]
        entries = [
            item
            for key, item in self._manifest.items()
            if key.partition("/")[2] == inner and item.get("type") == entry["type"]
        ]
        boxes: dict[Box, tuple[Spec, Source]] = {}
        for rank_entry in entries:
            for shard in rank_entry.get("shards", rank_entry.get("chunks")):
                spec = self._tensor(shard["tensor"])
                box = Box(_numbers(shard["offsets"]), _numbers(shard["sizes"]))
                if not isinstance(spec, Spec) or spec.shape != box.size:
                    raise CorruptCheckpoint("a shard of another shape than its place", where=self._where)
                boxes[box] = spec, spec.source()
        if not boxes:
            raise CorruptCheckpoint(f"{path[:80]} has no shards", where=self._where)
        shape = (
            _numbers(entry["shape"])
            if "shape" in entry
            else tuple(map(max, zip(*(map(sum, zip(*box)) for box in boxes), strict=True)))
        )
        dtypes = {spec.dtype for spec, _ in boxes.values()}
        if len(dtypes) != 1:
            raise CorruptCheckpoint("shards of several dtypes", where=self._where)
        (dtype,) = dtypes
        tiled = Tiled(
            dtype, shape, [(box, source) for box, (_, source) in boxes.items()], f"{self._where}: {path[:80]}"
        )
        return AssembledTensor(dtype, shape, tiled, (self._files.path, path))

    def _dtype(self, name: Any) -> str:
        leaf = DTYPE_LEAVES.get(name) if isinstance(name, str) else None
        if leaf is None or leaf.meta not in DTYPES:
            raise IncompatibleState(f"dtype {str(name)[:40]}, which Relight has no name for", where=self._where)
        return str(leaf.meta)


def _primitive(kind: Any, text: Any) -> Any:
    if not isinstance(text, str):
        raise ValueError("a value that is not text")
    if kind == "int":
        return int(text) if len(text) < 100 else _refuse("an integer of many digits")
    if kind == "str":
        return text
    if kind == "bool":
        return {"True": True, "False": False}[text]
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("not base 64") from error
    if kind == "float":
        return struct.unpack("<d", data)[0]
    return data if kind == "bytes" else _refuse(f"an entry of type {str(kind)[:40]}")


def _refuse(what: str) -> Any:
    raise ValueError(what)


def _numbers(value: Any) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > 64
        or any(type(number) is not int or not 0 <= number < 2**62 for number in value)
    ):
        raise ValueError("a shape or a place")
    return tuple(value)


def _quoted(key: Any) -> str:
    """Return a key in the form that paths use."""
    return str(key).replace("%", "%25").replace("/", "%2F")


def _unquoted(key: str) -> str:
    return key.replace("%2F", "/").replace("%25", "%")
