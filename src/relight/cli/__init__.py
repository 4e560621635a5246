"""Command line: one small file for each command, imported when the command is used.

Invariants: exit code 0 is yes, 1 a well-formed no (damage found, nothing there), 2 bad usage or a bad environment, 130 interrupted, 141 the
output's reader closed the pipe. Stored text is escaped before it is printed. May import everything below it, but never torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from typing import Any, NoReturn

import click

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError, UnsafeContent
from relight.observe.console import be_command
from relight.version import VERSION

INSPECT, KEEP, SHARE, RUN, MORE = "Inspect", "Keep safe", "Branch and share", "Run", "More"
"""Groups of commands, in the order of the help. ``relight --help`` leaves out the last one."""


class CommandEntry:
    """A command's group, its line in the help, and its effects (``audit.effects``). Without any, it only shows something."""

    def __init__(self, group: str, help: str, *effects: str) -> None:
        self.group, self.help, self.effects = group, help, effects


COMMANDS = {
    "ls": CommandEntry(INSPECT, "list the checkpoints of a run, or the runs of a store"),
    "show": CommandEntry(INSPECT, "show one checkpoint: facts, tensors, statistics"),
    "log": CommandEntry(INSPECT, "show a run's history, record by record"),
    "diff": CommandEntry(INSPECT, "compare two checkpoints"),
    "top": CommandEntry(INSPECT, "watch runs live in the terminal"),
    "serve": CommandEntry(INSPECT, "serve a dashboard and an API for the runs of stores", "run job"),
    "verify": CommandEntry(KEEP, "check every byte against what was committed", "verify"),
    "doctor": CommandEntry(KEEP, "diagnose machine, store, run and settings", "repair"),
    "prune": CommandEntry(KEEP, "remove checkpoints that no rule keeps, with the reasons", "retire"),
    "undelete": CommandEntry(KEEP, "bring back retired checkpoints whose bytes still exist", "undelete"),
    "cp": CommandEntry(KEEP, "copy checkpoints to another store or run", "create run", "add checkpoints"),
    "tag": CommandEntry(KEEP, "name a checkpoint; a tag also keeps it", "tag"),
    "branch": CommandEntry(SHARE, "fork a run from a checkpoint without copying bytes", "create run"),
    "export": CommandEntry(SHARE, "export a checkpoint's model for other tools", "take out"),
    "import": CommandEntry(SHARE, "import a checkpoint of another framework", "create run", "add checkpoints"),
    "push": CommandEntry(
        SHARE, "copy a run's missing checkpoints to another store", "create run", "add checkpoints", "tag"
    ),
    "pull": CommandEntry(
        SHARE, "copy missing checkpoints from another store to a run", "create run", "add checkpoints", "tag"
    ),
    "run": CommandEntry(RUN, "run a training job as torchrun does, and keep it alive", "run job"),
    "save": CommandEntry(RUN, "request a save from a training job on any machine", "request save"),
    "incidents": CommandEntry(RUN, "show a run's failures, the decisions and their costs"),
    "goodput": CommandEntry(RUN, "show where the time of a run's jobs went, by cause"),
    "demo": CommandEntry(RUN, "train, kill, resume, compare: see it work in two minutes", "run job"),
    "recover": CommandEntry(MORE, "rebuild a run's log from its checkpoint directories", "repair"),
    "describe": CommandEntry(MORE, "describe a checkpoint: name, origin, notes, metadata"),
    "note": CommandEntry(MORE, "write a note about a checkpoint", "note"),
    "promote": CommandEntry(MORE, "move a stage (candidate, staging, production) to a checkpoint", "stage"),
    "hold": CommandEntry(MORE, "keep a checkpoint whatever the retention rules are", "hold"),
    "migrate": CommandEntry(
        MORE, "import a whole directory of other frameworks' checkpoints", "create run", "add checkpoints", "retire"
    ),
    "repack": CommandEntry(MORE, "make checkpoints that need others' bytes self-contained", "add checkpoints"),
    "drain": CommandEntry(MORE, "copy missing checkpoints to a run's further tiers", "run job"),
    "scrub": CommandEntry(MORE, "read every byte again, and repair damage from another tier", "repair"),
    "keys": CommandEntry(MORE, "manage an encrypted store's keys: new, status, add, rotate …", "change keys"),
    "rekey": CommandEntry(MORE, "encrypt again what a leaked key could open", "change keys"),
    "explain": CommandEntry(MORE, "explain why a run saved when it did"),
    "plan": CommandEntry(MORE, "compute what saving costs, how often to save, how much is lost"),
    "preset": CommandEntry(MORE, "print a relight.toml for a kind of machine"),
    "metrics": CommandEntry(MORE, "serve or print metrics for Prometheus; dashboards, alert rules"),
    "trace": CommandEntry(MORE, "show where the time of a save went, and its critical path"),
    "alerts": CommandEntry(MORE, "check what would fire, list the rules, send a test"),
    "predict": CommandEntry(MORE, "train and evaluate the prediction of failures", "run job"),
    "simulate": CommandEntry(MORE, "simulate months of a fleet in seconds, with several policies", "run job"),
    "config": CommandEntry(MORE, "show each setting and its source; check a settings file"),
    "ready": CommandEntry(MORE, "grade how ready store and run are for an important job"),
    "drill": CommandEntry(MORE, "break a job on purpose, and check that it recovers", "drill"),
    "token": CommandEntry(MORE, "manage access tokens of relight serve", "make token", "revoke token"),
    "audit": CommandEntry(MORE, "show and verify who did what to which checkpoint", "read audit"),
    "prove": CommandEntry(MORE, "check whether a training script resumes bit-exactly", "run job"),
    "bench": CommandEntry(MORE, "measure what saving costs here, and recommend settings", "run job"),
    "help": CommandEntry(MORE, "show the help of a command; --all lists every command"),
    "completion": CommandEntry(MORE, "print shell completion for bash, zsh or fish"),
    "version": CommandEntry(MORE, "print the versions of Relight and of its main dependencies"),
}
"""All commands by name, in the order of the help. The command NAME is in ``cli/NAME.py``."""
_ASKED_ALL_THE_SAME = ("completion", "config", "doctor", "help", "ready", "preset", "version")
"""Commands that run in spite of mistakes in the settings file: they report the mistakes, or need no settings."""
NO = (CheckpointNotFound, CorruptCheckpoint, UnsafeContent)
"""Errors that are an answer (exit code 1). Other errors mean that the command could not run (exit code 2)."""


