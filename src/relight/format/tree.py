"""The tree of a state: nested plain values with leaves that point at tensors. No pickle, nothing is executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from relight.errors import IncompatibleState, UnsafeContent

LEVELS_MAX = 100
DIGITS_MAX = 4096
PATH_MAX = 8192
"""Characters of a path that leaves are told; names of tensors are half as long at most."""
EQUAL_HASHES_MAX = 64
LEAF_KINDS: dict[str, int] = {
    "tensor": 1,
    "expanded": 1,
    "numpy": 1,
    "numpy_scalar": 0,
    "sparse_coo": 2,
    "sparse_csr": 3,
    "sparse_csc": 3,
    "sparse_bsr": 3,
    "sparse_bsc": 3,
    "quantized_tensor": 1,
    "quantized_channel": 3,
    "torch_dtype": 0,
    "torch_device": 0,
    "torch_size": 0,
}
"""Leaf kinds and how many tensors each takes."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is not a plain value: ``kind`` says how to build it from ``tensors`` (indices into the part's) and ``meta``."""

    kind: str
    tensors: tuple[int, ...] = ()
    meta: Any = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A node that is encoded already: a subtree that is the same in every save."""

    data: bytes

    @classmethod
    def of(cls, node: Any) -> Encoded:
        """Encode it now. ``IncompatibleState`` as ``encode_tree``."""
        return cls(encode_tree(node))


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def join_path(parent: str, key: Any, *, sequence: bool = False) -> str:
    """The path of ``key`` below ``parent``, as tensors are named: text as it is but for ``%``, ``/``, zero bytes and a leading ``~``."""
    if sequence:
        element = str(key)
    elif isinstance(key, str):
        element = key.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
        if element.startswith("~"):
            element = "%7E" + element[1:]
        elif not element:
            element = "~"
        elif element == "__metadata__" and not parent:
            element = "%5F_metadata__"  # safetensors keeps that name for itself
    else:
        element = "~" + repr(key).replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return f"{parent}/{element}" if parent else element


def encode_tree(tree: Any) -> bytes:
    """``tree`` as the format's MessagePack. ``IncompatibleState`` names the path of what it cannot hold."""
    return _pack(_encode(tree, "", 0))


def _encode(value: Any, path: str, level: int) -> Any:
    if level > LEVELS_MAX:
        raise IncompatibleState(f"nested deeper than {LEVELS_MAX} levels", where=path[:200], hint="does it contain itself?")
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is bytes:
        return value
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise IncompatibleState("text that is not valid Unicode (a lone surrogate)", where=path) from None
        return value
    if kind is int:
        if -(2**63) <= value < 2**64:
            return value
        if value.bit_length() > DIGITS_MAX * 3:
            raise IncompatibleState(f"an integer of {value.bit_length()} bits", where=path)
        return ["i", str(value)]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is bytearray:
        return bytes(value)
    if kind is Encoded:
        return msgspec.Raw(value.data)
    if kind is Leaf:
        return ["@", value.kind, list(value.tensors), _encode(value.meta, path, level + 1)]
    if kind is dict:
        out: list[Any] = ["d"]
        for key, item in value.items():
            out += (_encode(key, path, level + 1), _encode(item, join_path(path, key), level + 1))
        return out
    sequences: dict[type[Any], str] = {list: "l", tuple: "t", set: "s", frozenset: "f"}
    if kind in sequences:
        return [sequences[kind], *(_encode(item, join_path(path, i, sequence=True), level + 1) for i, item in enumerate(value))]
    raise IncompatibleState(
        f"cannot save a {kind.__module__}.{kind.__qualname__}",
        where=path,
        hint="give its state as tensors, arrays and plain values, or an object with state_dict() and load_state_dict()",
    )


def decode_tree(data: bytes, tensors: int, leaf: Callable[[Leaf, str], Any], where: str) -> Any:
    """The tree in ``data``. ``leaf(leaf, path)`` builds each leaf; ``tensors`` is how many there are to point at."""
    try:
        node = _unpack(data)
        return _decode(node, tensors, leaf, "", where, 0)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise UnsafeContent(f"not a tree of values: {str(error)[:200]}", where=where) from None


