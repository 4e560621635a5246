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
        options = {name: one for one in self.get_params(ctx) if isinstance(one, click.Option) for name in one.opts}
        own, other, at = list[str](), list[str](), 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
            name, equals, _ = args[at].partition("=")
            if name in _GROUP:
                given = args[at] if equals or name == "--debug" else " ".join(args[at : at + 2])
                raise click.UsageError(f"{name} stands before the command: relight {given} {self.name} …", ctx)
            option = options.get(name)
            length = _length(option, bool(equals)) if option is not None else _torchrun_length(args[at:])
            (own if option is not None else other).extend(args[at : at + length])
            at += length
        return [*own, *other, *args[at:]]


def _length(option: click.Option, has_value: bool) -> int:
    return 1 if has_value or option.is_flag or option.count else 1 + option.nargs


def _torchrun_length(args: list[str]) -> int:
    """How many of ``args`` the flag at their front takes, itself included. Cost: the import of torch, which the launch needs."""
    from relight.supervise.launch import flag_length

    return flag_length(args)
