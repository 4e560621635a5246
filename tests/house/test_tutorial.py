"""The tutorial, as somebody would follow it who pastes every command: what is printed is what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def blocks(kind: str) -> list[str]:
    """The page's code of that kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def steps() -> list[tuple[str, str]]:
    """Each command, and what it prints."""
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def pattern(output: str) -> str:
    """``…`` is anything, on a line of its own any number of lines."""
    lines = [r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n" for line in output.splitlines()]
    return "".join(lines)


@pytest.mark.timeout(600)
@pytest.mark.distributed
def test_every_command_of_the_tutorial_prints_what_the_page_says(tmp_path: Path) -> None:
    """In one directory, one after the other. Losses of runs that are to end alike do."""
    for code in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", code)
        assert name is not None
        (tmp_path / name[1]).write_text(code)
    here = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "RELIGHT_BACKGROUND": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    assert len(steps()) > 15
    losses = []
    for command, output in steps():
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = re.sub(r"bash: line 1: +\d+ Killed .*\n", "", done.stdout)
        assert re.fullmatch(pattern(output), said), f"$ {command}\n{said}\n-- the page:\n{output}"
        assert done.returncode == 0, (command, said)
        losses += re.findall(r"after 400 steps: (.*)", said)
    straight, killed, damaged, other = losses
    assert straight == killed == damaged != other
