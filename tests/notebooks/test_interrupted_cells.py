"""A notebook's cell that trains is interrupted at any moment and run again, in a real Jupyter kernel."""

from __future__ import annotations

import json
import os
import queue
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import relight

jupyter_client = pytest.importorskip("jupyter_client", reason="jupyter_client is not installed: make notebooks")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: make notebooks")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]  # of the kernel's own packages

CELL = """
import time, torch, relight
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.Tanh(), torch.nn.Linear(700, 700))
optimizer = torch.optim.AdamW(model.parameters())
ckpt = relight.Checkpointer({run!r}, model=model, optimizer=optimizer, save=relight.every(steps=2), keep=relight.keep(last=5), {options})
start = ckpt.restore()
print(f"start={{start}}")
for step in range(start, start + 100000):
    optimizer.zero_grad()
    model(torch.randn(8, 700)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
    ckpt.step(step)
    print(f"step={{step}}")
"""
COUNT = """
import gc, json, os, sys, threading
sys.last_traceback = sys.last_value = sys.last_type = sys.last_exc = None
gc.collect()
links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
print("counts=" + json.dumps({
    "threads": sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("relight")),
    "memfds": sorted(link for link in links if "memfd:" in link and "relight-workers" not in link),
    "workers": sum("relight-workers" in link for link in links),
    "descriptors": len(links),
    "maps": [line.split("/", 1)[1].strip() for line in open("/proc/self/maps") if "memfd:" in line and "relight-workers" not in line],
}))
"""
IGNORED = "Exception ignored in"
"""Python prints this, and continues, if an interrupt comes while it finalizes an object."""
REPEATED_S = 5.0
"""Seconds after the last interrupt until it is sent again if Python has ignored it, as a user would send it again."""


class Kernel:
    """A Jupyter kernel. ``run`` executes a cell and interrupts it."""

    def __init__(self) -> None:
        environment = {**os.environ, "RELIGHT_BACKGROUND": "1"}
        self._manager, self._client = jupyter_client.manager.start_new_kernel(startup_timeout=120, env=environment)
        self.shown: dict[str, str] = {}
        """The last result that was shown, by its type."""
        self.pid = int(self._manager.provisioner.pid)

    def run(
        self, cell: str, interrupts: tuple[float, ...] = (), after: str = "", wait_s: float = 120.0
    ) -> tuple[str, str]:
        """Return what the cell printed on both streams, and the name of its exception.

        ``interrupts``: seconds of each interrupt, from the start of the cell, or from the moment when ``after`` was printed.
        """
        sent, printed, error, begins, ends = (
            self._client.execute(cell),
            "",
            "",
            time.monotonic(),
            time.monotonic() + wait_s,
        )
        pending, last = list(interrupts), ends
        while True:
            left = ends if not pending or (after and after not in printed) else begins + pending[0]
            try:
                message = self._client.get_iopub_msg(timeout=max(0.001, left - time.monotonic()))
            except queue.Empty:
                lost = not pending and IGNORED in printed and time.monotonic() < last
                assert pending or lost, f"the cell did not end in {wait_s} s: {printed[-2000:]}"
                self._manager.interrupt_kernel()
                pending = pending[1:]
                ends = min(last, time.monotonic() + REPEATED_S) if interrupts and not pending else ends
                continue
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                is_first = after not in printed
                printed += content["text"]
                begins = time.monotonic() if after and is_first and after in printed else begins
            elif kind == "execute_result":
                self.shown = content["data"]
            elif kind == "error":
                error = f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, error

    def counts(self) -> dict[str, Any]:
        """Return numbers of the kernel's threads, descriptors and mappings of Relight, and of its agents."""
        printed, error = self.run(COUNT)
        assert not error, error
        return json.loads(printed.rpartition("counts=")[2])

    def agents(self) -> list[int]:
        """Return the agents that the kernel has started and that are alive."""
        pids = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command, status = (
                    (path / "cmdline").read_bytes(),
                    (path / "stat").read_text().rpartition(")")[2].split(),
                )
            except OSError:
                continue
            if b"relight.agent.server" in command and int(status[1]) == self.pid and status[0] != "Z":
                pids.append(int(path.name))
        return pids

    def end(self) -> None:
        """End the kernel."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """A kernel that ends with the test."""
    made = Kernel()
    yield made
    made.end()


def newest(run: Path) -> int:
    """Return the step of the run's newest checkpoint; -1 if there is none."""
    try:
        checkpoints = relight.open(run).checkpoints()
    except relight.RelightError:
        return -1
    return max((checkpoint.step for checkpoint in checkpoints), default=-1)


