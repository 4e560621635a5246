"""Little memory: a clear degradation, never a dead process."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import relight

SCRIPT = """
import logging, os, sys
if len(sys.argv) > 2:
    with open(sys.argv[2] + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
import torch, relight
from relight.observe import counters
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
model = torch.nn.Linear(2048, 6144, bias=False)  # one slot of it is too much, and a second is not requested
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model.weight.grad = torch.ones_like(model.weight)
optimizer.step()
with relight.Checkpointer(sys.argv[1], model=model, optimizer=optimizer) as ckpt:
    for step in range(3):
        optimizer.step()
        ckpt.save(step)
print("refused", counters["agent.memory"], "failed", counters["save.failed"])
"""


@pytest.fixture
def group() -> Iterator[str]:
    """A control group of our own, whichever version there is."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        path = Path(base, f"relight-test-{os.getpid()}")
        try:
            path.mkdir()
            (path / limit).write_text(str(420 << 20))
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            continue
        yield str(path)
        for _ in range(50):  # the last process in it may still be on its way out
            with contextlib.suppress(OSError):
                path.rmdir()
                return
            time.sleep(0.1)
        return
    pytest.skip("no control group may be made here")


def run_script(*args: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", SCRIPT, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "RELIGHT_BACKGROUND": "1"},
    )


def test_a_memory_limit_is_respected(tmp_path: Path, group: str) -> None:
    """With memory for the trainer but not for slots: one refusal is logged, saves succeed, no process is killed."""
    done = run_script(str(tmp_path / "s" / "r"), group)
    assert done.returncode == 0, f"{done.returncode} {done.stdout[-500:]} {done.stderr[-500:]}"
    assert "refused 1 failed 0" in done.stdout
    assert "memory limit of this cgroup" in done.stdout
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "s" / "r").checkpoints()] == [0, 1, 2]


def test_a_tiny_dev_shm_does_not_matter(tmp_path: Path) -> None:
    """Memory is shared by descriptor, not by name: 64 KiB of /dev/shm are plenty."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace may be made here")
    shell = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    done = run_script(str(tmp_path / "s" / "r"), before=("unshare", "-m", "sh", "-c", shell, "sh"))
    assert done.returncode == 0, done.stderr[-500:]
    assert "refused 0 failed 0" in done.stdout
    assert len(relight.open(tmp_path / "s" / "r").checkpoints()) == 3
