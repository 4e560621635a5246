"""Judging: every planted fault is found by its check and by no other, nothing is found where nothing is wrong."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import click
import pytest
from planted_faults import FAULTS, HEALTHY, machine

from relight.cli import cli
from relight.doctor import CHECKS, DoctorFacts, grade, judge
from relight.doctor.checks_machine import numbers
from relight.doctor.complaints import PEOPLE_SAY, PROGRAMS_SAY
from relight.doctor.explain import _BY_KIND, SYMPTOMS
from relight.doctor.facts import Machine, StoreFacts
from relight.doctor.finding import SEVERITIES, all_checks
from relight.doctor.page import put_in

WITHOUT_A_COMMAND = {"shm", "conditional-writes"}
"""What no command puts right: a container's start, a file, a server."""
PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(name: str) -> None:
    """What is planted is found, by its check and no other; what is said of it is whole."""
    plant, wanted = FAULTS[name]
    found = judge(plant())
    assert {one.name for one in found} == wanted
    for one in found:
        assert one.what and one.where and one.evidence and one.hurts and one.do, one
        assert one.severity == "note" or one.command or one.fix or one.name in WITHOUT_A_COMMAND, one
        assert "None" not in f"{one.what} {one.evidence} {one.command}", one


def options_of(command: click.Command, words: list[str]) -> None:
    """Raise if ``command`` does not take them."""
    if isinstance(command, click.Group):
        options_of(command.commands[words[0]], words[1:])
        return
    unknown = command.context_settings.get("ignore_unknown_options", False)
    parent = click.Context(
        cli, help_option_names=["-h", "--help"]
    )  # as the command line has it: a command remembers its own option for help
    with click.Context(command, parent=parent, ignore_unknown_options=unknown) as context:
        _, left, order = command.make_parser(context).parse_args(list(words))
        assert not left or any(isinstance(one, click.Argument) and one.nargs == -1 for one in command.params), words
        missing = [one.name for one in command.params if one.required and one not in order]
        assert not missing, (words, missing)


def test_commands_can_be_typed() -> None:
    """What a finding, a line or an explanation says to run is a command that there is, with options that it has; paths are quoted."""
    told = [one.command for plant, _ in FAULTS.values() for one in judge(plant())]
    told += [one.command for plant, _ in FAULTS.values() for one in grade(plant(), []).lines]
    told += [one.command for one in (*PROGRAMS_SAY, *PEOPLE_SAY)]
    told += [one.command for one in SYMPTOMS] + [command for _, command in _BY_KIND.values()]
    typed = {tuple(shlex.split(one)) for one in told if one.startswith("relight ")}
    assert len(typed) > 20
    for words in typed:
        command = cli.get_command(click.Context(cli), words[1])
        assert command is not None, words
        options_of(command, list(words[2:]))


def test_paths_in_commands_are_quoted() -> None:
    """A store whose name is a shell's command is a store's name."""
    odd = "/data/$(reboot); rm -rf runs"
    for facts in (replace(HEALTHY.store, url=odd, mode=0o777), replace(HEALTHY.store, url=odd, leftovers=(".relight-bench-1",))):
        (found,) = judge(replace(HEALTHY, store=facts))
        assert odd in shlex.split(found.command)[-1]


def test_a_healthy_set_up_has_nothing() -> None:
    """No finding at all, not even a note."""
    assert judge(HEALTHY) == []


def test_what_could_not_be_seen_is_not_wrong() -> None:
    """Facts of which nothing could be seen lead to no finding: unseen is told as unseen."""
    assert judge(DoctorFacts(machine=Machine(unseen={"memory": "no answer"}), store=StoreFacts(url="/data/runs", there=False))) == []


def test_every_check_is_planted_for() -> None:
    """No check without a fault that it must find; there are more than forty."""
    planted = set().union(*(wanted for _, wanted in FAULTS.values()))
    assert all_checks().keys() == planted
    assert len(planted) >= 40


def test_the_worst_comes_first() -> None:
    """Errors, warnings, notes."""
    facts = DoctorFacts(
        machine=machine(preload="libeatmydata.so", memory_bytes=1, dead_supervisors=("x",)).machine, store=HEALTHY.store, runs=HEALTHY.runs
    )
    found = [one.severity for one in judge(facts)]
    assert found == ["error", "warning", "note"]
    assert all(one.severity in SEVERITIES for one in CHECKS.values())


def test_the_page_has_the_table_of_the_register() -> None:
    """docs/doctor.md is current: ``python -m relight.doctor.page docs/doctor.md`` makes it so."""
    text = PAGE.read_text(encoding="utf-8")
    assert put_in(text) == text
    assert len(re.findall(r"^\| `[a-z-]+` \| (?:error|warning|note) \| ", text, re.MULTILINE)) == len(all_checks())


@pytest.mark.parametrize(
    ("older", "newer"), [("1.9", "1.10"), ("2.6.0", "2.13.0+cpu"), ("0.18.6", "0.19"), ("1", "1.0.1"), ("2.0rc1", "2.1"), ("", "0.1")]
)
def test_versions_are_compared_by_their_numbers(older: str, newer: str) -> None:
    """1.10 is newer than 1.9; what stands behind a plus does not count."""
    assert numbers(older) < numbers(newer)


def test_equal_versions_are_equal() -> None:
    """Trailing zeros and local parts do not count."""
    assert numbers("2.13") == numbers("2.13.0+cpu") == (2, 13)
