"""A directory that ``torch.distributed.checkpoint`` wrote: what is in it, and its bytes, without running any of it.

``.metadata`` is a pickle, and so is each value; both are read as data. A tensor's chunks lie in the ``.distcp`` files, each a file of
``torch.save`` within the file, whose numbers are where its zip directory says.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from relight.capture.regions import sink_of_piece
from relight.capture.tensors import TORCH_DTYPES, memory_of
from relight.errors import CorruptCheckpoint, StoreUnavailable, UnsafeContent
from relight.format import Leaf, Tensor
from relight.importers.archive import TorchArchive
from relight.importers.dcp import Chunk, Metadata, Value, grouped
from relight.importers.files import read_into
from relight.importers.nesting import OpaqueNode, Path, crowded, nested
from relight.integrations.foreign_values import read_spec, value_of
from relight.layout import Sink

_SLAB_BYTES = 16 << 20


class Folder:
    """What ``.metadata`` says. ``tensors`` are numbered; ``found`` gives for each flat name its path, and what is there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        said = Metadata(self.path, self._open)
        self.tensors, self.chunks, self.found = said.tensors, said.chunks, said.found

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
        for file, names in grouped((one.file, name) for name, one in values.items()):
            with self._open(file) as handle:
                for name in names:
                    where = f"{self.path}/{file}: {name[:80]}"
                    value = value_of(handle, values[name].span, where)
                    nodes.append(((name,) if name in flat else self.found[name][0], OpaqueNode(value)))
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
        for file, jobs in grouped((job[0], job) for job in work):
            with self._open(file) as handle:
                for _, _, index, chunk, one in jobs:
                    total += _read(handle, chunk, self.tensors[index], one, f"{self.path}/{file}: {self.tensors[index].name[:80]}")
        return total

    # -- inside

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
    spec = TorchArchive(handle, chunk.span, where).tensor()
    size = spec.itemsize
    if spec.dtype != tensor.dtype or spec.shape != chunk.box.size or spec.span.length != chunk.box.elements * size:
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
