"""The key of a table that causes an error. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from relight.errors import ConfigError

Keys = tuple[str, ...]


class InvalidSetting(ConfigError):
    """A value that a table may not have. ``keys``: its path within the table."""

    def __init__(self, what: str, keys: Keys, *, where: str = "", hint: str = "") -> None:
        super().__init__(what, where=where, hint=hint)
        self.keys = keys


@contextmanager
def located(table: Mapping[str, Any], above: Keys, where: str, prefix: str = "") -> Iterator[None]:
    """Raise a ``ConfigError`` of the code that uses the values of a table as an error of the key that its text names.

    ``above``: the path of the table; also the path of the error if its text names no key.
    """
    try:
        yield
    except ConfigError as error:
        keys = (*above, *_named_in(table, f"{error.what} {error.where}"))
        raise InvalidSetting(prefix + error.what, keys, where=where, hint=error.hint) from None


def _named_in(table: Mapping[str, Any], text: str) -> Keys:
    """Return the path of the first key that a text names. Keys of subtables, and texts in them, come first."""
    for key, below in table.items():
        for name, value in below.items() if isinstance(below, Mapping) else ():
            if re.search(rf"\b{re.escape(name)}(?!\w)", text) or (isinstance(value, str) and repr(value) in text):
                return key, name
    return next(((key,) for key in table if re.search(rf"\b{re.escape(key)}\b", text)), ())


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


def faults(
    table: Mapping[str, Any], make: Callable[[dict[str, Any]], object], most: int = 50
) -> Iterator[tuple[Keys, ConfigError]]:
    """Yield every error of ``make`` with its path, up to ``most``. Each invalid value is removed to find the next one."""
    rest = dict(table)
    for _ in range(most):
        try:
            make(rest)
            return
        except InvalidSetting as error:
            yield error.keys, error
            if not error.keys:
                return
            rest = without(rest, error.keys)
