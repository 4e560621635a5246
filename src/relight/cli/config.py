"""``relight config``: settings: what each is and where that was said; is a file right?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relight.cli.common import json_option
from relight.cli.output import Styled, emit_json, escape, paint, plural, table
from relight.errors import ConfigError

if TYPE_CHECKING:
    from relight.config import Mistake, ShownSetting
    from relight.config.show import Said

_WIDTH = 84
_VALUE_MIN = 10


@click.group("config")
def command() -> None:
    """Settings: an argument beats a variable, which beats relight.toml, which beats the default.

    \b
    Examples:
      relight config show
      relight config check
      relight --set supervise.same=4 config show
    """


@command.command("show")
@click.argument("directory", required=False, type=click.Path(path_type=Path), metavar="[DIR]")
@click.option("--all", "everything", is_flag=True, help="Also what has its default, and what is overridden.")
@json_option
def show(directory: Path | None, everything: bool, as_json: bool) -> int:
    """What each setting is, and where that was said. DIR has another relight.toml than the working directory.

    What is secret is never shown.

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
        emit_json({"file": str(path or ""), "mistakes": len(wrong), "settings": [_as_dict(one) for one in shown]})
        return 0
    groups: dict[str, list[ShownSetting]] = {}
    for one in shown:
        if everything or one.is_set:
            groups.setdefault(one.setting.name.rpartition(".")[0], []).append(one)
    for name, group in groups.items():
        click.echo(paint(f"[{name}]", "bold"))
        table(["key", "value", "from"], _rows(group, everything), wrap=("value", "from"))
        click.echo()
    count = sum(not one.is_set for one in shown)
    click.echo(f"file: {escape(path) if path else 'none (./relight.toml, or what RELIGHT_SETTINGS names)'}", err=True)
    if not everything:
        click.echo(f"{plural(count, 'setting')} at the default: relight config show --all", err=True)
    if wrong:
        click.echo(f"{plural(len(wrong), 'mistake')}: relight config check", err=True)
    return 0


@command.command("check")
@click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[FILE]")
@json_option
def check(file: Path | None, as_json: bool) -> int:
    """Is every setting right? All that is wrong, with file, line and column, or the variable.

    FILE is checked alone; without it the relight.toml that counts here, and the variables that are set. Exit status 1 if anything is wrong.

    \b
    Examples:
      relight config check
      relight config check deploy/relight.toml
    """
    from relight.config import check_file

    path = file or _file(None)
    wrong = check_file(file, True) if file is not None else _mistakes(path)
    if as_json:
        emit_json({"ok": not wrong, "file": str(path or ""), "mistakes": [one._asdict() for one in wrong]})
    else:
        for one in wrong:
            click.echo(_value_text(one))
        checked = (escape(path) if path else "no relight.toml") + ("" if file else ", and variables")
        click.echo(f"{checked}: {plural(len(wrong), 'mistake') if wrong else 'nothing is wrong'}", err=True)
    return 1 if wrong else 0


def _value_text(one: Mistake) -> str:
    return f"{escape(one.place)}: {escape(one.what)}" + (f"\n  → {escape(one.hint)}" if one.hint else "")


def _file(directory: Path | None) -> Path | None:
    """Which file counts; None: there is none."""
    from relight.settings.file import FILE, which_file

    if directory is not None:
        if not directory.is_dir():
            raise ConfigError("it is no directory", where=str(directory), hint="relight config check FILE looks at a file")
        path, named = directory / FILE, False
    else:
        path, named = which_file()
    return path if named or path.is_symlink() or path.exists() else None


def _mistakes(path: Path | None) -> list[Mistake]:
    from relight.config import check_file, check_variables
    from relight.settings.file import NOT_TOML, parse, read_text, which_file

    wrong = check_file(path, which_file()[1]) if path is not None else []
    told: dict[str, Any] = {}
    if path is not None and not any(NOT_TOML in one.what for one in wrong):
        told = parse(read_text(path), path)
    return [*wrong, *check_variables(told)]


def _rows(group: list[ShownSetting], everything: bool) -> list[list[object]]:
    """Of one table of the file. Values are cut where a line would be too long; JSON has all of them."""
    keys = [one.setting.name.rpartition(".")[2] for one in group]
    beaten = [[said for said in one.beaten if said.source != "default"] if everything else [] for one in group]
    longest = max([len(one.counts.source) for one in group] + [len(f"{said.source} (overridden)") for each in beaten for said in each])
    room = max(_VALUE_MIN, _WIDTH - longest - max(map(len, keys)) - 4)
    rows: list[list[object]] = []
    for key, one, each in zip(keys, group, beaten, strict=True):
        rows.append([key, _value(one.counts, room), one.counts.source])
        rows += [["", Styled(_value(said, room), "bright_black"), Styled(f"{said.source} (overridden)", "bright_black")] for said in each]
    return rows


def _value(said: Said, room: int) -> str:
    text = said.value if isinstance(said.value, str) else json.dumps(said.value, ensure_ascii=False)
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _as_dict(one: ShownSetting) -> dict[str, Any]:
    setting = one.setting
    return {
        "name": setting.name, "value": one.counts.value if one.is_set else None, "from": one.counts.source, "line": one.counts.line or None,
        "default": setting.default, "kind": setting.kind, "variable": setting.variable, "argument": setting.argument,
        "overridden": [{"value": said.value, "from": said.source} for said in one.beaten if said.source != "default"],
    }  # fmt: skip
