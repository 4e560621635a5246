"""Followers of each run, as their events on this machine report them: kept in memory, within bounds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace

from relight.monitoring.files import FileEvent
from relight.serve.values import FollowerRow

ROLE = "follower"
EVENTS = ("follow.switched", "follow.skipped", "follow.ended")
RUNS_MAX, FOLLOWERS_MAX = 200, 100
"""Runs with followers, and followers of each run that are kept. Those without events for the longest time go first."""
_TEXT_MAX = 200


class FollowersSeen:
    """The last state of each follower that has not ended. Thread-safe."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, str], OrderedDict[tuple[str, int, int], FollowerRow]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, event: FileEvent) -> tuple[str, str] | None:
        """Keep a follower's event. Return its store and run; None if it is none. Its fields are unchecked: they come from a file."""
        if event.name not in EVENTS:
            return None
        fields, head = event.fields, event.head
        store, run = fields.get("store"), fields.get("run")
        key = (store, run) if isinstance(store, str) and isinstance(run, str) else (head.store, head.run)
        process = head.host, head.pid, head.rank
        with self._lock:
            rows = self._runs.setdefault(key, OrderedDict())
            self._runs.move_to_end(key)
            before = rows.pop(process, FollowerRow(*process))
            if event.name == "follow.switched":
                rows[process] = FollowerRow(
                    *process,
                    _number(fields.get("step")),
                    event.time_s,
                    _number(fields.get("lag_s")),
                    before.bytes + int(_number(fields.get("bytes")) or 0),
                    _text(fields.get("source")),
                )
            elif event.name == "follow.skipped":
                rows[process] = replace(before, error=_text(fields.get("why")))
            while len(rows) > FOLLOWERS_MAX:
                rows.popitem(last=False)
            while len(self._runs) > RUNS_MAX:
                self._runs.popitem(last=False)
        return key

    def rows(self, store: str, run: str) -> list[FollowerRow]:
        """Return a run's followers, by host, process and rank."""
        with self._lock:
            return sorted(self._runs.get((store, run), {}).values(), key=lambda row: (row.host, row.pid, row.rank))


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and -1e18 < value < 1e18 else None


def _text(value: object) -> str:
    return value[:_TEXT_MAX] if isinstance(value, str) else ""
