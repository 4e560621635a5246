"""``relight.toml`` and the variables that stand for what is in it: read within bounds, and merged, each table for whoever has it.

A variable beats the file, key by key. What is wrong is told with its place: ``relight.toml:12:1``, or the variable.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from relight.errors import ConfigError
from relight.settings.error_location import culprit
from relight.settings.lines import Keys, places
from relight.settings.registry import NAMED_ONLY, PREFIX, SETTINGS, TABLES, nearest, variable_of

FILE = "relight.toml"
PLACE = "RELIGHT_SETTINGS"
"""Names another file than the one in the working directory."""
NOT_TOML = "it is no TOML"
_BYTES_MAX = 256 << 10
_DOTS_MAX = 200
"""In a line: reading a key of many parts takes the square of them."""
Made = TypeVar("Made")
_given: set[str] = set()
_taken: dict[str, str] = {}


def which_file(path: Path | None = None) -> tuple[Path, bool]:
    """The file that counts, and whether somebody named it."""
    named = os.environ.get(PLACE, "")
    return (path, True) if path is not None else (Path(named or FILE), bool(named))


def read_text(path: Path) -> str:
    """The file. ``ConfigError``, at once and within bounds, for what is no file, too long, or no text."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError("it is no file", where=str(path), hint="settings stand in a file of text")
            told = file.read(_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"it cannot be read: {why}", where=str(path)) from None
    if len(told) > _BYTES_MAX:
        raise ConfigError(f"a settings file of more than {_BYTES_MAX >> 10} kiB", where=str(path))
    try:
        return told.decode("utf-8")
    except UnicodeDecodeError as error:
        line = told.count(b"\n", 0, error.start) + 1
        column = error.start - told.rfind(b"\n", 0, error.start)
        raise ConfigError(f"{NOT_TOML}: it is not UTF-8", where=f"{path}:{line}:{column}") from None


