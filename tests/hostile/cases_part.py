"""Hostile parts: inconsistent packs, chunks and tensors, invalid MessagePack."""

from __future__ import annotations

import json
import struct
from typing import Any

import msgpack
from case import Case, pack_of, part_of
from cases_log import ANSI, MISSING, _set
from forge import Forge

PART, PACK = part_of("c"), pack_of("c")
W, B, M, SCALAR, EMPTY, FLAGS = range(6)
NAME, DTYPE, SHAPE, ROLE, IN, OFFSET, LENGTH, BOX = range(8)


def field(name: str, value: Any) -> Any:
    """The newest part with one field changed."""
    return lambda forge: forge.part("c", lambda part: _set(part, name, value))


def tensor(index: int, **fields: Any) -> Any:
    """The newest part with one tensor changed."""
    places = {
        "name": NAME,
        "dtype": DTYPE,
        "shape": SHAPE,
        "role": ROLE,
        "pack": IN,
        "offset": OFFSET,
        "length": LENGTH,
        "box": BOX,
    }

    def change(part: Any) -> None:
        for name, value in fields.items():
            part["tensors"][index][places[name]] = value

    return lambda forge: forge.part("c", change)


def part(change: Any) -> Any:
    """The newest part, changed."""
    return lambda forge: forge.part("c", lambda value: change(value) and None)


def pack(**fields: Any) -> Any:
    """The newest part with its pack described otherwise."""
    places = {"file": 0, "size": 1, "chunks": 2}

    def change(value: Any) -> None:
        for name, given in fields.items():
            value["packs"][0][places[name]] = given

    return lambda forge: forge.part("c", change)


def chunks(change: Any) -> Any:
    """The newest part with the chunks of its pack changed, as a list of ``[length, hash]``."""
    return lambda forge: forge.part("c", lambda value: value["packs"][0].__setitem__(2, change(value["packs"][0][2])))


RAW: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("nil", b"\xc0"),
    ("an array", b"\x90"),
    ("an empty map", b"\x80"),
    ("an unused byte", b"\xc1"),
    ("a map of 2^32 − 1", b"\xdf\xff\xff\xff\xff"),
    ("an array of 2^32 − 1", b"\xdd\xff\xff\xff\xff"),
    ("packs of 2^32 − 1", b"\x8c\xa5packs\xdd\xff\xff\xff\xff\x93"),
    ("tensors of 2^32 − 1", b"\x8c\xa7tensors\xdd\xff\xff\xff\xff\x98"),
    ("a tree of 2^32 − 1 bytes", b"\x8c\xa4tree\xc6\xff\xff\xff\xffx"),
    ("a text of 2^32 − 1 bytes", b"\x8c\xdb\xff\xff\xff\xffx"),
    ("nested arrays", b"\x91" * 100_000),
    ("nested maps", b"\x81\xa1a" * 100_000),
    ("nested under a field", b"\x8c\xa5packs" + b"\x91" * 100_000),
    ("an extension", b"\x8c\xa5packs\xd4\x05\x00"),
    ("a timestamp", b"\x8c\xa4time\xd6\xff\x00\x00\x00\x00"),
    ("invalid UTF-8", b"\x8c\xa2\xff\xfe\x01"),
    ("JSON", b'{"relight":"part"}'),
]

FIELDS: list[tuple[str, str, Any]] = [
    ("version 0", "version", 0),
    ("version 2", "version", 2),
    ("version 2^31", "version", 2**31),
    ("version −1", "version", -1),
    ("version is text", "version", "1"),
    ("version is true", "version", True),
    ("version is a float", "version", 1.0),
    ("no version", "version", MISSING),
    ("no kind of file", "relight", MISSING),
    ("another kind of file", "relight", "root"),
    ("store of another", "store", "0" * 32),
    ("run of another", "run", "0" * 32),
    ("id of another", "id", "b" * 10),
    ("step of another", "step", 20),
    ("step is a NaN", "step", float("nan")),
    ("epoch of another", "epoch", 1),
    ("rank of another", "rank", 1),
    ("rank −1", "rank", -1),
    ("world of another", "world", 2),
    ("packs is nil", "packs", None),
    ("packs is a map", "packs", {}),
    ("no packs for its tensors", "packs", []),
    ("tensors is text", "tensors", "model/w"),
    ("no tensors for its pack", "tensors", []),
    ("tree is text", "tree", "abc"),
    ("tree is nil", "tree", None),
    ("no tree", "tree", MISSING),
    ("an unknown field", "exec", "rm"),
    ("an unknown field with escapes", ANSI, 1),
    ("an unknown field of a megabyte", "x" * 1_000_000, 1),
    ("a field that is a number", 5, 1),  # type: ignore[list-item]
]

