"""Convert values from a foreign file to torch's own: tensors, arrays, dtypes, devices, sizes."""

from __future__ import annotations

import math
from typing import Any

import torch

from relight.capture.rebuild import numpy_dtype
from relight.capture.tensors import TORCH_DTYPES
from relight.errors import IncompatibleState, UnsafeContent
from relight.format import Leaf
from relight.importers.archive import Storage, StorageKind, TorchArchive
from relight.importers.files import pread
from relight.importers.pickles import AllowedCall, AllowedClass, UnpickledObject
from relight.importers.tensors import Compound, FileRange, Spec

VALUES_MORE = 10_000
"""Values that are allowed in addition to the number of bytes that encode them."""
LEVELS_MAX = 80


def value_of(handle: int, span: FileRange, where: str) -> Any:
    """Return the value that ``torch.save`` wrote, with its tensors and arrays.

    Raise ``UnsafeContent`` if it is nested too deeply, or too large.
    """
    archive = TorchArchive(handle, span, where)
    try:
        return _Values(handle, where, 16 * span.length, archive.pickle_bytes + VALUES_MORE).value(archive.content(), 0)
    except (TypeError, RuntimeError, KeyError) as error:
        raise UnsafeContent(f"the values cannot be rebuilt: {str(error)[:100]}", where=where) from None


def torch_dtype(name: str, where: str) -> torch.dtype:
    """Return torch's dtype of that name. Raise ``IncompatibleState`` if this torch has none."""
    if name not in TORCH_DTYPES:
        raise IncompatibleState(f"this torch has no dtype {name}", where=where, hint="upgrade torch")
    return TORCH_DTYPES[name]


def read_spec(handle: int, spec: Spec, where: str) -> torch.Tensor:
    """Read a tensor; its whole storage if its elements are not in order."""
    dtype = torch_dtype(spec.dtype, where)
    if not math.prod(spec.shape):
        return torch.empty(spec.shape, dtype=dtype, device="cpu")
    if spec.in_order:
        data = bytearray(pread(handle, spec.span.offset + spec.offset * spec.itemsize, spec.length, where))
        return torch.frombuffer(data, dtype=dtype).view(spec.shape)
    storage = torch.frombuffer(bytearray(pread(handle, spec.span.offset, spec.span.length, where)), dtype=dtype)
    return storage.as_strided(spec.shape, spec.stride, spec.offset).contiguous()


class _Values:
    """Converts pickled values."""

    def __init__(self, handle: int, where: str, bytes_max: int, values_max: int) -> None:
        self._handle, self._where, self._count, self._left = handle, where, values_max, bytes_max
        self._read: dict[int, tuple[Spec, torch.Tensor]] = {}

    def value(self, node: Any, level: int) -> Any:
        self._count -= 1
        if level > LEVELS_MAX or self._count < 0:
            raise UnsafeContent("values nested too deeply, or too many", where=self._where)
        if isinstance(node, Spec):
            return self._tensor(node)
        if isinstance(node, UnpickledObject):
            return self._array(node)
        if isinstance(node, Leaf):
            return self._leaf(node)
        if type(node) is dict:
            return {self.value(key, level + 1): self.value(item, level + 1) for key, item in node.items()}
        if type(node) in (list, tuple, set, frozenset):
            return type(node)(self.value(item, level + 1) for item in node)
        if isinstance(node, (AllowedClass, AllowedCall, Storage, StorageKind, Compound)):
            raise UnsafeContent("a class, a storage or a sparse tensor as a value", where=self._where)
        return node

    def _leaf(self, node: Leaf) -> Any:
        if node.kind == "torch_dtype":
            return getattr(torch, node.meta)
        return torch.Size(node.meta) if node.kind == "torch_size" else torch.device(node.meta)

    def _tensor(self, node: Spec) -> torch.Tensor:
        """Return one tensor for each saved one, however often it is referenced.

        The total size is limited, because many tensors may share a storage.
        """
        if id(node) not in self._read:
            self._left -= node.length
            if self._left < 0:
                raise UnsafeContent("tensors many times as large as the file", where=self._where)
            self._read[id(node)] = node, read_spec(self._handle, node, self._where)
        return self._read[id(node)][1]

    def _array(self, node: UnpickledObject) -> Any:
        import numpy as np

        try:
            if node.name == "scalar":
                return np.frombuffer(node.args[1], dtype=_dtype_of(node.args[0]), count=1)[0]
            _, shape, descriptor, columns, data = node.state
            dtype = _dtype_of(descriptor)
            if (
                not isinstance(data, bytes)
                or min(shape, default=0) < 0
                or math.prod(shape) * dtype.itemsize != len(data)
            ):
                raise ValueError("its bytes do not fit its shape")
            return np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if columns else "C").copy()
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise UnsafeContent(f"an array that cannot be rebuilt: {str(error)[:80]}", where=self._where) from None


def _dtype_of(node: Any) -> Any:
    if not isinstance(node, UnpickledObject) or node.name != "dtype":
        raise ValueError("no dtype")
    order = (
        node.state[1] if isinstance(node.state, tuple) and len(node.state) > 1 and node.state[1] in ("<", ">") else ""
    )
    return numpy_dtype(f"{order}{node.args[0]}")
