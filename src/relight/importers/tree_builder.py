"""Build Relight's tree and items from the values of a foreign file. Values that do not fit are listed as left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from relight.errors import UnsafeContent
from relight.format import DTYPES, Leaf
from relight.format.manifest import NAME_BYTES_MAX
from relight.format.tree import DIGITS_MAX, EQUAL_HASHES_MAX, join_path
from relight.importers.archive import Storage, StorageKind
from relight.importers.pickles import STRANGE, AllowedCall, AllowedClass, Stranger, UnpickledObject
from relight.importers.tensors import AssembledTensor, Compound, Spec
from relight.layout import Bytes, Item
from relight.settings.utf8 import is_utf8

LEVELS_MAX = 80
VALUES_MAX = 500_000
"""Containers, tensors and single values, at most; sixteen times as many in plain lists."""
_BULK = 16
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
GROWTH_MAX = 16
"""Largest ratio of all tensors to the files: a file can declare many tensors in one storage."""
_OUT = object()
_NUMPY_KINDS = "biufcSUMm"


class Numbers(NamedTuple):
    """An array in memory: its bytes, numpy's name of its dtype, its shape."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]


class TreeBuilder:
    """Collects items while the tree is built. A tensor that repeats becomes the same item.

    ``left_out`` has ``(what, why)``.
    """

    def __init__(self, bytes_max: int, where: str, wanted: Callable[[str], bool] | None = None) -> None:
        self.items: list[Item] = []
        self.left_out: list[tuple[str, str]] = []
        self._where, self._left, self._values = where, GROWTH_MAX * bytes_max + (1 << 20), VALUES_MAX * _BULK
        self._known: dict[object, int] = {}
        self._names: set[str] = set()
        self._wanted = wanted or (lambda path: True)
        self._not_asked = 0

    def module(self, node: dict[str, Any], path: str, trained: Collection[str] = ()) -> dict[Any, Any]:
        """Return a module's state as a node.

        ``trained``: names of parameters that an optimizer has. If it is empty, all floating-point tensors count as
        parameters.
        """
        entries: dict[Any, Any] = {}
        for key, value in node.items():
            below = join_path(path, key)
            if isinstance(value, (Spec, AssembledTensor)):
                floating = "float" in value.dtype
                is_trained = not trained or key in trained
                leaf = self._leaf(
                    value,
                    below,
                    "param" if floating and is_trained else "buffer",
                    bool(trained) and floating and is_trained,
                )
            else:
                leaf = self._value(value, below, "value", 1)
            if leaf is not _OUT:
                entries[key] = leaf
        return entries

    def value(self, node: Any, path: str, role: str = "value") -> tuple[bool, Any]:
        """Return whether any value of a component other than a module is imported, and its node."""
        built = self._value(node, path, role, 1)
        return (False, None) if built is _OUT else (True, built)

    def finish(self) -> None:
        """Record how many tensors were not selected."""
        if self._not_asked:
            self.left_out.append((f"{self._not_asked} tensors", "not asked for"))

    # -- inside

    def _value(self, value: Any, path: str, role: str, level: int) -> Any:
        self._values -= _BULK
        if level > LEVELS_MAX or self._values < 0:
            raise UnsafeContent("values nested too deeply, or too many", where=self._where)
        kind = type(value)
        # command-line arguments
        if kind is UnpickledObject and value.name == "Namespace" and isinstance(value.state, dict):
            value, kind = value.state, dict
        if kind in _PLAIN:
            return self._plain(value, path)
        if isinstance(value, (Spec, AssembledTensor)):
            return self._leaf(value, path, role, False)
        if kind is Leaf:
            return value
        if kind is Compound:
            return self._compound(value, path, role)
        if kind is UnpickledObject:
            return self._made(value, path, role)
        if kind is Numbers:
            return self._numbers(value, path, role)
        if kind is dict:
            entries: dict[Any, Any] = {}
            for key, item in value.items():
                below = join_path(path, key)
                if not _is_key(key):
                    self._out(below, f"its key is {described(key)}")
                    continue
                node = self._value(item, below, role, level + 1)
                if node is not _OUT:
                    entries[key] = node
            return entries
        if kind in (list, tuple):
            return self._sequence(value, path, role, level)
        if kind in (set, frozenset):
            return (
                value
                if all(_is_key(member) for member in value)
                else self._out(path, "a set of what has no place in one")
            )
        return self._out(path, f"it holds {described(value)}")

    def _sequence(self, value: Any, path: str, role: str, level: int) -> Any:
        if all(type(element) in _PLAIN for element in value):
            self._values -= len(value)
            if self._values < 0:
                raise UnsafeContent("too many values", where=self._where)
            nodes = [self._plain(element, path) for element in value]
        else:
            nodes = [
                self._value(item, join_path(path, i, sequence=True), role, level + 1) for i, item in enumerate(value)
            ]
        if any(node is _OUT for node in nodes):  # keep the positions of the others
            return (
                _OUT
                if all(node is _OUT for node in nodes)
                else type(value)(None if node is _OUT else node for node in nodes)
            )
        return type(value)(nodes)

    def _plain(self, value: Any, path: str) -> Any:
        if type(value) is int and value.bit_length() > DIGITS_MAX * 3:
            return self._out(path, f"an integer of {value.bit_length()} bits")
        if type(value) is str and not is_utf8(value):
            return self._out(path, "text that is not Unicode")
        return value

    def _leaf(self, spec: Spec | AssembledTensor, path: str, role: str, trainable: bool) -> Any:
        if not self._wanted(path):
            self._not_asked += 1
            return _OUT
        if (
            isinstance(spec, Spec)
            and 0 in spec.stride
            and any(n > 1 and not step for n, step in zip(spec.shape, spec.stride))
        ):
            return self._expanded(spec, path, role, trainable)
        index = self._item(spec, path, role, trainable)
        return _OUT if index is None else Leaf("tensor", (index,))

    def _expanded(self, spec: Spec, path: str, role: str, trainable: bool) -> Any:
        """Return the leaf of a tensor that repeats elements: they are stored once."""
        shape = tuple(1 if not step else extent for extent, step in zip(spec.shape, spec.stride, strict=True))
        index = self._item(
            spec._replace(shape=shape, stride=tuple(step or 1 for step in spec.stride)), path, role, trainable
        )
        return _OUT if index is None else Leaf("expanded", (index,), spec.shape)

    def _item(self, spec: Spec | AssembledTensor, path: str, role: str, trainable: bool) -> int | None:
        if isinstance(spec, AssembledTensor):
            key, length = spec.key, spec.made_of.length
        else:
            home = (spec.home.files.path, spec.home.name) if spec.home is not None else None
            key, length = (home, spec.dtype, spec.shape, spec.stride, spec.offset, spec.span), spec.length
        if length and key in self._known:
            return self._known[key]
        if not path or len(path.encode(errors="surrogatepass")) > NAME_BYTES_MAX or not is_utf8(path):
            self._out(path[:80], "its name is too long, or not Unicode")
            return None
        self._left -= length
        if self._left < 0:
            raise UnsafeContent("tensors many times as large as the files", where=self._where)
        while path in self._names:
            path += "~"
        self._names.add(path)
        self.items.append(Item(path, spec.dtype, spec.shape, role, spec.source(), None, trainable))
        self._known[key] = len(self.items) - 1
        return len(self.items) - 1

    def _compound(self, value: Compound, path: str, role: str) -> Any:
        names = {"sparse_coo": ("indices", "values")}[value.kind]
        if not self._wanted(path):
            return _OUT
        indices = [
            self._item(part, f"{path}/{name}", role, False) for name, part in zip(names, value.parts, strict=True)
        ]
        return (
            _OUT
            if None in indices
            else Leaf(value.kind, tuple(index for index in indices if index is not None), value.meta)
        )

    def _made(self, value: UnpickledObject, path: str, role: str) -> Any:
        if value.name.startswith(STRANGE):
            return self._out(
                path, f"an object of {value.name[len(STRANGE) :][:120]}: only the name of this class is known"
            )
        try:
            if value.name == "scalar":
                dtype = numpy_dtype(value.args[0])
                data = value.args[1]
                if not isinstance(data, bytes) or len(data) != dtype.itemsize:
                    raise ValueError("bytes")
                return Leaf("numpy_scalar", (), (dtype.str, data))
            if value.name == "array":
                return self._array(value, path, role)
        except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise UnsafeContent(f"an array that cannot be rebuilt: {str(error)[:80]}", where=self._where) from None
        return self._out(path, f"it holds a {value.name[:80]}")

    def _array(self, value: UnpickledObject, path: str, role: str) -> Any:
        array = array_of(value)
        return self._numbers(Numbers(array.tobytes(), array.dtype.str, tuple(array.shape)), path, role)

    def _numbers(self, value: Numbers, path: str, role: str) -> Any:
        name, dims = numpy_dtype(value.dtype).name, value.shape
        if name not in DTYPES or value.dtype[0] == ">":
            name, dims = "uint8", (len(value.data),)
        index = self._item(
            AssembledTensor(name, dims, Bytes(value.data), ("array", id(value), path)), path, role, False
        )
        return _OUT if index is None else Leaf("numpy", (index,), (value.dtype, value.shape))

    def _out(self, path: str, why: str) -> Any:
        self.left_out.append((path, why))
        return _OUT


