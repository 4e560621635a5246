"""A directory that ``torch.distributed.checkpoint`` wrote: what is in it, and its bytes, without running any of it.

``.metadata`` is a pickle, and so is each value; both are read as data. A tensor's chunks lie in the ``.distcp`` files, each a file of
``torch.save`` within the file, whose numbers are where its zip directory says.
"""

from __future__ import annotations

import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from relight.capture.regions import sink_of_piece
from relight.capture.tensors import TORCH_DTYPES, dtype_name, memory_of
from relight.errors import CheckpointNotFound, CorruptCheckpoint, IncompatibleState, StoreUnavailable, UnsafeContent
from relight.format import Leaf, Tensor
from relight.format.manifest import NAME_BYTES_MAX, check_tensor
from relight.interop.dcp_tree import DEPTH_MAX, Kept, Path, crowded, name_of, nested
from relight.interop.foreign_pickle import Call, Class, Made, read_pickle
from relight.interop.foreign_zip import Archive, Span, pread, read_into, read_spec
from relight.layout import Box, Sink, check_tiling

METADATA_BYTES_MAX = 512 << 20
_SLAB_BYTES = 16 << 20
_HOME = "torch.distributed.checkpoint"


class Chunk(NamedTuple):
    """A box of a tensor, and the bytes of a file that hold it."""

    file: str
    span: Span
    box: Box


class Value(NamedTuple):
    """Something that is no tensor, and the bytes of a file that hold it."""

    file: str
    span: Span