def _decode(node: Any, tensors: int, leaf: Callable[[Leaf, str], Any], path: str, where: str, level: int) -> Any:
    if not isinstance(node, list):
        if isinstance(node, (dict, msgspec.msgpack.Ext)) or type(node).__name__ in ("Timestamp", "datetime"):
            raise UnsafeContent("a kind of MessagePack value the format has not", where=where)
        return node
    if level > LEVELS_MAX:
        raise UnsafeContent(f"values nested deeper than {LEVELS_MAX} levels", where=where)
    if not node or not isinstance(node[0], str):
        raise UnsafeContent("a node without a tag", where=where)
    tag, rest = node[0], node[1:]

    def child(item: Any, at: str) -> Any:
        return _decode(item, tensors, leaf, at, where, level + 1)

    path = path if len(path) <= PATH_MAX else path[:PATH_MAX] + "…"  # each child gets a copy: a long one must not cost its square

    if tag in ("l", "t"):
        items = [child(item, join_path(path, i, sequence=True)) for i, item in enumerate(rest)]
        return items if tag == "l" else tuple(items)
    if tag == "d":
        if len(rest) % 2:
            raise UnsafeContent("a dict with a key and no value", where=where)
        result: dict[Any, Any] = {}
        hashable = _Hashable(where)
        for i in range(0, len(rest), 2):
            key = hashable(child(rest[i], path))
            if key in result:
                raise UnsafeContent(f"duplicate key {str(key)[:40]!r} in a dict", where=where)
            result[key] = child(rest[i + 1], join_path(path, key))
        return result
    if tag in ("s", "f"):
        hashable = _Hashable(where)
        elements = {hashable(child(item, path)) for item in rest}
        if len(elements) != len(rest):
            raise UnsafeContent("a set with a member twice", where=where)
        return elements if tag == "s" else frozenset(elements)
    if tag == "i" and len(rest) == 1 and isinstance(rest[0], str):
        digits = rest[0].removeprefix("-")
        if not digits.isascii() or not digits.isdigit() or len(digits) > DIGITS_MAX:
            raise UnsafeContent("not a decimal integer", where=where)
        return int(rest[0])
    if tag == "c" and len(rest) == 2 and all(type(item) is float for item in rest):
        return complex(rest[0], rest[1])
    if tag == "@" and len(rest) == 3:
        return leaf(_leaf(rest, tensors, child(rest[2], path), where), path)
    raise UnsafeContent(f"unknown or malformed node {tag[:20]!r}", where=where)


def _leaf(rest: list[Any], tensors: int, meta: Any, where: str) -> Leaf:
    kind, indices = rest[0], rest[1]
    if not isinstance(kind, str) or kind not in LEAF_KINDS:
        raise UnsafeContent(f"unknown kind of leaf {str(kind)[:40]!r}", where=where)
    if not isinstance(indices, list) or len(indices) != LEAF_KINDS[kind]:
        raise UnsafeContent(f"a {kind} of {len(indices) if isinstance(indices, list) else '?'} tensors", where=where)
    if any(type(index) is not int or not 0 <= index < tensors for index in indices):
        raise UnsafeContent(f"a {kind} that points at no tensor", where=where)
    return Leaf(kind, tuple(indices), meta)


class _Hashable:
    """Gives back the keys of one dict or members of one set. Refuses what has no hash, and many of one hash: they cost their square."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._counts: Counter[int] = Counter()

    def __call__(self, value: Any) -> Any:
        try:
            code = hash(value)
        except TypeError:
            raise UnsafeContent("a key or set member that cannot be one", where=self._where) from None
        if type(value) not in (str, bytes):  # those are hashed with a secret of this process
            self._counts[code] += 1
            if self._counts[code] > EQUAL_HASHES_MAX:
                raise UnsafeContent("keys or set members made to collide", where=self._where)
        return value
