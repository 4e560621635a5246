"""``relight completion``: what a shell reads to complete Relight's commands."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ShellComplete, ZshComplete, add_completion_class

VARIABLE = "_RELIGHT_COMPLETE"


class _Paths(ShellComplete):
    """What click knows, and where it knows nothing, names of files: a store is a directory, and so is a run in it."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Commands, subcommands, options and choices; behind a command, paths."""
        known = super().get_completions(args, incomplete)
        if known or not args or incomplete.startswith("-") or not self._takes_paths(args):
            return known
        return [CompletionItem(incomplete, type="file")]

    def _takes_paths(self, args: list[str]) -> bool:
        """A command does; not what still lacks its subcommand, or is no command."""
        if not isinstance(self.cli, click.Group):
            return True
        with click.Context(self.cli) as context:
            command = self.cli.get_command(context, args[0])
        return len(args) > 1 if isinstance(command, click.Group) else command is not None


class _Bash(_Paths, BashComplete):
    @staticmethod
    def _check_version() -> None:
        """Whoever reads the script may be another shell than the one on this machine's path; the script says what it needs."""


class _Zsh(_Paths, ZshComplete):
    pass


class _Fish(_Paths, FishComplete):
    pass


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def teach_shells() -> None:
    """Have click answer shells as above. Asked for only where a shell waits for an answer."""
    for shell, one in _SHELLS.items():
        add_completion_class(one, shell)


def script(shell: str, cli: click.Command) -> str:
    """What ``shell`` is to read."""
    no_settings: dict[str, Any] = {}
    return _SHELLS[shell](cli, no_settings, "relight", VARIABLE).source()


@click.command("completion")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def command(shell: str) -> None:
    """Print what makes a shell complete commands, options, choices and paths.

    Written once to where the shell looks for such files, it costs nothing when a shell starts. It asks the relight on the path, so that it
    need not be written anew for a newer one. bash 4.4 or newer.

    \b
    Examples:
      relight completion bash > ~/.local/share/bash-completion/completions/relight
      relight completion zsh > ~/.zfunc/_relight    # with ~/.zfunc in fpath
      relight completion fish > ~/.config/fish/completions/relight.fish
      eval "$(relight completion bash)"             # this shell only
    """
    from relight.cli import cli

    click.echo(script(shell, cli))
