"""Settings of one process alone: commands wait less for a store, jobs that they start do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

ASK = """
import json, os, subprocess, sys
from relight.cli import _apply_settings
from relight.store.object_client import RetryTimes
_apply_settings(sys.argv[1], ())
child = [sys.executable, "-c", "from relight.store.object_client import RetryTimes; print(RetryTimes.usual().deadline_s)"]
print(json.dumps([RetryTimes.usual().deadline_s, float(subprocess.check_output(child))]))
"""


@pytest.mark.parametrize("command", ["ls", "run", "drill"])
@pytest.mark.parametrize(("variable", "found"), [("", [20.0, 120.0]), ("7", [7.0, 7.0])])
def test_a_command_waits_less_than_the_jobs_it_starts(command: str, variable: str, found: list[float]) -> None:
    """A command has a short deadline, its jobs the usual one. A variable sets both."""
    environment = {**os.environ, "RELIGHT_STORE_PATIENCE_S": variable}
    done = subprocess.run(
        [sys.executable, "-c", ASK, command], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == found
