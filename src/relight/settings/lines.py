"""In which line of a TOML text each key stands. The text is valid; it is parsed again, a statement at a time. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

Keys = tuple[str, ...]
_WORK_MAX = 2 << 20
"""Characters that are parsed at most, statements that go over many lines several times: what stands behind has no place."""
_CLOSERS = ("]", "}", '"""', "'''")


def places(text: str) -> dict[Keys, tuple[int, int]]:
    """Line and column, from 1 on, of the statement that each key is in; those of a table are its heading's, or its first key's."""
    found: dict[Keys, tuple[int, int]] = {}
    under: Keys = ()
    for line, column, is_heading, told in _statements(text):
        if is_heading:
            under = _heading(told)
            keys = [under]
        else:
            keys = [under + one for one in _paths(told)]
        for one in keys:
            for n in range(1, len(one) + 1):
                found.setdefault(one[:n], (line, column))
        if is_heading:
            found[under] = (line, column)
    return found


def _statements(text: str) -> Iterator[tuple[int, int, bool, dict[str, Any]]]:
    """A statement ends where what was read of it parses by itself: one that is cut off within never does."""
    begun, start, work = "", 0, 0
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not begun and (not line.strip() or line.lstrip().startswith("#")):
            continue
        start = start if begun else number
        several = bool(begun)
        begun += line + "\n"
        if several and not any(one in line for one in _CLOSERS):
            continue
        work += len(begun)
        if work > _WORK_MAX:
            return
        try:
            told = tomllib.loads(begun)
        except (tomllib.TOMLDecodeError, RecursionError, ValueError):
            continue
        first = begun.split("\n", 1)[0]
        yield start, len(first) - len(first.lstrip()) + 1, first.lstrip().startswith("["), told
        begun = ""


def _heading(told: dict[str, Any]) -> Keys:
    keys: Keys = ()
    at: Any = told
    while isinstance(at, (dict, list)) and at:
        if isinstance(at, list):
            at = at[0]
            continue
        name = next(iter(at))
        keys, at = (*keys, name), at[name]
    return keys


def _paths(told: dict[str, Any], above: Keys = ()) -> Iterator[Keys]:
    for name, value in told.items():
        here = (*above, name)
        yield here
        if isinstance(value, dict) and len(here) < 8:
            yield from _paths(value, here)
