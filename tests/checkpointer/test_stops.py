"""The stops of a save and of a restore in docs/design.md, on a real run, and the hook that the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import relight

PAGE = Path(__file__).parents[2] / "docs" / "design.md"
TRACER = """
import os, sys, threading, time

WANTED = {tuple(stop.split(":")) for stop in os.environ["STOPS"].split()}
FILE = os.open(os.environ["TRACE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
AGENT = any("relight.agent" in word for word in sys.orig_argv)


def on_event(frame, event, _):
    code = frame.f_code
    if event == "call" and "/relight/" in code.co_filename:
        stop = code.co_filename.rpartition("/relight/")[2], code.co_qualname
        if stop in WANTED:
            line = f"{time.monotonic_ns()} {stop[0]}:{stop[1]} {'agent' if AGENT else 'trainer'}\\n"
            os.write(FILE, line.encode())


threading.setprofile(on_event)
sys.setprofile(on_event)
"""
TRAINING = """
import sys, time, torch, relight
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())
with relight.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, save=relight.every(steps=2)) as ckpt:
    for step in range(ckpt.restore(), 2):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        if step == 0:
            ckpt.save(step)  # starts the agent
        else:
            print(time.monotonic_ns())
            ckpt.step(step)
"""


class Stop(NamedTuple):
    """One row of a table."""

    name: str
    """``file:function``."""
    process: str


def stops(heading: str) -> list[Stop]:
    """Return the stops in the table under a heading of the page."""
    section = PAGE.read_text(encoding="utf-8").partition(f"### {heading}\n")[2].partition("\n##")[0]
    rows = re.findall(r"^\| \d+ \| `([\w/.]+)` `([\w.]+)` \| ([^|]*) \|", section, re.MULTILINE)
    return [
        Stop(f"{file}:{function}", "agent" if where.startswith("agent") else "trainer")
        for file, function, where in rows
    ]


def passed(trace: Path, since: int) -> list[Stop]:
    """Return the traced calls from a time on, in the order of their times."""
    lines = sorted(
        (int(time), name, process) for time, name, process in (line.split() for line in trace.read_text().splitlines())
    )
    return [Stop(name, process) for time, name, process in lines if time >= since]


def missed(wanted: list[Stop], calls: list[Stop]) -> Stop | None:
    """Return the first of the stops that was not passed after those before it; None if all were, in their order."""
    remaining = iter(calls)
    return next((stop for stop in wanted if stop not in remaining), None)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Stop]]:
    """The calls of one save after the first, and of one restore, by the headings of the page."""
    folder = tmp_path_factory.mktemp("stops")
    (folder / "sitecustomize.py").write_text(TRACER)
    (folder / "training.py").write_text(TRAINING)
    traced = {}
    for heading in ("One save in ten stops", "One restore in eight stops"):
        names = " ".join({stop.name for stop in stops(heading)})
        trace = folder / heading.replace(" ", "-")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
            "STOPS": names,
            "TRACE": str(trace),
        }
        done = subprocess.run(
            [sys.executable, str(folder / "training.py"), str(folder / "runs" / "r")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        times = [int(line) for line in done.stdout.split() if line.isdecimal()]
        traced[heading] = passed(trace, times[0] if times else 0)
    return traced


@pytest.mark.parametrize("heading, count", [("One save in ten stops", 10), ("One restore in eight stops", 8)])
def test_a_real_run_passes_the_stops_of_the_page_in_their_order(
    traces: dict[str, list[Stop]], heading: str, count: int
) -> None:
    """The page names function, file and process of each stop."""
    wanted = stops(heading)
    assert len(wanted) == count
    assert missed(wanted, traces[heading]) is None


def test_stops_in_another_order_are_noticed(traces: dict[str, list[Stop]]) -> None:
    """Each pair of neighbours, exchanged, or one of another process, is missed."""
    wanted, calls = stops("One restore in eight stops"), traces["One restore in eight stops"]
    for index in range(len(wanted) - 1):
        assert missed([*wanted[:index], wanted[index + 1], wanted[index], *wanted[index + 2 :]], calls) is not None
    assert missed([wanted[0]._replace(process="agent")], calls) is not None


def test_the_hook_of_the_page_writes_a_line_for_each_checkpoint(tmp_path: Path) -> None:
    """In the background and in this process. Its file has at most 30 lines."""
    (source,) = re.findall(
        r"```python\n(\"\"\"A list of the checkpoints.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(source.splitlines()) <= 30
    names: dict[str, type] = {}
    exec(compile(source, "checkpoint_list.py", "exec"), names)
    for background in (True, False):
        lines = tmp_path / f"list-{background}"
        with relight.Checkpointer(
            tmp_path / f"run-{background}", model=torch.nn.Linear(2, 2), save=None, background=background
        ) as ckpt:
            ckpt._hooks.in_order.append(names["CheckpointList"](lines))
            ckpt.restore()
            saves = [ckpt.save(step) for step in range(3)]
        assert lines.read_text().splitlines() == [f"{save.step} {save.id} {save.bytes}" for save in saves]
