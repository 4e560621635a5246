"""Packs with chunks that are stored elsewhere: a good one, and all that may be wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blake3 import blake3
from case import Case, pack_of, part_of
from cases_log import ANSI
from forge import DIRS, SEQ, Forge

from relight.format.codecs import BYTES, Way, encode

PART, PACK, DONOR = part_of("c"), pack_of("c"), pack_of("b")
CHUNKS = PACK.replace(".safetensors", ".chunks")
HOME = [DIRS["b"].rpartition("/")[2], "pack-00000-000.safetensors"]
OFFSET, LENGTH, CODED, HASH, BASE = range(1, 6)
HEADER, WEIGHT, FLAGS = 0, 2, 5
"""Chunks: a difference from the donor's chunk, a raw chunk, and a chunk of the donor."""


def move(
    forge: Forge, change: Callable[[Any], object] | None = None, *, coded: Callable[[bytes], bytes] = bytes
) -> None:
    """Store the newest checkpoint's chunks as differences, with a donor, and in a file of their own. ``change`` is given ``stored``."""
    pack, donor = forge.files.pop(PACK), forge.files[DONOR]
    own = bytearray()

    def store(part: Any) -> None:
        pieces, offset = [], 0
        for number, (length, value) in enumerate(part["packs"][0][2]):
            chunk, theirs = pack[offset : offset + length], donor[offset : offset + length]
            if number == HEADER:
                body = encode(memoryview(chunk), Way(BYTES, True, (1,), ("repeats",), 0.1), memoryview(theirs))
                assert body is not None
                body = coded(body)
                pieces.append(
                    [
                        0,
                        len(own),
                        len(body),
                        True,
                        blake3(body).digest(),
                        [1, offset, length, False, blake3(theirs).digest(), None],
                    ]
                )
                own.extend(body)
            elif chunk == theirs:
                pieces.append([1, offset, length, False, value, None])
            else:
                pieces.append([0, len(own), length, False, value, None])
                own.extend(chunk)
            offset += length
        assert pieces[FLAGS][0] == 1 and pieces[WEIGHT][0] == 0
        stored: Any = [len(own), [list(HOME)], pieces]
        given = change(stored) if change is not None else None
        part["packs"][0].append(stored if given is None else given)

    forge.part("c", store)
    forge.files[CHUNKS] = bytes(own)
    forge.root("c", lambda root: root.update(features=["stored-chunks"], requires=["b" * 10]))
    forge.record(SEQ["c"], lambda record: record["body"].update(requires=["b" * 10]))


def stored(change: Callable[[Any], object]) -> Callable[[Forge], None]:
    """The newest checkpoint stored that way, with one thing wrong in ``stored``."""
    return lambda forge: move(forge, change)


def piece(number: int, field: int, value: Any) -> Callable[[Forge], None]:
    """Return a change of one field of one piece."""
    return stored(lambda s: s[2][number].__setitem__(field, value))


def base(field: int, value: Any) -> Callable[[Forge], None]:
    """Return a change of one field of the first chunk's base."""
    return stored(lambda s: s[2][HEADER][BASE].__setitem__(field, value))


def flip(key: str, at: int) -> Callable[[Forge], None]:
    """The checkpoint stored that way, and a bit of a file flipped."""

    def make(forge: Forge) -> None:
        move(forge)
        data = bytearray(forge.files[key])
        data[at] ^= 1
        forge.files[key] = bytes(data)

    return make


def with_files(change: Callable[[Forge], object]) -> Callable[[Forge], None]:
    """The checkpoint stored that way, and its files changed."""

    def make(forge: Forge) -> None:
        move(forge)
        change(forge)

    return make


def _chain(depth: int) -> Callable[[Forge], None]:
    def change(s: Any) -> None:
        header = s[2][HEADER]
        for _ in range(depth):
            header[BASE] = [1, 0, 50, True, bytes(32), header[BASE]]

    return stored(change)


def _with_pack(forge: Forge) -> None:
    """The pack itself was added, as a repair does, and it is damaged."""
    pack = forge.files[PACK]
    move(forge)
    forge.files[PACK] = pack[:-1] + bytes([pack[-1] ^ 1])