def array_of(value: UnpickledObject) -> Any:
    """Return a pickled array of numbers or plain text. Raise ``ValueError`` and the like for others."""
    import numpy as np

    _, shape, descriptor, columns, data = value.state
    dtype = numpy_dtype(descriptor)
    if (
        not isinstance(shape, tuple)
        or len(shape) > 32
        or any(type(extent) is not int or extent < 0 for extent in shape)
    ):
        raise ValueError("shape")
    if not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("its bytes do not fit its shape")
    return np.ascontiguousarray(np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if columns else "C"))


def numpy_dtype(node: Any) -> Any:
    """Return numpy's dtype, from its pickle or its name. Raise ``ValueError`` unless it is of numbers or text."""
    import numpy as np

    text = node
    if isinstance(node, UnpickledObject):
        if node.name != "dtype" or not node.args or not isinstance(node.args[0], str):
            raise ValueError("no dtype")
        order = (
            node.state[1]
            if isinstance(node.state, tuple) and len(node.state) > 1 and node.state[1] in ("<", ">")
            else ""
        )
        text = f"{order}{node.args[0]}"
    dtype = np.dtype(str(text)[:64])
    if dtype.hasobject or dtype.kind not in _NUMPY_KINDS or not dtype.itemsize:
        raise ValueError(f"dtype {str(text)[:40]!r}")
    return dtype


def _is_key(key: Any, level: int = 0) -> bool:
    if type(key) in (tuple, frozenset):
        return level < 8 and len(key) <= EQUAL_HASHES_MAX and all(_is_key(element, level + 1) for element in key)
    if type(key) is str:
        return is_utf8(key) and len(key) <= NAME_BYTES_MAX
    return key is None or type(key) in (bool, int, float, complex, bytes)


def described(value: Any) -> str:
    """Return what an unpickled value is, for an error, with an article. Classes of this package never appear in it."""
    if isinstance(value, (Stranger, AllowedClass)):
        name = f"class {value.name[:120]}"
    elif isinstance(value, UnpickledObject):
        name = value.name[:120]
    elif isinstance(value, (Spec, AssembledTensor)):
        name = "single tensor"
    elif isinstance(value, Compound):
        name = "sparse or quantized tensor"
    elif isinstance(value, (Storage, StorageKind)):
        name = "storage"
    else:
        name = "function" if isinstance(value, AllowedCall) else type(value).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"