def parse(text: str, path: Path) -> dict[str, Any]:
    """What the text says. ``ConfigError`` with line and column for what is no TOML."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _DOTS_MAX and not line.lstrip().startswith("#"):
            raise ConfigError(f"a line with more than {_DOTS_MAX} dots", where=f"{path}:{number}:1")
    try:
        told = tomllib.loads(text)
        if _has_too_big(told):
            raise ValueError("a number of more than 64 bits")
        return told
    except tomllib.TOMLDecodeError as error:
        what, _, at = str(error).rpartition(" (at ")
        words = at.replace(",", "").rstrip(")").split()  # line 3 column 7; or: end of document
        end = (text.count("\n") + 1, len(text) - text.rfind("\n"))
        place = (int(words[1]), int(words[3])) if words[:1] == ["line"] else end
        raise ConfigError(f"{NOT_TOML}: {what or error}", where=f"{path}:{place[0]}:{place[1]}") from None
    except (RecursionError, ValueError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise ConfigError(f"{NOT_TOML}: {why}", where=str(path)) from None


def _has_too_big(told: dict[str, Any]) -> bool:
    """TOML's whole numbers have 64 bits; Python's have as many as a file, and can then not even be shown."""
    rest: list[Any] = [told]
    while rest:
        one = rest.pop()
        if isinstance(one, int) and not -(1 << 63) <= one < 1 << 63:
            return True
        rest += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return False


def value_of(text: str) -> Any:
    """What a variable says, as it would stand in the file; what is no TOML is a text."""
    if "\n" in text or "\r" in text or len(text) > 1 << 16 or text.count(".") > _DOTS_MAX:
        return text
    try:
        told = tomllib.loads(f"it = {text}")
        return text if _has_too_big(told) else told["it"]
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return text


def from_variables(name: str) -> dict[Keys, str]:
    """Of one table, what variables of the form ``RELIGHT_…`` say: path in the table, variable."""
    start = f"{PREFIX}{name.upper()}__"
    if name == "environment":  # its keys are variables themselves
        return {}
    found = sorted(one for one, value in os.environ.items() if one.startswith(start) and value)
    named = {one: f"{name}.{one.removeprefix(start).lower().replace('__', '.')}" for one in found}
    for one, setting in named.items():
        if variable_of(setting) != one:
            raise ConfigError(f"that setting's variable is {variable_of(setting)}", where=one)
    return {tuple(setting.split(".")[1:]): one for one, setting in named.items()}


def merged(table: Mapping[str, Any], variables: Mapping[Keys, str]) -> dict[str, Any]:
    """The table with what variables say in place of what it says."""
    whole = _copy(table)
    for keys, variable in variables.items():
        at = whole
        for key in keys[:-1]:
            if not isinstance(at.get(key), dict):
                at[key] = {}
            at = at[key]
        at[keys[-1]] = value_of(os.environ[variable])
    return whole


def _copy(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) if isinstance(value, dict) else value for name, value in table.items()}


def _read(name: str, path: Path | None) -> tuple[dict[str, Any], Path, str]:
    path, named = which_file(path)
    if not named and not os.path.lexists(path):
        return {}, path, ""
    text = read_text(path)
    told = parse(text, path)
    for one in told:
        if one not in TABLES:
            close = nearest(one)
            hint = f"did you mean [{close}]?" if close else f"it has {', '.join(f'[{table}]' for table in TABLES)}"
            raise ConfigError(f"there is no [{one[:80]}]", where=_at(path, text, (one,)), hint=hint)
    table = told.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"[{name}] is a table", where=_at(path, text, (name,)))
    for key, error in () if named else unnamed(name, table, str(path)):
        raise ConfigError(error.what, where=_at(path, text, (name, key)), hint=error.hint)
    return table, path, text


def unnamed(name: str, table: Mapping[str, Any], where: str) -> Iterator[tuple[str, ConfigError]]:
    """Yield each key of a table that does not count in a file that nobody named, with its error."""
    for key, value in table.items():
        if (setting := f"{name}.{key}") in NAMED_ONLY and not (setting == "environment.events" and value in (0, "0")):
            hint = f"export {variable_of(setting)}=…, or {PLACE}={where}"
            yield key, ConfigError(f"[{name}] {key} counts only in a file that is named", where=where, hint=hint)


def checked(name: str, make: Callable[[dict[str, Any], str], Made], path: Path | None = None) -> tuple[Made, Path]:
    """What ``make`` makes of a table (it is given the table, and where that is from), and the file. An error says the line or variable."""
    table, path, text = _read(name, path)
    variables = from_variables(name)
    whole = merged(table, variables)
    try:
        return make(whole, str(path)), path
    except ConfigError as error:
        keys = culprit(whole, lambda part: make(part, str(path)), error.what)
        variable = next((variables[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in variables), None)
        if variable is None and keys and not _holds(table, keys):
            variable = next((one for under, one in variables.items() if under[: len(keys)] == keys), None)
        raise ConfigError(error.what, where=variable or _at(path, text, (name, *keys)), hint=error.hint) from None


def _holds(table: Mapping[str, Any], keys: Keys) -> bool:
    at: Any = table
    for key in keys:
        if not isinstance(at, Mapping) or key not in at:
            return False
        at = at[key]
    return True


def _at(path: Path, text: str, keys: Keys) -> str:
    """``relight.toml:12:1``; the file alone if that is not known."""
    known = places(text)
    found = next((known[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in known), None)
    return f"{path}:{found[0]}:{found[1]}" if found else str(path)


def give(name: str, value: str) -> None:
    """Have a setting be what an argument says: it beats variable and file, also in the processes that this one starts."""
    if name not in SETTINGS:
        close = nearest(name)
        raise ConfigError(f"there is no setting {name[:80]!r}", hint=f"did you mean {close}?" if close else "relight config show --all")
    os.environ[variable_of(name)] = value
    _given.add(variable_of(name))


def was_given(variable: str) -> bool:
    """Whether an argument has said it."""
    return variable in _given


def was_taken(variable: str) -> bool:
    """Whether ``take_environment`` has set it, as the file says."""
    return variable in _taken and os.environ.get(variable) == _taken[variable]


def take_environment() -> None:
    """Have ``[environment]`` count: each of its keys becomes the variable that it stands for, unless that is set. Called again it looks
    again."""
    forget_taken()
    table, _ = checked("environment", variables_in)
    for variable, value in table.items():
        if not os.environ.get(variable):
            os.environ[variable] = _taken[variable] = value


def forget_taken() -> None:
    """Take back what ``take_environment`` has set."""
    for variable, value in _taken.items():
        if os.environ.get(variable) == value:
            del os.environ[variable]
    _taken.clear()


def variables_in(table: dict[str, Any], where: str) -> dict[str, str]:
    """What ``[environment]`` says, as variables."""
    known = [one.removeprefix("environment.") for one in SETTINGS if one.startswith("environment.")]
    found = {}
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"[environment] has no {name[:80]!r}", where=where, hint=f"it has {', '.join(known)}")
        found[variable_of(f"environment.{name}")] = _as_text(name, value, where)
    return found


def _as_text(name: str, value: Any, where: str) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        value = " ".join(value)
    if isinstance(value, (int, float)):
        return f"{value}"
    if not isinstance(value, str) or "\0" in value or not value:
        raise ConfigError(f"[environment] {name} is a text, a number, true or false", where=where)
    return value
