"""Check a table of ``relight.toml`` by its struct: every mistake with its path. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args

import msgspec
from msgspec.structs import FieldInfo

from relight.decode import from_plain
from relight.errors import shown
from relight.settings.error_location import InvalidSetting, Keys
from relight.settings.kinds import SettingsTable, fields_of
from relight.settings.registry import nearest, subtable
from relight.units import parse_size

Table = TypeVar("Table", bound=SettingsTable)


def decode(table: object, kind: type[Table], name: str, where: str = "") -> Table:
    """Return the table as its struct. Raise ``InvalidSetting`` for the first mistake. ``name``: the table's name."""
    for error in mistakes(table, kind, name, where):
        raise error
    return from_plain(_with_defaults(_in_numbers(table, kind), kind()), kind)  # type: ignore[arg-type]


def mistakes(
    table: object, kind: type[SettingsTable], name: str, where: str, above: Keys = ()
) -> Iterator[InvalidSetting]:
    """Yield every mistake of a table."""
    fields = fields_of(kind)
    if not isinstance(table, Mapping):
        yield InvalidSetting(f"[{name}] is a table", above, where=where, hint=f"it has {', '.join(fields)}")
        return
    for key, value in table.items():
        keys = (*above, key)
        if key not in fields:
            yield unknown_key(kind, name, key, where, above)
        elif (below := subtable(fields[key])) is not None:
            yield from mistakes(value, below, f"{name}.{key}", where, keys)
        else:
            yield from _mistakes_of_value(value, fields[key], kind, name, where, keys)


def unknown_key(kind: type[SettingsTable], name: str, key: str, where: str, above: Keys = ()) -> InvalidSetting:
    """Return the error for a key that the table does not have."""
    close = nearest(f"{name}.{key[:80]}")
    similar = close.rpartition(".")[0] == name
    hint = f"did you mean {close}?" if similar else f"it has {', '.join(kind.__struct_fields__)}"
    return InvalidSetting(f"[{name}] has no {shown(key)}", (*above, key), where=where, hint=hint)


def _mistakes_of_value(
    value: object, field: FieldInfo, kind: type[SettingsTable], name: str, where: str, keys: Keys
) -> Iterator[InvalidSetting]:
    tables = _tables_of(field)
    if tables is not None and isinstance(value, Mapping):
        for key, below in value.items():
            yield from mistakes(below, tables, f"{name}.{field.name}.{key}", where, (*keys, key))
    elif not fits(value, field, kind):
        values, own = field.type.__metadata__[0].extra, field.type.__metadata__[-1].extra
        part = (
            next((key for key in value if not fits({key: value[key]}, field, kind)), "")
            if isinstance(value, Mapping)
            else ""
        )
        if part:
            keys, value = (*keys, part), value[part]  # type: ignore[index]
        what = "" if own["secret"] else f", not {_shown(value)}{f' for {part!r}' if part else ''}"
        yield InvalidSetting(
            f"[{name}] {field.name} must be {values['kind']}{what}", keys, where=where, hint=values["hint"]
        )


def fits(value: object, field: FieldInfo, kind: type[SettingsTable]) -> bool:
    """Return whether a field of the struct may have the value."""
    number = in_number(value, field)
    if number is None or (isinstance(number, float) and not math.isfinite(number)):
        return False
    try:
        from_plain({field.name: number}, kind)
    except msgspec.ValidationError:
        return False
    return True


def in_number(value: Any, field: FieldInfo) -> Any:
    """Return the number of a text such as ``10m`` or ``16GB``, if it is a time, size or rate; None for a text that is not one.

    Any other value is returned unchanged.
    """
    parse = field.type.__metadata__[0].extra["parse"]
    if parse is None or not isinstance(value, str):
        return value
    number = parse(value)
    return int(number) if number is not None and parse is parse_size else number


def _in_numbers(table: Mapping[str, Any], kind: type[SettingsTable]) -> dict[str, Any]:
    """Return a valid table with its times, sizes and rates as numbers, so that the struct's readers need not parse them."""
    fields = fields_of(kind)
    return {key: _number_or_table(value, fields[key]) for key, value in table.items()}


def _number_or_table(value: Any, field: FieldInfo) -> Any:
    if (below := subtable(field)) is not None:
        return _in_numbers(value, below)
    if (tables := _tables_of(field)) is not None:
        return {name: _in_numbers(each, tables) for name, each in value.items()}
    return in_number(value, field)


def _tables_of(field: FieldInfo) -> type[SettingsTable] | None:
    """Return the struct of each table of a field that has tables by name; None for another field."""
    inner = get_args(get_args(field.type)[0])
    is_table = len(inner) == 2 and isinstance(inner[1], type) and issubclass(inner[1], SettingsTable)
    return inner[1] if is_table else None


def _with_defaults(table: Mapping[str, Any], defaults: Any) -> dict[str, Any]:
    """Return the table with defaults for missing keys of its subtables: those of the field, not of the subtable's struct."""
    whole = dict(table)
    for key, value in table.items():
        below = getattr(defaults, key)
        if isinstance(below, SettingsTable):
            whole[key] = {**msgspec.to_builtins(below), **_with_defaults(value, below)}
    return whole


def _shown(value: object) -> str:
    """Return a value for a message, without what an address may contain."""
    return re.sub(r"://[^\s'\"]+", "://…", shown(value))
