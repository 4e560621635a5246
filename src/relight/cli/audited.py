"""Record commands that change or export something in the audit log that ``RELIGHT_AUDIT`` names."""

from __future__ import annotations

from typing import Any

import click

from relight.settings.environment import environment

WITH = {
    "tag": "name", "tag --hold": "why let_go", "tag --stage": "", "branch": "name", "note": "text", "prune": "", "undelete": "which",
    "log --rebuild": "", "cp": "", "export": "", "export --follow": "",
    "import": "", "import --all": "", "repack": "", "keys": "", "keys rekey": "", "save": "",
    "verify": "", "verify --repair": "", "drill": "", "doctor": "fix", "follow": "",
}  # fmt: skip
"""The audited commands. The value names arguments: without any of them the command only reads. Empty: it always changes something."""
_READ_ONLY_FLAGS = ("dry_run", "listed", "history")


def audited(name: str, command: click.Command) -> click.Command:
    """Return ``command``, changed to record its use if RELIGHT_AUDIT is set and the command is audited."""
    if name not in WITH or not environment().audit or "invoke" in vars(command):  # already changed
        return command
    plain = command.invoke

    def invoke(context: click.Context) -> Any:
        words = [name, *[word for word in _words(context) if not word.startswith("-")]]
        needed, given = WITH[name].split(), context.params
        only_reads = any(given.get(flag) for flag in _READ_ONLY_FLAGS) or (
            needed and not any(given.get(argument) for argument in needed)
        )
        if only_reads or not environment().audit:
            return plain(context)
        if isinstance(command, click.Group) and words[1:2] == ["status"]:
            return plain(context)
        from relight.audit import recorded

        grouped = isinstance(command, click.Group)
        what = " ".join(words[:2]) if grouped else name
        from relight.cli.audited_facts import facts_of

        arguments = _of_group(command, context) if isinstance(command, click.Group) else _given(context)
        with recorded(what, "".join(words[2:3]) if grouped else _first(command, given), facts_of(name, arguments)):
            return plain(context)

    command.invoke = invoke  # type: ignore[method-assign,assignment] # one command, used once a process
    return command


def _words(context: click.Context) -> list[str]:
    """Return the words after a group's name: its subcommand and arguments."""
    return [*getattr(context, "_protected_args", ()), *context.args]


def _given(context: click.Context) -> dict[str, Any]:
    """Return the arguments that the user gave, by name."""
    default = click.core.ParameterSource.DEFAULT
    return {name: value for name, value in context.params.items() if context.get_parameter_source(name) is not default}


def _of_group(group: click.Group, context: click.Context) -> dict[str, Any]:
    """Return the arguments of a group's subcommand, which click has not parsed yet."""
    words = _words(context)
    command = group.get_command(context, words[0]) if words else None
    if command is None:
        return {"arguments": words}
    return _given(command.make_context(words[0], list(words[1:]), parent=context, resilient_parsing=True))


def _first(command: click.Command, given: dict[str, Any]) -> str:
    """Return the first positional argument: a run, a checkpoint or a directory."""
    name = next((parameter.name for parameter in command.params if isinstance(parameter, click.Argument)), None)
    return str(given.get(name or "") or "")
