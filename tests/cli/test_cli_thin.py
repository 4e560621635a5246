"""``demo`` and ``prove``: options arrive, answers become exit codes. What they do has tests of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relight.errors import ConfigError
from relight.prove import FirstDifference, ProveReport


@dataclass
class FakeReport:
    """Stands in for a demo's report."""

    ok: bool
    asked: list[Any] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return JSON as the real report does."""
        return {"ok": self.ok}

    def __rich__(self) -> str:
        return "the report"


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_demo_passes_options_on_and_answers(relight, monkeypatch: pytest.MonkeyPatch, ok: bool, code: int) -> None:
    """0 if the killed run equals the straight one, else 1."""
    demo_report = FakeReport(ok)
    monkeypatch.setattr("relight.cli.demo.run", lambda options: demo_report.asked.append(options) or demo_report)
    answer = relight("demo", "--quick", "--seed", 7, "--keep", "here", "--out", "a.png", "--json")
    assert (answer.code, answer.json) == (code, {"ok": ok})
    (asked,) = demo_report.asked
    assert (asked.quick, asked.seed, asked.keep, asked.out) == (True, 7, Path("here"), Path("a.png"))
    assert relight("demo").out == "the report\n"


def report(difference: FirstDifference | None) -> ProveReport:
    """Return the report of a proof."""
    return ProveReport(difference is None, 5, 3, 3, 42, difference, 1.0)


def test_prove_passes_the_scripts_own_arguments_on(relight, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arguments after the script are the script's, even if they look like options. A first ``--`` is dropped."""
    asked: list[Any] = []
    monkeypatch.setattr("relight.cli.drill_prove.run", lambda options: asked.append(options) or report(None))
    answer = relight(
        "drill", "--prove", "-n", 4, "-k", 2, "--keep", "here", "--json", "train.py", "--json", "-n", 9, "x"
    )
    assert (answer.code, answer.json["ok"]) == (0, True)
    relight("drill", "--prove", "train.py", "--", "--lr", "1")
    relight("drill", "--prove", "--", "train.py", "--lr", "1")
    assert [(run_options.script, tuple(run_options.args)) for run_options in asked] == [
        ("train.py", ("--json", "-n", "9", "x")),
        ("train.py", ("--lr", "1")),
        ("train.py", ("--lr", "1")),
    ]
    assert (asked[0].n, asked[0].k, asked[0].keep) == (4, 2, "here")
    assert relight("drill", "--prove", "train.py").out.startswith("exact: 3 steps")


def test_prove_names_what_differs_and_answers_1(relight, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first difference, its step and its reason are printed, escaped."""
    difference = FirstDifference(7, "after step 7", "model/\x1b[31mx", "the sampler has no state", ["model/y"])
    monkeypatch.setattr("relight.cli.drill_prove.run", lambda options: report(difference))
    answer = relight("drill", "--prove", "train.py")
    assert answer.code == 1
    assert "NOT exact: model/\\x1b[31mx differs after step 7" in answer.out
    assert "the sampler has no state" in answer.out


def test_prove_and_demo_that_cannot_run_are_2(relight, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing script is a no, a script that breaks or an option that is wrong is no answer."""

    def fail(options: Any) -> None:
        raise ConfigError("it ended early", details=["a \x1b[2J line"])

    monkeypatch.setattr("relight.cli.drill_prove.run", fail)
    answer = relight("drill", "--prove", "train.py")
    assert (answer.code, answer.out) == (2, "")
    assert "a \\x1b[2J line" in answer.err
    assert relight("drill", "--prove", "-n", 0, "train.py").code == 2
    assert relight("drill", "--prove", "--typo", "train.py").code == 2
    assert relight("demo", "--seed", "x").code == 2
    monkeypatch.undo()
