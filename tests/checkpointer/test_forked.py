"""Forked children of a trainer: they end at once, and leave the parent's agent, sockets and pages alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.scripts import run_script

import relight
from relight.heartbeat.heartbeat_page import make_page, read_beat

TRAINER = """
import gc, os, signal, sys, threading, time, torch, relight
from relight.observe import counters, emit
torch.set_num_threads(1)
run = sys.argv[1]
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(first, last):
    for step in range(first, last):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        ckpt.step(step)

def child(act):
    pid = os.fork()
    if pid == 0:
        act()
        sys.exit(7)
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return "hung"

ckpt = relight.Checkpointer(run, model=model, optimizer=optimizer, save=relight.every(steps=1))
ckpt.restore()
ckpt.save(0)  # starts the agent and allocates its memory
"""


def trainer(tmp_path: Path, text: str, **settings: str) -> str:
    """Run a trainer that forks. Return what it printed."""
    run = tmp_path / "store" / "run"
    done = run_script(
        TRAINER + textwrap.dedent(text),
        str(run),
        timeout_s=120,
        cwd=tmp_path,
        **{"RELIGHT_BACKGROUND": "1", **settings},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "act",
    [
        "None",
        "ckpt.close()",
        "ckpt.__enter__().__exit__(None, None, None)",
        "ckpt.__exit__(SystemExit, SystemExit(), None)",
        "(model(torch.ones(1, 64)).sum().backward(), optimizer.step(), ckpt.barrier())",
        "(globals().pop('ckpt'), gc.collect())",
    ],
)
def test_a_forked_child_ends_at_once(tmp_path: Path, act: str) -> None:
    """Wait for nothing in a child that exits normally. The parent's agent continues to serve the parent."""
    printed = trainer(
        tmp_path,
        f"""
        train(1, 3)
        agent = ckpt._saves.writer._agent.pid
        print(child(lambda: {act}))
        train(3, 6)
        assert ckpt._saves.writer._agent.pid == agent and ckpt._saves.writer._agent.alive
        ckpt.close()
        print(counters["agent.lost"], counters["save.failed"])
        """,
    )
    assert printed == "7\n0 0\n"
    assert max(checkpoint.step for checkpoint in relight.open(str(tmp_path / "store" / "run")).checkpoints()) == 5


def test_a_child_is_forked_while_another_thread_emits(tmp_path: Path) -> None:
    """The lock of events that another thread holds at the fork does not stop the child."""
    printed = trainer(
        tmp_path,
        """
        from relight.observe import events
        held, let_go = threading.Event(), threading.Event()
        def hold():
            with events._lock:
                held.set()
                let_go.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        print(child(lambda: emit("attempt.ended", "in the child")))
        let_go.set()
        thread.join()
        ckpt.close()
        """,
    )
    assert printed == "7\n"


def test_a_childs_checkpointer_has_its_own_signals(tmp_path: Path) -> None:
    """A forked child that trains another run saves and ends on SIGTERM as any trainer does."""
    printed = trainer(
        tmp_path,
        """
        def other():
            with relight.Checkpointer(run + "-child", model=model, save=None) as mine:
                for step in range(mine.restore(), 10):
                    if step == 3:
                        signal.raise_signal(signal.SIGTERM)
                    mine.step(step)
        print(child(other))
        ckpt.close()
        """,
    )
    assert printed == "-15\n"
    assert [checkpoint.step for checkpoint in relight.open(str(tmp_path / "store" / "run-child")).checkpoints()] == [3]


def test_a_child_does_not_write_to_its_parents_page(tmp_path: Path) -> None:
    """Steps of a forked child do not overwrite the rank's heartbeat that ``relight run`` reads."""
    page = tmp_path / "page"
    make_page(page)
    printed = trainer(
        tmp_path,
        """
        def other():
            with relight.Checkpointer(run + "-child", model=model, save=None) as mine:
                mine.restore()
                mine.step(500)
        train(1, 3)
        print(child(other), flush=True)
        os._exit(0)
        """,
        RELIGHT_HEARTBEAT=str(page),
    )
    assert printed == "7\n"
    beat = read_beat(page)
    assert beat is not None and beat.step == 2


def test_a_childs_error_is_not_the_ranks(tmp_path: Path) -> None:
    """Under ``relight run``, an exception in a forked child is not written down as the error of the rank."""
    script, error = tmp_path / "script.py", tmp_path / "error.json"
    script.write_text(
        "import os\npid = os.fork()\nif pid == 0:\n    raise ValueError('in the child')\nos.waitpid(pid, 0)\n"
    )
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(error)}
    command = [sys.executable, "-m", "relight.supervise.worker", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0 and "in the child" in done.stderr
    assert not error.exists()


def test_a_child_that_lives_longer_keeps_no_memory_of_snapshots(tmp_path: Path) -> None:
    """A child unmaps the slots at the fork: as a loader's worker, it may outlive the Checkpointer."""
    printed = trainer(
        tmp_path,
        """
        def slots(pid):
            with open(f"/proc/{pid}/maps") as maps:
                mapped = sum("memfd:relight (" in line for line in maps)
            links = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
            return mapped + sum("memfd:relight (" in os.readlink(link) for link in links if os.path.islink(link))

        readable, writable = os.pipe()
        print(slots(os.getpid()) > 0)
        pid = os.fork()
        if pid == 0:
            os.close(writable)
            os.read(readable, 1)
            os._exit(0)
        train(1, 3)
        print(slots(pid))
        ckpt.close()
        os.close(writable)
        os.waitpid(pid, 0)
        """,
    )
    assert printed == "True\n0\n"
