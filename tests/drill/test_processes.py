"""A drill's processes end with it, and a drilled script obeys orders and writes only to the drill's store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relight.catalog.run import Run
from relight.drill.orders import DrillOrder, DrillOrders
from relight.drill.pace import Limit, Pace
from relight.drill.processes import arguments_of, descendants, is_below, kill_below
from relight.drill.stage import DrillJob
from relight.drill.storage import OWN_MOUNTS, cannot, move_back, spoiled
from relight.drill.target import DrillTarget
from relight.drill.warden import Warden, environment
from relight.errors import ConfigError, RelightError
from relight.store import open_bytes

ORPHAN = "import os, time; os.fork() or (os.setsid(), os.fork() or time.sleep(600)); os._exit(0)"
"""Script that leaves an orphan in its own session."""


def wait_for(condition: object, seconds: float = 20.0) -> None:
    """Wait until the condition is true."""
    ends = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < ends
        time.sleep(0.02)


def orphans(warden: int) -> list[int]:
    """Return the orphan of the script above, below a warden."""
    return [pid for pid in descendants(warden) if "time.sleep(600)" in " ".join(arguments_of(pid))]


def start(warden: Warden, folder: Path) -> int:
    """A started process leaves an orphan below the warden."""
    warden.start([sys.executable, "-c", ORPHAN], env=environment(), cwd="/", log=folder / "log")
    wait_for(lambda: orphans(warden.pid))
    time.sleep(0.2)
    (pid,) = orphans(warden.pid)
    assert is_below(pid, warden.pid) and is_below(pid, os.getpid()) and not is_below(os.getpid(), pid)
    return pid


def test_processes_of_a_warden_end_with_it(tmp_path: Path) -> None:
    """Orphans in their own sessions end, too, and so do stopped processes."""
    with Warden() as warden:
        pid = start(warden, tmp_path)
        os.kill(pid, signal.SIGSTOP)
    assert not arguments_of(pid)


def test_a_sweep_ends_the_processes_and_the_warden_continues(tmp_path: Path) -> None:
    """A sweep ends all processes at once, and their exit codes are known afterwards."""
    with Warden() as warden:
        pid = start(warden, tmp_path)
        sleeps = warden.start(["sleep", "600"], env=environment(), cwd="/", log=tmp_path / "log")
        fails = warden.start(["sh", "-c", "exit 7"], env=environment(), cwd="/", log=tmp_path / "log")
        wait_for(lambda: warden.ended(fails) == 7)
        assert warden.ended(sleeps) is None
        warden.sweep()
        assert not arguments_of(pid) and warden.ended(sleeps) == -signal.SIGKILL
        warden.call(["true"])
        with pytest.raises(RelightError, match="ended with 3"):
            warden.call(["sh", "-c", "echo no; exit 3"])
        with pytest.raises(RelightError):
            warden.call(["no-such-command-at-all"])


def test_if_the_drill_itself_is_killed_nothing_is_left(tmp_path: Path) -> None:
    """After SIGKILL to the warden's controller, the warden's input ends, and it ends all processes."""
    script = f"""
import sys, time
from pathlib import Path
from relight.drill.warden import Warden, environment
warden = Warden()
warden.start([sys.executable, "-c", {ORPHAN!r}], env=environment(), cwd="/", log=Path({str(tmp_path / "log")!r}))
print(warden.pid, flush=True)
time.sleep(600)
"""
    drill = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert drill.stdout is not None
    warden = int(drill.stdout.readline())
    wait_for(lambda: orphans(warden))
    time.sleep(0.2)
    (pid,) = orphans(warden)
    drill.kill()
    drill.communicate()
    wait_for(lambda: not arguments_of(pid) and not arguments_of(warden))


def test_only_descendants_of_a_process_are_killed() -> None:
    """Only descendants are killed; another child of the same parent survives."""
    neighbour = subprocess.Popen(["sleep", "600"])
    above = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"])
    try:
        wait_for(lambda: len(descendants(above.pid)) == 2)
        assert kill_below(above.pid) == [] and neighbour.poll() is None
    finally:
        for process in (above, neighbour):
            process.kill()
            process.wait()


SCRIPT = """
import sys, numpy, relight
with relight.Checkpointer(sys.argv[1], w=numpy.zeros(9), save=relight.every(steps=2), background=False) as ckpt:
    for step in range(ckpt.restore(), 8):
        ckpt.step(step, loss=1.0)
"""


def run_script(folder: Path, where: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a script as relight run does in a drill with the store ``folder/store``."""
    (folder / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "relight.drill.script",
        str(folder / "orders"),
        str(folder / "store"),
        str(folder / "script.py"),
        where,
    ]
    return subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_script_in_a_drill_saves_in_the_drills_store_or_not_at_all(tmp_path: Path) -> None:
    """A store outside the drill's is refused before anything is written there."""
    done = run_script(tmp_path, str(tmp_path / "real" / "demo"))
    assert (
        done.returncode
        and "may only write to the drill's own store" in done.stderr
        and not (tmp_path / "real").exists()
    )
    done = run_script(tmp_path, str(tmp_path / "store" / "demo"))
    assert done.returncode == 0, done.stderr
    assert [checkpoint.step for checkpoint in Run(open_bytes(tmp_path / "store"), "demo").history().live] == [
        1,
        3,
        5,
        7,
    ]


