"""Types of settings' values. Each has its bounds, and the words that state them. Data only."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

from relight.units import parse_duration, parse_rate, parse_size

DAY_S = 86400
NOT_SET: Any = msgspec.UNSET
"""Default of a setting for which the code computes the default, or uses none."""


class SettingsTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the structs that describe tables of ``relight.toml``."""


@cache
def fields_of(table: type[SettingsTable]) -> dict[str, FieldInfo]:
    """Return the fields of a struct by name. They are kept, because to evaluate the annotations takes a millisecond."""
    return {field.name: field for field in msgspec.structs.fields(table)}


def about(
    doc: str, default: str = "", *, argument: str = "", variable: str = "", secret: bool = False, named: bool = False
) -> Meta:
    """Return a setting's description.

    ``default``: the default in words, if it is computed. ``argument``: the equivalent keyword argument. ``variable``:
    its variable, if it has another name than the scheme gives. ``secret``: never show the value. ``named``: the
    setting counts only in a named file.
    """
    more = {"default": default, "argument": argument, "variable": variable, "secret": secret, "named": named}
    return Meta(description=doc, extra=more)


def kind(words: str, parse: Any = None, hint: str = "", **bounds: Any) -> Meta:
    """Return the bounds of a type, and the words that state them. ``parse`` returns None for an invalid text. ``hint``: a
    valid value, for errors."""
    return Meta(extra={"kind": words, "parse": parse, "hint": hint}, **bounds)


def choices(type_: Any) -> tuple[str, ...]:
    """Return the words of a type that allows only some."""
    return get_args(get_args(type_)[0])


