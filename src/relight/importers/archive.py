"""Read a file of ``torch.save``, or one inside another file: offsets of storages, tensors, other values.

Torch is not needed. A tensor becomes a ``Spec``; a dtype, device or size becomes the format's ``Leaf``; an array becomes
an ``UnpickledObject``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from relight.errors import CorruptCheckpoint, IncompatibleState, UnsafeContent
from relight.format import DTYPES, Leaf
from relight.importers.files import Handle, pread
from relight.importers.pickles import AllowedCall, AllowedClass, read_pickle
from relight.importers.tensors import Compound, FileRange, Home, Spec, row_major

ENTRIES_MAX = 100_000
EQUAL_MAX = 64
DIRECTORY_BYTES_MAX = 16 << 20
PICKLE_BYTES_MAX = 64 << 20
_END, _END64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_CENTRAL, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16", "LongStorage": "int64",
    "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64",
}  # fmt: skip


class Storage(NamedTuple):
    """The bytes that tensors share."""

    dtype: str
    span: FileRange
    home: Home | None = None


class StorageKind(NamedTuple):
    """A class of storages, with the dtype of its elements."""

    dtype: str


class TorchArchive:
    """Range ``span`` of the file ``handle``, which ``torch.save`` wrote. ``home``: the file that its tensors name."""

    def __init__(self, handle: Handle, span: FileRange, where: str, home: Home | None = None) -> None:
        self._handle, self._span, self._where, self._home = handle, span, where, home
        try:
            self._entries = self._directory()
            self._read_names()
        except (struct.error, UnicodeError, ValueError, IndexError) as error:
            raise UnsafeContent(f"not a file of torch.save: {str(error)[:100]}", where=where) from None

    @property
    def pickle_bytes(self) -> int:
        """Size of its pickle, in bytes."""
        return self._entries[f"{self._top}/data.pkl"].length

    def words(self) -> bytes:
        """Return its pickle and directory, which identify the content."""
        span = self._entries[f"{self._top}/data.pkl"]
        listing = "".join(
            f"{name}\0{entry.offset}\0{entry.length}\0{entry.crc}\n" for name, entry in sorted(self._entries.items())
        )
        data = pread(self._handle, span.offset, min(span.length, PICKLE_BYTES_MAX), self._where)
        return data + listing.encode(errors="surrogatepass")

    def content(self, *, strangers: bool = False) -> Any:
        """Return the saved values, with a ``Spec`` for each tensor, and ``UnpickledObject`` for arrays. ``strangers``:
        see ``read_pickle``."""
        span = self._entries[f"{self._top}/data.pkl"]
        if span.length > PICKLE_BYTES_MAX:
            raise UnsafeContent(
                f"its pickle has {span.length} bytes, and at most {PICKLE_BYTES_MAX} are read", where=self._where
            )
        data = pread(self._handle, span.offset, span.length, self._where)
        return read_pickle(data, TABLE, self._where, self._storage, strangers=strangers)

    def tensor(self) -> Spec:
        """Return the only tensor in the file."""
        value = self.content()
        if not isinstance(value, Spec):
            raise UnsafeContent("something other than a tensor", where=self._where)
        return value

    def _storage(self, reference: Any) -> Storage:
        if not (
            isinstance(reference, tuple)
            and len(reference) == 5
            and reference[0] == "storage"
            and isinstance(reference[2], str)
        ):
            raise UnsafeContent("a storage reference that is not in torch's form", where=self._where)
        _, kind, key, _, count = reference
        if not isinstance(kind, StorageKind) or type(count) is not int or count < 0:
            raise UnsafeContent("a storage of unknown type", where=self._where)
        span = self._entries.get(f"{self._top}/data/{key}")
        if span is None:
            raise CorruptCheckpoint(f"storage {key[:40]!r} is missing", where=self._where)
        if span.length != count * DTYPES[kind.dtype].itemsize:
            raise CorruptCheckpoint(
                f"a storage of {span.length} bytes, {count * DTYPES[kind.dtype].itemsize} were saved", where=self._where
            )
        return Storage(kind.dtype, span, self._home)

    def _read_names(self) -> None:
        tops = [
            name.removesuffix("/data.pkl")
            for name in self._entries
            if name.endswith("/data.pkl") and name.count("/") == 1
        ]
        if len(tops) != 1:
            raise ValueError("no data.pkl, or several")
        self._top = tops[0]
        order = self._entries.get(f"{self._top}/byteorder")
        if order is not None and pread(self._handle, order.offset, min(order.length, 16), self._where) != b"little":
            raise IncompatibleState("saved on a machine of another byte order", where=self._where)

    def _directory(self) -> dict[str, FileRange]:
        """Return the zip entries by name, with the ranges of their bytes."""
        start, size = self._span.offset, self._span.length
        length = min(size, _END.size + 65535)
        tail = pread(self._handle, start + size - length, length, self._where)
        position = tail.rfind(b"PK\5\6")
        if position < 0:
            raise ValueError("no zip archive")
        _, _, _, _, count, directory_size, directory, _ = _END.unpack_from(tail, position)
        if position >= _LOCATOR.size and tail[position - _LOCATOR.size :][:4] == b"PK\6\7":
            _, _, where, _ = _LOCATOR.unpack_from(tail, position - _LOCATOR.size)
            if where + _END64.size > size:
                raise ValueError("a directory outside the file")
            record = _END64.unpack(pread(self._handle, start + where, _END64.size, self._where))
            if record[0] != b"PK\6\6":
                raise ValueError("no 64-bit end")
            count, directory_size, directory = record[7:10]
        if count > ENTRIES_MAX or directory_size > DIRECTORY_BYTES_MAX or directory + directory_size > size:
            raise ValueError("a directory too large, or outside the file")
        data = pread(self._handle, start + directory, directory_size, self._where)
        entries: dict[str, FileRange] = {}
        position = 0
        for _ in range(count):
            name, span, position = self._entry(data, position)
            if name in entries:
                raise ValueError("a name twice")
            entries[name] = span
        end = 0
        for span in sorted(entries.values()):
            if span.offset < end and span.length:
                raise ValueError("two entries overlap")
            end = max(end, span.offset + span.length)
        return entries

    def _entry(self, data: bytes, offset: int) -> tuple[str, FileRange, int]:
        head = _CENTRAL.unpack_from(data, offset)
        if head[0] != b"PK\1\2" or head[3] & 1 or head[4] != 0:
            raise ValueError("an entry that is compressed or encrypted")
        crc, packed, size, name_length, extra_length, comment_length, local = *head[7:13], head[16]
        begin = offset + _CENTRAL.size
        name = data[begin : begin + name_length].decode("utf-8")
        size, packed, local = _wide(data[begin + name_length : begin + name_length + extra_length], size, packed, local)
        if size != packed or local + _LOCAL.size > self._span.length:
            raise ValueError("an entry outside the file")
        header = _LOCAL.unpack(pread(self._handle, self._span.offset + local, _LOCAL.size, self._where))
        if header[0] != b"PK\3\4":
            raise ValueError("no entry at the offset in the directory")
        first = local + _LOCAL.size + header[9] + header[10]
        if first + size > self._span.length:
            raise ValueError("an entry outside the file")
        return (
            name,
            FileRange(self._span.offset + first, size, crc),
            begin + name_length + extra_length + comment_length,
        )


def _wide(extra: bytes, size: int, packed: int, local: int) -> tuple[int, int, int]:
    """Return the three numbers, taken from the 64-bit field if they did not fit."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            fields = iter(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            size = next(fields, size) if size == 0xFFFFFFFF else size
            packed = next(fields, packed) if packed == 0xFFFFFFFF else packed
            local = next(fields, local) if local == 0xFFFFFFFF else local
        position += 4 + length
    return size, packed, local


