"""Starting, help, errors, exit codes, pipes, signals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from at_hand import environment, in_child, on_terminal

import relight.cli
from relight.cli import COMMANDS, FORMS, INSPECT, KEEP, MORE, RUN, SHARE
from relight.cli import cli as relight_cli
from relight.errors import CorruptCheckpoint, NoSpace
from relight.version import VERSION

HEAVY = (
    "torch",
    "numpy",
    "rich",
    "msgspec",
    "blake3",
    "relight.catalog",
    "relight.reader",
    "relight.run_records",
    "relight.store",
    "relight.format",
    "relight.commit",
)


def modules(*arguments: str) -> set[str]:
    """Return the modules that a command has imported when it ends."""
    script = f"""
import atexit, sys
atexit.register(lambda: print("MODULES", *sys.modules))
sys.argv = {["relight", *arguments]!r}
from relight.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=False
    )
    return set(next(line for line in done.stdout.splitlines() if line.startswith("MODULES")).split()[1:])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["lss"]], ids=str)
def test_help_and_version_import_next_to_nothing(arguments: list[str]) -> None:
    """Help, version, and the answer to a typo load neither torch nor rich nor other packages of Relight."""
    assert not modules(*arguments) & set(HEAVY)


def test_commands_into_a_pipe_need_neither_torch_nor_numpy_nor_rich(runs: Path) -> None:
    """Commands that a cron job runs every minute start without heavy imports."""
    for arguments in (["ls", "runs"], ["show", "runs/demo"], ["verify", "runs"], ["log", "runs/demo", "--json"]):
        assert not modules(*arguments) & {"torch", "numpy", "rich"}, arguments


@pytest.mark.parametrize("name", [*COMMANDS, *FORMS])
def test_help_of_each_command_has_an_example_and_fits_80_columns(relight, name: str) -> None:
    """``--help`` and ``-h`` show an example within 80 columns."""
    answer = relight(*name.split(), "--help")
    assert answer.code == 0
    examples = [line.split() for line in answer.out.partition("Example")[2].splitlines()[1:8]]
    assert any(line[:2] == ["relight", name.split()[0]] and set(name.split()) <= set(line) for line in examples)
    assert max(map(len, answer.out.splitlines())) <= 80
    assert relight(*name.split(), "-h").out == answer.out


@pytest.mark.parametrize("name", ["run", "drill"])
def test_help_of_a_launch_does_not_depend_on_the_first_context(relight, name: str) -> None:
    """A context of its own, as the reference page makes it, does not take ``-h`` away from the command."""
    command = relight_cli.get_command(click.Context(relight_cli), name)
    assert command is not None
    command._help_option = None  # type: ignore[attr-defined]  # as in a new process
    with click.Context(command, info_name=name) as context:
        command.get_help(context)
    assert relight(name, "-h").out == relight(name, "--help").out


def test_help_fits_one_screen_and_shows_groups(relight) -> None:
    """The first page has four groups on 40 lines of 80 columns, and names the setup of completion and the longer list."""
    answer = relight("--help")
    lines = answer.out.splitlines()
    assert (answer.code, answer.err) == (0, "")
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    shown = [line.split()[0] for line in lines if re.match(r"  [a-z]+  ", line)]
    assert shown == [name for name, command in COMMANDS.items() if command.group != MORE]
    headings = [line.rstrip(":") for line in lines if re.match(r"[A-Z][a-z ]+:$", line)]
    assert headings == [INSPECT, KEEP, SHARE, RUN]
    assert "relight config completion --help" in answer.out and "relight help --all" in answer.out


def test_help_all_lists_every_command_and_option(relight) -> None:
    """``relight help --all`` has each command, and the options of ``relight`` itself."""
    answer = relight("help", "--all")
    assert answer.code == 0
    assert all(f"  {name} " in answer.out for name in (*COMMANDS, "--debug", "--set", "-V,"))
    assert all(f"    {form.partition(' ')[2]} " in answer.out for form in FORMS)
    assert max(map(len, answer.out.splitlines())) <= 80


