"""A file system of memory that is full, as a container's often is: what a rank writes into it must not end the rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.commit.test_real_full_disks import mounted

pytestmark = pytest.mark.crash

CODE = """
import sys
from relight.heartbeat import HeartbeatWriter, RankStateWriter, make_rank_state
from relight.heartbeat.heartbeat_page import make_page
make_page(f"{sys.argv[1]}/heartbeat-0")
make_rank_state(f"{sys.argv[1]}/will-0")
with open(f"{sys.argv[1]}/other", "wb", buffering=0) as file:
    file.write(bytes(1 << 20))
assert not HeartbeatWriter(f"{sys.argv[1]}/heartbeat-0").has_reader
try:
    RankStateWriter(f"{sys.argv[1]}/will-0").write(1, bytes(100_000))
except OSError:
    print("not left")
"""


def test_ranks_continue_without_memory_for_their_heartbeat(tmp_path: Path) -> None:
    """Room is taken when a file is opened: writing to memory that cannot be had would be a bus error."""
    with mounted(tmp_path / "memory", "-t", "tmpfs", "-o", "size=256k", "none") as root:
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(root)], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stdout) == (0, "not left\n"), done.stderr