def _repaired(forge: Forge) -> None:
    pack = forge.files[PACK]
    move(forge)
    forge.files[PACK] = pack
    del forge.files[CHUNKS]


WRONG: list[tuple[str, Callable[[Forge], None]]] = [
    ("stored is text", stored(lambda s: "stored")),
    ("stored is empty", stored(lambda s: [])),
    ("stored has a field more", stored(lambda s: s.append(1))),
    ("size one more", stored(lambda s: s.__setitem__(0, s[0] + 1))),
    ("size one less", stored(lambda s: s.__setitem__(0, s[0] - 1))),
    ("size −1", stored(lambda s: s.__setitem__(0, -1))),
    ("size 2^64", stored(lambda s: s.__setitem__(0, 2**64 - 1))),
    ("no pieces", stored(lambda s: s.__setitem__(2, []))),
    ("a piece more", stored(lambda s: s[2].append(s[2][-1]))),
    ("a piece less", stored(lambda s: s[2].pop())),
    ("two pieces swapped", stored(lambda s: s[2].__setitem__(slice(1, 3), s[2][2:0:-1]))),
    ("no homes", stored(lambda s: s.__setitem__(1, []))),
    ("a home twice", stored(lambda s: s[1].append(s[1][0]))),
    ("a home that is not needed", stored(lambda s: s[1].append([DIRS["a"].rpartition("/")[2], HOME[1]]))),
    ("a home that the root does not name", stored(lambda s: s[1][0].__setitem__(0, DIRS["a"].rpartition("/")[2]))),
    ("a home that is its own", stored(lambda s: s[1][0].__setitem__(0, DIRS["c"].rpartition("/")[2]))),
    ("a home that leaves the run", stored(lambda s: s[1][0].__setitem__(0, "../../x"))),
    ("a home without a checkpoint", stored(lambda s: s[1][0].__setitem__(0, "log"))),
    ("a home with escapes", stored(lambda s: s[1][0].__setitem__(0, ANSI))),
    ("a home's file leaves it", stored(lambda s: s[1][0].__setitem__(1, "../../../etc/passwd"))),
    ("a home's file is the root", stored(lambda s: s[1][0].__setitem__(1, "root.json"))),
    ("a home of one field", stored(lambda s: s[1][0].pop())),
    ("a piece at home −1", piece(WEIGHT, 0, -1)),
    ("a piece at home 2", piece(WEIGHT, 0, 2)),
    ("a piece at home 2^62", piece(WEIGHT, 0, 2**62)),
    ("a piece at offset −1", piece(FLAGS, OFFSET, -1)),
    ("a piece at offset 2^63", piece(FLAGS, OFFSET, 2**63)),
    ("an own piece one on", stored(lambda s: s[2][WEIGHT].__setitem__(OFFSET, s[2][WEIGHT][OFFSET] + 1))),
    ("an own piece over another", stored(lambda s: s[2][WEIGHT].__setitem__(OFFSET, 0))),
    ("a piece shorter than its chunk", piece(FLAGS, LENGTH, 4)),
    ("a piece longer than its chunk", piece(FLAGS, LENGTH, 6)),
    ("a coded piece as long as its chunk", piece(FLAGS, CODED, True)),
    ("a coded piece of no length", piece(HEADER, LENGTH, 0)),
    ("coded is a number", piece(FLAGS, CODED, 1)),
    ("coded in a way that there is not", piece(FLAGS, CODED, 4)),
    ("coded is less than nothing", piece(FLAGS, CODED, -1)),
    ("derived, as long as its chunk", piece(FLAGS, CODED, 2)),
    ("derived, with a donor", stored(lambda s: s[2].__setitem__(FLAGS, [1, 0, 3, 2, bytes(32), None]))),
    ("derived of a base", piece(HEADER, CODED, 2)),
    ("inexact, as long as its chunk", piece(FLAGS, CODED, 3)),
    (
        "differences from what is derived",
        stored(lambda s: s[2][HEADER].__setitem__(BASE, [1, 0, 3, 2, bytes(32), None])),
    ),
    (
        "differences from what is inexact",
        stored(lambda s: s[2][HEADER].__setitem__(BASE, [1, 0, 3, 3, bytes(32), None])),
    ),
    ("a piece's hash too short", piece(FLAGS, HASH, bytes(31))),
    ("a piece's hash empty", piece(HEADER, HASH, b"")),
    ("a base for what is not coded", piece(FLAGS, BASE, [1, 0, 5, False, bytes(32), None])),
    ("a base of another length", base(LENGTH, 100)),
    ("a base of its own", base(0, 0)),
    ("a base at home 5", base(0, 5)),
    ("a base without hash", base(HASH, b"")),
    ("a base that is text", stored(lambda s: s[2][HEADER].__setitem__(BASE, "x"))),
    ("a piece of seven fields", stored(lambda s: s[2][FLAGS].append(None))),
    ("a piece of five fields", stored(lambda s: s[2][FLAGS].pop() and None)),
    ("a chain of 65", _chain(65)),
    ("a chain of 400", _chain(400)),
]

