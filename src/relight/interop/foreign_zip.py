"""A file that ``torch.save`` made, or a part of a file: where its storages lie, and what tensors and values are made of them."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from relight.capture.rebuild import _numpy_dtype
from relight.capture.tensors import TORCH_DTYPES
from relight.errors import CorruptCheckpoint, IncompatibleState, UnsafeContent
from relight.interop.foreign_pickle import Call, Class, Made, read_pickle

ENTRIES_MAX = 100_000
EQUAL_MAX = 64
DIRECTORY_BYTES_MAX = 16 << 20
PICKLE_BYTES_MAX = 64 << 20
VALUES_MORE = 10_000
"""How many more values there may be than bytes that say them."""
LEVELS_MAX = 80
_END, _END64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_CENTRAL, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16", "LongStorage": "int64",
    "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64",
}  # fmt: skip


class Span(NamedTuple):
    """Bytes of an open file. ``crc`` is what they are said to have, 0 if nothing is."""

    offset: int
    length: int
    crc: int = 0


class Spec(NamedTuple):
    """A tensor that lies in a storage of the archive: ``offset`` and ``stride`` in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    span: Span

    @property
    def in_order(self) -> bool:
        """Whether its elements lie one behind the other, in row-major order."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True


class _Storage(NamedTuple):
    dtype: torch.dtype
    span: Span


class Archive:
    """``span`` of the file ``handle``, which ``torch.save`` wrote."""

    def __init__(self, handle: int, span: Span, where: str) -> None:
        self._handle, self._span, self._where = handle, span, where
        try:
            self._entries = self._directory()
            self._read_names()
        except (struct.error, UnicodeError, ValueError, IndexError) as error:
            raise UnsafeContent(f"not a file of torch.save: {str(error)[:100]}", where=where) from None

    def content(self) -> Any:
        """What was saved, unread: values, with a ``Spec`` for each tensor, and ``Made`` for arrays."""
        span = self._entries[f"{self._top}/data.pkl"]
        if span.length > PICKLE_BYTES_MAX:
            raise UnsafeContent(f"a pickle of {span.length} bytes", where=self._where)
        return read_pickle(pread(self._handle, span.offset, span.length, self._where), _TABLE, self._where, self._storage)

    def tensor(self) -> Spec:
        """The one tensor that was saved."""
        found = self.content()
        if not isinstance(found, Spec):
            raise UnsafeContent("something other than a tensor", where=self._where)
        return found

    def value(self) -> Any:
        """What was saved, with its tensors and arrays. ``UnsafeContent`` for what nests too deeply or says one thing too often."""
        try:
            said = self._entries[f"{self._top}/data.pkl"].length
            return _Values(self._handle, self._where, 16 * self._span.length, said + VALUES_MORE).value(self.content(), 0)
        except (TypeError, RuntimeError) as error:
            raise UnsafeContent(f"values that cannot be made: {str(error)[:100]}", where=self._where) from None

    def _storage(self, told: Any) -> _Storage:
        if not (isinstance(told, tuple) and len(told) == 5 and told[0] == "storage" and isinstance(told[2], str)):
            raise UnsafeContent("a storage that is told of in another way", where=self._where)
        _, kind, key, _, count = told
        if not isinstance(kind, torch.dtype) or type(count) is not int or count < 0:
            raise UnsafeContent("a storage of no known kind", where=self._where)
        span = self._entries.get(f"{self._top}/data/{key}")
        if span is None:
            raise CorruptCheckpoint(f"storage {key[:40]!r} is missing", where=self._where)
        if span.length != count * kind.itemsize:
            raise CorruptCheckpoint(f"a storage of {span.length} bytes, {count * kind.itemsize} were saved", where=self._where)
        return _Storage(kind, span)

    def _read_names(self) -> None:
        tops = [name.removesuffix("/data.pkl") for name in self._entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(tops) != 1:
            raise ValueError("no data.pkl, or several")
        self._top = tops[0]
        order = self._entries.get(f"{self._top}/byteorder")
        if order is not None and pread(self._handle, order.offset, min(order.length, 16), self._where) != b"little":
            raise IncompatibleState("saved on a machine of another byte order", where=self._where)

    def _directory(self) -> dict[str, Span]:
        """Entries by name, with the place of their bytes."""
        start, size = self._span.offset, self._span.length
        length = min(size, _END.size + 65535)
        tail = pread(self._handle, start + size - length, length, self._where)
        at = tail.rfind(b"PK\5\6")
        if at < 0:
            raise ValueError("no zip archive")
        _, _, _, _, count, directory_size, directory, _ = _END.unpack_from(tail, at)
        if at >= _LOCATOR.size and tail[at - _LOCATOR.size :][:4] == b"PK\6\7":
            _, _, where, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
            if where + _END64.size > size:
                raise ValueError("a directory outside of it")
            record = _END64.unpack(pread(self._handle, start + where, _END64.size, self._where))
            if record[0] != b"PK\6\6":
                raise ValueError("no 64-bit end")
            count, directory_size, directory = record[7:10]
        if count > ENTRIES_MAX or directory_size > DIRECTORY_BYTES_MAX or directory + directory_size > size:
            raise ValueError("a directory too large, or outside of it")
        data = pread(self._handle, start + directory, directory_size, self._where)
        entries: dict[str, Span] = {}
        at = 0
        for _ in range(count):
            name, span, at = self._entry(data, at)
            if name in entries:
                raise ValueError("a name twice")
            entries[name] = span
        return entries

    def _entry(self, data: bytes, at: int) -> tuple[str, Span, int]:
        head = _CENTRAL.unpack_from(data, at)
        if head[0] != b"PK\1\2" or head[3] & 1 or head[4] != 0:
            raise ValueError("an entry that is compressed or encrypted")
        crc, packed, size, name_length, extra_length, comment_length, local = *head[7:13], head[16]
        begin = at + _CENTRAL.size
        name = data[begin : begin + name_length].decode("utf-8")
        size, packed, local = _wide(data[begin + name_length : begin + name_length + extra_length], size, packed, local)
        if size != packed or local + _LOCAL.size > self._span.length:
            raise ValueError("an entry outside of it")
        here = _LOCAL.unpack(pread(self._handle, self._span.offset + local, _LOCAL.size, self._where))
        if here[0] != b"PK\3\4":
            raise ValueError("no entry where one is said to be")
        first = local + _LOCAL.size + here[9] + here[10]
        if first + size > self._span.length:
            raise ValueError("an entry outside of it")
        return name, Span(self._span.offset + first, size, crc), begin + name_length + extra_length + comment_length


class _Values:
    """What was pickled, to values."""

    def __init__(self, handle: int, where: str, bytes_max: int, values_max: int) -> None:
        self._handle, self._where, self._count, self._left = handle, where, values_max, bytes_max
        self._read: dict[int, tuple[Spec, torch.Tensor]] = {}

    def value(self, node: Any, level: int) -> Any:
        self._count -= 1
        if level > LEVELS_MAX or self._count < 0:
            raise UnsafeContent("values nested too deeply, or too many", where=self._where)
        if isinstance(node, Spec):
            return self._tensor(node)
        if isinstance(node, Made):
            return self._array(node)
        if type(node) is dict:
            return {self.value(key, level + 1): self.value(one, level + 1) for key, one in node.items()}
        if type(node) in (list, tuple, set, frozenset):
            return type(node)(self.value(one, level + 1) for one in node)
        if isinstance(node, (Class, Call, _Storage)):
            raise UnsafeContent("a class or a storage as a value", where=self._where)
        return node

    def _tensor(self, node: Spec) -> torch.Tensor:
        """One tensor for each that was saved, however often it is named; not many of one storage."""
        if id(node) not in self._read:
            self._left -= math.prod(node.shape) * node.dtype.itemsize
            if self._left < 0:
                raise UnsafeContent("tensors many times as large as the file", where=self._where)
            self._read[id(node)] = node, read_spec(self._handle, node, self._where)
        return self._read[id(node)][1]

    def _array(self, node: Made) -> Any:
        import numpy as np

        try:
            if node.name == "scalar":
                return np.frombuffer(node.args[1], dtype=_dtype_of(node.args[0]), count=1)[0]
            _, shape, told, columns, data = node.state
            dtype = _dtype_of(told)
            if not isinstance(data, bytes) or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
                raise ValueError("shape and bytes")
            return np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if columns else "C").copy()
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise UnsafeContent(f"an array that cannot be rebuilt: {str(error)[:80]}", where=self._where) from None


def _dtype_of(node: Any) -> Any:
    if not isinstance(node, Made) or node.name != "dtype":
        raise ValueError("no dtype")
    order = node.state[1] if isinstance(node.state, tuple) and len(node.state) > 1 and node.state[1] in ("<", ">") else ""
    return _numpy_dtype(f"{order}{node.args[0]}")


def _wide(extra: bytes, size: int, packed: int, local: int) -> tuple[int, int, int]:
    """The three numbers as a 64-bit field has them, where they did not fit."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            fields = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size = next(fields, size) if size == 0xFFFFFFFF else size
            packed = next(fields, packed) if packed == 0xFFFFFFFF else packed
            local = next(fields, local) if local == 0xFFFFFFFF else local
        at += 4 + length
    return size, packed, local


