"""Hostile trees of values: hashed and committed, and refused when they are decoded."""

from __future__ import annotations

from typing import Any

import msgpack
from case import Case, part_of

PART = part_of("c")
_pack = msgpack.packb
_COLLIDE = 2**61 - 1


def tree(node: Any) -> Any:
    """The newest part with another tree."""
    return lambda forge: forge.tree("c", node if isinstance(node, bytes) else _pack(node))


def _nested(levels: int) -> Any:
    node: Any = ["l"]
    for _ in range(levels):
        node = ["l", node]
    return node


def _nested_leaf(levels: int) -> Any:
    return ["@", "torch_size", [], _nested(levels)]


_LONG = "k" * 1_000_000
NODES: list[tuple[str, Any]] = [
    ("empty", b""),
    ("an unused byte", b"\xc1"),
    ("nested 100,000 deep", b"\x92\xa1l" * 100_000 + b"\xc0"),
    ("nested 101 levels", _nested(101)),
    ("a leaf's meta nested 101 levels", _nested_leaf(101)),
    ("an array of 2^32 − 1", b"\xdd\xff\xff\xff\xff\xa1l"),
    ("bytes of 2^32 − 1", b"\xc6\xff\xff\xff\xff\x00"),
    ("a map", {"a": 1}),
    ("a map within", ["l", {"a": 1}]),
    ("a map as meta", ["@", "tensor", [0], {"a": 1}]),
    ("an extension", ["l", msgpack.ExtType(5, b"code")]),
    ("a timestamp", ["l", msgpack.Timestamp(0, 0)]),
    ("a malformed timestamp", b"\x92\xa1l\xc7\x0c\xff" + b"\xff" * 12),
    ("trailing bytes", _pack(["l"]) + b"\xc0"),
    ("cut short", _pack(["l", "abc"])[:-1]),
    ("invalid UTF-8", b"\x92\xa1l\xa2\xff\xfe"),
    ("a node without a tag", []),
    ("a node with a number as tag", [5]),
    ("a node with a node as tag", [["l"]]),
    ("an unknown tag", ["x", 1]),
    ("a tag with escapes", ["\x1b[31m"]),
    ("a tag of a megabyte", [_LONG]),
    ("a dict with a key and no value", ["d", "a"]),
    ("a dict with a key twice", ["d", "a", 1, "a", 2]),
    ("a dict with 1 and true", ["d", 1, "a", True, "b"]),
    ("a dict with a list as key", ["d", ["l"], 1]),
    ("a dict with a dict as key", ["d", ["d"], 1]),
    ("a dict with a list inside a key", ["d", ["t", ["l"]], 1]),
    ("a set with a list", ["s", ["l"]]),
    ("a set with a member twice", ["s", 1, 1]),
    ("a frozenset with a member twice", ["f", "a", "a"]),
    ("an integer without digits", ["i", ""]),
    ("an integer that is a sign", ["i", "-"]),
    ("an integer with two signs", ["i", "--5"]),
    ("an integer with an exponent", ["i", "1e5"]),
    ("an integer of 5,000 digits", ["i", "9" * 5000]),
    ("an integer of a million digits", ["i", "9" * 1_000_000]),
    ("an integer in other digits", ["i", "٣"]),
    ("an integer with underscores", ["i", "1_000"]),
    ("an integer with spaces", ["i", " 5"]),
    ("an integer that is a number", ["i", 5]),
    ("a complex of integers", ["c", 1, 2]),
    ("a complex of one", ["c", 1.0]),
    ("a leaf of an unknown kind", ["@", "pickle", [0], None]),
    ("a leaf of kind __class__", ["@", "__class__", [0], None]),
    ("a leaf of kind with escapes", ["@", "\x1b[31m", [0], None]),
    ("a leaf with a number as kind", ["@", 5, [0], None]),
    ("a leaf of no tensor", ["@", "tensor", [], None]),
    ("a leaf of two tensors", ["@", "tensor", [0, 1], None]),
    ("a leaf that points nowhere", ["@", "tensor", [6], None]),
    ("a leaf that points at −1", ["@", "tensor", [-1], None]),
    ("a leaf that points at 2^64 − 1", ["@", "tensor", [2**64 - 1], None]),
    ("a leaf that points at true", ["@", "tensor", [True], None]),
    ("a leaf that points at a float", ["@", "tensor", [0.0], None]),
    ("a leaf that points by name", ["@", "tensor", "model/w", None]),
    ("a leaf without meta", ["@", "tensor", [0]]),
    ("a leaf with more than meta", ["@", "tensor", [0], None, None]),
    (
        "fifty thousand keys of one hash",
        ["d", *(x for n in range(50_000) for x in (["i", str(n * _COLLIDE + 2**64)], 0))],
    ),
    ("a set of fifty thousand of one hash", ["s", *(["i", str(n * _COLLIDE + 2**65)] for n in range(50_000))]),
]

FINE: list[tuple[str, Any]] = [
    ("a long key above a hundred thousand values", ["d", _LONG, ["l", *range(100_000)]]),
    ("a long key above a long key", ["d", _LONG, ["d", _LONG, ["d", _LONG, ["l", *range(20_000)]]]]),
    ("fifty thousand keys", ["d", *(x for n in range(50_000) for x in (n, n))]),
    ("keys __class__ and __proto__", ["d", "__class__", "os.system", "__proto__", ["d", "a", 1]]),
    ("keys that leave the store", ["d", "../../x", 1, "/etc/passwd", 2, "", 3, "\0", 4]),
    ("nested 99 levels", _nested(99)),
    ("plain nil", None),
]

CASES: list[Case] = [
    *(Case(f"tree: {name}", tree(node), "b", PART) for name, node in NODES),
    *(Case(f"tree: {name}", tree(node)) for name, node in FINE),
]
