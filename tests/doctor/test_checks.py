"""Checks: exactly the expected checks find each planted fault, and healthy facts give no finding."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import click
import pytest
from planted_faults import FAULTS, HEALTHY, machine

from relight.cli import cli, form_of
from relight.doctor import CHECKS, DoctorFacts, grade, judge
from relight.doctor.checks_machine import numbers
from relight.doctor.complaints import PROGRAM_MESSAGES, USER_DESCRIPTIONS
from relight.doctor.explain import _BY_KIND, SYMPTOMS
from relight.doctor.facts import AttemptFacts, Machine, StoreFacts
from relight.doctor.finding import SEVERITIES
from relight.doctor.judge import all_checks
from relight.doctor.page import put_in

WITHOUT_A_COMMAND = {"shm", "conditional-writes"}
"""Checks without a command: a container must be started differently, or a server replaced."""
PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(name: str) -> None:
    """Exactly the expected checks find the fault, and each finding has all of its fields."""
    plant, wanted = FAULTS[name]
    findings = judge(plant())
    assert {finding.name for finding in findings} == wanted
    for finding in findings:
        assert finding.what and finding.where and finding.evidence and finding.hurts and finding.do, finding
        assert finding.severity == "note" or finding.command or finding.fix or finding.name in WITHOUT_A_COMMAND, (
            finding
        )
        assert "None" not in f"{finding.what} {finding.evidence} {finding.command}", finding


def test_a_run_that_another_attempt_continues_was_not_given_up() -> None:
    """The job was started again, on another machine, and has not saved yet; or it stopped because another job took the run over."""
    plant, wanted = FAULTS["given up"]
    (given_up,) = plant().runs
    (incident,) = given_up.incidents
    again = AttemptFacts(2, (incident.time_s or 0.0) + 5, "node-2", 0)
    for run in (
        replace(given_up, attempts=(*given_up.attempts, again)),
        replace(given_up, incidents=(incident._replace(kind="fenced"),)),
    ):
        assert "stopped" in wanted and judge(replace(plant(), runs=(run,))) == []


def options_of(command: click.Command, words: list[str]) -> None:
    """Raise if ``command`` does not accept ``words``."""
    if isinstance(command, click.Group):
        options_of(command.commands[words[0]], words[1:])
        return
    unknown = command.context_settings.get("ignore_unknown_options", False)
    # as the command line has it: a command remembers its own option for help
    parent = click.Context(cli, help_option_names=["-h", "--help"])
    with click.Context(command, parent=parent, ignore_unknown_options=unknown) as context:
        _, left, order = command.make_parser(context).parse_args(list(words))
        assert not left or any(
            isinstance(parameter, click.Argument) and parameter.nargs == -1 for parameter in command.params
        ), words
        missing = [parameter.name for parameter in command.params if parameter.required and parameter not in order]
        assert not missing, (words, missing)


def test_commands_can_be_typed() -> None:
    """Each command of a finding, a line or an explanation exists, with these options."""
    commands = [finding.command for plant, _ in FAULTS.values() for finding in judge(plant())]
    commands += [line.command for plant, _ in FAULTS.values() for line in grade(plant(), []).lines]
    commands += [complaint.command for complaint in (*PROGRAM_MESSAGES, *USER_DESCRIPTIONS)]
    commands += [symptom.command for symptom in SYMPTOMS] + [command for _, command in _BY_KIND.values()]
    typed = {tuple(shlex.split(text)) for text in commands if text.startswith("relight ")} - {("relight", "--version")}
    assert len(typed) > 20
    for words in typed:
        form, rest = form_of(words[1], words[2:])
        command = cli.get_command(click.Context(cli), form)
        assert command is not None, words
        options_of(command, rest)


def test_paths_in_commands_are_quoted() -> None:
    """A store's name with shell syntax is quoted in commands."""
    odd = "/data/$(reboot); rm -rf runs"
    for facts in (
        replace(HEALTHY.store, url=odd, mode=0o777),
        replace(HEALTHY.store, url=odd, leftovers=(".relight-bench-1",)),
    ):
        (finding,) = judge(replace(HEALTHY, store=facts))
        assert odd in shlex.split(finding.command)[-1]


def test_a_healthy_set_up_has_nothing() -> None:
    """Healthy facts give no finding, not even a note."""
    assert judge(HEALTHY) == []


def test_an_unseen_fact_is_no_finding() -> None:
    """Unknown facts lead to no finding: they are reported as unseen."""
    assert (
        judge(
            DoctorFacts(
                machine=Machine(unseen={"memory": "no answer"}), store=StoreFacts(url="/data/runs", there=False)
            )
        )
        == []
    )


def test_every_check_is_planted_for() -> None:
    """Each check has a fault that it must find, and there are at least forty checks."""
    planted = set().union(*(wanted for _, wanted in FAULTS.values()))
    assert all_checks().keys() == planted
    assert len(planted) >= 40


def test_the_worst_comes_first() -> None:
    """The order is errors, warnings, notes."""
    facts = DoctorFacts(
        machine=machine(preload="libeatmydata.so", memory_bytes=1, dead_supervisors=("x",)).machine,
        store=HEALTHY.store,
        runs=HEALTHY.runs,
    )
    severities = [finding.severity for finding in judge(facts)]
    assert severities == ["error", "warning", "note"]
    assert all(check.severity in SEVERITIES for check in CHECKS.values())


def test_the_page_has_the_table_of_the_register() -> None:
    """docs/doctor.md has the current table; ``python -m relight.doctor.page docs/doctor.md`` updates it."""
    text = PAGE.read_text(encoding="utf-8")
    assert put_in(text) == text
    assert len(re.findall(r"^\| `[a-z-]+` \| (?:error|warning|note) \| ", text, re.MULTILINE)) == len(all_checks())


@pytest.mark.parametrize(
    ("older", "newer"),
    [("1.9", "1.10"), ("2.6.0", "2.13.0+cpu"), ("0.18.6", "0.19"), ("1", "1.0.1"), ("2.0rc1", "2.1"), ("", "0.1")],
)
def test_versions_are_compared_by_their_numbers(older: str, newer: str) -> None:
    """1.10 is newer than 1.9, and the part after a plus does not count."""
    assert numbers(older) < numbers(newer)


def test_equal_versions_are_equal() -> None:
    """Trailing zeros and local parts do not count."""
    assert numbers("2.13") == numbers("2.13.0+cpu") == (2, 13)
