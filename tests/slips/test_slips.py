"""The slips of an ordinary user: each ends right, loses no checkpoint, and is quoted truly by its page."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.slips.before import BEFORE
from tests.slips.harness import Runner, fast
from tests.slips.page import NOTES, PAGE, notes_of, quoted_in
from tests.slips.slip import Slip, matches
from tests.slips.table import SLIPS


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """Return one process that forks all scripts, on a file system in memory."""
    with tempfile.TemporaryDirectory(dir=fast()) as root, Runner(Path(root)) as made:
        yield made


@pytest.mark.parametrize(
    "slip", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else []) for case in SLIPS]
)
def test_a_slip_ends_right_and_loses_no_checkpoint(runner: Runner, slip: Slip) -> None:
    """Each slip ends in the right result or in an error with a way out, earlier checkpoints keep their values, and the page quotes it."""
    outcome = runner.run(slip)
    assert not outcome.faults, "\n".join([*outcome.faults, outcome.output])
    quoted = quoted_in(PAGE.read_text(encoding="utf-8"), slip)
    assert quoted is not None, "docs/what-happens-if.md lacks this row: python -m tests.slips.page"
    flat = " ".join(line.strip() for line in outcome.output.splitlines()).replace("`", "'").replace("|", "…")
    assert matches(quoted, flat), f"the page quotes {quoted!r}, which is not in: {outcome.output}"


def test_names_and_rows_are_unique_and_the_page_has_no_others() -> None:
    """Check that the page has exactly one row for each slip of the table, and at least 60."""
    names = [slip.name for slip in SLIPS]
    assert len(set(names)) == len(names) >= 60
    assert set(names) >= BEFORE.keys()
    rows = [
        line
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.startswith("| what happens if ")
    ]
    assert len(rows) == len(SLIPS)


def test_the_notes_have_the_table() -> None:
    """The notes' table is the one of ``before.py``."""
    assert notes_of() in NOTES.read_text(encoding="utf-8")
