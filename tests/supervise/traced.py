"""``job.py``, and a line for each step that ends: ``JOB_TRACE/HOST`` gets host, rank, ranks, step, epoch and the monotonic time;
``JOB_TRACE/saves-HOST`` what each save took, from when it was asked for until it was durable."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import relight
from relight.checkpointer.observer import observers
from relight.observe import Event, subscribe


class Trace:
    """An ``Observer``. All ranks that train together have one epoch."""

    def __init__(self) -> None:
        self._file = (Path(os.environ["JOB_TRACE"]) / socket.gethostname()).open("a", buffering=1)
        self._saves = (Path(os.environ["JOB_TRACE"]) / f"saves-{socket.gethostname()}").open("a", buffering=1)
        self._asked: dict[int, float] = {}
        self._who = [socket.gethostname(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])]

    def record_save(self, event: Event) -> None:
        """Record when a save was requested, and its time until durable."""
        if event.name == "save.requested":
            self._asked[event.fields["step"]] = time.monotonic()
        elif event.name == "save.durable":
            self._saves.write(f"{time.monotonic() - self._asked[event.fields['step']]}\n")

    def place(self, url: str, run: str) -> tuple[str, str]:
        """Return the place unchanged."""
        return url, run

    def on_start(self, ckpt: relight.Checkpointer) -> None:
        """Nothing yet."""

    def on_restore(self, ckpt: relight.Checkpointer, step: int, checkpoint_id: str | None) -> None:
        """Nothing yet."""

    def on_step(self, ckpt: relight.Checkpointer, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """One has ended."""
        assert ckpt._session.attempt is not None
        self._file.write(json.dumps([*self._who, step, ckpt._session.attempt.epoch, time.monotonic()]) + "\n")

    def on_end(self, ckpt: relight.Checkpointer) -> None:
        """The script may do anything now."""


if __name__ == "__main__":
    trace = Trace()
    observers.append(trace)
    subscribe(trace.record_save)
    sys.argv[0] = str(Path(__file__).with_name("job.py"))
    runpy.run_path(sys.argv[0], run_name="__main__")
