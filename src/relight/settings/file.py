"""Read ``relight.toml`` within size limits, and merge the variables that override its keys, one table at a time.

A variable overrides the file, key by key. An error names its place: ``relight.toml:12:1``, or the variable.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from relight.errors import ConfigError
from relight.settings.environment import PREFIX, EnvironmentSettings, given_variables, text_of, typed
from relight.settings.error_location import InvalidSetting, value_at
from relight.settings.lines import Keys, places
from relight.settings.registry import TABLES, nearest, settings_by_name
from relight.settings.validation import unknown_key
from relight.units import size_text

FILE = "relight.toml"
PLACE = "RELIGHT_SETTINGS"
"""Variable that names another file than the one in the working directory."""
NOT_TOML = "it is no TOML"
_BYTES_MAX = 256 << 10
_DOTS_MAX = 200
"""Most dots in a line: the time to parse a dotted key grows with the square of its parts."""
Made = TypeVar("Made")
_given: set[str] = set()
"""The environment is how child processes get settings, so these variables are set there. This records which."""
_taken: dict[str, str] = {}
"""Variables that were set from the file, with their values: the next reading of the file replaces them."""


def which_file(path: Path | None = None) -> tuple[Path, bool]:
    """Return the settings file in effect, and whether it was named (by ``path`` or ``RELIGHT_SETTINGS``)."""
    named = text_of(PLACE)
    return (path, True) if path is not None else (Path(named or FILE), bool(named))


def read_text(path: Path) -> str:
    """Return the file's text. Raise ``ConfigError`` if it is not a regular file, too long, or not UTF-8. Never blocks,
    as on a FIFO."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError("this is not a regular file", where=str(path), hint="name a TOML file")
            data = file.read(_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"it cannot be read: {why}", where=str(path)) from None
    if len(data) > _BYTES_MAX:
        raise ConfigError(f"a settings file of more than {size_text(_BYTES_MAX)}", where=str(path))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise ConfigError(f"{NOT_TOML}: it is not UTF-8", where=f"{path}:{line}:{column}") from None


def parse(text: str, path: Path) -> dict[str, Any]:
    """Return the parsed text. Raise ``ConfigError`` with line and column if it is not valid TOML."""
    import tomllib  # 4 ms at the start of each command, which seldom has a settings file

    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _DOTS_MAX and not line.lstrip().startswith("#"):
            raise ConfigError(f"a line with more than {_DOTS_MAX} dots", where=f"{path}:{number}:1")
    try:
        table = tomllib.loads(text)
        if _has_int_beyond_64_bits(table):
            raise ValueError("a number of more than 64 bits")
        return table
    except tomllib.TOMLDecodeError as error:
        what, _, position = str(error).rpartition(" (at ")
        words = position.replace(",", "").rstrip(")").split()  # line 3 column 7; or: end of document
        end = (text.count("\n") + 1, len(text) - text.rfind("\n"))
        place = (int(words[1]), int(words[3])) if words[:1] == ["line"] else end
        raise ConfigError(f"{NOT_TOML}: {what or error}", where=f"{path}:{place[0]}:{place[1]}") from None
    except (RecursionError, ValueError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise ConfigError(f"{NOT_TOML}: {why}", where=str(path)) from None


def _has_int_beyond_64_bits(table: dict[str, Any]) -> bool:
    """Return whether a whole number has more than TOML's 64 bits. Python's may be as long as the file, and can then not
    be printed."""
    rest: list[Any] = [table]
    while rest:
        value = rest.pop()
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            return True
        rest += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return False


def value_of(text: str) -> Any:
    """Return a variable's text parsed as a TOML value; unchanged if it is not valid TOML."""
    if "\n" in text or "\r" in text or len(text) > 1 << 16 or text.count(".") > _DOTS_MAX:
        return text
    import tomllib

    try:
        table = tomllib.loads(f"it = {text}")
        return text if _has_int_beyond_64_bits(table) else table["it"]
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return text


def from_variables(name: str) -> dict[Keys, str]:
    """Return the variables that are set for keys of one table, by path in the table."""
    start = f"{PREFIX}{name.upper()}__"
    if name == "environment":  # its keys are variables themselves
        return {}
    present = sorted(variable for variable in given_variables() if variable.startswith(start))
    named = {variable: f"{name}.{variable.removeprefix(start).lower().replace('__', '.')}" for variable in present}
    for variable, setting in named.items():
        if setting in settings_by_name() and settings_by_name()[setting].variable != variable:
            raise ConfigError(
                f"this setting has another variable: {settings_by_name()[setting].variable}", where=variable
            )
    return {tuple(setting.split(".")[1:]): variable for variable, setting in named.items()}


def merged(table: Mapping[str, Any], variables: Mapping[Keys, str]) -> dict[str, Any]:
    """Return the table with the values of ``variables`` in place of its own."""
    whole = _copy(table)
    for keys, variable in variables.items():
        below = whole
        for key in keys[:-1]:
            if not isinstance(below.get(key), dict):
                below[key] = {}
            below = below[key]
        below[keys[-1]] = value_of(text_of(variable))
    return whole


def _copy(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) if isinstance(value, dict) else value for name, value in table.items()}