def _tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Spec:
    return _spec(storage, storage.dtype, offset, shape, stride)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> Spec:
    if not isinstance(dtype, Leaf) or dtype.kind != "torch_dtype" or dtype.meta not in DTYPES:
        raise ValueError("a dtype that the format has no name for")
    return _spec(storage, dtype.meta, offset, shape, stride)


def _spec(storage: Any, dtype: Any, offset: Any, shape: Any, stride: Any) -> Spec:
    """Return a tensor, after checking that all of its elements are inside the storage."""
    shape, stride = (
        value.meta if isinstance(value, Leaf) and value.kind == "torch_size" else value for value in (shape, stride)
    )
    if not isinstance(storage, Storage) or dtype not in DTYPES:
        raise ValueError("a tensor without a storage")
    for numbers in (shape, stride):
        if (
            not isinstance(numbers, tuple)
            or len(numbers) > 64
            or any(type(number) is not int or not 0 <= number < 2**63 for number in numbers)
        ):
            raise ValueError("shape or stride")
    if len(shape) != len(stride) or type(offset) is not int or not 0 <= offset < 2**63:
        raise ValueError("shape, stride or offset")
    if not math.prod(shape):
        if math.prod(extent for extent in shape if extent) >= 2**63:
            raise ValueError("a shape no tensor can have")
        # its strides and offset have no meaning
        return Spec(dtype, shape, row_major(shape), 0, storage.span, storage.home)
    spec = Spec(dtype, shape, stride, offset, storage.span, storage.home)
    if not spec.is_inside or spec.length > 64 * max(storage.span.length, 1 << 20):
        raise ValueError("a tensor beyond its storage")
    return spec


