"""The benchmark of idle processes starts what it measures."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.idle import agent


def test_an_agent_is_started_and_ended(tmp_path: Path) -> None:
    """The process that is measured runs within the block, and has ended after it."""
    with agent(tmp_path) as pid:
        assert "relight.agent.server" in Path(f"/proc/{pid}/cmdline").read_text()
    ends = time.monotonic() + 10
    while (status := Path(f"/proc/{pid}/stat")).exists() and ") Z " not in status.read_text():
        assert time.monotonic() < ends, "the agent was not ended"
        time.sleep(0.02)