def _read(name: str, path: Path | None) -> tuple[dict[str, Any], Path, str]:
    path, named = which_file(path)
    if not named and not os.path.lexists(path):
        return {}, path, ""
    text = read_text(path)
    tables = parse(text, path)
    for heading in tables:
        if heading not in TABLES:
            raise unknown_table(heading, _at(path, text, (heading,)))
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"[{name}] is a table", where=_at(path, text, (name,)))
    for key, error in () if named else unnamed(name, table, str(path)):
        raise ConfigError(error.what, where=_at(path, text, (name, key)), hint=error.hint)
    return table, path, text


def unknown_table(heading: str, where: str = "") -> ConfigError:
    """Return the error for a table that does not exist."""
    close = nearest(heading[:80])
    hint = f"did you mean [{close}]?" if close else f"there are {', '.join(f'[{table}]' for table in TABLES)}"
    return ConfigError(f"there is no [{heading[:80]}]", where=where, hint=hint)


def unnamed(name: str, table: Mapping[str, Any], where: str) -> Iterator[tuple[str, ConfigError]]:
    """Yield each key of a table that counts only in a named file, with its error."""
    for key, value in table.items():
        setting = settings_by_name().get(f"{name}.{key}")
        if setting is not None and setting.named and not (key == "events" and value in (0, "0")):
            hint = f"export {setting.variable}=…, or {PLACE}={where}"
            yield (
                key,
                ConfigError(
                    f"[{name}] {key} is used only in a settings file that is named explicitly", where=where, hint=hint
                ),
            )


def checked(name: str, make: Callable[[dict[str, Any], str], Made], path: Path | None = None) -> tuple[Made, Path]:
    """Return ``make(table, place of the file)`` for the merged table, and the file's path. An error names the line or
    variable."""
    table, path, text = _read(name, path)
    variables = from_variables(name)
    whole = merged(table, variables)
    try:
        return make(whole, str(path)), path
    except InvalidSetting as error:
        keys = error.keys
        variable = next((variables[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in variables), None)
        if variable is None and keys and value_at(table, keys) is None:
            variable = next((each for under, each in variables.items() if under[: len(keys)] == keys), None)
        raise ConfigError(error.what, where=variable or _at(path, text, (name, *keys)), hint=error.hint) from None


def _at(path: Path, text: str, keys: Keys) -> str:
    """Return ``relight.toml:12:1``, or only the file if line and column are unknown."""
    known = places(text)
    position = next((known[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in known), None)
    return f"{path}:{position[0]}:{position[1]}" if position else str(path)


def give(name: str, value: str) -> None:
    """Set a setting from a command's argument. It overrides variable and file, also in child processes."""
    if name not in settings_by_name():
        close = nearest(name)
        raise ConfigError(
            f"there is no setting {name[:80]!r}",
            hint=f"did you mean {close}?" if close else "relight config show --all",
        )
    os.environ[settings_by_name()[name].variable] = value
    _given.add(settings_by_name()[name].variable)


def was_given(variable: str) -> bool:
    """Return whether ``give`` has set the variable."""
    return variable in _given


def was_taken(variable: str) -> bool:
    """Return whether ``take_environment`` has set the variable from the file."""
    return variable in _taken and text_of(variable) == _taken[variable]


def take_environment() -> None:
    """Apply ``[environment]``: set the variable of each of its keys, unless it is set already. Each call reads the file
    again."""
    forget_taken()
    table, _ = checked("environment", variables_in)
    for variable, value in table.items():
        if not text_of(variable):
            os.environ[variable] = _taken[variable] = value


def forget_taken() -> None:
    """Remove the variables that ``take_environment`` has set."""
    for variable, value in _taken.items():
        if text_of(variable) == value:
            del os.environ[variable]
    _taken.clear()


def variables_in(table: dict[str, Any], where: str) -> dict[str, str]:
    """Return the values of ``[environment]`` by variable."""
    variables = {}
    for name, value in table.items():
        if name not in EnvironmentSettings.__struct_fields__:
            raise unknown_key(EnvironmentSettings, "environment", name, where)
        variable = settings_by_name()[f"environment.{name}"].variable
        variables[variable] = _as_text(name, value, where)
        try:
            typed(EnvironmentSettings, name, variables[variable], f"[environment] {name}")
        except ConfigError as error:
            raise InvalidSetting(error.what, (name,), where=where) from None
    return variables


def _as_text(name: str, value: Any, where: str) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        value = " ".join(value)
    if isinstance(value, (int, float)):
        return f"{value}"
    if not isinstance(value, str) or "\0" in value or not value:
        raise InvalidSetting(f"[environment] {name} is a text, a number, true or false", (name,), where=where)
    return value
