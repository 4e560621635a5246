"""Read scenarios from files or by name, and set single values. An error names the key and the line."""

from __future__ import annotations

import difflib
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import msgspec

from relight.decode import from_plain
from relight.errors import ConfigError
from relight.simulator.scenario import Scenario, check
from relight.units import size_text

_BYTES_MAX = 1 << 20
_DEEPEST = 4


def shipped() -> list[str]:
    """Return the names of the scenarios that are part of Relight."""
    return sorted(
        file.name.removesuffix(".toml")
        for file in resources.files("relight.simulator").joinpath("scenarios").iterdir()
        if file.name.endswith(".toml")
    )


def read_scenario(named: str, settings: dict[str, Any] | None = None) -> Scenario:
    """Return the scenario of that name, or from that file.

    ``settings``, such as ``{"save.stall_s": 2}``, override its values.
    """
    text, where = _text(named)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"it is not TOML: {error}", where=where) from None
    except RecursionError:
        raise ConfigError("it is not readable TOML: it is nested too deeply", where=where) from None
    values.setdefault("name", Path(named).stem[:40])
    for path, value in (settings or {}).items():
        put(values, path, value)
    return scenario_of(values, where, text)


def scenario_of(values: dict[str, Any], where: str = "", text: str = "") -> Scenario:
    """Return the scenario of these plain values.

    Raise ``ConfigError`` for an invalid value; ``text``: the file, for the line number.
    """
    try:
        scenario = from_plain(values, Scenario)
    except msgspec.ValidationError as error:
        raise _parse_error(str(error), where, text) from None
    return check(scenario)


def setting_of(text: str) -> tuple[str, Any]:
    """Split a setting such as ``save.stall_s=2`` into its path and its value. The value is TOML, or else text."""
    path, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[a-z_]+(\.[A-Za-z0-9_-]+){0,3}", path.strip()):
        raise ConfigError(
            f"{text[:60]!r} sets nothing", hint="KEY=VALUE, such as save.stall_s=2 or failure.0.broken=0.5"
        )
    return path.strip(), value_of(value)


def value_of(text: str) -> Any:
    """Return a value parsed as TOML, or the text itself if it is not valid TOML."""
    try:
        table = tomllib.loads(f"value = {text.strip()[:200]}")
    except tomllib.TOMLDecodeError:
        return text.strip()
    return table["value"] if len(table) == 1 else text.strip()


def _text(named: str) -> tuple[str, str]:
    path = Path(named)
    try:
        if path.is_file():
            if path.stat().st_size > _BYTES_MAX:
                raise ConfigError(f"a scenario of more than {size_text(_BYTES_MAX)}", where=named)
            return path.read_text(encoding="utf-8"), named
        if path.exists():
            raise ConfigError("it is not a file", where=named)
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}", where=named[:200]) from None
    except ValueError:
        raise ConfigError("it is not text", where=named[:200], hint="a scenario is TOML, in UTF-8") from None
    names = shipped()
    if named not in names:
        close = difflib.get_close_matches(named, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"a file, or one of {', '.join(names)}"
        raise ConfigError(f"there is no scenario {named[:80]!r}", hint=hint)
    return resources.files("relight.simulator").joinpath("scenarios", f"{named}.toml").read_text(
        encoding="utf-8"
    ), f"{named} (shipped)"


def put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path such as ``failure.0.broken``."""
    keys, into = path.split("."), values
    for key in keys[:-1]:
        inner: Any = into[int(key)] if isinstance(into, list) and key.isdecimal() and int(key) < len(into) else None
        if isinstance(into, dict):
            inner = into.setdefault(key, {})
        if not isinstance(inner, (dict, list)):
            raise ConfigError(f"{path}: there is no {key!r} to set something in")
        into = inner  # type: ignore[assignment]
    if isinstance(into, list):
        raise ConfigError(f"{path}: that is one of a list, which has keys of its own", hint=f"such as {path}.broken")
    into[keys[-1]] = value


_AT = re.compile(r" - at `\$(.*)`\Z", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`\Z", re.DOTALL)


def _parse_error(message: str, where: str, text: str) -> ConfigError:
    """Return msgspec's error as a ``ConfigError`` that names the key and its line."""
    place_match = _AT.search(message)
    reason, path = (message[: place_match.start()], place_match[1].lstrip(".")) if place_match else (message, "")
    unknown = _UNKNOWN.match(reason)
    key = f"{path}.{unknown[1]}".lstrip(".") if unknown else path
    line = _line_of(key, text)
    location = f"{where}, line {line}" if line else where
    if unknown:
        keys = _known(path)
        close = difflib.get_close_matches(unknown[1], keys, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there is {', '.join(keys)}"
        return ConfigError(f"there is no key {key[:80]!r}", where=location, hint=hint)
    return ConfigError(f"{key or 'the scenario'}: {reason[0].lower()}{reason[1:]}", where=location)


def _known(path: str) -> list[str]:
    """Return the keys of the table at a path."""
    kind: Any = Scenario
    for part in re.findall(r"[a-z_]+", path):
        field_type = {field.name: field.type for field in msgspec.structs.fields(kind)}.get(part)
        inner = (get_args(field_type) or (field_type,))[0]
        if not (isinstance(inner, type) and issubclass(inner, msgspec.Struct)):
            return []
        kind = inner
    return [field.name for field in msgspec.structs.fields(kind)]


_PATH = re.compile(r"(?:(?P<table>[\w-]+)(?:\[(?P<index>\d+)\])?\.)?(?P<name>[\w-]+)")


def _line_of(key: str, text: str) -> int:
    """Return the line of a key such as ``failure[1].broken``, by a search of the text without a parser; 0: not found."""
    path = _PATH.match(key)
    if path is None:
        return 0
    table, index, name = path["table"], path["index"], re.escape(path["name"])
    key_pattern, inside, count = re.compile(rf"\s*{name}\s*="), table is None, -1
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([\w-]+)\s*\]", line):
            if table is None and re.fullmatch(name, header[1]):
                return number
            count += header[1] == table
            inside = header[1] == table and (index is None or count == int(index))
        elif (inside and key_pattern.match(line)) or (
            table and re.match(rf"\s*{re.escape(table)}\s*=.*\b{name}\b", line)
        ):
            return number
    return 0
