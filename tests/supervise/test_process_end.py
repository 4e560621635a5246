"""The end of ``relight run``'s process while a thread is inside torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ENDS = """
import atexit, os, sys
from datetime import timedelta
from torch.distributed import TCPStore
from relight.cli import main
from relight.supervise import launch as launched
from relight.supervise.rendezvous_thread import _Ask

def launch(*_):
    store = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20), wait_for_workers=False)
    _Ask(lambda: store.get("a key that no node sets"))
    return launched.JobEnd(1, "stopped: another attempt has taken this run over", "runs/mine")

atexit.register(lambda: os.write(2, b"Python exits"))
launched.launch = launch
sys.argv = ["relight", "run", "train.py"]
main()
"""


def test_a_request_to_a_dead_rendezvous_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """Python's exit is not run: it ends threads by an exception, which torch's C++ cannot pass, so that a supervisor ended by SIGABRT."""
    (tmp_path / "train.py").write_text("")
    ended = subprocess.run(
        [sys.executable, "-c", ENDS], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1, ended.stderr
    assert "Python exits" not in ended.stderr and "has taken this run over" in ended.stderr