TENSORS: list[tuple[str, int, dict[str, Any]]] = [
    ("name empty", W, {"name": ""}),
    ("name with a zero byte", W, {"name": "a\0b"}),
    ("name of a megabyte", W, {"name": "x" * 1_000_000}),
    ("name of another", W, {"name": "model/b"}),
    ("name is a number", W, {"name": 5}),
    ("dtype object", W, {"dtype": "object"}),
    ("dtype float33", W, {"dtype": "float33"}),
    ("dtype empty", W, {"dtype": ""}),
    ("dtype in upper case", W, {"dtype": "FLOAT32"}),
    ("dtype with escapes", W, {"dtype": ANSI}),
    ("dtype is a number", W, {"dtype": 5}),
    ("dtype wider", W, {"dtype": "float64"}),
    ("dtype narrower", W, {"dtype": "float16"}),
    ("shape −1", W, {"shape": [-1, 8]}),
    ("shape both −", W, {"shape": [-12, -8]}),
    ("shape 2^63", W, {"shape": [2**63]}),
    ("shape that overflows 64 bits", W, {"shape": [2**32, 2**32]}),
    ("shape that overflows to its length", W, {"shape": [2**32 + 12, 2**32 + 8]}),
    ("shape too large", W, {"shape": [12, 9]}),
    ("shape too small", W, {"shape": [12, 7]}),
    ("shape of 65 dimensions", W, {"shape": [1] * 63 + [12, 8]}),
    ("shape of a million dimensions", W, {"shape": [1] * 1_000_000 + [12, 8]}),
    ("shape with a boolean", W, {"shape": [True, 96]}),
    ("shape with a float", W, {"shape": [12.0, 8]}),
    ("shape is a number", W, {"shape": 96}),
    ("role unknown", W, {"role": "root"}),
    ("role with escapes", W, {"role": ANSI}),
    ("pack −1", W, {"pack": -1}),
    ("pack 1", W, {"pack": 1}),
    ("pack 2^63", W, {"pack": 2**63}),
    ("offset −1", W, {"offset": -1}),
    ("offset in the header", W, {"offset": 0}),
    ("offset one on", W, {"offset": 4489}),
    ("offset of another", W, {"offset": 4104}),
    ("offset beyond the end", W, {"offset": 2**40}),
    ("offset 2^64 − 1", W, {"offset": 2**64 - 1}),
    ("length −1", W, {"length": -1}),
    ("length 0", W, {"length": 0}),
    ("length one more", W, {"length": 385}),
    ("length 2^62", W, {"length": 2**62}),
    ("length 2^62 with its shape", W, {"length": 2**62, "shape": [2**60]}),
    ("box beyond the shape", W, {"box": [[1, 0], [12, 8]]}),
    ("box that starts at −1", W, {"box": [[-1, 0], [12, 8]]}),
    ("box of negative size", W, {"box": [[0, 0], [-12, -8]]}),
    ("box of one dimension", W, {"box": [[0], [12]]}),
    ("box that leaves a hole", W, {"shape": [13, 8], "box": [[0, 0], [12, 8]]}),
    ("box of 2^63", W, {"box": [[2**63, 0], [12, 8]]}),
    ("box of three lists", W, {"box": [[0, 0], [12, 8], [1, 1]]}),
    ("box is text", W, {"box": "all"}),
    ("an empty one in pack −5", EMPTY, {"pack": -5}),
    ("an empty one at 2^64 − 1", EMPTY, {"offset": 2**64 - 1}),
    ("an empty one of 2^63", EMPTY, {"shape": [0, 2**63]}),
    ("an empty one with a negative extent", EMPTY, {"shape": [0, -4]}),
    ("a 0-d one of 9 bytes", SCALAR, {"length": 9}),
]