def pread(handle: int, offset: int, length: int, where: str) -> bytes:
    """All of these bytes; ``CorruptCheckpoint`` if the file is shorter."""
    found = bytearray(length)
    read_into(handle, offset, memoryview(found), where)
    return bytes(found)


def read_into(handle: int, offset: int, into: memoryview, where: str) -> None:
    """Fill ``into``; ``CorruptCheckpoint`` if the file is shorter."""
    at = 0
    while at < len(into):
        count = os.preadv(handle, [into[at : at + (64 << 20)]], offset + at)
        if not count:
            raise CorruptCheckpoint("the file ends too soon", where=where)
        at += count


def read_spec(handle: int, spec: Spec, where: str) -> torch.Tensor:
    """A tensor, read: with its whole storage if its elements do not lie in order."""
    count = math.prod(spec.shape)
    if not count:
        return torch.empty(spec.shape, dtype=spec.dtype)
    size = spec.dtype.itemsize
    if spec.in_order:
        data = bytearray(pread(handle, spec.span.offset + spec.offset * size, count * size, where))
        return torch.frombuffer(data, dtype=spec.dtype).view(spec.shape)
    storage = torch.frombuffer(bytearray(pread(handle, spec.span.offset, spec.span.length, where)), dtype=spec.dtype)
    return storage.as_strided(spec.shape, spec.stride, spec.offset).contiguous()


