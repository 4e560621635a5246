"""A directory that ``torch.distributed.checkpoint`` wrote: its content, and its bytes, without executing any of it.

``.metadata`` is a pickle, and so is each value; both are read as data. A tensor's chunks are in the ``.distcp`` files.
Each chunk is a ``torch.save`` file inside the file, and its zip directory has the position of its numbers.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from relight.capture.regions import sink_of_piece
from relight.capture.tensors import TORCH_DTYPES, memory_of
from relight.errors import CorruptCheckpoint, StoreUnavailable, UnsafeContent
from relight.format import Leaf, Tensor
from relight.format.crc import crc32
from relight.importers.archive import TorchArchive
from relight.importers.dcp import Chunk, Metadata, Value, grouped
from relight.importers.files import read_into
from relight.importers.nesting import OpaqueNode, Path, crowded, nested
from relight.integrations.foreign_values import read_spec, value_of
from relight.layout import Sink, skip_of

_SLAB_BYTES = 16 << 20


class Folder:
    """The content of ``.metadata``. ``tensors`` are numbered; ``found`` maps each flat name to its path and content."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        metadata = Metadata(self.path, self._open)
        self.tensors, self.chunks, self.found = metadata.tensors, metadata.chunks, metadata.found

    def tree(self, wanted: Callable[[str, Path], bool]) -> dict[Any, Any]:
        """Return the original state dict, with a leaf for each wanted tensor; its other values are read."""
        chosen = {name: entry for name, entry in self.found.items() if wanted(name, entry[0])}
        flat = crowded({name: path for name, (path, _) in chosen.items()})
        nodes: list[tuple[Path, Any]] = []
        values: dict[str, Value] = {}
        for name, (path, content) in chosen.items():
            if isinstance(content, Value):
                values[name] = content
            else:
                nodes.append(((name,) if name in flat else path, Leaf("tensor", (content,))))
        for file, names in grouped((entry.file, name) for name, entry in values.items()):
            with self._open(file) as handle:
                for name in names:
                    where = f"{self.path}/{file}: {name[:80]}"
                    value = value_of(handle, values[name].span, where)
                    nodes.append(((name,) if name in flat else self.found[name][0], OpaqueNode(value)))
        return nested(nodes)

    def check(self, index: int) -> None:
        """Check, before memory for a tensor is allocated, that its chunks have enough bytes."""
        if sum(chunk.span.length for chunk in self.chunks[index]) < self.tensors[index].length:
            raise CorruptCheckpoint("its chunks are smaller than it", where=self.tensors[index].name[:80])

    def fill(self, sinks: Mapping[int, Sink]) -> int:
        """Read the bytes that ``sinks`` take, file by file, in file order. Return the number of bytes read."""
        work: list[tuple[str, int, int, Chunk, Sink]] = []
        for index, sink in sinks.items():
            tensor = self.tensors[index]
            for chunk in self.chunks[index]:
                piece_sink = sink_of_piece(sink, tensor.shape, TORCH_DTYPES[tensor.dtype], chunk.box)
                if piece_sink is not None:
                    work.append((chunk.file, chunk.span.offset, index, chunk, piece_sink))
        work.sort(key=lambda job: job[:3])
        total = 0
        for file, jobs in grouped((job[0], job) for job in work):
            with self._open(file) as handle:
                for _, _, index, chunk, piece_sink in jobs:
                    total += _read(
                        handle,
                        chunk,
                        self.tensors[index],
                        piece_sink,
                        f"{self.path}/{file}: {self.tensors[index].name[:80]}",
                    )
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
            raise StoreUnavailable(
                f"cannot be opened: {error.strerror}", where=where, hint="links are not followed"
            ) from error
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise UnsafeContent("not a regular file", where=where)
            yield handle
        except OSError as error:
            raise StoreUnavailable(f"cannot be read: {error.strerror}", where=where) from error
        finally:
            os.close(handle)


def _read(handle: int, chunk: Chunk, tensor: Tensor, sink: Sink, where: str) -> int:
    """Read one chunk into ``sink``, and check its checksum if the whole chunk is read.

    Memory: a slab, or the whole chunk if its elements are not contiguous.
    """
    spec = TorchArchive(handle, chunk.span, where).tensor()
    size = spec.itemsize
    if spec.dtype != tensor.dtype or spec.shape != chunk.box.size or spec.span.length != chunk.box.elements * size:
        raise CorruptCheckpoint("a chunk of another shape or dtype than in the metadata", where=where)
    skip = skip_of(sink)
    if not spec.in_order:
        read = read_spec(handle, spec, where)
        memory = memory_of(read)
        assert memory is not None
        sink.absorb(0, memory[skip : skip + sink.length])
        return len(memory)
    crc, view = 0, sink.view()
    buffer = memoryview(bytearray(min(_SLAB_BYTES, sink.length))) if view is None else None
    for offset in range(0, sink.length, _SLAB_BYTES):
        count = min(_SLAB_BYTES, sink.length - offset)
        if view is not None:
            slab = view[offset : offset + count]
        else:
            assert buffer is not None
            slab = buffer[:count]
        read_into(handle, spec.span.offset + skip + offset, slab, where)
        crc = crc32(slab, crc)
        if view is None:
            sink.absorb(offset, slab)
    if sink.length == spec.span.length and spec.span.crc and crc != spec.span.crc:
        raise CorruptCheckpoint("a chunk with a wrong checksum", where=where)
    return sink.length
