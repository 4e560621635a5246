"""``relight plan simulate``: policies side by side, for people and programs, and a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FEW = ("--gpus", "1024", "--days", "3", "--seeds", "2", "--jobs", "1")


def test_policies_side_by_side(relight, tmp_path: Path) -> None:
    """A comparison has a table, the losses by cause, the difference, JSON and a picture, all within 84 columns."""
    answer = relight(
        "plan",
        "simulate",
        *FEW,
        "--policy",
        "adaptive,last=2",
        "--policy",
        "6h,last=2",
        "--plot",
        tmp_path / "fleet.png",
    )
    assert answer.code == 0 and max(map(len, answer.out.splitlines())) <= 84
    assert "goodput" in answer.out and "adaptive,l…" in answer.out and "points of goodput" in answer.out
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")
    results = relight("plan", "simulate", *FEW, "--policy", "adaptive,last=2", "--policy", "6h,last=2", "--json").json
    assert [policy["policy"] for policy in results[0]["policies"]] == ["adaptive,last=2", "6h,last=2"]
    assert sum(results[0]["policies"][0]["parts"].values()) == pytest.approx(1)
    assert results[0]["scenario"]["gpus"] == 1024


def test_several_values_and_the_scenarios_there_are(relight) -> None:
    """``--sweep`` prints a table for each value. ``--list`` prints the scenarios' names."""
    results = relight("plan", "simulate", *FEW, "--policy", "1h", "--sweep", "save.stall_s=1,200", "--json").json
    assert [row["sweep"] for row in results] == ["save.stall_s=1", "save.stall_s=200"]
    assert results[0]["policies"][0]["goodput"]["median"] > results[1]["policies"][0]["goodput"]["median"]
    answer = relight("plan", "simulate", "--list")
    assert "llama3-54-days" in answer.out and max(map(len, answer.out.splitlines())) <= 84
    assert {row["name"] for row in relight("plan", "simulate", "--list", "--json").json} >= {
        "meta-rsc",
        "opt-175b",
        "a-hundred-thousand",
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("none.toml",), "no scenario"),
        (("--policy", "adaptve"), "did you mean 'adaptive'"),
        (("--policy", "1h", "--policy", "1h"), "twice"),
        (("--set", "save.stal_s=2"), "did you mean 'stall_s'"),
        (("--sweep", "spares"), "sets nothing"),
        (
            (
                "--policy",
                "1s",
                "--days",
                "3000",
                "--set",
                "save.durable_s=0",
                "--set",
                "save.stall_s=0",
                "--set",
                "step_s=0.01",
            ),
            "saves in",
        ),
        (("mine", "--replay", "runs/demo"), "takes the place of a scenario"),
        (("--replay", "runs/demo"), "watched over"),
        (("--engine", "ray"), "needs Ray"),
    ],
)
def test_invalid_arguments_are_reported_soon(relight, runs, arguments, expected, monkeypatch) -> None:
    """Invalid arguments are reported before any simulation starts, without a traceback."""
    monkeypatch.setitem(sys.modules, "ray", None)
    answer = relight("plan", "simulate", *arguments)
    assert answer.code in (1, 2) and expected in answer.err and "Traceback" not in answer.err