def _tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Spec:
    return _spec(storage, storage.dtype, offset, shape, stride)


def _tensor_v3(storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any) -> Spec:
    return _spec(storage, dtype, offset, shape, stride)


def _spec(storage: Any, dtype: Any, offset: Any, shape: Any, stride: Any) -> Spec:
    """Checked: all of its elements lie in the storage."""
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor of no storage")
    for numbers in (shape, stride):
        if not isinstance(numbers, tuple) or len(numbers) > 64 or any(type(one) is not int or not 0 <= one < 2**63 for one in numbers):
            raise ValueError("shape or stride")
    if len(shape) != len(stride) or type(offset) is not int or offset < 0:
        raise ValueError("shape, stride or offset")
    if math.prod(shape):
        last = offset + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
        if (last + 1) * dtype.itemsize > storage.span.length or math.prod(shape) * dtype.itemsize > 64 * max(storage.span.length, 1 << 20):
            raise ValueError("a tensor beyond its storage")
    return Spec(dtype, shape, stride, offset, storage.span)


def _same(value: Any, *rest: Any) -> Any:
    return value


def _ordered(items: Any = ()) -> dict[Any, Any]:
    if not isinstance(items, (list, tuple)) or len(items) > EQUAL_MAX:
        raise ValueError("an OrderedDict of many pairs")
    return dict(items)


def _latin(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes in another encoding")
    return text.encode("latin1")


def _group(kind: Callable[[Any], Any]) -> Call:
    def make(items: Any = ()) -> Any:
        if not isinstance(items, (list, tuple)) or (len(items) > EQUAL_MAX and any(type(one) is not str for one in items)):
            raise ValueError("many members")
        return kind(items)

    return Call(make)


def _complex(real: Any, imaginary: Any) -> complex:
    return complex(float(real), float(imaginary))


def _device(kind: Any, index: Any = None) -> torch.device:
    return torch.device(str(kind)[:40]) if index is None else torch.device(str(kind)[:40], int(index))


_TABLE: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": Call(_tensor_v2),
    "torch._utils._rebuild_tensor_v3": Call(_tensor_v3),
    "torch._utils._rebuild_parameter": Call(_same),
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.Size": Call(torch.Size),
    "torch.device": Call(_device),
    "collections.OrderedDict": Call(_ordered),
    "_codecs.encode": Call(_latin),
    "numpy.dtype": Class("dtype"),
    "numpy.ndarray": Class("ndarray"),
    **{f"torch.{name}": TORCH_DTYPES[kind] for name, kind in _STORAGES.items()},
    **{f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
}
for _home in ("builtins", "__builtin__"):  # protocol 2 says the latter
    _TABLE |= {f"{_home}.complex": Call(_complex), f"{_home}.set": _group(set), f"{_home}.frozenset": _group(frozenset)}
for _home in ("numpy.core.multiarray", "numpy._core.multiarray"):
    _TABLE[f"{_home}._reconstruct"] = Class("array")
    _TABLE[f"{_home}.scalar"] = Class("scalar")