class Folder:
    """What ``.metadata`` says. ``tensors`` are numbered; ``where_of`` gives for each flat name its path, and what is there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.tensors: list[Tensor] = []
        self.chunks: list[list[Chunk]] = []
        self.found: dict[str, tuple[Path, int | Value]] = {}
        self._sizes: dict[str, int] = {}
        try:
            self._take(self._metadata())
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise UnsafeContent(f"not DCP's metadata: {type(error).__name__}: {str(error)[:100]}", where=f"{self.path}/.metadata") from None

    def tree(self, wanted: Callable[[str, Path], bool]) -> dict[Any, Any]:
        """The state dict as it was, with a leaf for each tensor that is wanted; its other values are read."""
        taken = {name: one for name, one in self.found.items() if wanted(name, one[0])}
        flat = crowded({name: path for name, (path, _) in taken.items()})
        nodes: list[tuple[Path, Any]] = []
        values: dict[str, Value] = {}
        for name, (path, what) in taken.items():
            if isinstance(what, Value):
                values[name] = what
            else:
                nodes.append(((name,) if name in flat else path, Leaf("tensor", (what,))))
        for file, names in _grouped((one.file, name) for name, one in values.items()):
            with self._open(file) as handle:
                for name in names:
                    where = f"{self.path}/{file}: {name[:80]}"
                    value = Archive(handle, values[name].span, where).value()
                    nodes.append(((name,) if name in flat else self.found[name][0], Kept(value)))
        return nested(nodes)

    def check(self, index: int) -> None:
        """Look at a tensor's chunks before memory is made for it: are there bytes enough in files of that size?"""
        if sum(chunk.span.length for chunk in self.chunks[index]) < self.tensors[index].length:
            raise CorruptCheckpoint("its chunks are smaller than it", where=self.tensors[index].name[:80])

    def fill(self, sinks: Mapping[int, Sink]) -> int:
        """Read what ``sinks`` take, file by file, in the order in which it lies there. The bytes that were read."""
        work: list[tuple[str, int, int, Chunk, Sink]] = []
        for index, sink in sinks.items():
            tensor = self.tensors[index]
            for chunk in self.chunks[index]:
                one = sink_of_piece(sink, tensor.shape, TORCH_DTYPES[tensor.dtype], chunk.box)
                if one is not None:
                    work.append((chunk.file, chunk.span.offset, index, chunk, one))
        work.sort(key=lambda job: job[:3])
        total = 0
        for file, jobs in _grouped((job[0], job) for job in work):
            with self._open(file) as handle:
                for _, _, index, chunk, one in jobs:
                    total += _read(handle, chunk, self.tensors[index], one, f"{self.path}/{file}: {self.tensors[index].name[:80]}")
        return total

    # -- inside

    def _metadata(self) -> Made:
        where = f"{self.path}/.metadata"
        try:
            with self._open(".metadata") as handle:
                size = os.fstat(handle).st_size
                if size > METADATA_BYTES_MAX:
                    raise UnsafeContent(f"metadata of {size} bytes", where=where)
                found = read_pickle(pread(handle, 0, size, where), _TABLE, where)
        except CorruptCheckpoint:
            if os.path.exists(f"{self.path}/__0.metadata"):
                raise IncompatibleState("each rank saved for itself (use_collectives=False)", where=self.path) from None
            raise CheckpointNotFound("no .metadata here: no checkpoint of DCP, or an unfinished one", where=self.path) from None
        if not isinstance(found, Made) or found.name != "Metadata":
            raise UnsafeContent("something other than DCP's metadata", where=where)
        return found

    def _take(self, told: Made) -> None:
        places: dict[tuple[str, tuple[int, ...] | None], Value] = {}
        for key, info in (told["storage_data"] or {}).items():
            offset = key.state.get("offset")
            places[_text(key["fqn"]), None if offset is None else _numbers(offset)] = self._place(info)
        self._check_spans(places.values())
        paths = told.state.get("planner_data")
        paths = paths if isinstance(paths, dict) else {}
        for name, entry in told["state_dict_metadata"].items():
            path = _path(paths.get(_text(name)), name)
            if entry.name == "BytesStorageMetadata":
                self.found[name] = path, places[name, None]
                continue
            if entry.name != "TensorStorageMetadata":
                raise ValueError("neither a tensor nor bytes")
            self.found[name] = path, len(self.tensors)
            self._tensor(name, path, entry, places)

    def _tensor(self, name: str, path: Path, entry: Made, places: Mapping[tuple[str, tuple[int, ...] | None], Value]) -> None:
        shape, dtype = _numbers(entry["size"]), entry["properties"].state[0]
        kind = dtype_name(dtype) if isinstance(dtype, torch.dtype) else None
        if kind is None:
            raise IncompatibleState(f"dtype {dtype}, which Relight has no name for", where=name[:80])
        chunks = []
        for one in entry["chunks"]:
            box = Box(_numbers(one["offsets"]), _numbers(one["sizes"]))
            place = places.get((name, box.start)) or places.get((name, None))
            if box.elements:
                if place is None:
                    raise CorruptCheckpoint(f"no file has {list(box.size)} at {list(box.start)}", where=name[:80])
                chunks.append(Chunk(place.file, place.span, box))
        tensor = Tensor(name_of(path), kind, shape, "value", len(self.tensors), 0, math.prod(shape) * dtype.itemsize)
        check_tensor(tensor, self.path)
        wrong = check_tiling(shape, [chunk.box for chunk in chunks])
        if wrong is not None:
            raise UnsafeContent(wrong, where=name[:80])
        self.tensors.append(tensor)
        self.chunks.append(chunks)

    def _place(self, info: Made) -> Value:
        if info.state.get("transform_descriptors"):
            raise IncompatibleState("files that an extension of DCP has transformed", where=self.path)
        file, offset, length = _text(info["relative_path"]), info["offset"], info["length"]
        if file != os.path.basename(file) or file in ("", ".", "..") or "\0" in file or not file.endswith(".distcp"):
            raise UnsafeContent(f"a file outside of the directory, or none of DCP's: {file[:80]!r}", where=self.path)
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
            raise ValueError("a place")
        return Value(file, Span(offset, length))

    def _check_spans(self, places: Any) -> None:
        """All lie in files that are there, and none on another: what is made of them is no larger than they are."""
        for file, spans in _grouped((place.file, place.span) for place in places):
            with self._open(file) as handle:
                size = os.fstat(handle).st_size
            end = 0
            for span in sorted(spans):
                if span.offset < end:
                    raise UnsafeContent("two values at one place", where=f"{self.path}/{file}")
                end = span.offset + span.length
            if end > size:
                raise CorruptCheckpoint(f"{size} bytes long, of {end} that were written", where=f"{self.path}/{file}")

    @contextmanager
    def _open(self, file: str) -> Iterator[int]:
        where = f"{self.path}/{file}"
        try:
            handle = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptCheckpoint("the file is missing", where=where) from error
        except OSError as error:
            raise StoreUnavailable(f"cannot be opened: {error.strerror}", where=where, hint="links are not followed") from error
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise UnsafeContent("not a regular file", where=where)
            yield handle
        except OSError as error:
            raise StoreUnavailable(f"cannot be read: {error.strerror}", where=where) from error
        finally:
            os.close(handle)


