"""Stacks of processes that do not answer in any other way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.supervise import stacks
from relight.supervise.procfs import has_handler, sample_process

SCRIPTS = {
    "waits": "import threading\ndef waiting():\n    threading.Event().wait()\nwaiting()",
    "holds the GIL": "import ctypes\nlock, c = ctypes.create_string_buffer(64), ctypes.PyDLL(None)\n"
    "def holding():\n    c.pthread_mutex_lock(lock)\n    c.pthread_mutex_lock(lock)\nholding()",
    "spins": "def spinning():\n    while True: pass\nspinning()",
}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield a list of processes, which are ended after the test."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def start(path: Path, script: str, *, offers: bool = True) -> subprocess.Popen[bytes]:
    """Start a process that runs the script. With ``offers``, its stacks can be taken."""
    code = (
        "from relight.supervise import stacks; stacks.offer()\n" if offers else ""
    ) + f"print('here', flush=True)\n{script}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, stacks.SETTING: str(path)}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline()
    time.sleep(0.2)
    return process


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_process_reports_its_stack(tmp_path: Path, name: str, started: list[subprocess.Popen[bytes]]) -> None:
    """The stack is taken whatever the process does. Two stacks of a process that does not move are equal."""
    path = tmp_path / "stacks"
    process = start(path, SCRIPTS[name])
    started.append(process)
    first = stacks.take({0: process.pid}, {0: path})[0]
    assert "waiting" in first or "holding" in first or "spinning" in first
    second = stacks.take({0: process.pid}, {0: path})[0]
    assert name == "spins" or first == second
    assert process.poll() is None


def test_only_the_main_thread_is_compared(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    """Another thread polls and has another stack each time. That does not count."""
    script = tmp_path / "script.py"
    script.write_text(
        "import threading, time\nprint('here', flush=True)\ndef polls():\n    while True:\n        time.sleep(0.001)\n        sum(range(100))\n"
        "threading.Thread(target=polls, daemon=True).start()\nthreading.Event().wait()\n"
    )
    path = tmp_path / "stacks"
    command = [sys.executable, "-u", "-m", "relight.supervise.worker", str(script)]
    process = subprocess.Popen(command, env={**os.environ, stacks.SETTING: str(path)}, stdout=subprocess.PIPE)
    started.append(process)
    assert process.stdout is not None and process.stdout.readline()
    time.sleep(0.2)
    dumps = [stacks.take({0: process.pid}, {0: path})[0] for _ in range(5)]
    assert all("polls" in dump for dump in dumps)
    assert len({stacks.of_main_thread(dump) for dump in dumps}) == 1
    assert "polls" not in stacks.of_main_thread(dumps[0]) and "wait" in stacks.of_main_thread(dumps[0])


def test_a_process_that_does_not_answer_is_reported_and_lives(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """Stopped, without a handler (the signal would end it), and gone processes are reported, together within 3 s."""
    stopped = start(tmp_path / "0", SCRIPTS["waits"])
    deaf = start(tmp_path / "1", SCRIPTS["waits"], offers=False)
    gone = start(tmp_path / "2", "pass")
    started += [stopped, deaf, gone]
    gone.wait()
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    before = time.monotonic()
    result = stacks.take({0: stopped.pid, 1: deaf.pid, 2: gone.pid}, {n: tmp_path / str(n) for n in range(3)})
    assert time.monotonic() - before < 3
    assert "state T" in result[0] and "state S" in result[1] and "gone" in result[2]
    assert deaf.poll() is None and not has_handler(deaf.pid, stacks.SIGNAL) and has_handler(stopped.pid, stacks.SIGNAL)


def test_what_the_kernel_reports_of_a_process(started: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Processor time and bytes of a working process grow."""
    process = start(
        tmp_path / "0",
        "import os\nwhile True: os.write(os.open('/dev/null', os.O_WRONLY), b'x' * 1000) and sum(range(10000))",
    )
    started.append(process)
    first = sample_process(process.pid)
    time.sleep(0.5)
    second = sample_process(process.pid)
    assert second.cpu_s > first.cpu_s and second.moved_bytes > first.moved_bytes
    assert sample_process(2**22 + 1).state == ""
