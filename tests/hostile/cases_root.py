"""Hostile roots, and parts of other checkpoints, hashed and committed unchanged."""

from __future__ import annotations

from typing import Any

from case import BOMBS, Case, part_of, root_of
from cases_log import ANSI, HEX, MISSING, _set
from forge import DIRS, Forge, dumps

ROOT = root_of("c")


def root(name: str, value: Any) -> Any:
    """The newest root with one field changed."""
    return lambda forge: forge.root("c", lambda root: _set(root, name, value))


def ref(**fields: Any) -> Any:
    """The newest root with its one part named otherwise."""
    return lambda forge: forge.root("c", lambda root: root["parts"][0].update(fields))


def parts(change: Any) -> Any:
    """The newest root with its list of parts changed."""
    return lambda forge: forge.root("c", lambda root: root.update(parts=change(root["parts"][0])))


FIELDS: list[tuple[str, str, Any]] = [
    ("version 0", "version", 0),
    ("version 2", "version", 2),
    ("version 2^31", "version", 2**31),
    ("version is text", "version", "1"),
    ("version is true", "version", True),
    ("no version", "version", MISSING),
    ("another kind of file", "relight", "part"),
    ("an unknown feature", "features", ["teleport"]),
    ("an unknown feature with escapes", "features", [ANSI]),
    ("features are lists", "features", [[]]),
    ("features are objects", "features", [{}]),
    ("features are numbers", "features", [1]),
    ("features is text", "features", "none"),
    ("parts that should be short", "features", ["short-parts"]),
    ("features of half a megabyte", "features", ["x" * 500_000]),
    ("store of another", "store", "0" * 32),
    ("store is a path", "store", "../../" + "a" * 26),
    ("run of another", "run", "0" * 32),
    ("id of another", "id", "b" * 10),
    ("id leaves the store", "id", "../../../x"),
    ("step of another", "step", 20),
    ("step −1", "step", -1),
    ("step 2^63", "step", 2**63),
    ("step 2^64", "step", 2**64),
    ("step is true", "step", True),
    ("epoch of another attempt", "epoch", 1),
    ("epoch −1", "epoch", -1),
    ("world 0", "world", 0),
    ("world −1", "world", -1),
    ("world 2", "world", 2),
    ("world 10^7", "world", 10**7),
    ("world 10^9", "world", 10**9),
    ("world 2^64 − 1", "world", 2**64 - 1),
    ("world is text", "world", "1"),
    ("parts empty", "parts", []),
    ("parts is null", "parts", None),
    ("no parts", "parts", MISSING),
    ("logical_bytes −1", "logical_bytes", -1),
    ("stored_bytes is text", "stored_bytes", "1"),
    ("metric is text", "metrics", {"loss": "abc"}),
    ("metric is NaN", "metrics", {"loss": float("nan")}),
    ("user nested 33 deep", "user", {"a": eval("[" * 33 + "]" * 33)}),  # noqa: S307
    ("user has an infinite number", "user", {"a": float("inf")}),
    ("user has a lone surrogate", "user", {"a": "\ud800"}),
    ("user has a lone surrogate as key", "user", {"\udfff": 1}),
    ("user is a list", "user", []),
    ("components are numbers", "components", {"model": 5}),
    ("requires are numbers", "requires", [5]),
    ("created is a number", "created", 5),
    ("an unknown field", "exec", "rm -rf /"),
    ("an unknown field with escapes", ANSI, 1),
    ("__class__ as a field", "__class__", "os.system"),
]

