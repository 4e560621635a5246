"""Record drill reports with a run: a small file each, in ``<run>/drills/``. Saves and restores do not depend on them."""

from __future__ import annotations

import contextlib

import msgspec

from relight.decode import from_json_bytes
from relight.drill.report import DrillReport
from relight.errors import RelightError
from relight.store import ByteStore

DIRECTORY = "drills"
_BYTES_MAX = 1 << 20


def remember(store: ByteStore, run: str, report: DrillReport) -> None:
    """Write a report to the run. Raises the store's errors."""
    store.put_once(f"{run}/{DIRECTORY}/{report.id}.json", msgspec.json.format(msgspec.json.encode(report), indent=1))


def drills_of(store: ByteStore, run: str) -> list[DrillReport]:
    """Return a run's drill reports, oldest first, without unreadable ones."""
    reports = []
    for entry in sorted(store.list(f"{run}/{DIRECTORY}"), key=lambda entry: entry.name):
        if not entry.is_dir and entry.name.endswith(".json"):
            with contextlib.suppress(RelightError, msgspec.MsgspecError):
                reports.append(from_json_bytes(store.get(f"{run}/{DIRECTORY}/{entry.name}", _BYTES_MAX), DrillReport))
    return reports
