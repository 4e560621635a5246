"""Follow the tutorial, as a user who pastes every command: the output equals the page's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paste import blocks, follow, steps
from tree import ROOT

PAGE = ROOT / "docs" / "tutorial.md"


@pytest.mark.timeout(600)
@pytest.mark.distributed
def test_every_command_of_the_tutorial_prints_the_output_of_the_page(tmp_path: Path) -> None:
    """The commands run in one directory, one after the other. Losses that must be equal are equal."""
    assert sum(len(steps(block)) for block in blocks(PAGE) if block.runs()) > 15
    printed = follow(PAGE, tmp_path, whole=True)
    shown = [output for block in blocks(PAGE) if block.runs() for _, output in steps(block)]
    assert sum(line == "…" for output in shown for line in output.splitlines()) <= 5, "only torch's own varies"
    straight, killed, damaged, other = re.findall(r"after 400 steps: (.*)", "".join(printed))
    assert straight == killed == damaged != other
