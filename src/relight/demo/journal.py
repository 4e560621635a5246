"""What a training run writes down as it goes, one JSON object a line, and how the other side reads it while it grows.

The file outlives the process that writes it, as often as that is killed: it is opened to append, and each line leaves the
process at once. So it tells of every step that was ever finished, and a step that was done twice is in it twice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class DemoJournal:
    """The writing side."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # killed in the middle of a line: end it, readers pass over it
                self._file.write(b"\n")

    def started(self, start: int, **facts: object) -> None:
        """A process is ready to train, from step ``start`` on."""
        self._write("started", start=start, **facts)

    def finished(self, step: int, loss: float, samples: str) -> None:
        """Step ``step`` is done; ``samples`` stands for the samples it saw. The loss is kept to the last bit."""
        self._write("finished", step=step, loss=loss.hex(), samples=samples)

    def saved(self, step: int, stall_s: float, size: int) -> None:
        """The state after ``step`` was saved, in ``size`` bytes; the loop stood still for ``stall_s``."""
        self._write("saved", step=step, stall_s=round(stall_s, 6), bytes=size)

    def ended(self, digest: str) -> None:
        """All steps are done; ``digest`` stands for parameters and optimizer."""
        self._write("ended", digest=digest)

    def _write(self, what: str, **fields: object) -> None:
        line = json.dumps({"what": what, **fields, "time": time.time()}) + "\n"
        self._file.write(line.encode())


class Tail:
    """The reading side: gives each line once, as soon as it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """What came since the last time."""
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
                continue  # the line a kill cut short
            if isinstance(entry, dict):
                yield entry
