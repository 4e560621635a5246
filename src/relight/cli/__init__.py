"""The command line: one small file a command, imported when the command is used.

Always holds: exit code 0 is yes, 1 a well-formed no (damage found, nothing there), 2 bad usage or a bad environment, 130
interrupted, 141 nobody read the output to its end. Stored text is escaped before it is printed. May import everything below it;
torch never.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from keyword import iskeyword
from typing import Any, NoReturn

import click

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError, UnsafeContent
from relight.observe.console import be_command
from relight.version import VERSION

COMMANDS = {
    "demo": "train, kill, resume, compare: see it work in two minutes",
    "ls": "checkpoints of a run, or runs of a store",
    "show": "one checkpoint: facts, tensors, statistics",
    "log": "what happened to a run, record by record",
    "verify": "is every byte what was committed?",
    "prune": "remove what no rule keeps, saying why",
    "undelete": "bring back what was retired, as long as its bytes are there",
    "recover": "rebuild a run's log from its checkpoint directories",
    "tag": "name a checkpoint; a tag also keeps it",
    "branch": "fork a run from a checkpoint, at no cost in bytes",
    "diff": "what differs between two checkpoints",
    "describe": "what a checkpoint is, and where it comes from",
    "note": "write something about a checkpoint",
    "promote": "candidate, staging, production: with who and why",
    "hold": "keep a checkpoint whatever the rules say",
    "cp": "copy checkpoints to another store or run",
    "push": "bring another store all that a run has and it lacks",
    "pull": "bring a run all that another store has and it lacks",
    "export": "write a checkpoint's model as other tools read it",
    "import": "bring in a checkpoint of another framework",
    "migrate": "bring a whole directory of other frameworks' checkpoints in",
    "repack": "have checkpoints that need others' bytes stand by themselves",
    "drain": "copy to a run's further tiers what they lack",
    "scrub": "read everything again, and mend what is damaged from another tier",
    "keys": "who can open an encrypted store: new, status, add, rotate, revoke",
    "rekey": "encrypt anew what a leaked key could open, or what is not encrypted",
    "run": "run a training job as torchrun does, and keep it alive",
    "save": "have a job that is training save now, wherever it runs",
    "incidents": "what happened to a run, and what was done about it",
    "goodput": "where the time of a run's jobs went, by cause",
    "explain": "why a run saved when it did",
    "plan": "what saving a model will cost, how often to save, how much is lost",
    "preset": "a relight.toml for a machine, chosen by numbers",
    "top": "runs as they are now, live in the terminal",
    "metrics": "what runs are like, for Prometheus; dashboards and alert rules",
    "trace": "where the time of a save went: lanes, slowest rank, critical path",
    "alerts": "what is worth an alert: check, list the rules, send a test",
    "predict": "failures seen coming: train on histories, and what that is worth",
    "simulate": "months of a fleet in seconds: what policies make of its failures",
    "config": "settings: what each is and where that was said; is a file right?",
    "doctor": "what is wrong with machine, store, run and settings, and what to do",
    "ready": "how ready is all of it for a run that matters? measured and graded",
    "drill": "break a job on purpose, and see whether it goes on as it should",
    "serve": "a dashboard and an API for the runs of stores",
    "token": "who may look at relight serve, and who may act",
    "audit": "who did what to which checkpoint, and is that unchanged?",
    "prove": "does a training script resume to the bit?",
    "bench": "what saving costs here, and which settings to choose",
    "completion": "what bash, zsh or fish needs to complete all this",
    "version": "of Relight and of what it works with",
}
_ASKED_ALL_THE_SAME = ("completion", "config", "doctor", "ready", "preset", "version")
"""Commands that a file of settings with mistakes does not stop: they tell of them, or do without."""
NO = (CheckpointNotFound, CorruptCheckpoint, UnsafeContent)
"""Errors that are an answer. The others say that the question could not be asked."""


class Commands(click.Group):
    """Commands by name; a file is imported when its command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of ``COMMANDS``."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command's own file."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"relight.cli.{cmd_name}{'_' if iskeyword(cmd_name) else ''}").command
        if os.environ.get("RELIGHT_AUDIT"):
            from relight.cli.audited import audited

            return audited(cmd_name, command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """A command that there is not is answered with the nearest that there is."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            close = get_close_matches(name, COMMANDS, n=1)
            ctx.fail(f"there is no command {name!r}" + (f": did you mean {close[0]!r}?" if close else "."))
        if name in COMMANDS and not ctx.resilient_parsing:
            _apply_settings(name, ctx.params.get("given", ()))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def make_context(self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any) -> click.Context:
        """Parse, or print help. A pipe that was closed ends it here, before click makes of it what would read as a no."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except BrokenPipeError:
            _nobody_reads()

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; of closed pipes see above."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _nobody_reads()


def _apply_settings(name: str, given: tuple[str, ...]) -> None:
    """What ``--set`` says, then what the file says of the environment: before the command, which may need either."""
    from relight.settings.file import give, take_environment
    from relight.settings.process_defaults import set_default

    for one in given:
        setting, equals, value = one.partition("=")
        if not equals or not value:
            raise ConfigError(f"{setting[:80]!r} is not NAME=VALUE", hint="such as --set supervise.same=4")
        give(setting.strip(), value)
    with contextlib.suppress(*((RelightError,) if name in _ASKED_ALL_THE_SAME else ())):
        take_environment()
    set_default("RELIGHT_STORE_PATIENCE_S", "20")  # somebody is looking at the screen; not at the jobs that it starts


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.option("--debug", is_flag=True, help="Show the traceback of an error; so does RELIGHT_DEBUG=1.")
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="A setting, before variables and relight.toml: relight config.")
@click.version_option(VERSION, "-V", "--version", prog_name="relight", message="%(prog)s %(version)s")
def cli(debug: bool, given: tuple[str, ...]) -> None:
    """Keep a training run alive: look at its checkpoints, check, copy and prune them, prove that it resumes exactly.

    The first argument of a command is a store (runs), a run in it (runs/demo), one of its checkpoints (runs/demo@best, or the
    checkpoint's directory), or the URL of one.

    \b
    Examples:
      relight ls runs/demo
      relight verify runs/demo

    Exit codes: 0 yes, 1 a well-formed no, 2 bad usage or environment. Completion for your shell: relight completion --help.
    """
    if debug:
        os.environ["RELIGHT_DEBUG"] = "1"


