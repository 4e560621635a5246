"""Line and column of each key of a valid TOML text, which is parsed again one statement at a time. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Keys = tuple[str, ...]
_WORK_MAX = 2 << 20
"""Most characters to parse; a statement of several lines counts once for each try. Keys after that limit have no
position."""
_CLOSERS = ("]", "}", '"""', "'''")


def places(text: str) -> dict[Keys, tuple[int, int]]:
    """Return line and column, from 1, of each key's statement. A table has the position of its heading, or of its first
    key."""
    positions: dict[Keys, tuple[int, int]] = {}
    under: Keys = ()
    for line, column, is_heading, statement in _statements(text):
        if is_heading:
            under = _heading(statement)
            keys = [under]
        else:
            keys = [under + below for below in _paths(statement)]
        for path in keys:
            for n in range(1, len(path) + 1):
                positions.setdefault(path[:n], (line, column))
        if is_heading:
            positions[under] = (line, column)
    return positions


def _statements(text: str) -> Iterator[tuple[int, int, bool, dict[str, Any]]]:
    """Yield each statement: line, column, whether it is a heading, and its parsed content. A statement ends at the
    first line at which it parses: an incomplete one never does."""
    import tomllib

    begun, start, work = "", 0, 0
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not begun and (not line.strip() or line.lstrip().startswith("#")):
            continue
        start = start if begun else number
        several = bool(begun)
        begun += line + "\n"
        if several and not any(closer in line for closer in _CLOSERS):
            continue
        work += len(begun)
        if work > _WORK_MAX:
            return
        try:
            content = tomllib.loads(begun)
        except (tomllib.TOMLDecodeError, RecursionError, ValueError):
            continue
        first = begun.split("\n", 1)[0]
        yield start, len(first) - len(first.lstrip()) + 1, first.lstrip().startswith("["), content
        begun = ""


def _heading(statement: dict[str, Any]) -> Keys:
    keys: Keys = ()
    below: Any = statement
    while isinstance(below, (dict, list)) and below:
        if isinstance(below, list):
            below = below[0]
            continue
        name = next(iter(below))
        keys, below = (*keys, name), below[name]
    return keys


def _paths(statement: dict[str, Any], above: Keys = ()) -> Iterator[Keys]:
    for name, value in statement.items():
        here = (*above, name)
        yield here
        if isinstance(value, dict) and len(here) < 8:
            yield from _paths(value, here)
