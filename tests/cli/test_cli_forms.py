"""Forms of commands, old names, and the commands that source and pages name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import pytest

from relight.cli import COMMANDS, FORMS, RENAMED, cli, form_of

ROOT = Path(__file__).parents[2]
OTHER = frozenset(
    (
        "as",
        "itself",
        "on",
        "agent",
        "block",
        "bound",
        "data",
        "file",
        "key",
        "keyed",
        "record",
        "rendezvous",
        "ring",
        "signer",
        "wrap",
    )
)
"""Words after "relight" that name no command: in prose, imports, and constants such as b"relight ring key"."""


def test_there_are_at_most_thirty_one_commands() -> None:
    """A user can survey them. A new one needs a place among the old ones, or is a form."""
    assert len(COMMANDS) <= 31
    assert not {name for name in FORMS if name.split()[0] not in COMMANDS}


@pytest.mark.parametrize(
    ("name", "arguments", "form", "rest"),
    [
        ("show", ["runs/demo"], "show", ["runs/demo"]),
        ("show", ["runs/demo", "--trace", "--json"], "show --trace", ["runs/demo", "--json"]),
        ("show", ["--trace", "runs/demo"], "show --trace", ["runs/demo"]),
        ("show", ["--", "--trace"], "show", ["--", "--trace"]),
        ("plan", ["simulate", "--gpus", "8"], "plan simulate", ["--gpus", "8"]),
        ("plan", ["--gpus", "8", "simulate"], "plan", ["--gpus", "8", "simulate"]),
        ("keys", ["rekey", "runs"], "keys rekey", ["runs"]),
        ("drill", ["--prove", "-n", "4", "train.py"], "drill --prove", ["-n", "4", "train.py"]),
        ("drill", ["train.py", "--prove"], "drill", ["train.py", "--prove"]),
    ],
    ids=str,
)
def test_the_arguments_choose_the_form(name: str, arguments: list[str], form: str, rest: list[str]) -> None:
    """A flag stands anywhere before a script, another word first; neither is an argument of the form."""
    assert form_of(name, arguments) == (form, rest)


def test_a_form_has_its_own_arguments(relight, runs: Path) -> None:
    """Options of the command are no options of its form, and a second form's flag is none."""
    for words, unknown in (
        (["show", "--trace", "--stats"], "--stats"),
        (["tag", "runs/demo", "--hold", "--stage"], "--stage"),
    ):
        answer = relight(*words, "runs/demo")
        assert answer.code == 2 and f"there is no option {unknown}" in answer.err
    answer = relight("drill", "--only", "kill", "--prove", "train.py")
    assert answer.code == 2 and "--prove stands first" in answer.err


def test_help_of_a_command_names_its_forms(relight) -> None:
    """Each form is an option, a subcommand or a line at the end."""
    for form in FORMS:
        name, word = form.split()
        assert re.search(rf"^ +(?:relight {name} )?{word}\b", relight(name, "--help").out, re.MULTILINE), form


def test_old_names_are_answered_with_the_new_form(relight) -> None:
    """Each former command gets one line that names what does its work, and that exists."""
    assert not RENAMED.keys() & COMMANDS.keys()
    for old, new in RENAMED.items():
        answer = relight(old, "runs/demo")
        assert (answer.code, answer.out) == (2, "")
        assert answer.err == f"relight: there is no command {old!r}\n  → relight {new}\n"
        assert new == "--version" or new in FORMS or new in COMMANDS
        assert relight("help", old).err == answer.err


def named_commands(text: str) -> list[str]:
    """Return the one or two words after each ``relight`` of a text."""
    return re.findall(r"(?<![\w./\-@:])relight(?: --debug| --set \S+)* +([a-z][\w-]*(?: +[\w-]+)?)", text)


def missing(words: str) -> bool:
    """Return whether no command, form or subcommand has this name."""
    first, *more = words.split()
    if first in OTHER:
        return False
    if first not in COMMANDS:
        return True
    with click.Context(cli) as context:
        command = cli.get_command(context, form_of(first, more)[0])
        assert command is not None
        rest = form_of(first, more)[1]
        return (
            isinstance(command, click.Group)
            and bool(rest)
            and not rest[0].startswith("-")
            and rest[0] not in command.commands
        )


def test_every_command_that_is_named_exists() -> None:
    """Source, pages, examples and deployments name only existing commands. Notes and the changelog are history."""
    seen, wrong = 0, list[str]()
    places = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]
    for folder in ("src", "docs", "examples", "deploy"):
        for directory, _, names in os.walk(ROOT / folder):
            if directory != str(ROOT / "docs/notes"):
                places += [Path(directory, name) for name in names if name.endswith(SUFFIXES)]
    for path in places:
        for words in named_commands(path.read_text(encoding="utf-8")):
            seen += 1
            if missing(words):
                wrong.append(f"{path.relative_to(ROOT)}: relight {words}")
    assert wrong == []
    assert seen > 800


SUFFIXES = (".py", ".md", ".html", ".toml", ".yaml", ".yml", ".json", ".service", ".ipynb", ".sh")


def test_a_name_that_is_left_over_is_found() -> None:
    """The scan sees old commands in the ways in which texts name them, and skips the program's own name."""
    for text in (
        "``relight scrub``",
        "→ relight audit verify",
        "hint=f'relight push {run}'",
        "$ relight --set a=1 ready runs",
        "relight config shwo",
    ):
        assert any(missing(words) for words in named_commands(text)), text
    for text in (
        b"relight ring key".decode(),
        "import relight as r",
        "relight.load(x)",
        "relight tag runs/demo --hold",
        "relight --version",
        "relight keys rekey",
    ):
        assert not any(missing(words) for words in named_commands(text)), text
