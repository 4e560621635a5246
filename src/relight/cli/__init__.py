"""Command line: one small file for each command, imported when the command is used.

Invariants: exit code 0 is yes, 1 a well-formed no (damage found, nothing there), 2 bad usage or a bad environment, 130 interrupted, 141 the
output's reader closed the pipe. Stored text is escaped before it is printed. May import everything below it, but never torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from keyword import iskeyword
from typing import Any, NoReturn, TextIO, cast

import click

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError, UnsafeContent
from relight.observe.console import be_command

INSPECT, KEEP, SHARE, RUN, MORE = "Inspect", "Keep safe", "Branch and share", "Run", "More"
"""Groups of commands, in the order of the help. ``relight --help`` leaves out the last one."""


class CommandEntry:
    """A command's group, its line in the help, and its effects (``audit.effects``). Without any, it only shows something."""

    def __init__(self, group: str, help: str, *effects: str) -> None:
        self.group, self.help, self.effects = group, help, effects


COMMANDS = {
    "ls": CommandEntry(INSPECT, "list the checkpoints of a run, or the runs of a store"),
    "show": CommandEntry(INSPECT, "show one checkpoint: origin, notes, tensors, statistics"),
    "log": CommandEntry(INSPECT, "show a run's history, record by record"),
    "diff": CommandEntry(INSPECT, "compare two checkpoints"),
    "top": CommandEntry(INSPECT, "watch runs live in the terminal"),
    "serve": CommandEntry(INSPECT, "serve a dashboard and an API for the runs of stores", "run job"),
    "verify": CommandEntry(KEEP, "check every byte against what was committed; repair it", "verify"),
    "doctor": CommandEntry(KEEP, "diagnose machine, store, run and settings", "repair"),
    "prune": CommandEntry(KEEP, "remove checkpoints that no rule keeps, with the reasons", "retire"),
    "undelete": CommandEntry(KEEP, "bring back retired checkpoints whose bytes still exist", "undelete"),
    "cp": CommandEntry(
        KEEP, "copy a run, or some of its checkpoints, to another store", "create run", "add checkpoints", "tag"
    ),
    "tag": CommandEntry(KEEP, "name a checkpoint, hold it, or move a stage to it", "tag"),
    "branch": CommandEntry(SHARE, "fork a run from a checkpoint without copying bytes", "create run"),
    "export": CommandEntry(SHARE, "export a checkpoint's model for other tools", "take out"),
    "import": CommandEntry(SHARE, "import checkpoints of other frameworks", "create run", "add checkpoints"),
    "run": CommandEntry(RUN, "run a training job as torchrun does, and keep it alive", "run job"),
    "save": CommandEntry(RUN, "request a save from a training job on any machine", "request save"),
    "follow": CommandEntry(RUN, "run a command for each new checkpoint; record its results", "note", "run job"),
    "incidents": CommandEntry(RUN, "show a run's failures, the decisions and their costs"),
    "goodput": CommandEntry(RUN, "show where the time of a run's jobs went, by cause"),
    "demo": CommandEntry(RUN, "train, kill, resume, compare: see it work in two minutes", "run job"),
    "note": CommandEntry(MORE, "write a note about a checkpoint", "note"),
    "repack": CommandEntry(MORE, "make checkpoints that need others' bytes self-contained", "add checkpoints"),
    "keys": CommandEntry(MORE, "manage an encrypted store's keys: new, status, add, rotate …", "change keys"),
    "plan": CommandEntry(MORE, "compute what saving costs, how often to save, how much is lost"),
    "config": CommandEntry(MORE, "show and check settings; presets, shell completion"),
    "metrics": CommandEntry(MORE, "serve or print metrics for Prometheus; dashboards, alert rules"),
    "drill": CommandEntry(MORE, "break a job on purpose, and check that it recovers", "drill"),
    "bench": CommandEntry(MORE, "measure what saving costs here, and recommend settings", "run job"),
    "token": CommandEntry(MORE, "manage access tokens of relight serve", "make token", "revoke token"),
    "help": CommandEntry(MORE, "show the help of a command; --all lists every command"),
}
"""All commands by name, in the order of the help. The command NAME is in ``cli/NAME.py``."""
FORMS = {
    "show --trace": CommandEntry(INSPECT, "show where the time of a save went"),
    "log --why": CommandEntry(INSPECT, "explain why a run saved when it did"),
    "log --audit": CommandEntry(INSPECT, "show who did what to which checkpoint", "read audit"),
    "log --rebuild": CommandEntry(INSPECT, "rebuild a lost log", "repair"),
    "verify --repair": CommandEntry(KEEP, "repair damage from another tier", "repair"),
    "doctor --ready": CommandEntry(KEEP, "state what an important job lacks"),
    "cp --tiers": CommandEntry(KEEP, "copy what a run's further tiers lack", "run job"),
    "tag --hold": CommandEntry(KEEP, "keep a checkpoint whatever the rules are", "hold"),
    "tag --stage": CommandEntry(KEEP, "move candidate, staging or production", "stage"),
    "export --follow": CommandEntry(SHARE, "keep an export at the newest checkpoint", "take out", "run job"),
    "import --all": CommandEntry(SHARE, "import a whole directory", "create run", "add checkpoints", "retire"),
    "keys rekey": CommandEntry(MORE, "encrypt again what a leaked key could open", "change keys"),
    "plan simulate": CommandEntry(MORE, "simulate months of a fleet", "run job"),
    "plan predict": CommandEntry(MORE, "train the prediction of failures", "run job"),
    "config preset": CommandEntry(MORE, "print a relight.toml for a kind of machine"),
    "config completion": CommandEntry(MORE, "print shell completion for bash, zsh or fish"),
    "metrics alerts": CommandEntry(MORE, "check what would fire, list the rules, send a test"),
    "drill --prove": CommandEntry(MORE, "check whether a script resumes bit-exactly", "run job"),
}
"""Forms of commands that have arguments of their own, and so a help of their own. ``show --trace`` is in ``cli/show_trace.py``."""
RENAMED = {
    "alerts": "metrics alerts", "audit": "log --audit", "completion": "config completion", "describe": "show", "drain": "cp --tiers",
    "explain": "log --why", "hold": "tag --hold", "migrate": "import --all", "predict": "plan predict", "preset": "config preset",
    "promote": "tag --stage", "prove": "drill --prove", "pull": "cp", "push": "cp", "ready": "doctor --ready", "recover": "log --rebuild",
    "rekey": "keys rekey", "scrub": "verify --repair", "simulate": "plan simulate", "trace": "show --trace", "version": "--version",
}  # fmt: skip
"""What does the work of commands that no longer exist, for the error that an old name gets."""
_ASKED_ALL_THE_SAME = ("config", "doctor", "help")
"""Commands that run in spite of mistakes in the settings file: they report the mistakes, or need no settings."""
NO = (CheckpointNotFound, CorruptCheckpoint, UnsafeContent)
"""Errors that are an answer (exit code 1). Other errors mean that the command could not run (exit code 2)."""