# fmt: off
YesNo = Annotated[bool, kind("true or false")]
Count = Annotated[int, kind("a whole number from 1 up", ge=1)]
CountFrom0 = Annotated[int, kind("a whole number from 0 up", ge=0)]
UpTo4 = Annotated[int, kind("a whole number from 1 to 4", ge=1, le=4)]
UpTo19 = Annotated[int, kind("a whole number from 1 to 19", ge=1, le=19)]
UpTo32 = Annotated[int, kind("a whole number from 1 to 32", ge=1, le=32)]
NumberFrom0 = Annotated[float, kind("a number from 0 up", ge=0, lt=1e12)]
Above0 = Annotated[float, kind("a number above 0", gt=0)]
UpTo1 = Annotated[float, kind("a number above 0, at most 1", gt=0, le=1)]
UpToDay = Annotated[float, kind("a number from 0 to 86400", ge=0, le=DAY_S)]
Share = Annotated[float, kind("a share between 0 and 1", hint="0.01 is one in a hundred", gt=0, lt=1)]
PauseShare = Annotated[float, kind("a share from 0 to 0.9", ge=0, le=0.9)]
Seconds = Annotated[float, kind('a time above 0: "10m", or seconds', parse_duration, gt=0)]
DaySeconds = Annotated[float, kind('a time of at most a day: "10m", or seconds', parse_duration, ge=0, le=DAY_S)]
DaySecondsAbove0 = Annotated[float, kind('a time above 0, at most a day: "10m", or seconds', parse_duration, gt=0, le=DAY_S)]
MonthSeconds = Annotated[float, kind('a time of at most 30 days: "2h", or seconds', parse_duration, ge=0, le=30 * DAY_S)]
MonthSecondsAbove0 = Annotated[float, kind('a time above 0, at most 30 days: "2h", or seconds', parse_duration, gt=0, le=30 * DAY_S)]
TimeFrom0 = Annotated[float, kind('a time: "1h", or seconds', parse_duration, ge=0, lt=1e12)]
RateAbove0 = Annotated[float, kind('a rate: "200MB", or bytes a second', parse_rate, gt=0)]
Bytes = Annotated[int, kind('a size: "16GB", or bytes', parse_size, ge=0)]
Time = Annotated[str | float, kind('a time: "36h", or seconds', parse_duration)]
SizeAbove0 = Annotated[str | int, kind('a size: "500GB", or bytes', parse_size)]
Severity = Annotated[Literal["info", "warning", "critical"], kind("info, warning or critical")]
TakeoverChoice = Annotated[Literal["ask", "refuse", "take"], kind('"ask", "refuse" or "take"')]
Mode = Annotated[Literal["min", "max"], kind('"min" or "max"')]
WhenBusy = Annotated[Literal["newest", "queue"], kind('"newest" or "queue"')]
Codecs = Annotated[Literal["auto", "never", "always"], kind('"auto", "never" or "always"')]
Coder = Annotated[Literal["cpu", "gpu"], kind('"cpu" or "gpu"')]
Plane = Annotated[Literal["auto", "tcp", "rdma"], kind('"auto", "tcp" or "rdma"')]
LogLevel = Annotated[Literal["quiet", "warnings", "default", "info", "debug"], kind("quiet, warnings, default, info or debug")]
Metric = Annotated[str, kind("a metric's name", min_length=1)]
Component = Annotated[str, kind("a component's name")]
Path = Annotated[str, kind("a path")]
Directory = Annotated[str, kind("a directory")]
DirectoryOr0 = Annotated[str, kind("a directory, or 0", extra_json_schema={"type": ["string", "integer"]})]
Name = Annotated[str, kind("a name")]
Zone = Annotated[str, kind("a name such as Europe/Berlin")]
Address = Annotated[str, kind("an address")]
WebAddress = Annotated[str, kind("an address: https://HOST", pattern=r"^(https?://[!-~]+)?$(?!\n)")]
Store = Annotated[str, kind("a store")]
_Place = Annotated[str, Meta(pattern=r"\S")]
Stores = Annotated[_Place | Annotated[tuple[_Place, ...], Meta(min_length=1)], kind("a store, or a list of stores")]
_OR_LIST = {"type": ["string", "array"], "items": {"type": "string"}}
KeySpecs = Annotated[str, kind("specs, separated by spaces: file:PATH, env:NAME", extra_json_schema=_OR_LIST)]
PublicKeys = Annotated[str, kind("specs, separated by spaces: ed25519:PUBLIC KEY, hash:file:PATH", extra_json_schema=_OR_LIST)]
SignSpec = Annotated[str, kind("a spec: ed25519:file:PATH, hash:file:PATH")]
SecretSpec = Annotated[str, kind("a spec: file:PATH, env:NAME, keyring:SERVICE/USER, or none")]
Pairs = Annotated[str, kind("NAME=VALUE, separated by commas")]
LossyPairs = Annotated[str, kind("PATTERN=WAY, separated by spaces")]
Factors = Annotated[dict[str, Above0], kind("a table of names and factors")]
BusyShares = Annotated[dict[Literal["disk", "device"], Share], kind("a table: disk, device")]
Ways = Annotated[dict[str, str], kind("a table of patterns and ways")]
ErrorBounds = Annotated[dict[str, str | float], kind("a table of patterns and bounds")]
CodecNames = Annotated[dict[str, str], kind("a table of patterns and codecs")]
Patterns = Annotated[tuple[Annotated[str, Meta(max_length=499)], ...], kind('a list of patterns, such as ["prod-*"]', max_length=1000)]
Modules = Annotated[tuple[Annotated[str, Meta(pattern=r"^[^\W\d]\w*(\.\w+)*$")], ...], kind("a list of modules' names")]
Notices = Annotated[tuple[str, ...], kind("a list of aws, aws-rebalance, gcp, gcp-maintenance, azure, addresses")]
Targets = Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], kind('a list of addresses, such as ["env:ALERTS_URL"]', max_length=50)]
_DAYS, _TIME = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)", "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_Window = Annotated[str, Meta(pattern=rf"^({_DAYS}(,{_DAYS})* )?{_TIME}-{_TIME}$(?!\n)")]
QuietTimes = Annotated[tuple[_Window, ...], kind('a list of times, such as ["22:00-07:00", "Sat,Sun 00:00-23:59"]', max_length=50)]
