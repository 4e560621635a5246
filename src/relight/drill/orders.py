"""What the drill tells training processes to do to themselves: a file that each looks at behind every step."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec

from relight.decode import from_json_bytes


class DrillOrder(msgspec.Struct, frozen=True):
    """``what``: ``poison`` (that step's loss is no number, whenever it is done), ``lock``, ``crash`` (from that step on, once)."""

    what: str
    step: int
    rank: int = 0


class DrillOrders:
    """The file, from both ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = path.with_suffix(".done")

    def give(self, order: DrillOrder) -> None:
        """Have it done. Replaces what was told before."""
        self.clear()
        temporary = self._path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(order))
        temporary.replace(self._path)

    def clear(self) -> None:
        """Nothing is to be done."""
        self._path.unlink(missing_ok=True)
        self._mark.unlink(missing_ok=True)

    def read(self) -> DrillOrder | None:
        """What is to be done, if anything is."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return from_json_bytes(self._path.read_bytes(), DrillOrder)
        return None

    def do(self) -> bool:
        """Say that it is being done, and when. False if somebody has said so before."""
        try:
            with self._mark.open("x", encoding="ascii") as file:
                file.write(f"{time.monotonic()!r}\n")
        except FileExistsError:
            return False
        return True

    def done(self) -> float | None:
        """When it was done first, on the monotonic clock; None if it was not."""
        with contextlib.suppress(OSError, ValueError):
            return float(self._mark.read_text(encoding="ascii"))
        return None