REFS: list[tuple[str, dict[str, Any]]] = [
    ("rank −1", {"rank": -1}),
    ("rank 1", {"rank": 1}),
    ("rank is text", {"rank": "0"}),
    ("rank is false", {"rank": False}),
    ("file leaves the store", {"file": "../../x"}),
    ("file is another checkpoint's", {"file": f"../{DIRS['b'].split('/')[1]}/part-00000.msgpack"}),
    ("file is absolute", {"file": "/etc/passwd"}),
    ("file with backslashes", {"file": "..\\part-00000.msgpack"}),
    ("file with a zero byte", {"file": "part-00000.msgpack\0"}),
    ("file with percent signs", {"file": "%2e%2e%2fpart-00000.msgpack"}),
    ("file starts with a dot", {"file": "./part-00000.msgpack"}),
    ("file with a newline", {"file": "part-00000.msgpack\n"}),
    ("file of another rank", {"file": "part-00001.msgpack"}),
    ("file is the root", {"file": "root.json"}),
    ("file with escapes", {"file": ANSI}),
    ("file of half a megabyte", {"file": "x" * 500_000}),
    ("file empty", {"file": ""}),
    ("size −1", {"size": -1}),
    ("size 0", {"size": 0}),
    ("size one less", {"size": 752}),
    ("size one more", {"size": 754}),
    ("size 2^62", {"size": 2**62}),
    ("size 2^63", {"size": 2**63}),
    ("size is text", {"size": "753"}),
    ("hash in upper case", {"hash": HEX.upper()}),
    ("hash too short", {"hash": HEX[:40]}),
    ("hash not hexadecimal", {"hash": "z" * 64}),
    ("hash names an algorithm", {"hash": "sha256:" + HEX[:57]}),
    ("hash of something else", {"hash": HEX}),
    ("hash empty", {"hash": ""}),
    ("an unknown field", {"url": "http://169.254.169.254/"}),
]
OF_PART = {"size 0", "size one less", "size one more", "hash of something else"}


def _duplicate(forge: Forge) -> None:
    forge.root("c", lambda root: dumps(root)[:-1] + b',"world":1}')


def _root_of_b(forge: Forge) -> None:
    forge.root("c", lambda root: forge.files[root_of("b")])


def _part_of_b(forge: Forge) -> None:
    forge.part("c", forge.files[part_of("b")])


def _part_of_another_attempt(forge: Forge) -> None:
    forge.part("c", lambda part: part.update(epoch=1))


def _two_ranks(forge: Forge) -> None:
    second = {"rank": 1, "file": "part-00001.msgpack"}
    forge.root("c", lambda root: root.update(world=2, parts=[root["parts"][0], root["parts"][0] | second]))


def _containers(forge: Forge) -> None:
    """Write as many small objects as the limits allow."""
    forge.root("c", lambda root: dumps(root | {"user": {"a": [{"b": 1} for _ in range(250_000)]}}))


def _strings(forge: Forge) -> None:
    forge.root("c", lambda root: dumps(root | {"user": {"a": ["x"] * 500_000}}))


def _keys(count: int) -> Any:
    return lambda forge: forge.root("c", lambda root: dumps(root | {"user": {f"{n:x}": n for n in range(count)}}))


def _ranks(forge: Forge) -> None:
    """Thirty thousand ranks, but the part of only one."""
    part = {"rank": 0, "file": "part-00000.msgpack", "size": 1, "hash": HEX}
    many = [part | {"rank": n, "file": f"part-{n:05d}.msgpack"} for n in range(28_000)]
    forge.root("c", lambda root: dumps(root | {"world": 28_000, "parts": many}))


CASES: list[Case] = [
    *(Case(f"root: {name}", root(field, value), "b", ROOT) for name, field, value in FIELDS),
    *(Case(f"root: part's {name}", ref(**fields), "b", part_of("c") if name in OF_PART else ROOT) for name, fields in REFS),
    *(Case(f"root: {name}", lambda f, d=data: f.root("c", d), "b", ROOT) for name, data in BOMBS),
    Case("root: duplicate key", _duplicate, "b", ROOT),
    Case("root: rank twice", parts(lambda entry: [entry, entry]), "b", ROOT),
    Case("root: one rank too many", parts(lambda entry: [entry, entry | {"rank": 1, "file": "part-00001.msgpack"}]), "b", ROOT),
    Case("root: ranks out of order", parts(lambda entry: [entry | {"rank": 1}, entry]), "b", ROOT),
    Case("root: two ranks, one part", _two_ranks, "b", "part-0000"),
    Case("root: another checkpoint's", _root_of_b, "b", ROOT),
    Case("root: 250,000 small objects", _containers, "b", ROOT),
    Case("root: 500,000 short texts", _strings, "b", ROOT),
    Case("root: 250,000 keys", _keys(250_000), "b", ROOT),
    Case("root: 100,000 keys", _keys(100_000)),
    Case("root: 28,000 ranks", _ranks, "b", "part-00000"),
    Case("root: user has __class__ and __proto__", root("user", {"__class__": "x", "__proto__": {"a": 1}})),
    Case("root: user has escapes", root("user", {ANSI: ANSI})),
    Case("part: another checkpoint's", _part_of_b, "b", part_of("c")),
    Case("part: another attempt's", _part_of_another_attempt, "b", part_of("c")),
]  # fmt: skip