def test_a_script_in_a_drill_is_poisoned_at_the_ordered_step(tmp_path: Path) -> None:
    """The order ``poison`` makes the loss of that step NaN."""
    from relight.heartbeat.heartbeat_page import make_page

    make_page(tmp_path / "page")
    DrillOrders(tmp_path / "orders").give(DrillOrder("poison", 5))
    done = run_script(tmp_path, str(tmp_path / "store" / "demo"), RELIGHT_HEARTBEAT=str(tmp_path / "page"))
    assert done.returncode and "Diverged" in done.stderr and "[onset 5]" in done.stderr, done.stderr
    assert DrillOrders(tmp_path / "orders").done() is not None


def test_a_script_in_a_drill_aborts_at_the_ordered_step(tmp_path: Path) -> None:
    """Only the ordered rank executes an order, once, at the step or the first one after it."""
    DrillOrders(tmp_path / "orders").give(DrillOrder("crash", 3, 1))
    assert run_script(tmp_path, str(tmp_path / "store" / "demo"), RANK="0").returncode == 0
    assert run_script(tmp_path, str(tmp_path / "store" / "other"), RANK="1").returncode == -signal.SIGABRT
    assert run_script(tmp_path, str(tmp_path / "store" / "other"), RANK="1").returncode == 0


def test_a_byte_that_matters_is_damaged(tmp_path: Path) -> None:
    """The changed byte is one that verify reports, and the previous checkpoint stays undamaged."""
    assert run_script(tmp_path, str(tmp_path / "store" / "demo")).returncode == 0
    with DrillJob(DrillTarget(), tmp_path / "job", tmp_path / "store", Limit(Pace(60))) as job:
        assert job.damage() == {}
        newest = job.checkpoints()[-1]
        with spoiled(job, newest) as where:
            assert where.startswith(newest.body.dir) and job.damage().keys() == {newest.id}
        assert job.damage() == {}


def test_no_process_of_others_is_sent_a_signal(tmp_path: Path) -> None:
    """The drill signals no process that it has not started, whatever a heartbeat page contains."""
    neighbour = subprocess.Popen(["sleep", "600"])
    try:
        with DrillJob(DrillTarget(), tmp_path, tmp_path / "store", Limit(Pace(60))) as job:
            own = job.warden.start(["sleep", "600"], env=environment(), cwd="/", log=tmp_path / "log")
            for pid in (neighbour.pid, own, 2**22 + 1):
                job.send(pid, signal.SIGKILL)
            wait_for(lambda: job.warden.ended(own) == -signal.SIGKILL)
            assert neighbour.poll() is None
    finally:
        neighbour.kill()
        neighbour.wait()


@pytest.mark.parametrize("made", [None, "empty", "full"])
def test_a_store_comes_back_whatever_is_in_its_place(tmp_path: Path, made: str | None) -> None:
    """A directory that was created in the store's place is moved aside and returned."""
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "relight.json").touch()
    store = tmp_path / "store"
    if made:
        store.mkdir()
        if made == "full":
            (store / "pack").touch()
    aside = move_back(tmp_path / "away", store)
    assert [path.name for path in store.iterdir()] == ["relight.json"] and not (tmp_path / "away").exists()
    assert [[path.name for path in folder.iterdir()] for folder in aside] == (
        [] if made is None else [["pack"] if made == "full" else []]
    )


def test_the_reason_for_an_impossible_rehearsal_is_reported() -> None:
    """The reason is a missing program, or the last line of its output."""
    assert cannot(["true"]) == ""
    assert "there is no no-such-command" in cannot(["no-such-command"])
    assert cannot(["sh", "-c", "echo not permitted >&2; exit 1"]) == "not permitted"


@pytest.mark.skipif(bool(cannot([*OWN_MOUNTS, "true"])), reason="no namespaces of one's own here")
def test_files_in_a_jobs_own_mount_are_read_from_outside(tmp_path: Path) -> None:
    """A mount in the namespace ends with it, and other processes never see it."""
    disk = tmp_path / "disk"
    with DrillJob(DrillTarget(), tmp_path, disk / "store", Limit(Pace(60)), OWN_MOUNTS) as job:
        disk.mkdir()
        job.warden.call(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)])
        job.warden.call(["touch", str(disk / "inside")])
        assert Path(job.seen(disk / "inside")).exists() and not (disk / "inside").exists()
    assert list(disk.iterdir()) == []


def test_only_paths_below_the_drills_store_are_its_own() -> None:
    """A URL with a scheme is not in the drill's store."""
    from relight.drill.script import Obedient

    obedient = Obedient(DrillOrders(Path("orders")), Path("/drill/store"))
    assert obedient.place("file:///drill/store", "demo") == ("file:///drill/store", "demo")
    for url in ("s3://bucket/runs", "/drill/store-of-another", "/drill/store/../real", "memory://drill"):
        with pytest.raises(ConfigError):
            obedient.place(url, "demo")


def test_runs_of_the_drills_store_are_read_from_it(tmp_path: Path) -> None:
    """The run is found in the store, and not in the job's heartbeats."""
    assert run_script(tmp_path, str(tmp_path / "store" / "demo")).returncode == 0
    with DrillJob(DrillTarget(), tmp_path / "job", tmp_path / "store", Limit(Pace(60))) as job:
        assert isinstance(job.run(), Run) and job.run().name == "demo" and job.checkpoints()[-1].step == 7
