"""The report of the proof engines: what counts as proved, what a violation states, and the exit code of a command."""

from __future__ import annotations

import json

import pytest

from proofs.report import KEPT, EngineUnavailable, Report, engine_parser, run_engine


def test_nothing_done_is_not_ok() -> None:
    """A report is ok if trials were done, none was violated, and the count that it needs is not 0."""
    assert not Report("cuts").ok
    report = Report("cuts", needs="checked")
    report.add("1", "default", [])
    assert not report.ok
    report.counts["checked"] += 1
    assert report.ok
    report.add("2", "default", ["I1: gone"])
    assert not report.ok


def test_a_violation_states_how_to_repeat_it() -> None:
    """The text has the call, the options that repeat the trial, and what was wrong. All violations count, some are kept."""
    report = Report("points", 3, "--replay {}")
    for number in range(KEPT + 5):
        report.add(f"3:fork:{number}", "fork", ["I1: gone"], "fsync /log")
    assert (report.violated, len(report.violations), report.total) == (KEPT + 5, KEPT, KEPT + 5)
    assert "at fsync /log   replay: --replay 3:fork:0\n    I1: gone" in report.show()
    first = report.to_dict()["first"]
    assert first[0] == {"trial": "3:fork:0", "wrong": ["I1: gone"], "where": "fsync /log", "trace": []}  # type: ignore[index]


def test_reports_of_processes_are_joined() -> None:
    """Trials, counts, tables and violations add up. The time is that of the process that joins."""
    whole, part = Report("schedules"), Report("schedules")
    for report in (whole, part):
        with report.timed():
            report.add("7", "schedules", ["wrong"])
        report.counts["commits"] += 2
        report.tables["faults"]["death"] += 3
    seconds = sum(whole.seconds.values())
    whole.join(part)
    assert (whole.total, whole.violated, len(whole.violations)) == (2, 2, 2)
    assert (whole.counts["commits"], whole.tables["faults"]["death"]) == (4, 6)
    assert sum(whole.seconds.values()) == seconds


def test_progress_and_violations_are_printed_only_if_trials_are_expected(capsys: pytest.CaptureFixture[str]) -> None:
    """A violation is printed at once to standard error, and so is the progress. Without ``expected`` nothing is."""
    for expected in (0, 10):
        report = Report("kills", expected=expected)
        report.began -= 60
        report.add("5", "agent", ["step 3 is gone"])
        output = capsys.readouterr().err
        assert ("5:  ['step 3 is gone']" in output, "1 of 10 kills, 1 violations" in output) == (expected > 0,) * 2


@pytest.mark.parametrize(("wrong", "code"), [([], 0), (["I1: gone"], 1), (None, 2)])
def test_the_exit_code_of_a_command(wrong: list[str] | None, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """0: every invariant held; 1: one did not; 2: the engine cannot run here, and standard error has the reason."""

    def run(seed: int) -> Report:
        if wrong is None:
            raise EngineUnavailable("strace is not installed")
        report = Report("kills", seed)
        report.add("1", "fsync", wrong)
        return report

    parser = engine_parser("proofs.kills", "Kill.", 5)
    assert run_engine(parser, lambda options: run(options.seed), ["--json", "--seed", "4"]) == code
    output = capsys.readouterr()
    if code == 2:
        assert "strace is not installed" in output.err
    else:
        assert (json.loads(output.out)["seed"], json.loads(output.out)["ok"]) == (4, code == 0)
