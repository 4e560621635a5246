"""Which key of a table an error is about, found by trying: without it the error is another, or it alone makes the same. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from relight.errors import ConfigError

Keys = tuple[str, ...]
_LEAVES_MAX = 400
_DEPTH_MAX = 6


def leaves(table: Mapping[str, Any], above: Keys = ()) -> Iterator[Keys]:
    """Paths of all that is no table, and of tables that are empty or very deep."""
    for name, value in table.items():
        here = (*above, name)
        if isinstance(value, dict) and value and len(here) < _DEPTH_MAX:
            yield from leaves(value, here)
        else:
            yield here


def value_at(table: Mapping[str, Any], keys: Keys) -> Any:
    """What is there; None if nothing is."""
    at: Any = table
    for key in keys:
        if not isinstance(at, Mapping) or key not in at:
            return None
        at = at[key]
    return at


def without(table: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """The table but for that; tables that are empty then go too."""
    rest = dict(table)
    if len(keys) == 1:
        rest.pop(keys[0], None)
    elif isinstance(rest.get(keys[0]), dict):
        below = without(rest[keys[0]], keys[1:])
        rest[keys[0]] = below
        if not below:
            del rest[keys[0]]
    return rest


def only(keys: Keys, value: Any) -> dict[str, Any]:
    """A table with that alone."""
    for key in reversed(keys):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def culprit(table: Mapping[str, Any], make: Callable[[dict[str, Any]], object], what: str) -> Keys:
    """The path of what makes ``make`` raise an error that says ``what``; empty if that is not to be found."""

    def said(part: dict[str, Any]) -> str:
        try:
            make(part)
        except ConfigError as error:
            return error.what
        return ""

    all_of = list(leaves(table))
    if len(all_of) > _LEAVES_MAX:
        return ()
    for keys in all_of:
        if said(only(keys, value_at(table, keys))) == what:
            return next((keys[:n] for n in range(1, len(keys)) if said(only(keys[:n], {})) == what), keys)
    return next((keys for keys in all_of if said(without(table, keys)) != what), ())


def faults(table: Mapping[str, Any], make: Callable[[dict[str, Any]], object], most: int = 50) -> Iterator[tuple[Keys, ConfigError]]:
    """Every error there is: what is to blame for one is left out, to find the next."""
    rest = dict(table)
    for _ in range(most):
        try:
            make(rest)
            return
        except ConfigError as error:
            keys = culprit(rest, make, error.what)
            yield keys, error
            if not keys:
                return
            rest = without(rest, keys)
