"""Runs to watch: a store with commits in its log, and events as processes would have kept them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relight.format.names import CheckpointDir
from relight.format.records import CommitBody, FenceBody
from relight.log import Log
from relight.log.identity import require_store
from relight.monitoring import RunSeen
from relight.store import open_bytes

RUN = "demo"


def make_run(
    where: Path,
    steps: int,
    *,
    run: str = RUN,
    began: int = 1_700_000_000,
    every: int = 60,
    suspect: tuple[int, ...] = (),
) -> str:
    """A run of so many checkpoints, in its log alone: a minute apart, a hundred steps each. The store's URL."""
    url = str(where)
    add_commits(url, range(steps), run=run, began=began, every=every, suspect=suspect)
    return url


def add_commits(
    url: str,
    numbers: range,
    *,
    run: str = RUN,
    began: int = 1_700_000_000,
    every: int = 60,
    suspect: tuple[int, ...] = (),
) -> None:
    """Append a commit with each of these numbers to the run's log."""
    times = iter([began - 1, began, *(began + number * every for number in numbers)])
    store = open_bytes(url)
    require_store(store)
    log = Log(store, run, now=lambda: stamp(next(times)))
    if log.start().head == 0 and not numbers.start:
        log.append(lambda view: (FenceBody(attempt="first", reason="fresh"), 1))
    else:
        next(times), next(times)
    for number in numbers:
        body = commit(number, suspect=number in suspect)
        log.append(lambda view, body=body: (body, 1))


def commit(number: int, *, suspect: bool = False) -> CommitBody:
    """Return the record of a commit."""
    step, id_ = 100 * (number + 1), id_of(number)
    return CommitBody(
        id=id_, step=step, dir=str(CheckpointDir(step, id_, 1)), root="0" * 64, root_bytes=1, parents=[], reason="every 100 steps", metrics={"loss": 1.0},
        logical_bytes=4000, stored_bytes=2000, new_bytes=1000, requires=[], suspect=suspect,
    )  # fmt: skip


def id_of(number: int) -> str:
    """Return the id of a commit."""
    return f"c{number:09d}"


def stamp(seconds: float) -> str:
    """Return a record's time."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def keep_events(
    directory: Path,
    store: str,
    *events: dict[str, Any],
    run: str = RUN,
    name: str = "0000000000001-1-000001",
    **head: Any,
) -> Path:
    """Append events to a file as a process keeps them, with a head if the file is new. An event without ``time`` has
    1.0."""
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f"{name}.jsonl"
    lines = []
    if not path.exists():
        process = {"pid": 1, "host": "here", "role": "trainer", "rank": 0, "since": 100.0, "monotonic": 0.0, **head}
        lines.append({"relight": "events", "version": 1, "store": store, "run": run, **process})
    lines += [{"time": 1.0, **event} for event in events]
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def values(seen: RunSeen) -> dict[str, float]:
    """The numbers of a run's metrics, those with labels by ``name{value,…}``."""
    return {
        sample.metric.name + ("{" + ",".join(sample.labels) + "}" if sample.labels else ""): sample.value
        for sample in seen.samples
    }
