"""Commands that change something, or take something out, are written into the audit log that ``RELIGHT_AUDIT`` names."""

from __future__ import annotations

import os
from typing import Any

import click

WITH = {
    "tag": "name", "branch": "name", "note": "text", "hold": "which", "promote": "", "prune": "", "undelete": "which",
    "recover": "", "cp": "",
    "push": "", "pull": "", "export": "", "import": "", "migrate": "", "repack": "", "keys": "", "rekey": "", "save": "", "scrub": "",
    "drill": "", "verify": "", "doctor": "fix",
}  # fmt: skip
"""Which; and the argument without which it only looks."""
_LOOKS = ("dry_run", "listed", "history")


def audited(name: str, command: click.Command) -> click.Command:
    """``command``, whose use is written down if a setting says where to; else it is as it was."""
    if name not in WITH or not os.environ.get("RELIGHT_AUDIT") or hasattr(command, "is_audited"):
        return command
    plain = command.invoke

    def invoke(context: click.Context) -> Any:
        words = [name, *[word for word in _words(context) if not word.startswith("-")]]
        needed, given = WITH[name], context.params
        looks = any(given.get(flag) for flag in _LOOKS) or (needed and given.get(needed) in (None, False, ()))
        if looks or not os.environ.get("RELIGHT_AUDIT"):
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
    command.is_audited = True  # type: ignore[attr-defined]
    return command


def _words(context: click.Context) -> list[str]:
    """What a group is given for its command."""
    return [*getattr(context, "_protected_args", ()), *context.args]


def _given(context: click.Context) -> dict[str, Any]:
    """The arguments that the caller gave, by their names, and those by which the command finds its object."""
    default = click.core.ParameterSource.DEFAULT
    return {name: value for name, value in context.params.items() if context.get_parameter_source(name) is not default}


def _of_group(group: click.Group, context: click.Context) -> dict[str, Any]:
    """The arguments of the command of a group, which click has not parsed yet."""
    words = _words(context)
    command = group.get_command(context, words[0]) if words else None
    if command is None:
        return {"arguments": words}
    return _given(command.make_context(words[0], list(words[1:]), parent=context, resilient_parsing=True))


def _first(command: click.Command, given: dict[str, Any]) -> str:
    """What is named first: a run, a checkpoint, a directory."""
    name = next((one.name for one in command.params if isinstance(one, click.Argument)), None)
    return str(given.get(name or "") or "")