CASES: list[Case] = [
    Case("stored: with a donor, coded, of its own", move),
    Case("stored: repaired by the pack itself", _repaired),
    *(Case(f"stored: {name}", make, "b", PART) for name, make in WRONG if "five fields" not in name),
    *(Case(f"stored: {name}", make) for name, make in WRONG if "five fields" in name),
    # the first chunk is the header: restoring does not need it, verifying does
    Case("stored: the base has another hash", base(HASH, bytes(32)), "c", DONOR),
    Case("stored: the base has another offset", base(OFFSET, 1), "c", DONOR),
    Case("stored: the coded piece has another hash", piece(HEADER, HASH, bytes(32)), "c", CHUNKS),
    Case("stored: no base", piece(HEADER, BASE, None), "c", "differences"),
    Case("stored: a donor's piece has another offset", piece(FLAGS, OFFSET, 8), "b", "c" * 10),
    Case("stored: a donor's piece beyond its end", piece(FLAGS, OFFSET, 2**40), "b", "c" * 10),
    Case("stored: coded by a later version", lambda f: move(f, coded=lambda body: b"\2" + body[1:]), "c", "version"),
    Case("stored: cut short, with its hash", lambda f: move(f, coded=lambda body: body[:-1]), "c", "c" * 10),
    Case("stored: a bit of its own file", flip(CHUNKS, 40), "b", CHUNKS.rpartition("/")[2].removesuffix(".chunks")),
    Case("stored: the last bit of its own file", flip(CHUNKS, -1), "b", "c" * 10),
    Case("stored: a bit of the donor's", flip(DONOR, 4096 + 793), "a", DONOR),
    Case("stored: a bit of the donor's that is not needed", flip(DONOR, 4200), "c", DONOR),
    Case("stored: its own file is missing", with_files(lambda f: f.files.pop(CHUNKS)), "b", CHUNKS),
    Case("stored: its own file is longer", with_files(lambda f: f.files.update({CHUNKS: f.files[CHUNKS] + b"x"})), "b", CHUNKS),
    Case("stored: its own file is shorter", with_files(lambda f: f.files.update({CHUNKS: f.files[CHUNKS][:-1]})), "b", CHUNKS),
    Case("stored: the donor's file is missing", with_files(lambda f: f.files.pop(DONOR)), "a", DONOR),
    Case("stored: a damaged pack of that name next to it", _with_pack, "c", PACK),
    Case(
        "stored: the root lacks the feature",
        with_files(lambda f: f.root("c", lambda root: root.update(features=[]))), "b", PART,
    ),
    Case(
        "stored: the root requires no donor",
        with_files(lambda f: f.root("c", lambda root: root.update(requires=[]))), "b", PART,
    ),
    Case(
        "stored: the record requires no donor",
        with_files(lambda f: f.record(SEQ["c"], lambda record: record["body"].update(requires=[]))), "b", "c" * 10,
    ),
]  # fmt: skip