def started(printed: str) -> int | None:
    """Return the step at which the cell began; None if it was interrupted before."""
    match = re.search(r"start=(\d+)", printed)
    return int(match[1]) if match else None


def above(most: dict[str, int], counts: dict[str, Any]) -> dict[str, int]:
    """Return the counts that exceed their bounds."""
    numbers = {name: value if isinstance(value, int) else len(value) for name, value in counts.items()}
    return {name: numbers[name] for name, bound in most.items() if numbers[name] > bound}


@pytest.mark.parametrize("options", ["", "signals=False", "background=False, signals=False"])
def test_twenty_interrupts_lose_no_checkpoint_and_leak_nothing(options: str, kernel: Kernel, tmp_path: Path) -> None:
    """Interrupts hit imports, the constructor, restores, steps and saves. Each next run of the cell continues after the newest checkpoint."""
    run, rng = tmp_path / "runs" / "demo", random.Random(options)
    cell = CELL.format(run=str(run), options=options)
    printed, error = kernel.run(cell, (0.5,), "step=3")
    assert error.startswith("KeyboardInterrupt") and started(printed) == 0, (printed, error)
    first, ends = kernel.counts(), time.monotonic() + 60
    while "background=False" not in options and not first["memfds"] and time.monotonic() < ends:
        kernel.run(cell, (0.5,), "step=")  # the agent had not started when the cell before was interrupted
        first = kernel.counts()
    for turn in range(20):
        before = newest(run)
        moments: tuple[float, ...] = (rng.uniform(0.0, 0.6),)
        if turn % 3 == 0 and "signals" not in options:  # a second interrupt ends a step that the first one lets finish
            moments = (*moments, moments[0] + rng.uniform(0.0, 0.02))
        printed, error = kernel.run(cell, moments, "" if turn % 2 else "start=")
        # without output and error, the interrupt came before the kernel had begun the cell, which it then drops
        assert error.startswith("KeyboardInterrupt") or not printed, (turn, printed[-1500:], error)
        start = started(printed)
        assert start is None or start >= before + 1, (turn, start, before, printed)
        assert newest(run) >= before
    printed, error = kernel.run(cell, (0.5,), "step=")
    assert error.startswith("KeyboardInterrupt")
    most = {
        "memfds": max(len(first["memfds"]), 4) + 2,  # the first run may have been interrupted before it had all four
        "descriptors": first["descriptors"] + 10,
        "threads": len(first["threads"]) + 2,
    }
    ends = time.monotonic() + 15  # threads that copied for an interrupted cell need a moment to end
    while (exceeded := above(most, last := kernel.counts())) and time.monotonic() < ends:
        time.sleep(0.5)
    assert not exceeded, (exceeded, first, last)
    assert len(kernel.agents()) <= 1
    printed, error = kernel.run("ckpt.close()")
    assert not error or "closed" in error, error
    printed, error = kernel.run("del ckpt; import gc; gc.collect()")
    assert not any(findings for _, findings in relight.open(run).verify())
    ended = kernel.counts()
    assert ended["memfds"] == ended["maps"] == ended["threads"] == [] and not kernel.agents(), ended
    assert ended["workers"] == first["workers"], "a process has one page of signals that its workers ignore"


def test_objects_and_bars_in_a_notebook(kernel: Kernel, tmp_path: Path) -> None:
    """Objects are shown as tables, and a bar as text with carriage returns on stderr."""
    run = tmp_path / "runs" / "demo"
    relight.save(run, {"values": {"x": torch.ones(3)}}, step=4, metrics={"loss": 0.5})
    assert not kernel.run(
        f"import relight, time\nckpt = relight.Checkpointer({str(run)!r}, state=dict(x=1), save=None)"
    )[1]
    for expression in ("ckpt", f"relight.open({str(run)!r})", f"relight.open({str(run)!r}).checkpoints()"):
        assert not kernel.run(expression)[1]
        assert "<table" in kernel.shown["text/html"] and "demo" in kernel.shown["text/html"] + expression
    assert "loss=0.5" in kernel.shown["text/html"]
    printed, error = kernel.run(
        "from relight.observe.progress_bar import progress_bar\n"
        "with progress_bar('restoring step 4', 60 << 20) as meter:\n"
        "    for _ in range(60): time.sleep(0.05); meter(1 << 20)\n"
    )
    assert not error and printed.count("\rrestoring step 4") > 3 and "\x1b" not in printed
    assert printed.endswith("\r" + " " * 79 + "\r")
