"""Map a checkpoint's tensors from its files, for ``relight.load(mmap=True)``. Bytes are read when touched, and not verified."""

from __future__ import annotations

from mmap import mmap

from relight.errors import ConfigError
from relight.format import DTYPES, Tensor
from relight.layout import whole
from relight.reader.merged_parts import MergedCheckpoint
from relight.reader.opened import Opened
from relight.store.base import MapsFile


class Mapped:
    """Maps each tensor that is stored raw, in one piece, in a file of a local store."""

    def __init__(self, opened: Opened, joined: MergedCheckpoint | None = None) -> None:
        """``joined``: the merged checkpoint, if several ranks saved it. Indices are then those of its tensors."""
        self._opened, self._joined = opened, joined
        self._files: dict[str, mmap] = {}

    def __call__(self, index: int) -> memoryview | None:
        """Return the bytes of tensor ``index``. None if it is coded, stored with an earlier save, in pieces, or unaligned: read it then.

        Raise ``ConfigError`` if the store's files cannot be mapped. The caller has checked that the file exists in its committed length.
        """
        part, tensor = self._home(index)
        if tensor is None or not tensor.length:
            return None
        pack = self._opened.parts[part].packs[tensor.pack]
        if pack.stored is not None or tensor.offset % DTYPES[tensor.dtype].itemsize:
            return None
        key = f"{self._opened.prefix}/{pack.file}"
        mapping = self._files.get(key)
        if mapping is None:
            reader = self._opened.store.open(key)
            try:
                if not isinstance(reader, MapsFile):
                    message = "load(mmap=True) failed: the store's files cannot be mapped"
                    hint = "leave mmap= out, or copy the run (relight cp) to one local directory that is not encrypted"
                    raise ConfigError(message, where=self._opened.store.url, hint=hint)
                mapping = self._files[key] = reader.map()
            finally:
                reader.close()
        return memoryview(mapping)[tensor.offset : tensor.offset + tensor.length]

    def _home(self, index: int) -> tuple[int, Tensor | None]:
        """Return the part that holds all of a tensor, and its entry there; None for the entry if it is in several pieces."""
        if self._joined is None:
            return 0, self._opened.parts[0].tensors[index]
        pieces = self._joined.pieces[index]
        if len(pieces) != 1 or pieces[0].box != whole(self._joined.tensors[index].shape):
            return 0, None
        return pieces[0].part, self._opened.parts[pieces[0].part].tensors[pieces[0].tensor]
