"""Commands that take torchrun's flags: their own options may stand anywhere before the script."""

from __future__ import annotations

import click

_GROUP = ("--set", "--debug")
"""Options of ``relight`` itself, which stand before the command."""


class LaunchCommand(click.Command):
    """A command with torchrun's flags. Its own options are found between these; all after the script belongs to the script."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Return ``-h`` and ``--help`` in every context: click keeps the first one's names, and torchrun would take an unknown ``-h``."""
        return ["-h", "--help"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move the command's own options to the front, as click stops at the first flag that it does not know."""
        return super().parse_args(ctx, self._in_order(ctx, list(args)))

    def _in_order(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = {
            name: option for option in self.get_params(ctx) if isinstance(option, click.Option) for name in option.opts
        }
        own, other, position = list[str](), list[str](), 0
        while position < len(args) and args[position].startswith("-") and args[position] not in ("-", "--"):
            name, equals, _ = args[position].partition("=")
            if name in _GROUP:
                given = args[position] if equals or name == "--debug" else " ".join(args[position : position + 2])
                raise click.UsageError(f"{name} stands before the command: relight {given} {self.name} …", ctx)
            option = options.get(name)
            length = _length(option, bool(equals)) if option is not None else _torchrun_length(args[position:])
            (own if option is not None else other).extend(args[position : position + length])
            position += length
        return [*own, *other, *args[position:]]


def _length(option: click.Option, has_value: bool) -> int:
    return 1 if has_value or option.is_flag or option.count else 1 + option.nargs


def _torchrun_length(args: list[str]) -> int:
    """Return how many of ``args`` the first flag takes, itself included. Cost: imports torch, which the launch needs anyway."""
    from relight.supervise.launch import flag_length

    return flag_length(args)
