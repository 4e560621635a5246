"""The tutorial, as somebody would follow it who pastes every command: what is printed is what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paste import blocks, follow, steps
from tree import ROOT

PAGE = ROOT / "docs" / "tutorial.md"


@pytest.mark.timeout(600)
@pytest.mark.distributed
def test_every_command_of_the_tutorial_prints_what_the_page_says(tmp_path: Path) -> None:
    """In one directory, one after the other. Losses of runs that are to end alike do."""
    assert sum(len(steps(block)) for block in blocks(PAGE) if block.runs()) > 15
    printed = follow(PAGE, tmp_path)
    straight, killed, damaged, other = re.findall(r"after 400 steps: (.*)", "".join(printed))
    assert straight == killed == damaged != other
