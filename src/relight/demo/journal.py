"""Journal of a training run: one JSON object per line, read by the driver while the file grows.

The file survives kills of its writer: it is opened for appending, and each line is written unbuffered. So it has every
finished step, and a step that was done twice appears twice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class DemoJournal:
    """Writer of a journal."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # killed in the middle of a line: end the line, readers skip it
                self._file.write(b"\n")

    def started(self, start: int, **facts: object) -> None:
        """Record that a process is ready to train from step ``start`` on."""
        self._write("started", start=start, **facts)

    def finished(self, step: int, loss: float, samples: str) -> None:
        """Record that ``step`` is done. ``samples``: hash of its samples. The loss is recorded to the last bit."""
        self._write("finished", step=step, loss=loss.hex(), samples=samples)

    def saved(self, step: int, stall_s: float, size: int) -> None:
        """Record that the state after ``step`` was saved in ``size`` bytes, and that the loop waited ``stall_s`` seconds."""
        self._write("saved", step=step, stall_s=round(stall_s, 6), bytes=size)

    def ended(self, digest: str) -> None:
        """Record that all steps are done. ``digest``: hash of parameters and optimizer."""
        self._write("ended", digest=digest)

    def _write(self, what: str, **fields: object) -> None:
        line = json.dumps({"what": what, **fields, "time": time.time()}) + "\n"
        self._file.write(line.encode())


class Tail:
    """Reader of a journal: returns each line once, after it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the entries added since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # a line cut short by a kill
            if isinstance(entry, dict):
                yield entry
