"""The reference has every command and every option, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import click

from relight.cli import COMMANDS, FORMS, cli

PAGE = Path(__file__).parents[2] / "docs" / "reference-cli.md"


def test_each_command_has_a_section_with_all_its_options() -> None:
    """The line under a heading names the options that the command has, by one of their names."""
    sections = re.findall(r"^###? relight (\w+(?: [\w-]+)?)\n\n((?:`relight .*`\n)+)", PAGE.read_text(), re.MULTILINE)
    forms = {name: [form for form in FORMS if form.startswith(f"{name} ")] for name in COMMANDS}
    assert [name for name, _ in sections] == [part for name in COMMANDS for part in (name, *forms[name])]
    usages: list[tuple[str, click.Command, str]] = []
    for name, lines in sections:
        with click.Context(cli) as context:
            command = cli.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            written = dict(re.findall(rf"^`relight {name} (\w+) ?(.*)`$", lines, re.MULTILINE))
            assert written.keys() == command.commands.keys() - {form.split()[1] for form in FORMS}
            usages += [
                (f"{name} {subcommand}", command.commands[subcommand], usage) for subcommand, usage in written.items()
            ]
        else:
            usages.append((name, command, lines))
    for name, command, usage in usages:
        options = [set(param.opts) for param in command.params if isinstance(param, click.Option)]
        written = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", usage)) - {name.partition(" ")[2]}
        assert all(option & written for option in options), (name, options, written)
        assert written <= set().union(*options), (name, written)


def test_the_reference_has_the_groups_of_the_help() -> None:
    """The page's table of groups equals ``COMMANDS``."""
    groups: dict[str, list[str]] = {}
    for name, entry in COMMANDS.items():
        groups.setdefault(entry.group, []).append(name)
    rows = re.findall(r"^\| ([A-Z][a-z ]+) \| (\[.*) \|$", PAGE.read_text().partition("\n## ")[0], re.MULTILINE)
    assert {group: re.findall(r"\[(\w+)\]\(#relight-\1\)", cell) for group, cell in rows} == groups


def test_outputs_in_the_reference_can_be_read_on_a_page() -> None:
    """Documented outputs are as wide as in a pipe, at most 84 columns."""
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    assert [line for block in blocks for line in block.splitlines() if len(line) > 84] == []
