"""Run names as people give them, and the directory of each: one reversible rule, in ASCII that every store and URL takes.

A plain name (A–Z a–z 0–9 . _ -, not starting with a dot or a dash) is its own directory. Every other name gets ``_-`` and its ASCII
characters: letters, digits, ``.``, ``-`` and ``_`` stay, all else becomes ``_`` and two hexadecimal digits, as does a ``_`` which two such
digits or a ``-`` follow. Other letters follow after a further ``_-``, as the deltas of Punycode (RFC 3492). Names are NFC first.
"""

from __future__ import annotations

import json
import re
import unicodedata

NAME_BYTES_MAX = 200
"""Bytes of a run's name in UTF-8."""
DIR_BYTES_MAX = 255
"""Bytes of a directory's name: the limit of ext4, XFS, NFS and most others."""
PREFIX = "_-"

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}\Z")
_OTHER = re.compile(r"[^A-Za-z0-9._-]|_(?=[0-9a-f]{2}|-)")
_ESCAPE = re.compile(r"_([0-9a-f]{2})")
_TOKEN = re.compile(r"(?<![A-Za-z0-9._-])_-[A-Za-z0-9._-]+")


def is_dir(directory: str) -> bool:
    """Whether ``directory`` may be a run's directory."""
    return _PLAIN.match(directory) is not None and directory != "log"


def run_dir(name: str) -> str:
    """Return the directory of run ``name``; a directory's own name is returned unchanged. ``ValueError`` says why there is none."""
    if _PLAIN.match(name):
        if name == "log":
            raise ValueError("'log' is the directory of a run's log")
        if len(name) > NAME_BYTES_MAX and run_name(name) == name:
            raise ValueError(f"it is {len(name)} bytes long, and {NAME_BYTES_MAX} are possible")
        return name
    name = unicodedata.normalize("NFC", name)
    if reason := _why_not(name):
        raise ValueError(reason)
    if len(name.encode()) > NAME_BYTES_MAX:
        raise ValueError(f"it is {len(name.encode())} bytes long, and {NAME_BYTES_MAX} are possible")
    if _PLAIN.match(name):  # what is plain once it is normalised
        return name
    directory = _escaped(name)
    if len(directory) > DIR_BYTES_MAX:
        raise ValueError(
            f"its directory would be {len(directory)} bytes long, and {DIR_BYTES_MAX} are possible: "
            "each character other than letters, digits, '.', '_' and '-' takes three"
        )
    return directory


def dir_of(name: str) -> str:
    """Return the directory of run ``name``; ``name`` unchanged if no run may have that name."""
    try:
        return run_dir(name)
    except ValueError:
        return name


def run_name(directory: str) -> str:
    """Return the name that a run's directory stands for; ``directory`` itself if it is no escaped name."""
    if not directory.startswith(PREFIX):
        return directory
    basic, mark, deltas = directory[len(PREFIX) :].partition(PREFIX)
    text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), basic)
    if mark:
        try:
            text = (f"{text}-{deltas}" if text else deltas).encode("ascii").decode("punycode")
        except (ValueError, OverflowError):  # among them UnicodeError
            return directory
    if (
        _why_not(text)
        or _PLAIN.match(text)
        or not unicodedata.is_normalized("NFC", text)
        or _escaped(text) != directory
    ):
        return directory
    return text


def shown(text: str) -> str:
    """``text`` with the name of each run for its directory: for messages and listings, which people read."""
    return _TOKEN.sub(_named, text) if PREFIX in text else text


def shown_json(data: bytes) -> bytes:
    """JSON ``data`` with the name of each run for its directory."""
    if PREFIX.encode() not in data:
        return data
    return _TOKEN.sub(lambda match: json.dumps(_named(match))[1:-1], data.decode()).encode()


def _named(match: re.Match[str]) -> str:
    token = match[0]
    body = token.rstrip(".-")  # what ends a sentence
    for one in (token, body):
        if (name := run_name(one)) != one:
            return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name) + token[len(one) :]
    return token


def _escaped(name: str) -> str:
    if name.isascii():
        return PREFIX + _basic(name)
    code = name.encode("punycode").decode("ascii")
    basic, _, deltas = code.rpartition("-")
    return f"{PREFIX}{_basic(basic)}{PREFIX}{deltas}"


def _basic(text: str) -> str:
    return _OTHER.sub(lambda match: f"_{ord(match[0]):02x}", text)


def _why_not(name: str) -> str:
    if not name:
        return "it is empty"
    if name[0] in ".-":
        return "it starts with a dot or a dash"
    if name[0] == " " or name[-1] == " ":
        return "it starts or ends with a space"
    for character in name:
        if character == "/":
            return "it has a slash, which separates the store from the run"
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            return f"it has the control character U+{ord(character):04X}"
    return ""
