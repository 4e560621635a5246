"""``relight config completion``: print the script with which a shell completes Relight's commands."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from threading import Thread
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

from relight.cli import FORMS

VARIABLE = "_RELIGHT_COMPLETE"
_PATIENCE_S = 1.0
"""Seconds to wait for a store's directory: a shell waits for its completions, and a network file system may hang."""
_STEPS_MAX = 200
"""Largest number of steps to offer, the newest ones."""
_BASH = """%(complete_func)s() {
    local IFS=$'\\n'
    local response completion type value
    local line="${COMP_LINE:-}"
    line="${line:0:${COMP_POINT:-0}}"

    response=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD COMP_LINE="$line" %(complete_var)s=bash_complete $1)

    for completion in $response; do
        IFS=',' read type value <<< "$completion"

        if [[ $type == 'file' ]]; then
            COMPREPLY=()
            compopt -o default
        elif [[ $type == 'more' ]]; then
            COMPREPLY+=($value)
            compopt -o nospace
        elif [[ $type == 'plain' ]]; then
            COMPREPLY+=($value)
        fi
    done

    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""
"""Click's script, with the typed line: bash takes ``runs/demo@step=4`` apart at ``@`` and ``=``."""


class _Paths(ShellComplete):
    """Click's completions, and file names where click has none: stores and runs are directories."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Return commands, subcommands, options and choices; after a command, paths."""
        known = super().get_completions(args, incomplete)
        if not known and incomplete and len(args) == 1:  # a word that chooses a form, such as plan simulate
            known = [
                CompletionItem(form.partition(" ")[2]) for form in FORMS if form.startswith(f"{args[0]} {incomplete}")
            ]
        if known or not args or incomplete.startswith("-") or not self._takes_paths(args):
            return known
        return within(lambda: named_checkpoints(incomplete)) or [CompletionItem(incomplete, type="file")]

    def _takes_paths(self, args: list[str]) -> bool:
        """Return whether ``args`` name a complete command: not an unknown one, nor a group without its subcommand."""
        if not isinstance(self.cli, click.Group):
            return True
        with click.Context(self.cli) as context:
            command = self.cli.get_command(context, args[0])
        return len(args) > 1 if isinstance(command, click.Group) else command is not None


class _Bash(_Paths, BashComplete):
    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the word at it, as a command would get them."""
        line = os.environ.get("COMP_LINE", "")
        if not line:
            return super().get_completion_args()
        words = split_arg_string(line)
        incomplete = "" if line[-1].isspace() or not words else words.pop()
        self._replaced = incomplete[: max(map(incomplete.rfind, "@=:")) + 1]
        return words[1:], incomplete

    _replaced = ""
    """Part of the incomplete word that bash keeps: it replaces only what follows the last ``@``, ``=`` or ``:``."""

    def format_completion(self, item: CompletionItem) -> str:
        """Return the item without what bash keeps. No space follows an unfinished name."""
        if item.type != "plain":
            return super().format_completion(item)
        value = item.value.removeprefix(self._replaced)
        return f"{'more' if value.endswith((':', '=', '@')) else item.type},{value}"

    @staticmethod
    def _check_version() -> None:
        """Skip click's check: another bash than the one on PATH may read the script. The script states the version it needs."""


class _Zsh(_Paths, ZshComplete):
    pass


class _Fish(_Paths, FishComplete):
    pass


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def within(read: Callable[[], list[CompletionItem]]) -> list[CompletionItem]:
    """Return what ``read`` returns. If it fails or takes too long, return nothing: a shell shows no errors of completions."""
    result: list[CompletionItem] = []

    def work() -> None:
        with contextlib.suppress(Exception):
            result.extend(read())

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return [] if thread.is_alive() else result


def named_checkpoints(incomplete: str) -> list[CompletionItem]:
    """Return the runs of a local store that begin with ``incomplete``, or, after ``RUN@``, the steps, tags and metrics of the run.

    A store with a URL is not asked, nor is a local store if the anchor has a URL: both may be on other machines.
    """
    path, at_sign, beginning = incomplete.rpartition("@")
    place = path if at_sign else os.path.dirname(incomplete)
    if "://" in incomplete or not os.path.isdir(os.path.expanduser(place or ".")):
        return []
    import logging

    logging.disable()
    from relight.catalog.find import STEP, finite_metrics
    from relight.catalog.locate import locate
    from relight.catalog.run import list_runs, open_run
    from relight.format.names import BRANCH_TAGS
    from relight.settings.environment import environment

    if "://" in environment().anchor:
        return []
    location = locate(place)
    if not at_sign:
        if location.run is not None:
            return []
        prefix = incomplete[: len(incomplete) - len(os.path.basename(incomplete))]
        runs = [f"{prefix}{name}" for name in list_runs(location.store)]
        return [CompletionItem(run) for run in runs if run.startswith(incomplete)]
    if location.run is None or location.which is not None:
        return []
    history = open_run(location.store, location.run).history()
    newest = history.live[::-1][:_STEPS_MAX]
    names = ["latest", *(name for name in history.tags if not name.startswith(BRANCH_TAGS))]
    names += [f"best:{metric}" for metric in sorted(finite_metrics(history))]
    names += dict.fromkeys(f"{STEP}{checkpoint.step}" for checkpoint in newest)
    if beginning.isdecimal():
        names += dict.fromkeys(str(checkpoint.step) for checkpoint in newest)
    return [CompletionItem(f"{path}@{name}") for name in names if name.startswith(beginning)]


def teach_shells() -> None:
    """Register these classes with click. Called only if a shell requests completions."""
    for shell, shell_class in _SHELLS.items():
        add_completion_class(shell_class, shell)


def script(shell: str, cli: click.Command) -> str:
    """Return the completion script for ``shell``."""
    no_settings: dict[str, Any] = {}
    return _SHELLS[shell](cli, no_settings, "relight", VARIABLE).source()


@click.command("config completion")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def command(shell: str) -> None:
    """Print the script that makes a shell complete commands, options, choices, paths and, after @, checkpoints.

    In the shell's completion directory it costs nothing when a shell starts. It calls the relight on the path, so it stays valid for newer
    versions. Needs bash 4.4 or newer.

    \b
    Examples:
      relight config completion bash \\
        > ~/.local/share/bash-completion/completions/relight
      relight config completion zsh > ~/.zfunc/_relight   # with ~/.zfunc in fpath
      relight config completion fish \\
        > ~/.config/fish/completions/relight.fish
      eval "$(relight config completion bash)"             # this shell only
    """
    click.echo(script(shell, click.get_current_context().find_root().command))
