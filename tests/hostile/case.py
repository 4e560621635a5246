"""A hostile store, as one line of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forge import DIRS, SEQ, Forge, record_key


@dataclass(frozen=True)
class Case:
    """``make`` forges the files, ``after`` the directory they were written to."""

    name: str
    make: Callable[[Forge], object] = lambda forge: None
    newest: str | None = "c"
    """The letter a restore must then take: ``c`` is the newest, ``b`` the one before it, None if the run must be refused."""
    named: str = ""
    """Text that the error must have: most often the file."""
    after: Callable[[Path], object] | None = None
    resumes: bool = True
    """Whether a new attempt can begin and save."""


BOMBS: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("one zero byte", b"\0"),
    ("null", b"null"),
    ("a list", b"[]"),
    ("an empty object", b"{}"),
    ("a number", b"5"),
    ("nested 100,000 deep", b"[" * 100_000),
    ("nested 60,000 deep and closed", b"[" * 60_000 + b"]" * 60_000),
    ("objects nested 40,000 deep", b'{"a":' * 40_000 + b"1" + b"}" * 40_000),
    ("nested 33 deep", b'{"a":' * 33 + b"1" + b"}" * 33),
    ("50 MB of spaces", b" " * 50_000_000),
    ("a million spaces", b" " * 1_000_000 + b"{}"),
    ("NaN", b'{"a":NaN}'),
    ("Infinity", b'{"a":-Infinity}'),
    ("1e999", b'{"a":1e999}'),
    ("an integer of 5,000 digits", b'{"a":' + b"9" * 5000 + b"}"),
    ("two hundred integers of 4,300 digits", b'{"a":[' + b",".join([b"9" * 4300] * 200) + b"]}"),
    ("a byte order mark", b'\xef\xbb\xbf{"a":1}'),
    ("UTF-16", '{"a":1}'.encode("utf-16")),
    ("UTF-32", '{"a":1}'.encode("utf-32-le")),
    ("invalid UTF-8", b'{"a":"\xff\xfe"}'),
    ("an encoded surrogate", b'{"a":"\xed\xa0\x80"}'),
    ("an escaped lone surrogate as key", b'{"\\ud800":1}'),
    ("60,000 empty objects", b'{"a":[' + b",".join([b"{}"] * 60_000) + b"]}"),
    ("a trailing comma", b'{"a":1,}'),
    ("two values", b'{"a":1}{"a":1}'),
    ("a comment", b'{"a":1/**/}'),
    ("single quotes", b"{'a':1}"),
    ("a raw control character", b'{"a":"\x1b"}'),
    ("cut short", b'{"a":'),
]
"""What stands where one JSON object should."""


def part_of(letter: str) -> str:
    """Return the key of a checkpoint's part."""
    return f"{DIRS[letter]}/part-00000.msgpack"


def pack_of(letter: str) -> str:
    """Return the key of a checkpoint's pack."""
    return f"{DIRS[letter]}/pack-00000-000.safetensors"


def root_of(letter: str) -> str:
    """Return the key of a checkpoint's root."""
    return f"{DIRS[letter]}/root.json"


NEWEST_RECORD = record_key(SEQ["c"])
