"""``relight help``: show the help of a command, or list every command."""

from __future__ import annotations

import click

from relight.cli import INSPECT, KEEP, MORE, RUN, SHARE, form_of, no_command, write_groups
from relight.errors import ConfigError


@click.command("help", context_settings={"ignore_unknown_options": True})
@click.argument("names", nargs=-1, metavar="[COMMAND]…", type=click.UNPROCESSED)
@click.option("--all", "everything", is_flag=True, help="List every command, and the options of relight itself.")
@click.pass_context
def command(context: click.Context, names: tuple[str, ...], everything: bool) -> None:
    """Show the help of a command, as its --help does, or the commands in groups.

    \b
    Examples:
      relight help --all
      relight help ls
      relight help keys new
      relight help show --trace
    """
    root = context.find_root()
    if everything and names:
        raise ConfigError("--all lists every command, so it takes no COMMAND")
    click.echo(_every_command(root) if everything else _help_of(root, names))


def _help_of(context: click.Context, names: tuple[str, ...]) -> str:
    """Return the help of the command, or of the subcommand, that ``names`` name."""
    if names:
        form, rest = form_of(names[0], names[1:])
        names = (form, *rest)
    for name in names:
        group = context.command
        known = group.list_commands(context) if isinstance(group, click.Group) else []
        below = group.get_command(context, name) if isinstance(group, click.Group) else None
        if below is None:
            raise no_command(name, known)
        context = below.context_class(below, parent=context, info_name=name, **below.context_settings)
    return context.get_help()


def _every_command(context: click.Context) -> str:
    """Return the list of all commands by group, and the options of ``relight``."""
    formatter = context.make_formatter()
    context.command.format_usage(context, formatter)
    write_groups(formatter, (INSPECT, KEEP, SHARE, RUN, MORE), forms=True)
    click.Command.format_options(context.command, context, formatter)
    with formatter.section("Exit codes"):
        formatter.write_text("0 yes, 1 a well-formed no, 2 bad usage or environment, 130 interrupted.")
    return formatter.getvalue().rstrip("\n")
