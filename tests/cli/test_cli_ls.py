"""``relight ls``: a line for each checkpoint, a column for each metric, sorted and with the columns that were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from at_hand import directory, flip, ids, on_terminal, request

from relight.cli.ls_table import number_text
from relight.commit import Attempt
from relight.store import open_bytes

LOSSES = [2.5, float("nan"), 0.123456, 1.0]


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with seven metrics, long reasons and tags; its second checkpoint is known to be damaged."""
    monkeypatch.chdir(tmp_path)
    attempt = Attempt.begin(open_bytes(tmp_path / "runs"), "demo")
    for step, loss in enumerate(LOSSES):
        more = {f"validation/accuracy-{n}": n + loss / 1000 for n in range(6)}
        attempt.save(request(step, reason="every 100 steps, asked for by a signal", metrics={"loss": loss, **more}))
    return tmp_path / "runs"


def damage(relight, runs: Path) -> None:
    """Damage the second checkpoint, and let ``verify`` record it."""
    flip(directory(runs, 1) / "pack-00000-000.safetensors")
    assert relight("verify", "runs/demo").code == 1


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 140])
def test_a_checkpoint_takes_one_line_at_any_width(relight, wide: Path, columns: int) -> None:
    """No line wraps. A damaged checkpoint is marked in its row, and metrics that do not fit are counted."""
    damage(relight, wide)
    relight("tag", "runs/demo", "a/rather/long/tag/of/a/release", "1")
    answer = on_terminal("ls", "runs/demo", columns=columns)
    lines = [line for line in answer.out.splitlines() if line[:10] in ids(wide)]
    table = [line for line in answer.out.splitlines() if line.startswith("id") or line in lines]
    assert answer.code == 0 and len(lines) == len(LOSSES)
    assert max(map(len, table)) <= columns, answer.out
    assert ["DAMAGED" in line for line in lines] == [False, True, False, False]
    assert "step" in table[0] and "loss" in table[0] and "+" in table[0]
    assert ("saved" in table[0]) == (columns > 40) and ("reason" in table[0]) == (columns >= 100)


def test_more_columns_show_more_metrics(wide: Path) -> None:
    """Headings of metrics are shortened at their beginnings, and values have four significant digits."""
    heading = on_terminal("ls", "runs/demo", columns=100).out.splitlines()[0]
    assert "  +" in heading and "…tion/accuracy-0" in heading
    heading, *lines = on_terminal("ls", "runs/demo", columns=220).out.splitlines()
    assert "+" not in heading and "…tion/accuracy-5" in heading
    assert "0.1235" in lines[2] and "0.123456" not in lines[2]


def test_in_a_pipe_nothing_is_cut(relight, wide: Path) -> None:
    """All metrics have columns, with their full names."""
    out = relight("ls", "runs/demo").out
    assert all(f"validation/accuracy-{n}" in out for n in range(6))
    assert "every 100 steps, asked for by a signal" in out and "…" not in out


@pytest.mark.parametrize(
    ("by", "steps"),
    [
        ("step", [0, 1, 2, 3]),
        ("-step", [3, 2, 1, 0]),
        ("-saved", [0, 1, 2, 3]),
        ("loss", [2, 3, 0, 1]),
        ("-loss", [0, 3, 2, 1]),
    ],
)
def test_sort_orders_rows_and_puts_those_without_a_value_last(relight, wide: Path, by: str, steps: list[int]) -> None:
    """A NaN is last in both orders. JSON has the same order."""
    if by != "-saved":  # saves of one second have equal times
        assert [row["step"] for row in relight("ls", "runs/demo", "--sort", by, "--json").json] == steps
    shown = relight("ls", "runs/demo", "--sort", by, "--columns", "step").out.splitlines()[1:-1]
    assert sorted(shown) == ["   0", "   1", "   2", "   3"] and (
        by == "-saved" or [int(line) for line in shown] == steps
    )


def test_columns_shows_those_asked_for_and_marks_damage_all_the_same(relight, wide: Path) -> None:
    """The order is the caller's, and ``metrics`` stands for all of them."""
    assert relight("ls", "runs/demo", "--columns", "step,loss").out.splitlines()[0].split() == ["step", "loss"]
    heading = relight("ls", "runs/demo", "--columns", "metrics, id").out.splitlines()[0].split()
    assert heading[0] == "loss" and heading[-1] == "id" and len(heading) == 8
    damage(relight, wide)
    lines = relight("ls", "runs/demo", "--columns", "step").out.splitlines()
    assert lines[0].split() == ["step", "flags"] and lines[2].split() == ["1", "DAMAGED"]


def test_an_unknown_column_is_answered_with_the_nearest(relight, wide: Path) -> None:
    """Exit code 2, and nothing on stdout."""
    for words, near in (
        (["--sort", "lss"], "did you mean loss?"),
        (["--columns", "id,tgs"], "did you mean tags?"),
        (["--columns", "id", "--json"], "--columns does not go with --json"),
        (["--columns", "id", "--tiers"], "--columns does not go with --tiers"),
    ):
        answer = relight("ls", "runs/demo", *words)
        assert (answer.code, answer.out) == (2, "") and near in answer.err, answer


def test_numbers_have_four_significant_digits() -> None:
    """Exponents are left for the very large and very small; a missing value is a dash."""
    values = [0.123456, 12345.6, 1234567.0, 0.00001234, 3, "nan", None, -0.5]
    shown = [number_text(value) for value in values]
    assert shown == ["0.1235", "12346", "1.235e+06", "1.234e-05", "3", "nan", "–", "-0.5"]