def _duplicate_key(forge: Forge) -> None:
    def change(value: Any) -> bytes:
        data = bytearray(msgpack.packb(value))
        data[0] += 1
        return bytes(data) + msgpack.packb("rank") + msgpack.packb(0)

    forge.part("c", change)


def _duplicate_for_missing(forge: Forge) -> None:
    """Keep the number of keys, with one key twice and one key with a default missing."""

    def change(value: Any) -> bytes:
        del value["version"]
        data = bytearray(msgpack.packb(value))
        data[0] += 1
        return bytes(data) + msgpack.packb("rank") + msgpack.packb(0)

    forge.part("c", change)


def _huge(size: int) -> Any:
    """Describe one tensor and one chunk of ``size`` bytes in a shorter file."""

    def change(value: Any) -> None:
        value["packs"][0][1] = 4096 + size
        value["packs"][0][2] = [value["packs"][0][2][0], [size, bytes(32)]]
        value["tensors"] = [["model/w", "uint8", [size], "param", 0, 4096, size, None]]
        value["tree"] = msgpack.packb(["l"])

    return lambda forge: forge.part("c", change)


def _many_small(forge: Forge) -> None:
    """Thirty thousand tensors of one byte, no two of a name, in a pack that is not there."""
    count = 30_000

    def change(value: Any) -> None:
        value["packs"] = [["pack-00000-000.safetensors", 4096 + count, [[4096, bytes(32)], [count, bytes(32)]]]]
        value["tensors"] = [[f"{n}", "uint8", [1], "param", 0, 4096 + n, 1, None] for n in range(count)]

    forge.part("c", change)


def _cut(*lengths: int) -> Any:
    """The pack cut into chunks of other lengths, all hashes right."""

    def make(forge: Forge) -> None:
        assert sum(lengths) == len(forge.files[PACK])

        def change(value: Any) -> None:
            value["packs"][0][2] = [[length, b""] for length in lengths]

        forge.part("c", change)
        forge.pack("c", lambda data: data)

    return make


def _second_pack(forge: Forge) -> None:
    """A second pack with a header of its own and nothing in it, that is not there."""
    forge.part("c", lambda value: value["packs"].append(["pack-00000-001.safetensors", 4096, [[4096, bytes(32)]]]))


def _same_pack_twice(forge: Forge) -> None:
    forge.part("c", lambda value: value["packs"].append(value["packs"][0]))


def _damaged_with_escapes(forge: Forge) -> None:
    """A tensor with control sequences in its name and with other bytes than were committed."""
    tensor(W, name=ANSI)(forge)
    data = bytearray(forge.files[PACK])
    data[4490] ^= 1
    forge.files[PACK] = bytes(data)


def _longer(forge: Forge) -> None:
    forge.files[PACK] += b"\0"


def _shorter(forge: Forge) -> None:
    forge.files[PACK] = forge.files[PACK][:-1]


