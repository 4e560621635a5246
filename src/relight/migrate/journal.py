"""Journal of a migration, in the destination store: sessions, and in each the result of every task.

``migrations/<which>/<session>/begin.json``, and ``<number>.json`` for each task: created once, never changed. Each process begins a new
session, and stops when it finds a later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, LeaseHeld
from relight.format import hexdigest
from relight.format.strict import from_json, to_json
from relight.settings.utf8 import escaped, is_utf8
from relight.store import ByteStore

HOME = "migrations"
BEGIN = "begin.json"
RECORD_BYTES_MAX = 1 << 20


class MigrationJournal:
    """Sessions of the migration from one place to one store."""

    def __init__(self, store: ByteStore, old: str) -> None:
        if not is_utf8(old):
            raise ConfigError(
                "this path is not UTF-8, and the journal records it", where=escaped(old), hint="rename it"
            )
        self._store = store
        self.prefix = f"{HOME}/{hexdigest(old.encode())[:16]}"

    def sessions(self) -> list[int]:
        """Return the sessions' numbers, in order."""
        return sorted(
            int(entry.name) for entry in self._store.list(self.prefix) if entry.is_dir and entry.name.isdecimal()
        )

    def begin(self, facts: dict[str, Any]) -> int:
        """Begin a new session, later than all others. Return its number."""
        data = to_json(facts)
        number = max(self.sessions(), default=-1) + 1
        while not self._store.put_once(f"{self.prefix}/{number:06d}/{BEGIN}", data):
            number += 1
        return number

    def check_newest(self, session: int) -> None:
        """Raise ``LeaseHeld`` if a later session has begun."""
        if max(self.sessions(), default=session) > session:
            raise LeaseHeld(
                "this migration was begun again by another process",
                where=self.prefix,
                hint="the other process continues it",
            )

    def write(self, session: int, number: int, facts: dict[str, Any]) -> None:
        """Write a task's result. Only the first call for a task has an effect."""
        self._store.put_once(f"{self.prefix}/{session:06d}/{number}.json", to_json(facts))

    def read(self, session: int, number: int) -> dict[str, Any] | None:
        """Return a task's result; None if it is not written yet."""
        try:
            return self._get(f"{self.prefix}/{session:06d}/{number}.json")
        except CheckpointNotFound:
            return None

    def begun(self, session: int) -> dict[str, Any]:
        """Return a session's facts; empty if it was killed before it wrote them."""
        try:
            return self._get(f"{self.prefix}/{session:06d}/{BEGIN}")
        except CheckpointNotFound:
            return {}

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield all results, by session and task. Unreadable ones are skipped: their task is repeated, and then found to be done."""
        for session in self.sessions():
            names = {entry.name for entry in self._store.list(f"{self.prefix}/{session:06d}") if not entry.is_dir}
            for number in sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()):
                try:
                    record = self.read(session, number)
                except (CorruptCheckpoint, ValueError):
                    continue
                if record is not None:
                    yield record

    def _get(self, key: str) -> dict[str, Any]:
        record = from_json(self._store.get(key, RECORD_BYTES_MAX), key, RECORD_BYTES_MAX)
        if not isinstance(record, dict):
            raise CorruptCheckpoint("not a record of a migration", where=key)
        return record


class MigrationState:
    """State from a journal: the imported checkpoints, by source, and the checked ids."""

    def __init__(self, journal: MigrationJournal) -> None:
        self.brought: dict[str, dict[str, Any]] = {}
        self.checked: set[str] = set()
        self.runs: set[str] = set()
        """Runs made by this migration."""
        for record in journal.records():
            kind = record.get("kind")
            if kind == "bring" and record.get("ok"):
                self.brought[str(record["source"])] = record
            elif kind == "check" and record.get("ok"):
                self.checked.add(str(record["id"]))
            elif kind == "back":
                gone = set(record.get("ids", []))
                self.brought = {source: entry for source, entry in self.brought.items() if entry["id"] not in gone}
                self.checked -= gone
        for session in journal.sessions():
            runs = journal.begun(session).get("runs")
            self.runs.update(map(str, runs if isinstance(runs, list) else ()))
