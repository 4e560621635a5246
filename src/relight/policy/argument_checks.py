"""Check argument values: times, sizes and numbers as people write them, names and choices."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args, get_origin

from msgspec.structs import FieldInfo

from relight.errors import ConfigError, shown
from relight.settings.amounts import bytes_of, float_of, rate_of, seconds_of
from relight.settings.kinds import SettingsTable, fields_of
from relight.settings.validation import fits
from relight.units import parse_count, parse_duration, parse_rate, parse_size


def checked_arguments(
    table: type[SettingsTable], given: Mapping[str, Any], what: str = "{}", required: Collection[str] = ()
) -> dict[str, Any]:
    """Return arguments that are also settings of a table, checked by its types: times in seconds, sizes in bytes, and the
    numbers of other packages as int and float. Values of other types are unchanged.

    ``what`` has braces for the name in errors. ``required``: arguments that may not be None.
    """
    return {
        field.name: None
        if given[field.name] is None and field.name not in required
        else _checked(table, field, given[field.name], what.format(field.name))
        for field in fields_of(table).values()
        if field.name in given
    }


def _checked(table: type[SettingsTable], field: FieldInfo, value: Any, what: str) -> Any:
    base, bounds = field.type.__origin__, field.type.__metadata__[0]
    words = bounds.extra
    if words["parse"] is parse_duration:
        return seconds_of(value, what)
    if words["parse"] is parse_rate:
        return rate_of(value, what)
    if words["parse"] is parse_size:
        return bytes_of(value, what, least=1 if bounds.ge is None else bounds.ge)
    if base is int:
        return whole_of(value, what, least=bounds.ge, most=bounds.le)
    if base is bool:
        return check_bool(value, what)
    if get_origin(base) is Literal:
        return one_of(value, get_args(base), what)
    if base is float and not fits(number := float_of(value), field, table):
        raise ConfigError(f"{what} must be {words['kind']}, not {shown(value)}", hint=words["hint"])
    return number if base is float else value


def number_above_0(value: Any, what: str) -> float:
    """Return ``value`` as a finite float above 0. ``what`` names the argument in the error."""
    number = float_of(value)
    if not 0 < number < math.inf:
        raise ConfigError(f"{what} must be a number above 0, not {shown(value)}")
    return number


def share_of(value: Any, what: str, hint: str = "") -> float:
    """Return ``value`` as a float between 0 and 1, both excluded."""
    share = float_of(value)
    if not 0 < share < 1:
        raise ConfigError(f"{what} must be a share between 0 and 1, not {shown(value)}", hint=hint)
    return share


def whole_of(value: Any, what: str, *, least: int = 1, most: int | None = None) -> int:
    """Return ``value`` as an int in a range. It may be an int, a NumPy integer, or anything with ``__index__``, but not
    a bool."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        bounds = f"from {least} up" if most is None else f"from {least} to {most}"
        hint = f"write {int(value)}" if isinstance(value, float) and value.is_integer() and value >= least else ""
        raise ConfigError(f"{what} must be a whole number {bounds}, not {shown(value)}", hint=hint)
    return number


def check_bool(value: Any, what: str) -> bool:
    """Return ``value`` if it is True or False, else raise ``ConfigError``: ``"no"`` would count as True."""
    if not isinstance(value, bool):
        raise ConfigError(f"{what} must be True or False, not {shown(value)}")
    return value


def one_of(value: Any, among: Collection[str], what: str) -> str:
    """Return ``value`` if it is one of ``among``, else raise ``ConfigError``."""
    if not isinstance(value, str) or value not in among:
        raise ConfigError(f"{what} must be {' or '.join(map(repr, among))}, not {shown(value)}")
    return value


def name_of(value: Any, what: str) -> str:
    """Return ``value`` if it is a text that can name a metric, else raise ``ConfigError``."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{what} must be the name of a metric that step() is given, not {shown(value)}")
    return value


def number_of(amount: str | int, what: str) -> int:
    """Return the number of ``"8B"``, ``"1.3T"``, ``"124M"``, or a whole number. ``what`` names the argument in the
    error."""
    number = parse_count(str(amount)[:40]) or 0.0
    if not 1 <= number <= 1e16:
        raise ConfigError(
            f"{what} must be a number such as '8B' or '1.3T', not {str(amount)[:40]!r}", hint="units: k M B T"
        )
    return round(number)
