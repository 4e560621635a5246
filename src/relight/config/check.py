"""Every mistake of a settings file, and of the variables that stand for settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relight.doctor.facts_config import check_variable
from relight.errors import ConfigError
from relight.monitoring.settings import alerting_of
from relight.policy.file_defaults import defaults_of
from relight.settings.environment import PREFIX, PROCESS_VARIABLES, given_variables
from relight.settings.error_location import Keys, faults, located, value_at
from relight.settings.file import (
    NOT_TOML,
    from_variables,
    merged,
    parse,
    read_text,
    unknown_table,
    unnamed,
    variables_in,
)
from relight.settings.lines import places
from relight.settings.registry import TABLES, nearest_variable, settings_by_name, settings_by_variable
from relight.supervise.settings import settings_of

_MISTAKES_MAX = 100
_OF_TESTS = f"{PREFIX}TEST_"


class Mistake(NamedTuple):
    """One mistake. ``where`` is the file or the variable; ``line`` and ``column`` are 0 if there are none."""

    where: str
    line: int
    column: int
    setting: str
    what: str
    hint: str = ""

    @property
    def place(self) -> str:
        """``relight.toml:12:1``, or the variable."""
        return f"{self.where}:{self.line}:{self.column}" if self.line else self.where


def check_file(path: Path, named: bool) -> list[Mistake]:
    """Return all mistakes of the file, in the order of its lines. ``named``: whether the file was named, rather than
    found in the working directory. Raise ``ConfigError`` if it cannot be read at all."""
    try:
        text = read_text(path)
        tables = parse(text, path)
    except ConfigError as error:
        where, line, column = _parted(error.where)
        if where == str(path) and not line and NOT_TOML not in error.what:
            raise
        return [Mistake(where, line, column, "", error.what, error.hint)]
    known = places(text)
    mistakes = []
    for name, value in tables.items():
        for keys, fault in _faults_of(name, value, str(path), named):
            line, column = next((known[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in known), (0, 0))
            mistakes.append(
                Mistake(str(path), line, column, ".".join(keys)[:120], _without_secret(keys, fault.what), fault.hint)
            )
        if len(mistakes) >= _MISTAKES_MAX:
            break
    return sorted(mistakes, key=lambda mistake: (mistake.line, mistake.column))


def _faults_of(name: str, table: Any, where: str, named: bool) -> Iterator[tuple[Keys, ConfigError]]:
    if name not in TABLES:
        yield (name,), unknown_table(name)
        return
    if not isinstance(table, dict):
        yield (name,), ConfigError(f"[{name}] is a table")
        return
    early = {} if named else dict(unnamed(name, table, where))
    for key, error in early.items():
        yield (name, key), error
    for keys, error in faults({key: value for key, value in table.items() if key not in early}, makers(where)[name]):
        yield (name, *keys), error


def makers(where: str) -> dict[str, Callable[[dict[str, Any]], object]]:
    """Return for each table the function that parses it and raises ``ConfigError`` for a mistake."""
    return {
        "checkpoint": lambda table: defaults_of(table, where),
        "supervise": lambda table: settings_of(table, where),
        "alerts": lambda table: alerting_of(table, where),
        "environment": lambda table: _check_all(variables_in(table, where)),
    }


def check_variables(tables: Mapping[str, Any]) -> list[Mistake]:
    """Return the mistakes of the variables that are set; ``tables`` is the parsed file."""
    mistakes = []
    judged: set[str] = set()
    for name in TABLES:
        try:
            variables = from_variables(name)
        except ConfigError as error:
            judged.add(error.where)
            mistakes.append(Mistake(error.where, 0, 0, "", error.what, error.hint))
            continue
        judged |= set(variables.values())
        make = makers("")[name]
        file = tables.get(name, {}) if isinstance(tables.get(name), dict) else {}
        right = {keys for keys, _ in faults(file, make)}
        for keys, fault in faults(merged(file, variables), make):
            variable = next(
                (
                    each
                    for under, each in variables.items()
                    if keys[: len(under)] == under or under[: len(keys)] == keys
                ),
                "",
            )
            if variable and (keys not in right or value_at(file, keys) is None):
                path = (name, *keys)
                mistakes.append(Mistake(variable, 0, 0, ".".join(path), _without_secret(path, fault.what), fault.hint))
    for variable, text in sorted(given_variables().items()):
        if variable in judged:
            continue
        if variable in settings_by_variable():
            try:
                check_variable(variable, text)
            except ConfigError as error:
                mistakes.append(Mistake(variable, 0, 0, settings_by_variable()[variable].name, error.what, error.hint))
        elif variable not in PROCESS_VARIABLES and not variable.startswith(_OF_TESTS):
            close = nearest_variable(variable)
            hint = f"did you mean {close}?" if close else "relight config show --all"
            mistakes.append(Mistake(variable, 0, 0, "", "it is no setting", hint))
    return mistakes


def _check_all(variables: Mapping[str, str]) -> None:
    for variable, text in variables.items():
        with located({}, (settings_by_variable()[variable].name.partition(".")[2],), ""):
            check_variable(variable, text)


def _without_secret(keys: Keys, what: str) -> str:
    """Return the error's text, or a text without the value if the value may be secret."""
    setting = settings_by_name().get(".".join(keys))
    if setting is None or not setting.secret or " is a list" in what or "counts only" in what:
        return re.sub(r"://[^\s'\"]+", "://…", what)
    return f"it is not what it may be: {setting.kind}"


def _parted(where: str) -> tuple[str, int, int]:
    path, _, rest = where.rpartition(":")
    file, _, line = path.rpartition(":")
    return (file, int(line), int(rest)) if rest.isdecimal() and line.isdecimal() else (where, 0, 0)