class Commands(click.Group):
    """Commands by name; a file is imported when its command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of ``COMMANDS``."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, or a form of one."""
        if cmd_name not in COMMANDS and cmd_name not in FORMS:
            return None
        command = _imported(cmd_name)
        _offer_forms(cmd_name, command)
        from relight.settings.environment import environment

        if environment().audit:
            from relight.cli.audited import audited

            return audited(cmd_name, command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command, or the form of it that the arguments choose. For an unknown name, suggest the right or the nearest one."""
        name = args[0]
        if name not in COMMANDS:
            if not name.startswith("-") and not ctx.resilient_parsing:
                _show(no_command(name, COMMANDS))
                ctx.exit(2)
            return super().resolve_command(ctx, args)
        if not ctx.resilient_parsing:
            _apply_settings(name, ctx.params.get("given", ()))
        form, rest = form_of(name, args[1:])
        return form, self.get_command(ctx, form), rest

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


def form_of(name: str, args: Sequence[str]) -> tuple[str, list[str]]:
    """Return the form of command ``name`` that ``args`` choose, or ``name``, and the arguments without the word that chose it.

    A flag may stand anywhere, but not within the arguments of a script that the command starts. Another word stands first.
    """
    for number, word in enumerate(args):
        if word == "--" or (name == "drill" and not word.startswith("-")):
            break
        if f"{name} {word}" in FORMS and (number == 0 or word.startswith("--")):
            return f"{name} {word}", [*args[:number], *args[number + 1 :]]
    return name, list(args)


def _imported(name: str) -> click.Command:
    module = re.sub(r"\W+", "_", name) + ("_" if iskeyword(name) else "")
    command: click.Command = import_module(f"relight.cli.{module}").command
    return command


def _offer_forms(name: str, command: click.Command) -> None:
    """Add the forms of command ``name`` to its help and to its completions: flags as options, words as subcommands or at the end."""
    forms = {full.removeprefix(f"{name} "): entry.help for full, entry in FORMS.items() if full.startswith(f"{name} ")}
    known = {option for param in command.params for option in param.opts}
    for word, text in forms.items():
        if isinstance(command, click.Group):
            command.add_command(_imported(f"{name} {word}"), word)
        elif word.startswith("--") and word not in known:
            about = f"{text[0].upper()}{text[1:]}: see relight {name} {word} --help."
            flag = click.Option([word], is_flag=True, expose_value=False, callback=_stands_first, help=about)
            command.params.append(flag)
    words = [f"  relight {name} {word:<10}{text}" for word, text in forms.items() if not word.startswith("--")]
    if words and not isinstance(command, click.Group):
        command.epilog = "\b\nAlso, each with a --help of its own:\n" + "\n".join(words)


def _stands_first(context: click.Context, option: click.Parameter, value: bool) -> None:
    """Refuse a form's flag that ``form_of`` did not find: it stands after another option's value."""
    if value and not context.resilient_parsing:
        raise click.UsageError(
            f"{option.opts[0]} stands first: relight {context.info_name} {option.opts[0]} …", context
        )


def no_command(name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown command: it has the new form of an old name, or the nearest of the ``known`` names."""
    if name in RENAMED:
        return ConfigError(f"there is no command {name!r}", hint=f"relight {RENAMED[name]}")
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=1)
    near = f"did you mean {close[0]}? " if close else ""
    return ConfigError(f"there is no command {name!r}", hint=f"{near}relight help --all lists the commands")


