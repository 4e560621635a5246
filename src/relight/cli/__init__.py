"""The command line: one small file a command, imported when the command is used.

Exit codes: 0 yes, 1 a well-formed no (damage found, nothing there), 2 bad usage or a bad environment, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click

from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, UnsafeContent
from relight.version import VERSION

COMMANDS = {
    "demo": "train, kill, resume, compare: see it work in two minutes",
    "ls": "checkpoints of a run, or runs of a store",
    "show": "one checkpoint: facts, tensors, statistics",
    "log": "what happened to a run, record by record",
    "verify": "is every byte what was committed?",
    "prune": "remove what no rule keeps, saying why",
    "tag": "name a checkpoint; a tag also keeps it",
    "cp": "copy checkpoints to another store or run",
    "prove": "does a training script resume to the bit?",
}


class Commands(click.Group):
    """Commands by name; a file is imported when its command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of ``COMMANDS``."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command's own file."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"relight.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, "--version", prog_name="relight")
def cli() -> None:
    """Keep a training run alive: look at its checkpoints, check, copy and prune them, prove that it resumes exactly.

    The first argument of a command is a store, a run in it (store/run), or a checkpoint's directory.
    """


def main() -> None:
    """The entry point: errors of ours become a message and an exit code."""
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except RelightError as error:
        if os.environ.get("RELIGHT_DEBUG"):
            raise
        from relight.cli.output import escape

        click.echo(f"relight: {escape(str(error), lines=True)}", err=True)
        sys.exit(1 if isinstance(error, (CheckpointNotFound, CorruptCheckpoint, UnsafeContent)) else 2)
    sys.exit(code if isinstance(code, int) else 0)
