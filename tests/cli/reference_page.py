"""Write what the commands themselves state into ``docs/reference-cli.md``: groups, usage lines and options.

``python -m tests.cli.reference_page`` writes the page; ``make fix`` runs it. The rest of each section, such as examples with their output, is
written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from relight.cli import COMMANDS, FORMS, cli

PAGE = Path(__file__).parents[2] / "docs" / "reference-cli.md"
BEGIN, END = "<!-- generated -->", "<!-- end -->"
_BLOCK = re.compile(rf"{BEGIN}\n.*?\n{END}\n\n?", re.DOTALL)
_SECTION = re.compile(r"^###? relight (\w+(?: [\w-]+)?)\n\n?", re.MULTILINE)
_ENTRIES = {
    name: entry
    for command in COMMANDS
    for name, entry in [
        (command, COMMANDS[command]),
        *((form, FORMS[form]) for form in FORMS if form.startswith(f"{command} ")),
    ]
}
"""The commands, each with its forms after it: those have a heading one level lower."""


def put_in(text: str) -> str:
    """Return the page with generated parts of the present commands, in their order. A command without a section gets one."""
    preamble, *parts = _SECTION.split(text)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    if unknown := sections.keys() - _ENTRIES.keys():
        raise SystemExit(f"{PAGE.name} has sections of commands that do not exist: {', '.join(sorted(unknown))}")
    groups = _marked(_groups())
    if BEGIN in preamble:
        preamble = _BLOCK.sub(lambda _: groups, preamble, count=1)
    else:
        preamble = preamble.rstrip() + "\n\n" + groups
    return preamble + "".join(_section(name, sections.get(name)) for name in _ENTRIES)


def _section(name: str, by_hand: str | None) -> str:
    if by_hand is None:
        help_line = _ENTRIES[name].help
        by_hand = f"{help_line[0].upper()}{help_line[1:]}.\n"
    by_hand = _BLOCK.sub("", by_hand, count=1) if by_hand.startswith(BEGIN) else by_hand
    while re.match(rf"`relight {name.split()[0]}\b[^\n]*`\n", by_hand):
        by_hand = by_hand.partition("\n")[2]
    return f"{'###' if name in FORMS else '##'} relight {name}\n\n{_marked(_usages(name))}{by_hand.strip()}\n\n"


def _marked(text: str) -> str:
    return f"{BEGIN}\n\n{text.strip()}\n\n{END}\n\n"


def _groups() -> str:
    groups: dict[str, list[str]] = {}
    for name, entry in COMMANDS.items():
        groups.setdefault(entry.group, []).append(name)
    rows = [
        f"| {group} | {', '.join(f'[{name}](#relight-{name})' for name in names)} |" for group, names in groups.items()
    ]
    return "\n".join(["| group | commands |", "|---|---|", *rows])


def _usages(name: str) -> str:
    # with its settings: a command's first context decides whether the command takes -h from then on
    with click.Context(cli, info_name="relight", **cli.context_settings) as above:
        command = cli.get_command(above, name)
        assert command is not None
        with click.Context(command, above, info_name=name) as context:
            if isinstance(command, click.Group):
                return "\n\n".join(_usages_of_group(command, context, name))
            return _usage(command, context)


def _usages_of_group(group: click.Group, above: click.Context, full: str) -> Iterator[str]:
    for name in group.list_commands(above):
        if f"{full} {name}" in FORMS:
            continue
        command = group.get_command(above, name)
        assert command is not None
        with click.Context(command, above, info_name=name) as context:
            yield _usage(command, context, command.get_short_help_str(limit=200))


def _usage(command: click.Command, context: click.Context, purpose: str = "") -> str:
    """Return the usage line, with what the command is for, and a table of its options."""
    words = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    line = f"`{words}`" + (f": {purpose[0].lower()}{purpose[1:].rstrip('.')}." if purpose else "")
    records = [param.get_help_record(context) for param in command.params if isinstance(param, click.Option)]
    rows = [f"| `{_cell(names)}` | {_cell(help_text)} |" for names, help_text in filter(None, records)]
    return "\n".join([line, "", "| option | meaning |", "|---|---|", *rows]) if rows else line


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(put_in(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