def write_groups(formatter: click.HelpFormatter, groups: Sequence[str], *, forms: bool = False) -> None:
    """Write the commands of ``groups``, a section for each group, with their forms if requested."""
    width = max(len(name) for name, command in COMMANDS.items() if command.group in groups)
    for group in groups:
        with formatter.section(group):
            rows = []
            for name, command in COMMANDS.items():
                if command.group == group:
                    rows.append((name.ljust(width), command.help))
                    rows += [
                        (f"  {full.partition(' ')[2]}", FORMS[full].help)
                        for full in FORMS
                        if forms and full.startswith(f"{name} ")
                    ]
            formatter.write_dl(rows)


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


def _print_versions(context: click.Context, option: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from relight.cli.versions import versions

        click.echo("\n".join(f"{name} {text or 'not installed'}" for name, text in versions().items()))
        context.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    options_metavar="[--set NAME=VALUE] [--debug]",
    subcommand_metavar="COMMAND [ARGS]…",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error; so does RELIGHT_DEBUG=1.")
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="Override a setting: see relight config.")
@click.option(
    "-V", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_versions,
    help="Print the versions of Relight and of what it uses, for bug reports.",
)  # fmt: skip
def cli(debug: bool, given: tuple[str, ...]) -> None:
    """Keep a training run alive. A command's first argument is a store (runs), a run (runs/demo) or a checkpoint (runs/demo@step=400,
    runs/demo@best:loss). To complete names in your shell: relight config completion --help.
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
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # no locale may break a listing
    if "_RELIGHT_COMPLETE" in os.environ:  # a shell requests completions
        import_module("relight.cli.config_completion").teach_shells()
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


class LossyStream:
    """The stderr of a command: text that cannot be written, because stderr is full or was closed, is lost.

    Neither the work of a command, such as the supervision of a job, nor its exit code depends on it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text. Return its length also if it is lost."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _open_standard_streams() -> None:
    """Open the null device in place of each standard stream that is closed, and make stderr lossy.

    Otherwise the next file that is opened would have the number of a standard stream, and Python has no such stream.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    sys.stderr = cast(TextIO, LossyStream(sys.stderr))


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