CASES: list[Case] = [
    *(Case(f"part: {name}", lambda f, d=data: f.part("c", d), "b", PART) for name, data in RAW),
    *(Case(f"part: {name}", field(where, value), "b", PART) for name, where, value in FIELDS),
    *(Case(f"tensor: {name}", tensor(index, **fields), "b") for name, index, fields in TENSORS),
    Case("part: trailing bytes", lambda f: f.part("c", f.files[PART] + b"\xc0"), "b", PART),
    Case("part: cut short", lambda f: f.part("c", f.files[PART][:-1]), "b", PART),
    Case("part: duplicate key", _duplicate_key, "b", PART),
    Case("part: duplicate key for a missing one", _duplicate_for_missing, "b", PART),
    Case("pack: file leaves the store", pack(file="../../x"), "b", PART),
    Case("pack: file is absolute", pack(file="/etc/passwd"), "b", PART),
    Case("pack: file with backslashes", pack(file="..\\..\\x"), "b", PART),
    Case("pack: file with a zero byte", pack(file="pack-00000-000.safetensors\0"), "b", PART),
    Case("pack: file with percent signs", pack(file="%2e%2e/pack-00000-000.safetensors"), "b", PART),
    Case("pack: file of another rank", pack(file="pack-00001-000.safetensors"), "b", PART),
    Case("pack: file of another number", pack(file="pack-00000-001.safetensors"), "b", PART),
    Case("pack: file is the root", pack(file="root.json"), "b", PART),
    Case("pack: file with escapes", pack(file=ANSI), "b", PART),
    Case("pack: size 0", pack(size=0), "b", PART),
    Case("pack: size −1", pack(size=-1), "b", PART),
    Case("pack: size one less", pack(size=4892), "b", PART),
    Case("pack: size 2^63", pack(size=2**63), "b", PART),
    Case("pack: size 2^64 − 1", pack(size=2**64 - 1), "b", PART),
    Case("pack: no chunks", pack(chunks=[]), "b", PART),
    Case("pack: no chunks and no size", pack(chunks=[], size=0), "b", PART),
    Case("pack: listed twice", _same_pack_twice, "b", PART),
    Case("pack: a second, empty and absent", _second_pack, "c", "pack-00000-001"),
    Case("pack: one byte longer", _longer, "b", PACK),
    Case("pack: one byte shorter", _shorter, "b", PACK),
    Case("pack: missing", lambda f: f.files.pop(PACK), "b", PACK),
    Case("pack: another checkpoint's", lambda f: f.files.update({PACK: f.files[pack_of("b")]}), "b", PACK),
    Case("chunk: one missing", chunks(lambda c: c[:-1]), "b", PART),
    Case("chunk: one twice", chunks(lambda c: [*c, c[-1]]), "b", PART),
    Case("chunk: two swapped", chunks(lambda c: [c[0], c[1], c[3], c[2], *c[4:]]), "b", PACK),
    Case("chunk: length 0", chunks(lambda c: [*c, [0, c[0][1]]]), "b", PART),
    Case("chunk: lengths −1 and one more", chunks(lambda c: [[c[0][0] + 1, c[0][1]], *c[1:], [-1, c[0][1]]]), "b", PART),
    Case("chunk: length 2^63", chunks(lambda c: [[2**63, c[0][1]], *c[1:]]), "b", PART),
    Case("chunk: hash too short", chunks(lambda c: [[c[0][0], c[0][1][:31]], *c[1:]]), "b", PART),
    Case("chunk: hash too long", chunks(lambda c: [[c[0][0], c[0][1] + b"x"], *c[1:]]), "b", PART),
    Case("chunk: hash empty", chunks(lambda c: [[c[0][0], b""], *c[1:]]), "b", PART),
    Case("chunk: hash is text", chunks(lambda c: [[c[0][0], "x" * 32], *c[1:]]), "b", PART),
    Case("chunk: hash of zeros", chunks(lambda c: [*c[:-1], [c[-1][0], bytes(32)]]), "b", PACK),
    Case("chunk: three fields", chunks(lambda c: [[*c[0], 1], *c[1:]]), "b", PART),
    Case("chunk: cuts an element", _cut(4096, 8, 384, 385, 15, 5), "b", PART),
    Case("chunk: cuts the header", _cut(4000, 104, 384, 384, 16, 5), "b", PART),
    Case("chunk: one for all tensors", _cut(4096, 797)),
    Case("chunk: one for each four bytes", _cut(4096, 8, *[4] * 196, 5)),
    Case("tensors: 2^30 bytes declared", _huge(2**30), "b", "c" * 10),
    Case("tensors: 2^40 bytes declared", _huge(2**40), "b", "c" * 10),
    Case("tensors: 2^62 bytes declared", _huge(2**62), "b", "c" * 10),
    Case("tensors: 100 MB declared", _huge(100 << 20), "b", "c" * 10),
    Case("tensors: 30,000 of one byte", _many_small, "b", "c" * 10),
    Case("tensors: one missing", part(lambda p: p["tensors"].pop()), "b", PART),
    Case("tensors: one twice", part(lambda p: p["tensors"].append(p["tensors"][0])), "b", PART),
    Case("tensors: one of seven fields", part(lambda p: p["tensors"][0].pop()), "c"),
    Case("tensors: one of nine fields", part(lambda p: p["tensors"][0].append(None)), "b", PART),
    Case("tensor: damaged, its name with escapes", _damaged_with_escapes, "b", PACK),
    Case("tensor: named __class__", tensor(FLAGS, name="__class__"), "c", PACK),
    Case("tensor: named __proto__", tensor(FLAGS, name="__proto__"), "c", PACK),
    Case("tensor: name leaves the store", tensor(FLAGS, name="../../x"), "c", PACK),
]  # fmt: skip


