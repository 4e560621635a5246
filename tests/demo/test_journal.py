"""The journal outlives the process that writes it."""

from __future__ import annotations

from pathlib import Path

from relight.demo.journal import DemoJournal, Tail


def test_entries_come_once_and_whole(tmp_path: Path) -> None:
    """A reader gets each entry once, also those of a later process, and every bit of the loss."""
    path = tmp_path / "j"
    tail = Tail(path)
    assert list(tail.read()) == []
    DemoJournal(path).finished(0, 0.1, "s")
    (entry,) = tail.read()
    assert float.fromhex(entry["loss"]) == 0.1
    DemoJournal(path).finished(1, 0.2, "s")
    assert [entry["step"] for entry in tail.read()] == [1]
    assert list(tail.read()) == []


def test_a_line_cut_short_costs_only_itself(tmp_path: Path) -> None:
    """A line that a kill cut short is not read, and neither are the next process's entries glued to it."""
    path = tmp_path / "j"
    DemoJournal(path).finished(0, 0.1, "s")
    with path.open("ab") as file:
        file.write(b'{"what": "finis')
    tail = Tail(path)
    assert [entry["step"] for entry in tail.read()] == [0]
    DemoJournal(path).finished(1, 0.2, "s")
    assert [entry["step"] for entry in tail.read()] == [1]
