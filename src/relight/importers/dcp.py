"""Read the ``.metadata`` of a ``torch.distributed.checkpoint`` directory: a pickle, read as data."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from relight.errors import CheckpointNotFound, CorruptCheckpoint, IncompatibleState, UnsafeContent
from relight.format import DTYPES, Leaf, Tensor
from relight.format.manifest import NAME_BYTES_MAX, check_tensor
from relight.importers.archive import DTYPE_LEAVES
from relight.importers.files import Handle, pread, size_of
from relight.importers.nesting import DEPTH_MAX, Path, name_of
from relight.importers.pickles import AllowedCall, AllowedClass, UnpickledObject, read_pickle
from relight.importers.tensors import FileRange
from relight.layout import Box, check_tiling

METADATA_BYTES_MAX = 512 << 20
_HOME = "torch.distributed.checkpoint"
Opener = Callable[[str], AbstractContextManager[Handle]]


class Chunk(NamedTuple):
    """A box of a tensor, and the range of a file with its bytes."""

    file: str
    span: FileRange
    box: Box


class Value(NamedTuple):
    """A value other than a tensor, and the range of a file with its bytes."""

    file: str
    span: FileRange


class Metadata:
    """The content of ``.metadata``. ``tensors`` are numbered; ``found`` maps each flat name to its path and content.

    ``open_file`` opens a file of the directory by name. ``strangers``: see ``read_pickle``.
    """

    def __init__(self, path: str, open_file: Opener, *, strangers: bool = False) -> None:
        self.path, self._open, self._strangers = path, open_file, strangers
        self.tensors: list[Tensor] = []
        self.chunks: list[list[Chunk]] = []
        self.found: dict[str, tuple[Path, int | Value]] = {}
        try:
            self._take(self._metadata())
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise UnsafeContent(
                f"not DCP's metadata: {type(error).__name__}: {str(error)[:100]}", where=f"{self.path}/.metadata"
            ) from None

    def _metadata(self) -> UnpickledObject:
        where = f"{self.path}/.metadata"
        try:
            with self._open(".metadata") as handle:
                size = size_of(handle)
                if size > METADATA_BYTES_MAX:
                    raise UnsafeContent(f"metadata of {size} bytes", where=where)
                metadata = read_pickle(pread(handle, 0, size, where), _TABLE, where, strangers=self._strangers)
        except CorruptCheckpoint:
            if os.path.exists(f"{self.path}/__0.metadata"):
                raise IncompatibleState(
                    "each rank saved a checkpoint of its own (use_collectives=False), and Relight cannot join them",
                    where=self.path,
                ) from None
            raise CheckpointNotFound(
                "no .metadata: not a DCP checkpoint, or an unfinished one", where=self.path
            ) from None
        if not isinstance(metadata, UnpickledObject) or metadata.name != "Metadata":
            raise UnsafeContent("something other than DCP's metadata", where=where)
        return metadata

    def _take(self, metadata: UnpickledObject) -> None:
        places: dict[tuple[str, tuple[int, ...] | None], Value] = {}
        for key, info in (metadata["storage_data"] or {}).items():
            offset = key.state.get("offset")
            places[_text(key["fqn"]), None if offset is None else _numbers(offset)] = self._place(info)
        self._check_spans(places.values())
        paths = metadata.state.get("planner_data")
        paths = paths if isinstance(paths, dict) else {}
        for name, entry in metadata["state_dict_metadata"].items():
            path = _path(paths.get(_text(name)), name)
            if entry.name == "BytesStorageMetadata":
                self.found[name] = path, places[name, None]
                continue
            if entry.name != "TensorStorageMetadata":
                raise ValueError("neither a tensor nor bytes")
            self.found[name] = path, len(self.tensors)
            self._tensor(name, path, entry, places)

    def _tensor(
        self, name: str, path: Path, entry: UnpickledObject, places: Mapping[tuple[str, tuple[int, ...] | None], Value]
    ) -> None:
        shape, dtype = _numbers(entry["size"]), entry["properties"].state[0]
        kind = dtype.meta if isinstance(dtype, Leaf) and dtype.kind == "torch_dtype" else None
        if kind not in DTYPES:
            raise IncompatibleState(f"dtype {kind}, which Relight has no name for", where=name[:80])
        chunks = []
        for chunk_entry in entry["chunks"]:
            box = Box(_numbers(chunk_entry["offsets"]), _numbers(chunk_entry["sizes"]))
            place = places.get((name, box.start)) or places.get((name, None))
            if box.elements:
                if place is None:
                    raise CorruptCheckpoint(f"no file has {list(box.size)} at {list(box.start)}", where=name[:80])
                chunks.append(Chunk(place.file, place.span, box))
        tensor = Tensor(
            name_of(path), kind, shape, "value", len(self.tensors), 0, math.prod(shape) * DTYPES[kind].itemsize
        )
        check_tensor(tensor, self.path)
        problems = check_tiling(shape, [chunk.box for chunk in chunks])
        if problems is not None:
            raise UnsafeContent(problems, where=name[:80])
        self.tensors.append(tensor)
        self.chunks.append(chunks)

    def _place(self, info: UnpickledObject) -> Value:
        if info.state.get("transform_descriptors"):
            raise IncompatibleState("files that an extension of DCP has transformed", where=self.path)
        file, offset, length = _text(info["relative_path"]), info["offset"], info["length"]
        if file != os.path.basename(file) or file in ("", ".", "..") or "\0" in file or not file.endswith(".distcp"):
            raise UnsafeContent(f"a file outside the directory, or not a file of DCP: {file[:80]!r}", where=self.path)
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
            raise ValueError("a place")
        return Value(file, FileRange(offset, length))

    def _check_spans(self, places: Any) -> None:
        """Check that all ranges are inside existing files and do not overlap, so that values are no larger than the
        files."""
        for file, spans in grouped((place.file, place.span) for place in places):
            with self._open(file) as handle:
                size = size_of(handle)
            end = 0
            for span in sorted(spans):
                if span.offset < end:
                    raise UnsafeContent("two values overlap", where=f"{self.path}/{file}")
                end = span.offset + span.length
            if end > size:
                raise CorruptCheckpoint(f"{size} bytes long, but {end} were written", where=f"{self.path}/{file}")


def grouped(pairs: Any) -> list[tuple[str, list[Any]]]:
    """Return values by key, sorted by key."""
    groups: dict[str, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return sorted(groups.items(), key=lambda pair: pair[0])


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value.encode()) > NAME_BYTES_MAX:
        raise ValueError("a name")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or any(type(number) is not int or not 0 <= number < 2**63 for number in value):
        raise ValueError("a shape")
    return tuple(value)


def _path(value: Any, name: str) -> Path:
    if (
        isinstance(value, tuple)
        and 0 < len(value) <= DEPTH_MAX
        and type(value[0]) is str
        and all(type(element) in (str, int) for element in value)
    ):
        return value
    return (name,)


def _size(numbers: Any = ()) -> tuple[int, ...]:
    return _numbers(tuple(numbers) if isinstance(numbers, (list, tuple)) else None)


def _nothing(*args: Any) -> None:
    """Replace values that are not needed: layouts, memory formats, paths."""


_TABLE: dict[str, Any] = {
    **{
        f"{_HOME}.metadata.{name}": AllowedClass(name)
        for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "StorageMeta",
        )
    },
    f"{_HOME}.metadata._MEM_FORMAT_ENCODING": AllowedCall(_nothing),
    f"{_HOME}.filesystem._StorageInfo": AllowedClass("_StorageInfo"),
    "torch.serialization._get_layout": AllowedCall(_nothing),
    "torch.Size": AllowedCall(_size),
    "builtins.getattr": AllowedCall(_nothing),  # for enum members, as Python up to 3.11.3 pickled them
    "__builtin__.getattr": AllowedCall(_nothing),  # the same, in protocol 2
    "pathlib.PosixPath": AllowedCall(_nothing),
    "pathlib.WindowsPath": AllowedCall(_nothing),
    "pathlib._local.PosixPath": AllowedCall(_nothing),
    "pathlib._local.WindowsPath": AllowedCall(_nothing),
    "collections.OrderedDict": AllowedCall(dict, hashes=True),
    **DTYPE_LEAVES,
}  # fmt: skip
