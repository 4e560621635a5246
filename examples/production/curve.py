"""A tracker that writes a line for each value to a file. With it, the example needs no tracker's package."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from relight.integrations.trackers import StepRow, Tracker


class Curve(Tracker):
    """Writes ``STEP NAME VALUE``. One process at a time has the file: the next one waits until the first has ended."""

    name = "curve"

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: IO[str] | None = None
        self._last: dict[str, int] = {}
        super().__init__()

    def open(self, run: str, key: str, first: int) -> tuple[str, str]:
        """Continue the file after its last whole line: a kill may cut a line."""
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # if another job still writes, rows wait
        except BlockingIOError:
            file.close()
            raise
        file.seek(0)
        text = file.read()
        whole = text[: text.rfind("\n") + 1]
        file.truncate(len(whole))
        self._file = file
        self._last = {name: step for step, name, _ in lines_of(whole)}
        return self._path.stem, str(self._path)

    def has(self, name: str, step: int) -> bool:
        """Return whether the file had the value when it was opened."""
        return step <= self._last.get(name, -1)

    def write(self, rows: Sequence[StepRow]) -> None:
        """Append the rows."""
        assert self._file is not None
        self._file.writelines(f"{row.step} {name} {value!r}\n" for row in rows for name, value in row.values.items())
        self._file.flush()

    def finish(self) -> None:
        """Let the next process have the file."""
        if self._file is not None:
            self._file.close()


def lines_of(text: str) -> list[tuple[int, str, float]]:
    """Return step, name and value of each line."""
    return [(int(step), name, float(value)) for step, name, value in map(str.split, text.splitlines())]