class Commands(click.Group):
    """Commands by name; a file is imported when its command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of ``COMMANDS``."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"relight.cli.{cmd_name}{'_' if iskeyword(cmd_name) else ''}").command
        from relight.settings.environment import environment

        if environment().audit:
            from relight.cli.audited import audited

            return audited(cmd_name, command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command. For an unknown name, suggest the nearest one."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            close = get_close_matches(name, COMMANDS, n=1)
            near = f"did you mean {close[0]}? " if close else ""
            _show(ConfigError(f"there is no command {name!r}", hint=f"{near}relight help --all lists the commands"))
            ctx.exit(2)
        if name in COMMANDS and not ctx.resilient_parsing:
            _apply_settings(name, ctx.params.get("given", ()))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in their groups, without importing them."""
        write_groups(formatter, (INSPECT, KEEP, SHARE, RUN))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands. The usage line names the options, which ``relight help --all`` explains: one screen is for the commands."""
        self.format_commands(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text("relight help --all lists all commands and options.")

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse, or print help. A closed pipe ends the process here: click would exit with 1, which means no."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except BrokenPipeError:
            _end_without_reader()

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A closed pipe ends the process, as in ``make_context``."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _end_without_reader()


def write_groups(formatter: click.HelpFormatter, groups: Sequence[str]) -> None:
    """Write the commands of ``groups``, a section for each group."""
    width = max(len(name) for name, command in COMMANDS.items() if command.group in groups)
    for group in groups:
        with formatter.section(group):
            formatter.write_dl(
                [(name.ljust(width), command.help) for name, command in COMMANDS.items() if command.group == group]
            )


def _apply_settings(name: str, given: tuple[str, ...]) -> None:
    """Apply ``--set``, then the file's environment settings, before the command, which may need either."""
    from relight.settings.environment import set_default
    from relight.settings.file import give, take_environment

    for assignment in given:
        setting, equals, value = assignment.partition("=")
        if not equals or not value:
            raise ConfigError(f"{setting[:80]!r} is not NAME=VALUE", hint="such as --set supervise.same=4")
        give(setting.strip(), value)
    with contextlib.suppress(*((RelightError,) if name in _ASKED_ALL_THE_SAME else ())):
        take_environment()
    # a user waits for this process; jobs that it starts have no such user
    set_default("store_patience_s", "20")


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    options_metavar="[--set NAME=VALUE] [--debug]",
    subcommand_metavar="COMMAND [ARGS]…",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error; so does RELIGHT_DEBUG=1.")
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="Override a setting: see relight config.")
@click.version_option(VERSION, "-V", "--version", prog_name="relight", message="%(prog)s %(version)s")
def cli(debug: bool, given: tuple[str, ...]) -> None:
    """Keep a training run alive. A command's first argument is a store (runs), a run (runs/demo) or a checkpoint (runs/demo@step=400,
    runs/demo@best:loss). To complete names in your shell: relight completion --help.
    """
    if debug:
        from relight.settings.file import give

        give("environment.debug", "1")


