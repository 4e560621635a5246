"""Background writers have the lowest priority, also if the kernel schedules by sessions first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
PRINT_PRIORITY = (
    "from relight.comm import lower_priority; lower_priority(7); import os; print(os.getpriority(os.PRIO_PROCESS, 0))"
)
PRINT_GROUP = PRINT_PRIORITY + "; print(open('/proc/self/autogroup').read())"


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel groups nothing by sessions")
@pytest.mark.parametrize("leads", [True, False])
def test_the_session_waits_too_if_it_is_ones_own(leads: bool) -> None:
    """An agent lowers the priority of its own session, which would otherwise get as much CPU as training.

    Other sessions are unchanged.
    """
    result = subprocess.run(
        [sys.executable, "-c", PRINT_GROUP],
        start_new_session=leads,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    nice, group = result.stdout.split("\n")[:2]
    assert nice == "7"
    assert group.endswith("nice 7") == leads, group


def test_without_such_a_kernel_it_is_the_process_alone() -> None:
    """A priority that the system refuses is no error."""
    result = subprocess.run(
        [sys.executable, "-c", PRINT_PRIORITY], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "7"


PRINT_IDLE = """
import os, threading
from relight.comm import idle_priority, lower_priority
def nice(): return f"{os.getpriority(os.PRIO_PROCESS, threading.get_native_id())}/{os.sched_getscheduler(0)}"
def group(): return open("/proc/self/autogroup").read().split()[-1] if os.path.exists("/proc/self/autogroup") else "?"
def work():
    found = []
    thread = threading.Thread(target=lambda: found.append(nice()))
    thread.start()
    thread.join()
    return [nice(), *found, group()]
lower_priority(4)
print(*idle_priority(work, 4), nice(), group())
try:
    idle_priority(lambda: 1 / 0, 4)
except ZeroDivisionError:
    print(nice(), group(), threading.active_count())
"""


def test_work_without_a_waiting_caller_gets_the_lowest_priority() -> None:
    """``idle_priority`` lowers the thread, threads that it starts, and the session, and the kernel runs them only on idle cores.

    The process and its session are restored, also after an error.
    """
    result = subprocess.run(
        [sys.executable, "-c", PRINT_IDLE],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    last, back = ("19", "4") if AUTOGROUP.exists() else ("?", "?")
    idle = f"19/{os.SCHED_IDLE}"
    assert result.stdout.split("\n")[:2] == [f"{idle} {idle} {last} 4/0 {back}", f"4/0 {back} 1"]


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel groups nothing by sessions")
def test_the_agent_waits(tmp_path: Path) -> None:
    """The agent of a trainer lowers its session to ``Limits(nice=…)``."""
    script = f"""
import relight, torch, glob, os
with relight.Checkpointer({str(tmp_path / "run")!r}, x=torch.ones(3), background=True, limits=relight.Limits(nice=13)) as ckpt:
    ckpt.restore()
    ckpt.save(0)
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = open(path, "rb").read().split(b"\\0")
            parent = open(os.path.dirname(path) + "/stat").read().rsplit(")", 1)[1].split()[1]
            if b"relight.agent.server" in words and int(parent) == os.getpid():
                print(open(os.path.dirname(path) + "/autogroup").read())
        except OSError:
            pass
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout.strip().endswith("nice 13"), result
