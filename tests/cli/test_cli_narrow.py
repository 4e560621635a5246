"""Tables on a terminal that is too narrow: nothing is cut off."""

from __future__ import annotations

import pytest

from relight.cli.output import _rich_table


def test_a_table_wider_than_the_terminal_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines break at the terminal's edge. Columns that may wrap are as narrow as possible."""
    monkeypatch.setenv("COLUMNS", "30")
    columns = ["name", "first number", "second number", "last"]
    cells = [[("a rather long name of something", ""), ("1", ""), ("2", ""), ("the end", "")]]
    _rich_table(columns, cells, ("first number", "second number"), ("name",))
    output = capsys.readouterr().out
    assert "second number" in output and "the end" in output and "something" in output.replace("\n", " ")
