"""``relight config``: show each setting and its source; check a settings file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relight.cli.common import json_option
from relight.cli.output import Styled, emit_json, escape, paint, table
from relight.errors import ConfigError
from relight.units import count_text

if TYPE_CHECKING:
    from relight.config import Mistake, ShownSetting
    from relight.config.show import Said

_WIDTH = 84
_VALUE_MIN = 10


@click.group("config")
def command() -> None:
    """Show and check settings. An argument overrides a variable, which overrides relight.toml, which overrides the default.

    \b
    Examples:
      relight config show
      relight config check
      relight --set supervise.same=4 config show
    """


@command.command("schema")
def print_schema() -> int:
    """Print the JSON schema of relight.toml, for editors.

    \b
    Example:
      relight config schema > relight.schema.json
    """
    from relight.config.schema import schema

    emit_json(schema())
    return 0


@command.command("show")
@click.argument("directory", required=False, type=click.Path(path_type=Path), metavar="[DIR]")
@click.option("--all", "everything", is_flag=True, help="Also show defaults and overridden values.")
@json_option
def show(directory: Path | None, everything: bool, as_json: bool) -> int:
    """Show each setting and its source. DIR: the directory of the relight.toml, by default the working directory.

    Secrets are never shown.

    \b
    Examples:
      relight config show
      relight config show --all --json
    """
    from relight.config import effective_settings

    path = _file(directory)
    shown = effective_settings(path)
    wrong = _mistakes(path)
    if as_json:
        emit_json(
            {"file": str(path or ""), "mistakes": len(wrong), "settings": [_as_dict(setting) for setting in shown]}
        )
        return 0
    groups: dict[str, list[ShownSetting]] = {}
    for setting in shown:
        if everything or setting.is_set:
            groups.setdefault(setting.setting.name.rpartition(".")[0], []).append(setting)
    for name, group in groups.items():
        click.echo(paint(f"[{name}]", "bold"))
        table(["key", "value", "from"], _rows(group, everything), wrap=("value", "from"))
        click.echo()
    count = sum(not setting.is_set for setting in shown)
    click.echo(f"file: {escape(path) if path else 'none (./relight.toml, or what RELIGHT_SETTINGS names)'}", err=True)
    if not everything:
        click.echo(f"{count_text(count, 'setting')} at the default: relight config show --all", err=True)
    if wrong:
        click.echo(f"{count_text(len(wrong), 'mistake')}: relight config check", err=True)
    return 0


@command.command("check")
@click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[FILE]")
@json_option
def check(file: Path | None, as_json: bool) -> int:
    """Check every setting, and list all mistakes with file, line and column, or the variable.

    FILE is checked alone. Without FILE, the relight.toml in effect and the environment variables are checked. Exit code 1 if one is wrong.

    \b
    Examples:
      relight config check
      relight config check deploy/relight.toml
    """
    from relight.config import check_file

    path = file or _file(None)
    wrong = check_file(file, True) if file is not None else _mistakes(path)
    if as_json:
        emit_json({"ok": not wrong, "file": str(path or ""), "mistakes": [mistake._asdict() for mistake in wrong]})
    else:
        for mistake in wrong:
            click.echo(_value_text(mistake))
        checked = (escape(path) if path else "no relight.toml") + ("" if file else ", and variables")
        click.echo(f"{checked}: {count_text(len(wrong), 'mistake') if wrong else 'nothing is wrong'}", err=True)
    return 1 if wrong else 0


def _value_text(mistake: Mistake) -> str:
    return f"{escape(mistake.place)}: {escape(mistake.what)}" + (
        f"\n  → {escape(mistake.hint)}" if mistake.hint else ""
    )


def _file(directory: Path | None) -> Path | None:
    """Return the settings file in effect; None without one."""
    from relight.settings.file import FILE, which_file

    if directory is not None:
        if not directory.is_dir():
            raise ConfigError(
                "it is not a directory", where=str(directory), hint="relight config check FILE checks a file"
            )
        path, named = directory / FILE, False
    else:
        path, named = which_file()
    return path if named or path.is_symlink() or path.exists() else None


def _mistakes(path: Path | None) -> list[Mistake]:
    from relight.config import check_file, check_variables
    from relight.settings.file import NOT_TOML, parse, read_text, which_file

    wrong = check_file(path, which_file()[1]) if path is not None else []
    file_values: dict[str, Any] = {}
    if path is not None and not any(NOT_TOML in mistake.what for mistake in wrong):
        file_values = parse(read_text(path), path)
    return [*wrong, *check_variables(file_values)]


def _rows(group: list[ShownSetting], everything: bool) -> list[list[object]]:
    """Return the rows of one table of the file. Values are cut where a line would be too long; ``--json`` has them whole."""
    keys = [setting.setting.name.rpartition(".")[2] for setting in group]
    beaten = [
        [value for value in setting.beaten if value.source != "default"] if everything else [] for setting in group
    ]
    longest = max(
        [len(setting.counts.source) for setting in group]
        + [len(f"{value.source} (overridden)") for each in beaten for value in each]
    )
    room = max(_VALUE_MIN, _WIDTH - longest - max(map(len, keys)) - 4)
    rows: list[list[object]] = []
    for key, setting, each in zip(keys, group, beaten, strict=True):
        rows.append([key, _value(setting.counts, room), setting.counts.source])
        rows += [
            ["", Styled(_value(value, room), "bright_black"), Styled(f"{value.source} (overridden)", "bright_black")]
            for value in each
        ]
    return rows


def _value(setting_value: Said, room: int) -> str:
    text = (
        setting_value.value
        if isinstance(setting_value.value, str)
        else json.dumps(setting_value.value, ensure_ascii=False)
    )
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _as_dict(shown_setting: ShownSetting) -> dict[str, Any]:
    setting = shown_setting.setting
    return {
        "name": setting.name, "value": shown_setting.counts.value if shown_setting.is_set else None,
        "from": shown_setting.counts.source, "line": shown_setting.counts.line or None,
        "default": setting.default, "kind": setting.kind, "variable": setting.variable, "argument": setting.argument,
        "overridden": [{"value": value.value, "from": value.source} for value in shown_setting.beaten if value.source != "default"],
    }  # fmt: skip