@pytest.mark.parametrize(
    "names",
    [["ls"], ["run"], ["drill"], ["keys", "new"], ["metrics"], ["show", "--trace"], ["plan", "predict", "eval"], []],
    ids=str,
)
def test_help_of_a_command_by_name_equals_its_help_option(relight, names: list[str]) -> None:
    """``relight help keys new`` prints what ``relight keys new --help`` prints."""
    assert relight("help", *names) == relight(*names, "--help")


def test_help_of_an_unknown_command_suggests_the_nearest(relight) -> None:
    """A misspelt command or subcommand has exit code 2 and a suggestion."""
    for names, near in ((["lss"], "ls"), (["keys", "nw"], "new"), (["ls", "x"], "help --all")):
        answer = relight("help", *names)
        assert (answer.code, answer.out) == (2, "") and near in answer.err, answer


def test_shell_completion_knows_the_commands() -> None:
    """The shell's request for completions of ``relight ve`` is answered."""
    answer = in_child(_RELIGHT_COMPLETE="bash_complete", COMP_WORDS="relight ve", COMP_CWORD="1")
    assert answer.out.split() == ["plain,verify"]


def test_each_command_is_a_click_command_of_its_own_name() -> None:
    """``COMMANDS``, ``FORMS`` and the files agree."""
    files = {re.sub("(?<!_)_$", "", path.stem) for path in Path(relight.cli.__file__).parent.glob("*.py")} - {
        "__init__",
        "audited",
        "audited_facts",
        "common",
        "followed",
        "launched",
        "ls_table",
        "output",
        "usage",
        "versions",
    }
    assert files == {re.sub(r"\W+", "_", name) for name in (*COMMANDS, *FORMS)}
    with click.Context(relight.cli.cli) as context:
        for name in (*COMMANDS, *FORMS):
            result = relight.cli.cli.get_command(context, name)
            assert result is not None
            assert result.name == name


@pytest.mark.parametrize(
    "arguments", [["ls"], ["ls", "--nope", "runs"], ["nope"], ["prune", "runs/demo", "--keep-last", "x"], []], ids=str
)
def test_bad_usage_is_2_and_stdout_stays_empty(relight, arguments: list[str]) -> None:
    """No program mistakes a misspelt option for an answer."""
    answer = relight(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["ls"], "the argument PATH is missing\n  → relight ls --help"),
        (["ls", "--tier", "runs"], "there is no option --tier\n  → did you mean --tiers?"),
        (["ls", "runs", "-n", "x"], "-n is invalid: 'x' is not a whole number\n  → relight ls --help"),
        (["config", "completion", "tcsh"], "bash|zsh|fish is invalid: 'tcsh' is not one of 'bash'"),
        (["keys", "nw"], "no such command 'nw'"),
        (["run", "--set", "a=1", "x.py"], "--set stands before the command"),
    ],
    ids=str,
)
def test_errors_of_usage_have_the_form_of_all_others(relight, arguments: list[str], shown: str) -> None:
    """The prefix, the hint and the exit code are those of Relight's errors; there is no usage block."""
    answer = relight(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"relight: {shown}"), answer.err
    assert "Usage:" not in answer.err and len(answer.err.splitlines()) <= 2


def test_an_error_is_red_on_a_terminal_unless_no_color_is_set(runs: Path) -> None:
    """Errors of usage and others have the same red prefix."""
    for arguments in (["ls"], ["ls", "runs/dmeo"]):
        assert on_terminal(*arguments).err.startswith("\x1b[31mrelight:\x1b[0m ")


def test_a_misspelt_command_is_answered_with_the_nearest(relight) -> None:
    """The error of ``relight verfy`` suggests ``verify``."""
    answer = relight("verfy")
    assert answer.code == 2
    assert "did you mean verify?" in answer.err


def test_nothing_there_is_1_with_a_hint_and_no_traceback(relight) -> None:
    """``relight ls /nowhere`` is a friendly no."""
    answer = relight("ls", "/nowhere")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("relight: this path does not exist [/nowhere]\n  → ")
    assert "Traceback" not in answer.err


