"""Scripts that wait at ``standby()``, and the spare processes that wait there."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from relight.comm.children import child_command
from relight.heartbeat import HeartbeatPage, read_beat
from relight.heartbeat.heartbeat_page import make_page
from relight.supervise import spare
from relight.supervise.spare import Spares

WORKER = child_command("relight.supervise.worker", unbuffered=True)


def run(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    import os

    return subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_a_supervisor_standby_does_nothing() -> None:
    """Repeated calls have no effect either, and torch is not imported."""
    done = run("import relight, sys; relight.standby(); relight.standby(); print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_a_rank_publishes_its_memory_at_standby(tmp_path: Path) -> None:
    """The value is more than the script allocated, and less than the machine has."""
    make_page(tmp_path / "page")
    assert (
        run(
            "import relight; held = bytearray(64 << 20); relight.standby()", RELIGHT_HEARTBEAT=str(tmp_path / "page")
        ).returncode
        == 0
    )
    beat = read_beat(tmp_path / "page")
    assert beat is not None and 64 << 20 < beat.ahead < 1 << 30
    assert isinstance(HeartbeatPage(tmp_path / "page"), HeartbeatPage)


@pytest.mark.parametrize(
    ("before", "named"),
    [
        ("relight.Checkpointer('store/run', state=dict(value=1))", "is called after a Checkpointer"),
        (
            "import torch.distributed as dist; dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
            "is called after init_process_group",
        ),
    ],
)
def test_a_late_standby_fails_at_once(tmp_path: Path, before: str, named: str) -> None:
    """The error comes in the job's first incarnation, not when a spare is needed."""
    done = run(f"import os, relight; os.chdir({str(tmp_path)!r})\n{before}\nrelight.standby()")
    assert (
        done.returncode == 1
        and named in done.stderr
        and "call standby() before anything that depends on the rank" in done.stderr
    )


def test_nothing_of_a_rank_happens_in_a_spare(tmp_path: Path) -> None:
    """A Checkpointer before standby() would be a second writer: it is refused there, and the store is not even made."""
    source = f"""
import relight
from relight.heartbeat.standby import wait_with
wait_with(lambda: None)
relight.Checkpointer({str(tmp_path / "store" / "run")!r}, value=1)
"""
    done = run(source)
    assert done.returncode == 1 and "a Checkpointer is called before relight.standby()" in done.stderr
    done = run(source.replace("Checkpointer", "save").replace("value=1", "{'value': 1}, step=1"))
    assert done.returncode == 1 and "relight.save is called before relight.standby()" in done.stderr
    assert not (tmp_path / "store").exists()


def fill(spares: Spares, ahead_bytes: int) -> None:
    """Start spares, and wait until one is ready."""
    ends = time.monotonic() + 60
    spares.fill(ahead_bytes)
    while not any(spare._is_ready(process.channel) for process in spares._waiting):
        time.sleep(0.02)
        assert time.monotonic() < ends


def test_it_is_run_ahead_only_where_there_is_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare runs the script ahead only if all missing spares together need at most half of the available memory."""
    script = tmp_path / "script.py"
    script.write_text(f"import relight, pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nrelight.standby()\n")
    for available, ran in ((4 * 100 - 1, False), (4 * 100, True)):
        monkeypatch.setattr(spare, "available_bytes", lambda available=available: available)
        spares = Spares(2, ())
        assert spares.take([*WORKER, str(script)], {}, None, None) is None
        try:
            fill(spares, 100)
            assert (tmp_path / "ran").exists() is ran
        finally:
            spares.close()


def test_a_killed_spare_is_replaced_and_a_failed_one_is_not(tmp_path: Path) -> None:
    """A killed spare may have been killed for its memory. A script that raised would raise again."""
    script = tmp_path / "script.py"
    script.write_text("import relight, os\nprint(os.getpid())\nrelight.standby()\n")
    spares = Spares(1, ())
    assert spares.take([*WORKER, str(script)], {}, None, None) is None
    try:
        fill(spares, 1)
        (first,) = spares._waiting
        first.process.kill()
        first.process.wait()
        fill(spares, 1)
        (second,) = spares._waiting
        assert second.output >= 0 and second.process.pid != first.process.pid
        script.write_text("raise ValueError('no')\n")
        second.process.kill()
        second.process.wait()
        spares.fill(1)
        (third,) = spares._waiting
        assert third.process.wait(60) == 1
        fill(spares, 1)
        (fourth,) = spares._waiting
        assert fourth.output < 0
    finally:
        spares.close()
