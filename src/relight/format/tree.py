"""Encode and decode the tree of a state: nested plain values, with leaves that refer to tensors. No pickle, nothing is executed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import repeat
from operator import eq
from typing import Any

import msgspec

from relight.errors import IncompatibleState, NewerFormat, UnsafeContent

LEVELS_MAX = 100
DIGITS_MAX = 4096
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
    "standard": 0,
}
"""Leaf kinds, with the number of tensors of each."""
MANY = 64
"""Smallest number of values in one container that are first checked together, in C."""
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_SALTED = frozenset((str, bytes))
"""Types with hashes that are salted with a secret, so that an attacker cannot make them collide."""


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """A value that is not plain. ``kind`` defines how to build it from ``tensors`` (indices of the part's tensors) and ``meta``.

    There are as many leaves as tensors, so the garbage collector does not track them.
    """

    kind: str
    tensors: tuple[int, ...] = ()
    meta: Any = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded node: a subtree that is equal in every save, and encoded once."""

    data: bytes

    @classmethod
    def encode(cls, node: Any) -> Encoded:
        """Encode ``node`` now. Raises ``IncompatibleState`` like ``encode_tree``."""
        return cls(encode_tree(node))


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def join_path(parent: str, key: Any, *, sequence: bool = False) -> str:
    """Return the path of ``key`` below ``parent``, as in tensor names. In text, ``%``, ``/``, zero bytes and leading ``~`` are escaped."""
    if sequence:
        element = str(key)
    elif isinstance(key, str):
        element = key.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
        if element.startswith("~"):
            element = "%7E" + element[1:]
        elif not element:
            element = "~"
        elif element == "__metadata__" and not parent:
            element = "%5F_metadata__"  # safetensors reserves this name
    else:
        element = "~" + repr(key).replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return f"{parent}/{element}" if parent else element


def encode_tree(tree: Any) -> bytes:
    """Encode ``tree`` as MessagePack. Raise ``IncompatibleState``, with its path, for a value that cannot be encoded."""
    return _pack(_encode(tree, "", 0))


def _encode(value: Any, path: str, level: int) -> Any:
    if level > LEVELS_MAX:
        raise IncompatibleState(
            f"nested deeper than {LEVELS_MAX} levels", where=path[:200], hint="does it contain itself?"
        )
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
            own = key if type(key) is str and key.isascii() else _encode(key, path, level + 1)
            if type(item) is Leaf and item.meta is None:  # nearly all of a large tree: 0.5 µs instead of 2
                out += (own, ["@", item.kind, list(item.tensors), None])
            else:
                out += (own, _encode(item, join_path(path, key), level + 1))
        return out
    sequences: dict[type[Any], str] = {list: "l", tuple: "t", set: "s", frozenset: "f"}
    if kind in sequences:
        return [
            sequences[kind],
            *(_encode(item, join_path(path, i, sequence=True), level + 1) for i, item in enumerate(value)),
        ]
    raise IncompatibleState(
        f"cannot save a {kind.__module__}.{kind.__qualname__}",
        where=path,
        hint="give its state as tensors, arrays and plain values, or an object with state_dict() and load_state_dict()",
    )


def decode_tree(data: bytes, tensors: int, where: str) -> Any:
    """Decode the tree in ``data``, with leaves as ``Leaf``. ``tensors`` is the number of the part's tensors."""
    try:
        return _Decoder(tensors, where).value(_unpack(data), 0)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise UnsafeContent(f"not a tree of values: {str(error)[:200]}", where=where) from None


class _Decoder:
    """Converts the nodes of one tree to values."""

    def __init__(self, tensors: int, where: str) -> None:
        self._tensors, self._where = tensors, where

    def value(self, node: Any, level: int) -> Any:
        if type(node) in _PLAIN:
            return node
        if type(node) is not list:
            raise self._unsafe("a MessagePack type that the format does not have")
        if level > LEVELS_MAX:
            raise self._unsafe(f"values nested deeper than {LEVELS_MAX} levels")
        if not node or type(node[0]) is not str:
            raise self._unsafe("a node without a tag")
        tag, count = node[0], len(node) - 1
        if tag == "@" and count == 3:
            return self._leaf(node[1], node[2], self.value(node[3], level + 1))
        if tag == "d":
            return self._dict(node, level + 1)
        if tag in ("l", "t"):
            items = self._each(node[1:], level + 1)
            return items if tag == "l" else tuple(items)
        if tag in ("s", "f"):
            elements = set(self._hashable(self._each(node[1:], level + 1)))
            if len(elements) != count:
                raise self._unsafe("a set with a duplicate member")
            return elements if tag == "s" else frozenset(elements)
        if tag == "i" and count == 1 and type(node[1]) is str:
            digits = node[1].removeprefix("-")
            if not digits.isascii() or not digits.isdigit() or len(digits) > DIGITS_MAX:
                raise self._unsafe("not a decimal integer")
            return int(node[1])
        if tag == "c" and count == 2 and type(node[1]) is float and type(node[2]) is float:
            return complex(node[1], node[2])
        raise self._unsafe(f"unknown or malformed node {tag[:20]!r}")

    def _each(self, nodes: list[Any], level: int) -> list[Any]:
        if len(nodes) >= MANY:
            kinds = set(map(type, nodes))
            if kinds <= _PLAIN:
                return nodes
            leaves = self._leaves(nodes) if kinds == {list} and level <= LEVELS_MAX else None
            if leaves is not None:
                return leaves
        values: list[Any] = []
        for node in nodes:
            if type(node) in _PLAIN:
                values.append(node)
            elif type(node) is list and len(node) == 4 and node[0] == "@" and node[3] is None and level <= LEVELS_MAX:
                values.append(self._leaf(node[1], node[2], None))
            else:
                values.append(self.value(node, level))
        return values

    def _leaves(self, nodes: list[Any]) -> list[Any] | None:
        """Return all nodes as leaves if each is a plain tensor, as in a large module; else None. Each condition is one pass in C."""
        if set(map(len, nodes)) != {4}:
            return None
        tags, kinds, indices, metas = zip(*nodes, strict=True)
        if not (
            all(map(eq, tags, repeat("@")))
            and all(map(eq, kinds, repeat("tensor")))
            and metas.count(None) == len(metas)
        ):
            return None
        if set(map(type, indices)) != {list} or set(map(len, indices)) != {1}:
            return None
        numbers = [index for (index,) in indices]
        if set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) >= self._tensors:
            return None
        return list(map(Leaf, repeat("tensor"), zip(numbers), repeat(None)))

    def _dict(self, node: list[Any], level: int) -> dict[Any, Any]:
        if not len(node) % 2:
            raise self._unsafe("a dict with a key without a value")
        keys = self._hashable(self._each(node[1::2], level))
        result = dict(zip(keys, self._each(node[2::2], level), strict=True))
        if len(result) != len(keys):
            twice = next(key for key, times in Counter(keys).items() if times > 1)
            raise self._unsafe(f"duplicate key {str(twice)[:40]!r} in a dict")
        return result

    def _leaf(self, kind: Any, indices: Any, meta: Any) -> Leaf:
        if type(indices) is list and len(indices) == 1 and kind == "tensor":  # nearly all
            index = indices[0]
            if type(index) is int and 0 <= index < self._tensors:
                return Leaf("tensor", (index,), meta)
        if not isinstance(kind, str) or kind not in LEAF_KINDS:
            raise NewerFormat(
                f"unknown kind of leaf {str(kind)[:40]!r}",
                where=self._where,
                hint="upgrade relight, if a newer version has written it",
            )
        if not isinstance(indices, list) or len(indices) != LEAF_KINDS[kind]:
            raise self._unsafe(f"a {kind} of {len(indices) if isinstance(indices, list) else '?'} tensors")
        if any(type(index) is not int or not 0 <= index < self._tensors for index in indices):
            raise self._unsafe(f"a {kind} with an invalid tensor index")
        return Leaf(kind, tuple(indices), meta)

    def _hashable(self, values: list[Any]) -> list[Any]:
        """Return the keys of one dict or members of one set. Refuses unhashable values, and many with one hash: quadratic cost."""
        if set(map(type, values)) <= _SALTED:
            return values
        guessable = [value for value in values if type(value) not in _SALTED]
        try:
            hashes = Counter(map(hash, guessable))
        except TypeError:
            raise self._unsafe("an unhashable key or set member") from None
        if len(guessable) > EQUAL_HASHES_MAX and max(hashes.values()) > EQUAL_HASHES_MAX:
            raise self._unsafe("keys or set members with colliding hashes")
        return values

    def _unsafe(self, what: str) -> UnsafeContent:
        return UnsafeContent(what, where=self._where)