def _shows_tracebacks() -> bool:
    from relight.settings.environment import environment

    with contextlib.suppress(ConfigError):
        return environment().debug
    return True


def main() -> None:
    """Run the command line. Relight's errors become a message and an exit code."""
    try:
        _run()
    finally:
        try:
            sys.stdout.flush()
        except (OSError, ValueError):  # Python would try again at its end, and change the exit code to 120
            _discard_output()


def _run() -> NoReturn:
    be_command()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # no locale may break a listing
    if "_RELIGHT_COMPLETE" in os.environ:  # a shell requests completions
        from relight.cli.completion import teach_shells

        teach_shells()
    try:
        code = cli.main(prog_name="relight", standalone_mode=False)
        sys.stdout.flush()
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        from relight.cli.usage import usage_error

        _show(usage_error(error))
        sys.exit(2)
    except BrokenPipeError:
        _end_without_reader()
    except RelightError as error:
        if _shows_tracebacks():
            import traceback

            traceback.print_exc()
        else:
            _show(error)
        sys.exit(1 if isinstance(error, NO) else 2)
    except OSError as error:
        _show(RelightError(str(error)))
        sys.exit(2)
    except ModuleNotFoundError as error:
        if (error.name or "relight").split(".")[0] == "relight":
            raise
        _show(RelightError(f"{error.name} is not installed for {sys.executable}"))
        sys.exit(2)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 (nothing is lost: the traceback is printed)
        import traceback

        from relight.supervise.refusals import limit_of, shown_refusal

        if limit := limit_of(error):  # such as MemoryError while torch is imported
            _show(RelightError(shown_refusal(error, limit, "this command")))
            sys.exit(2)

        traceback.print_exc()
        click.echo("relight: this is a bug in Relight; please report it with the lines above", err=True)
        sys.exit(2)  # never 1, which means no
    sys.exit(code if isinstance(code, int) else 0)


def _show(error: RelightError) -> None:
    from relight.cli.output import show_error

    show_error(error)


def _end_without_reader() -> NoReturn:
    """Exit as if SIGPIPE had ended the process: the answer may not have arrived, so the exit code is neither yes nor no."""
    _discard_output()
    sys.exit(141)


def _discard_output() -> None:
    """Send what is still buffered for stdout to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
