"""Find the key of a table that causes an error. An error of a struct has its path. That of another check is found by
trial: the key alone causes the same error, or without it the error changes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from relight.errors import ConfigError

Keys = tuple[str, ...]
_LEAVES_MAX = 400
_DEPTH_MAX = 6


class InvalidSetting(ConfigError):
    """A value that its struct does not allow. ``keys``: its path within the table."""

    def __init__(self, what: str, keys: Keys, *, where: str = "", hint: str = "") -> None:
        super().__init__(what, where=where, hint=hint)
        self.keys = keys


def leaves(table: Mapping[str, Any], above: Keys = ()) -> Iterator[Keys]:
    """Yield the paths of all values that are not tables, and of tables that are empty or very deep."""
    for name, value in table.items():
        here = (*above, name)
        if isinstance(value, dict) and value and len(here) < _DEPTH_MAX:
            yield from leaves(value, here)
        else:
            yield here


def value_at(table: Mapping[str, Any], keys: Keys) -> Any:
    """Return the value at a path; None if there is none."""
    value: Any = table
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def without(table: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Return the table without the value at a path. Tables that become empty are removed too."""
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
    """Return a table that has only this value, at that path."""
    for key in reversed(keys):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def culprit(table: Mapping[str, Any], make: Callable[[dict[str, Any]], object], error: ConfigError) -> Keys:
    """Return the path of the value for which ``make`` raised ``error``; empty if it cannot be found."""
    if isinstance(error, InvalidSetting):
        return error.keys
    what = error.what

    def error_text(part: dict[str, Any]) -> str:
        try:
            make(part)
        except ConfigError as error:
            return error.what
        return ""

    all_of = list(leaves(table))
    if len(all_of) > _LEAVES_MAX:
        return ()
    for keys in all_of:
        if error_text(only(keys, value_at(table, keys))) == what:
            return next((keys[:n] for n in range(1, len(keys)) if error_text(only(keys[:n], {})) == what), keys)
    return next((keys for keys in all_of if error_text(without(table, keys)) != what), ())


def faults(
    table: Mapping[str, Any], make: Callable[[dict[str, Any]], object], most: int = 50
) -> Iterator[tuple[Keys, ConfigError]]:
    """Yield every error with its path, up to ``most``. Each culprit is removed to find the next error."""
    rest = dict(table)
    for _ in range(most):
        try:
            make(rest)
            return
        except ConfigError as error:
            keys = culprit(rest, make, error)
            yield keys, error
            if not keys:
                return
            rest = without(rest, keys)