def _sparse(layout: Any, arguments: Any) -> Compound:
    if layout != "sparse_coo" or not isinstance(arguments, tuple) or len(arguments) not in (3, 4):
        raise ValueError("a sparse tensor of another layout than COO")
    indices, values, shape = arguments[:3]
    shape = shape.meta if isinstance(shape, Leaf) else shape
    if (
        not isinstance(indices, Spec)
        or not isinstance(values, Spec)
        or not isinstance(shape, tuple)
        or any(type(extent) is not int for extent in shape)
    ):
        raise ValueError("a sparse tensor")
    return Compound("sparse_coo", (indices, values), (shape, bool(arguments[3]) if len(arguments) == 4 else False))


def _layout(name: Any) -> str:
    return str(name).removeprefix("torch.")[:40]


def _sized(numbers: Any = ()) -> Leaf:
    if (
        not isinstance(numbers, (list, tuple))
        or len(numbers) > 64
        or any(type(number) is not int for number in numbers)
    ):
        raise ValueError("a size")
    return Leaf("torch_size", (), tuple(numbers))


def _typed(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Return a tensor or parameter without its attributes."""
    if (
        function not in _REBUILDERS
        or not isinstance(kind, AllowedClass)
        or kind.name not in ("Tensor", "Parameter")
        or not isinstance(args, tuple)
    ):
        raise ValueError("a tensor of another class")
    return function.function(*args)


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


def _group(kind: Callable[[Any], Any]) -> AllowedCall:
    def make(items: Any = ()) -> Any:
        if not isinstance(items, (list, tuple)) or (
            len(items) > EQUAL_MAX and any(type(item) is not str for item in items)
        ):
            raise ValueError("many members")
        return kind(items)

    return AllowedCall(make, hashes=True)


def _complex(real: Any, imaginary: Any) -> complex:
    return complex(float(real), float(imaginary))


def _device(kind: Any, index: Any = None) -> Leaf:
    return Leaf("torch_device", (), str(kind)[:40] if index is None else f"{str(kind)[:40]}:{int(index)}")


def _defaults(kind: Any = None) -> dict[Any, Any]:
    return {}


_ALIASES = {
    "half": "float16", "float": "float32", "double": "float64", "short": "int16", "int": "int32", "long": "int64", "cfloat": "complex64",
    "cdouble": "complex128", "chalf": "complex32",
}  # fmt: skip
_QUANTISED = ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")

_REBUILDERS = (AllowedCall(_tensor_v2), AllowedCall(_tensor_v3), AllowedCall(_same))
DTYPE_LEAVES: dict[str, Any] = {
    **{f"torch.{name}": Leaf("torch_dtype", (), name) for name in (*DTYPES, *_QUANTISED)},
    **{f"torch.{name}": Leaf("torch_dtype", (), kind) for name, kind in _ALIASES.items()},
}

TABLE: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _REBUILDERS[0],
    "torch._utils._rebuild_tensor_v3": _REBUILDERS[1],
    "torch._utils._rebuild_parameter": _REBUILDERS[2],
    "torch._utils._rebuild_parameter_with_state": _REBUILDERS[2],
    "torch._tensor._rebuild_from_type_v2": AllowedCall(_typed),
    "torch.Tensor": AllowedClass("Tensor"),
    "torch.nn.parameter.Parameter": AllowedClass("Parameter"),
    "torch._utils._rebuild_sparse_tensor": AllowedCall(_sparse),
    "torch.serialization._get_layout": AllowedCall(_layout),
    "torch.storage.UntypedStorage": StorageKind("uint8"),
    "torch.Size": AllowedCall(_sized),
    "torch.device": AllowedCall(_device),
    "collections.OrderedDict": AllowedCall(_ordered, hashes=True),
    "collections.defaultdict": AllowedCall(_defaults),
    "_codecs.encode": AllowedCall(_latin),
    "argparse.Namespace": AllowedClass("Namespace"),
    "numpy.dtype": AllowedClass("dtype"),
    "numpy.ndarray": AllowedClass("ndarray"),
    **{f"torch.{name}": StorageKind(kind) for name, kind in _STORAGES.items()},
    **DTYPE_LEAVES,
}
"""Names that a file of ``torch.save`` may request, and what they become here."""
for _home in ("builtins", "__builtin__"):  # protocol 2 uses the latter
    TABLE |= {
        f"{_home}.complex": AllowedCall(_complex),
        f"{_home}.set": _group(set),
        f"{_home}.frozenset": _group(frozenset),
    }
    TABLE |= {
        f"{_home}.{name}": AllowedClass(name) for name in ("dict", "list", "int", "float", "str", "bool", "tuple")
    }
for _home in ("numpy.core.multiarray", "numpy._core.multiarray"):
    TABLE[f"{_home}._reconstruct"] = AllowedClass("array")
    TABLE[f"{_home}.scalar"] = AllowedClass("scalar")