def _header(change: Any) -> Any:
    """The pack's header differs from the part. Both have valid hashes."""

    def make(forge: Forge) -> None:
        header = forge.header_of("c")
        given = change(header)
        forge.header("c", given if isinstance(given, bytes) else as_json(header))

    return make


def as_json(value: Any) -> bytes:
    """Plain JSON."""
    return json.dumps(value).encode()


def _prefix(length: int) -> Any:
    return lambda forge: forge.pack("c", lambda data: struct.pack("<Q", length) + data[8:])


def _offsets(header: Any, *offsets: Any) -> None:
    header["flags"]["data_offsets"] = list(offsets)


def _swap_offsets(header: Any) -> None:
    w, m = header["model/w"], header["optim/m"]
    w["data_offsets"], m["data_offsets"] = m["data_offsets"], w["data_offsets"]


HEADERS: list[tuple[str, Any]] = [
    ("not JSON", _header(lambda h: b"\x80\x04pickle")),
    ("a list", _header(lambda h: b"[]")),
    ("empty object", _header(lambda h: b"{}")),
    ("nested 3,000 deep", _header(lambda h: b"[" * 3000)),
    ("invalid UTF-8", _header(lambda h: b'{"\xff":1}')),
    ("UTF-16", _header(lambda h: '{"a":1}'.encode("utf-16"))),
    (
        "an integer of 3,500 digits",
        _header(lambda h: b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,' + b"9" * 3500 + b"]}}"),
    ),
    ("offsets infinite", _header(lambda h: _offsets(h, float("inf"), 5))),
    ("offsets NaN", _header(lambda h: _offsets(h, float("nan"), 5))),
    ("offsets 1e400", _header(lambda h: as_json(h).replace(b"[792, 797]", b"[1e400,797]"))),
    ("offsets as text", _header(lambda h: _offsets(h, "792", "797"))),
    ("offsets as floats", _header(lambda h: _offsets(h, 792.5, 797.5))),
    ("offsets swapped between two", _header(_swap_offsets)),
    ("offsets missing", _header(lambda h: h["flags"].pop("data_offsets") and None)),
    ("one tensor missing", _header(lambda h: h.pop("flags") and None)),
    ("one tensor more", _header(lambda h: h.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}))),
    ("one tensor twice", _header(lambda h: as_json(h)[:-1] + b',"flags":' + as_json(h["flags"]) + b"}")),
    ("another dtype", _header(lambda h: h["model/w"].update(dtype="I32"))),
    ("another shape", _header(lambda h: h["model/w"].update(shape=[8, 12]))),
    ("another name", _header(lambda h: h.update({"flag\x1b": h.pop("flags")}))),
    ("its length 0", _prefix(0)),
    ("its length 2^63", _prefix(2**63)),
    ("its length beyond the file", _prefix(90_000_000)),
    ("its length one less", _prefix(4087)),
]
CASES += [Case(f"header: {name}", make, "c", PACK) for name, make in HEADERS]