def main() -> None:
    """The entry point: errors of ours become a message and an exit code."""
    be_command()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # no locale may break a listing
    if "_RELIGHT_COMPLETE" in os.environ:  # a shell asks
        from relight.cli.completion import teach_shells

        teach_shells()
    try:
        code = cli.main(prog_name="relight", standalone_mode=False)
        sys.stdout.flush()
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except BrokenPipeError:
        _nobody_reads()
    except RelightError as error:
        if os.environ.get("RELIGHT_DEBUG"):
            import traceback

            traceback.print_exc()
        else:
            from relight.cli.output import show_error

            show_error(error)
        sys.exit(1 if isinstance(error, NO) else 2)
    except OSError as error:
        click.echo(f"relight: {error}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if (error.name or "relight").split(".")[0] == "relight":
            raise
        click.echo(f"relight: {error.name} is not installed for {sys.executable}", err=True)
        sys.exit(2)
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 (nothing is lost: the traceback is printed)
        import traceback

        traceback.print_exc()
        click.echo("relight: this is a bug in Relight; please report it with the lines above", err=True)
        sys.exit(2)  # never 1: that is an answer
    sys.exit(code if isinstance(code, int) else 0)


def _nobody_reads() -> NoReturn:
    """As if SIGPIPE had ended us: the answer is not known to have arrived, so it is neither yes nor no."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(141)
