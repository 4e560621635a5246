"""Values of the standard library, torch and NumPy that are restored as their own type: paths, dates, decimals and so on.

The types are in fixed tables. No class is found by a stored name, and a subclass is never taken for its base.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import torch

from relight.format import Leaf
from relight.format.tree import DIGITS_MAX

KIND = "standard"
"""Kind of the leaves. Their ``meta`` is ``(name, content)``, and the content is a plain value."""
_TEXT_MAX = 4096
_LAYOUTS = {name: value for name, value in vars(torch).items() if type(value) is torch.layout}
_MEMORY_FORMATS = {name: value for name, value in vars(torch).items() if type(value) is torch.memory_format}


class Unstorable(ValueError):
    """A value of a known type that cannot be stored. The text has the reason, and what to pass instead."""


class _StandardType(NamedTuple):
    kind: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _TEXT_MAX:
        raise ValueError("not a short text")
    return value


def _path(value: PurePath) -> str:
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unstorable("a path with bytes that are not Unicode: pass os.fsencode() of it") from None
    if len(text) > _TEXT_MAX:
        raise Unstorable(f"a path of more than {_TEXT_MAX} characters")
    return text


def _zone(value: tzinfo | None) -> Any:
    """Return None, the name of a time zone, or seconds, microseconds and name of a fixed offset."""
    if value is None:
        return None
    if type(value) is timezone:
        offset, name = value.utcoffset(None), value.tzname(None)
        return offset.days * 86400 + offset.seconds, offset.microseconds, name
    if type(value) is ZoneInfo and value.key is not None:
        return value.key
    kind = type(value)
    raise Unstorable(f"a time zone of class {kind.__module__}.{kind.__qualname__}: pass .astimezone(timezone.utc)")


def _to_zone(value: Any) -> tzinfo | None:
    if value is None:
        return None
    if type(value) is str:
        try:
            return ZoneInfo(_text(value))
        except (ZoneInfoNotFoundError, OSError) as error:
            raise ValueError(f"this machine does not know the time zone {value[:80]!r}") from error
    seconds, microseconds, name = value
    offset = timedelta(seconds=_int(seconds), microseconds=_int(microseconds))
    plain = timezone(offset)
    return plain if plain.tzname(None) == name else timezone(offset, _text(name))


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("not an integer")
    return value


def _numbers(value: Any, count: int) -> list[int]:
    if type(value) is not tuple or len(value) != count:
        raise ValueError(f"not {count} integers")
    return [_int(number) for number in value]


def _decimal(value: Decimal) -> str:
    text = str(value)
    if len(text) > DIGITS_MAX:
        raise Unstorable(f"a Decimal of more than {DIGITS_MAX} digits: pass str() of it")
    return text


def _slice(value: slice) -> tuple[Any, Any, Any]:
    parts = value.start, value.stop, value.step
    if any(part is not None and type(part) is not int for part in parts):
        raise Unstorable("a slice with bounds that are not integers")
    return parts


def _to_slice(value: Any) -> slice:
    if type(value) is not tuple or len(value) != 3 or any(part is not None and type(part) is not int for part in value):
        raise ValueError("not the bounds of a slice")
    return slice(*value)


def _moment(value: datetime) -> tuple[str, int, Any]:
    return value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _zone(value.tzinfo)


def _to_moment(value: Any) -> datetime:
    text, fold, zone = value
    return datetime.fromisoformat(_text(text)).replace(fold=_int(fold), tzinfo=_to_zone(zone))


def _clock(value: time) -> tuple[str, int, Any]:
    return value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _zone(value.tzinfo)


def _to_clock(value: Any) -> time:
    text, fold, zone = value
    return time.fromisoformat(_text(text)).replace(fold=_int(fold), tzinfo=_to_zone(zone))


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise TypeError("not bytes")
    return value


_TYPES = (
    *(_StandardType(kind, "path", _path, lambda value: Path(_text(value))) for kind in (PosixPath, WindowsPath)),
    _StandardType(PurePosixPath, "posix path", _path, lambda value: PurePosixPath(_text(value))),
    _StandardType(PureWindowsPath, "windows path", _path, lambda value: PureWindowsPath(_text(value))),
    _StandardType(datetime, "datetime", _moment, _to_moment),
    _StandardType(date, "date", date.isoformat, lambda value: date.fromisoformat(_text(value))),
    _StandardType(time, "time", _clock, _to_clock),
    _StandardType(
        timedelta,
        "timedelta",
        lambda value: (value.days, value.seconds, value.microseconds),
        lambda value: timedelta(*_numbers(value, 3)),
    ),
    _StandardType(timezone, "timezone", _zone, _to_zone),
    _StandardType(ZoneInfo, "time zone", _zone, _to_zone),
    _StandardType(Decimal, "decimal", _decimal, lambda value: Decimal(_text(value))),
    _StandardType(
        Fraction,
        "fraction",
        lambda value: (value.numerator, value.denominator),
        lambda value: Fraction(*_numbers(value, 2)),
    ),
    _StandardType(UUID, "uuid", lambda value: value.bytes, lambda value: UUID(bytes=_bytes(value))),
    _StandardType(
        range, "range", lambda value: (value.start, value.stop, value.step), lambda value: range(*_numbers(value, 3))
    ),
    _StandardType(slice, "slice", _slice, _to_slice),
    _StandardType(bytearray, "bytearray", bytes, lambda value: bytearray(_bytes(value))),
    _StandardType(
        torch.layout, "torch layout", lambda value: str(value).removeprefix("torch."), lambda value: _LAYOUTS[value]
    ),
    _StandardType(
        torch.memory_format,
        "torch memory format",
        lambda value: str(value).removeprefix("torch."),
        lambda value: _MEMORY_FORMATS[value],
    ),
)
_BY_TYPE = {entry.kind: entry for entry in _TYPES}
_BY_NAME = {entry.name: entry for entry in _TYPES}
NAMES = tuple(sorted({f"{kind.__module__.removeprefix('_')}.{kind.__qualname__}" for kind in _BY_TYPE}))
"""The types, for pages and tests."""


def standard_leaf(value: Any) -> Leaf | None:
    """Return the leaf of a value of a type in the table; None for other types. Raise ``Unstorable``."""
    entry = _BY_TYPE.get(type(value))
    if entry is not None:
        return Leaf(KIND, (), (entry.name, entry.encode(value)))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.dtype):
        if value.hasobject or value.fields is not None or value.subdtype is not None:
            raise Unstorable("a NumPy dtype with fields, or of objects: pass str() of it")
        return Leaf(KIND, (), ("numpy dtype", value.str))
    return None


def standard_value(meta: Any) -> Any:
    """Return the value of a leaf's ``meta``. Raise ``ValueError`` or ``TypeError`` for anything malformed."""
    name, content = meta
    if name == "numpy dtype":
        import numpy as np

        dtype = np.dtype(_text(content)[:64])
        if dtype.hasobject or dtype.fields is not None:
            raise ValueError("not a plain dtype")
        return dtype
    if type(name) is not str or name not in _BY_NAME:
        raise ValueError(f"a type that this Relight does not know: {str(name)[:40]!r}")
    return _BY_NAME[name].decode(content)
