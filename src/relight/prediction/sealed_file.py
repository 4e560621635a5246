"""Files of models and recordings: one sealed JSON object, as in docs/format.md, of a declared type. Arrays are base64."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from relight.decode import from_json_bytes
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, UnsafeContent
from relight.format.strict import seal, sealed_payload
from relight.store.base import write_whole
from relight.store.disk import Disk
from relight.store.durable import Replacement, translate
from relight.units import size_text

FILE_BYTES_MAX = 256 << 20
Arrays = dict[str, np.ndarray[Any, Any]]
T = TypeVar("T", bound=msgspec.Struct)


class StoredArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array in a file: its type, its shape, and its elements in row-major order."""

    type: Literal["<f4", "<f8", "<i4"]
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, le=FILE_BYTES_MAX)], ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> StoredArray:
        """Return the stored form of ``array``."""
        kind: Any = array.dtype.newbyteorder("<").str
        return cls(kind, array.shape, np.ascontiguousarray(array, dtype=kind).tobytes())

    def array(self) -> np.ndarray[Any, Any]:
        """Return the array, read-only. Raise ``ValueError`` if its elements do not fill its shape."""
        return np.frombuffer(self.data, self.type).reshape(self.shape)


def write_sealed(path: Path, value: msgspec.Struct) -> None:
    """Write a file atomically and durably; it replaces an existing one."""
    data = seal(msgspec.json.encode(value))
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(
            f"the file has {size_text(len(data))}, at most {size_text(FILE_BYTES_MAX)} are allowed", where=str(path)
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise translate(error, "making a directory", str(path.parent)) from error
    write_whole(Replacement(Disk(), os.path.abspath(path), len(data), direct=False), data)


def read_sealed(path: Path, kind: type[T], what: str) -> T:
    """Return the value in a file.

    ``what``: the kind of file, for errors. Raise ``CorruptCheckpoint`` if the file is damaged or has another type.
    """
    try:
        if not path.is_file():
            raise CheckpointNotFound(f"there is no {what}", where=str(path))
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise translate(error, "reading", str(path)) from error
    try:
        return from_json_bytes(sealed_payload(data, str(path), FILE_BYTES_MAX), kind)
    except (CorruptCheckpoint, UnsafeContent) as error:
        raise CorruptCheckpoint(f"it is not an intact {what}: {error.what}", where=str(path)) from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptCheckpoint(f"it is not an intact {what}: {str(error)[:120]}", where=str(path)) from None