def _read(handle: int, chunk: Chunk, tensor: Tensor, sink: Sink, where: str) -> int:
    """One chunk's bytes into ``sink``; its checksum is looked at if all of it is read. Memory: a slab, unless it is not in order."""
    spec = Archive(handle, chunk.span, where).tensor()
    size = spec.dtype.itemsize
    if dtype_name(spec.dtype) != tensor.dtype or spec.shape != chunk.box.size or spec.span.length != chunk.box.elements * size:
        raise CorruptCheckpoint("a chunk of another shape or dtype than the metadata says", where=where)
    skip = getattr(sink, "skip", 0)
    if not spec.in_order:
        read = read_spec(handle, spec, where)
        memory = memory_of(read)
        assert memory is not None
        sink.absorb(0, memory[skip : skip + sink.length])
        return len(memory)
    crc, view = 0, sink.view()
    room = memoryview(bytearray(min(_SLAB_BYTES, sink.length))) if view is None else None
    for at in range(0, sink.length, _SLAB_BYTES):
        count = min(_SLAB_BYTES, sink.length - at)
        if view is not None:
            slab = view[at : at + count]
        else:
            assert room is not None
            slab = room[:count]
        read_into(handle, spec.span.offset + skip + at, slab, where)
        crc = zlib.crc32(slab, crc)
        if view is None:
            sink.absorb(at, slab)
    if sink.length == spec.span.length and spec.span.crc and crc != spec.span.crc:
        raise CorruptCheckpoint("a chunk whose checksum is another", where=where)
    return sink.length


def _grouped(pairs: Any) -> list[tuple[str, list[Any]]]:
    groups: dict[str, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return sorted(groups.items(), key=lambda pair: pair[0])


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value.encode()) > NAME_BYTES_MAX:
        raise ValueError("a name")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or any(type(one) is not int or not 0 <= one < 2**63 for one in value):
        raise ValueError("a shape")
    return tuple(value)


def _path(value: Any, name: str) -> Path:
    if isinstance(value, tuple) and 0 < len(value) <= DEPTH_MAX and type(value[0]) is str and all(type(one) in (str, int) for one in value):
        return value
    return (name,)


def _size(numbers: Any = ()) -> tuple[int, ...]:
    return _numbers(tuple(numbers) if isinstance(numbers, (list, tuple)) else None)


def _nothing(*args: Any) -> None:
    """What is not needed: layouts, memory formats, paths."""


_TABLE: dict[str, Any] = {
    **{
        f"{_HOME}.metadata.{name}": Class(name)
        for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "StorageMeta",
        )
    },
    f"{_HOME}.metadata._MEM_FORMAT_ENCODING": Call(_nothing),
    f"{_HOME}.filesystem._StorageInfo": Class("_StorageInfo"),
    "torch.serialization._get_layout": Call(_nothing),
    "torch.Size": Call(_size),
    "builtins.getattr": Call(_nothing),
    "pathlib.PosixPath": Call(_nothing),
    "pathlib.WindowsPath": Call(_nothing),
    "pathlib._local.PosixPath": Call(_nothing),
    "pathlib._local.WindowsPath": Call(_nothing),
    "collections.OrderedDict": Call(dict),
    **{f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
}  # fmt: skip