def test_debug_shows_the_traceback_and_keeps_the_code(runs: Path) -> None:
    """``--debug`` and ``RELIGHT_DEBUG`` do the same."""
    for answer in (in_child("--debug", "ls", "/nowhere"), in_child("ls", "/nowhere", RELIGHT_DEBUG="1")):
        assert answer.code == 1
        assert "Traceback" in answer.err
        assert "CheckpointNotFound" in answer.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CorruptCheckpoint("x"), 1),
        (NoSpace("x"), 2),
        (PermissionError("x"), 2),
        (ModuleNotFoundError("x", name="blake3"), 2),
        (ZeroDivisionError("x"), 2),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_each_kind_of_error_has_its_exit_code(
    relight, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    """Exit code 1 is only an answer. Bugs, full disks and missing packages have exit code 2."""

    def fail(path: str) -> None:
        raise error

    monkeypatch.setattr("relight.cli.ls.locate", fail)
    monkeypatch.setattr("relight.cli._end_without_reader", lambda: sys.exit(141))  # the real one gives away stdout
    answer = relight("ls", "runs")
    assert answer.code == code
    assert answer.out == ""
    assert ("Traceback" in answer.err) == isinstance(error, ZeroDivisionError)


def test_a_reader_that_goes_away_is_no_error_and_no_answer(runs: Path) -> None:
    """``relight verify … | head -1`` prints nothing on stderr. Its exit code claims no result."""
    for arguments in (["verify", "runs"], ["ls", "runs", "--json"]):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [sys.executable, "-m", "relight", *arguments],
            stdout=write,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
        os.close(write)
        assert (done.returncode, done.stderr) == (141, b"")


def test_a_full_disk_under_stdout_is_exit_code_2(runs: Path) -> None:
    """If the output cannot be written, the exit code is 2."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "relight", "ls", "runs"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
    assert done.returncode == 2
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [("verify runs/demo", 0), ("ls runs/none", 1), ("ls", 2), ("show --nothing", 2)]
)
@pytest.mark.parametrize("redirection", ["2> /dev/full", "2>&-", "2>&- <&-"])
def test_a_stderr_that_cannot_be_written_changes_no_exit_code(
    runs: Path, arguments: str, code: int, redirection: str
) -> None:
    """What cannot be written there is lost. The answer on stdout and the exit code are the same."""
    command = f"exec {sys.executable} -m relight {arguments}"
    alone = subprocess.run(["sh", "-c", command], capture_output=True, env=environment(), check=False)
    done = subprocess.run(["sh", "-c", f"{command} {redirection}"], capture_output=True, env=environment(), check=False)
    assert (done.returncode, done.stdout) == (code, alone.stdout)


@pytest.mark.parametrize(("arguments", "code"), [("ls runs", 0), ("ls runs/none", 1), ("verify runs/demo", 0)])
def test_a_closed_stdout_changes_no_exit_code(runs: Path, arguments: str, code: int) -> None:
    """A process that a daemon starts may have none. The exit code is that of the answer, and there is no traceback."""
    command = f"exec {sys.executable} -m relight {arguments} >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, env=environment(), check=False)
    assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr


def test_ctrl_c_is_130_and_quiet(runs: Path) -> None:
    """Ctrl-C at a question deletes nothing and prints no traceback."""
    answer = on_terminal("prune", "runs/demo", "--keep-last", 1, typed="\x03", prompt="Remove them for good?")
    assert answer.code == 130
    assert "Traceback" not in answer.out
    assert len(list((runs / "demo").glob("0*"))) == 4


def test_a_locale_without_unicode_breaks_nothing(runs: Path) -> None:
    """Characters that stdout cannot encode are escaped."""
    answer = in_child("tag", "runs/demo", "new", "99", PYTHONIOENCODING="latin-1")
    assert answer.code == 0
    assert "new \\u2192 " in answer.out


def test_version_names_what_matters_for_a_report(relight) -> None:
    """``--version`` prints a line for each, and imports none of it."""
    lines = dict(line.split(" ", 1) for line in relight("--version").out.splitlines())
    assert {"relight", "format", "python", "torch", "numpy", "system"} <= lines.keys()
    assert list(lines)[0] == "relight" and lines["relight"] == VERSION and lines["format"] == "1"
    assert not modules("--version") & {"torch", "numpy"}
