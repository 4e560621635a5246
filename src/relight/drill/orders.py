"""Orders from the drill to training processes to fail: a file that each process reads after every step."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec

from relight.decode import from_json_bytes


class DrillOrder(msgspec.Struct, frozen=True):
    """``what``: ``poison`` (the step's loss becomes NaN each time it runs), ``lock`` or ``crash`` (once, at that step or a later one)."""

    what: str
    step: int
    rank: int = 0


class DrillOrders:
    """The file of the order: the drill's side and the training processes' side."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = path.with_suffix(".done")

    def give(self, order: DrillOrder) -> None:
        """Write an order. Replaces the previous one."""
        self.clear()
        temporary = self._path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(order))
        temporary.replace(self._path)

    def clear(self) -> None:
        """Remove the order."""
        self._path.unlink(missing_ok=True)
        self._mark.unlink(missing_ok=True)

    def read(self) -> DrillOrder | None:
        """Return the order; None without one."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return from_json_bytes(self._path.read_bytes(), DrillOrder)
        return None

    def do(self) -> bool:
        """Record that the order is executed now. Return False if a process has recorded that before."""
        try:
            with self._mark.open("x", encoding="ascii") as file:
                file.write(f"{time.monotonic()!r}\n")
        except FileExistsError:
            return False
        return True

    def done(self) -> float | None:
        """Return when the order was first executed, on the monotonic clock in seconds; None if it was not."""
        with contextlib.suppress(OSError, ValueError):
            return float(self._mark.read_text(encoding="ascii"))
        return None
