"""Makes stores of many runs in seconds, with the code that saves: real records, roots, parts and tiny packs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.format.forge import load, request, write

from relight.commit import Attempt
from relight.format.names import STORE_FILE
from relight.log import require_store
from relight.store import open_bytes
from relight.supervise.goodput import Account
from relight.supervise.incidents import Incident, IncidentLog, RecoveryRecord

MINUTES = 10
"""Minutes between two checkpoints. The newest of each run is of now."""


def make_many_runs(root: Path, runs: int, checkpoints: int, *, incidents: int = 3) -> Path:
    """Make a store at ``root``. Each run is saved in memory first, because that is fast, and then written to disk."""
    require_store(open_bytes(str(root)))
    identity = {STORE_FILE: (root / STORE_FILE).read_bytes()}
    for number in range(runs):
        name = f"run-{number:03d}"
        store = load(identity)
        clock = _Clock(datetime.now(UTC) - timedelta(minutes=MINUTES * checkpoints))
        attempt = Attempt.begin(store, name, now=clock)
        parents: list[str] = []
        for count in range(checkpoints):
            clock.tick()
            parents = [attempt.save(request((count + 1) * 100, parents=parents)).id]
        book = IncidentLog(root)
        book.at(store, name)
        for count in range(incidents):
            incident = _incident(number * incidents + count, clock())
            book.write(incident)
            book.write(
                RecoveryRecord(
                    incident.id, restored=incident.durable, steps_lost=7, seconds={"noticed": 0.2, "all": 4.5}
                )
            )
        book.keep(
            Account(
                name,
                clock(),
                1000.0,
                {"training": 940.0, "starting": 20.0},
                {"killed": {"again": 40.0}},
                {"killed": incidents},
                10_000,
                21,
            )
        )
        write({key: data for key, data in store._files.items() if key != STORE_FILE}, root)  # noqa: SLF001
    return root


class _Clock:
    """A clock that advances by ``MINUTES`` at each tick."""

    def __init__(self, at: datetime) -> None:
        self._at = at

    def __call__(self) -> str:
        return self._at.strftime("%Y-%m-%dT%H:%M:%SZ")

    def tick(self) -> None:
        """Advance to the next checkpoint's time."""
        self._at += timedelta(minutes=MINUTES)


def _incident(number: int, at: str) -> Incident:
    return Incident(
        id=f"{1_800_000_000_000 + number:013d}-{number:06x}", at=at, host="node-1", job="job", life=1, kind="killed", why="rank 0 was ended by SIGKILL", rank=0,
        step=700 + number, durable=600 + number, words="", action="resume", reason="the newest checkpoint is good", delay_s=0.0, settings={},
        clues=[{"kind": "signal", "weight": 50, "what": "SIGKILL"}], workers=[], stacks={"0": "File train.py, line 40"},
    )  # fmt: skip
