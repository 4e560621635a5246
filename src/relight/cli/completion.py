"""``relight completion``: print the script with which a shell completes Relight's commands."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

VARIABLE = "_RELIGHT_COMPLETE"


class _Paths(ShellComplete):
    """Click's completions, and file names where click has none: stores and runs are directories."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Return commands, subcommands, options and choices; after a command, paths."""
        known = super().get_completions(args, incomplete)
        if known or not args or incomplete.startswith("-") or not self._takes_paths(args):
            return known
        return [CompletionItem(incomplete, type="file")]

    def _takes_paths(self, args: list[str]) -> bool:
        """Return whether ``args`` name a complete command: not an unknown one, nor a group without its subcommand."""
        if not isinstance(self.cli, click.Group):
            return True
        with click.Context(self.cli) as context:
            command = self.cli.get_command(context, args[0])
        return len(args) > 1 if isinstance(command, click.Group) else command is not None


class _Bash(_Paths, BashComplete):
    @staticmethod
    def _check_version() -> None:
        """Skip click's check: another bash than the one on PATH may read the script. The script states the version it needs."""


class _Zsh(_Paths, ZshComplete):
    pass


class _Fish(_Paths, FishComplete):
    pass


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def teach_shells() -> None:
    """Register these classes with click. Called only if a shell requests completions."""
    for shell, shell_class in _SHELLS.items():
        add_completion_class(shell_class, shell)


def script(shell: str, cli: click.Command) -> str:
    """Return the completion script for ``shell``."""
    no_settings: dict[str, Any] = {}
    return _SHELLS[shell](cli, no_settings, "relight", VARIABLE).source()


@click.command("completion")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def command(shell: str) -> None:
    """Print the script that makes a shell complete commands, options, choices and paths.

    In the shell's completion directory it costs nothing when a shell starts. It calls the relight on the path, so it stays valid for newer
    versions. Needs bash 4.4 or newer.

    \b
    Examples:
      relight completion bash > ~/.local/share/bash-completion/completions/relight
      relight completion zsh > ~/.zfunc/_relight    # with ~/.zfunc in fpath
      relight completion fish > ~/.config/fish/completions/relight.fish
      eval "$(relight completion bash)"             # this shell only
    """
    click.echo(script(shell, click.get_current_context().find_root().command))
