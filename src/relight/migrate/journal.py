"""What a migration has done, in the store it goes to: sessions, one after the other, and in each what came of every task.

``migrations/<which>/<session>/begin.json``, and ``<number>.json`` for each task: created once, never changed. Who comes later begins a
session of its own; who finds that there is a later one stops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relight.errors import CheckpointNotFound, CorruptCheckpoint, LeaseHeld
from relight.format import hexdigest
from relight.format.strict import from_json, to_json
from relight.store import ByteStore

HOME = "migrations"
BEGIN = "begin.json"
RECORD_BYTES_MAX = 1 << 20


class MigrationJournal:
    """The sessions of the migration of one place to one store."""

    def __init__(self, store: ByteStore, old: str) -> None:
        self._store = store
        self.prefix = f"{HOME}/{hexdigest(old.encode())[:16]}"

    def sessions(self) -> list[int]:
        """Their numbers, in order."""
        return sorted(int(entry.name) for entry in self._store.list(self.prefix) if entry.is_dir and entry.name.isdigit())

    def begin(self, facts: dict[str, Any]) -> int:
        """A new session, later than all others; its number."""
        data = to_json(facts)
        number = max(self.sessions(), default=-1) + 1
        while not self._store.put_once(f"{self.prefix}/{number:06d}/{BEGIN}", data):
            number += 1
        return number

    def check_newest(self, session: int) -> None:
        """``LeaseHeld`` if a later one has begun."""
        if max(self.sessions(), default=session) > session:
            raise LeaseHeld("this migration was begun again by another process", where=self.prefix, hint="that one goes on with it")

    def write(self, session: int, number: int, facts: dict[str, Any]) -> None:
        """What came of a task. Said once; a second time counts for nothing."""
        self._store.put_once(f"{self.prefix}/{session:06d}/{number}.json", to_json(facts))

    def read(self, session: int, number: int) -> dict[str, Any] | None:
        """The same again, if it is known yet."""
        try:
            return self._get(f"{self.prefix}/{session:06d}/{number}.json")
        except CheckpointNotFound:
            return None

    def begun(self, session: int) -> dict[str, Any]:
        """What a session is about; nothing if it was killed before it could say."""
        try:
            return self._get(f"{self.prefix}/{session:06d}/{BEGIN}")
        except CheckpointNotFound:
            return {}

    def records(self) -> Iterator[dict[str, Any]]:
        """All that was done, in order of sessions, and tasks. What cannot be read counts for nothing: its task is done again, and then is
        found to be done."""
        for session in self.sessions():
            names = {entry.name for entry in self._store.list(f"{self.prefix}/{session:06d}") if not entry.is_dir}
            for number in sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()):
                try:
                    found = self.read(session, number)
                except (CorruptCheckpoint, ValueError):
                    continue
                if found is not None:
                    yield found

    def _get(self, key: str) -> dict[str, Any]:
        found = from_json(self._store.get(key, RECORD_BYTES_MAX), key, RECORD_BYTES_MAX)
        if not isinstance(found, dict):
            raise CorruptCheckpoint("not a record of a migration", where=key)
        return found


class MigrationState:
    """What a journal amounts to: what was brought, by source, and which of that was checked."""

    def __init__(self, journal: MigrationJournal) -> None:
        self.brought: dict[str, dict[str, Any]] = {}
        self.checked: set[str] = set()
        self.runs: set[str] = set()
        """Made by this migration."""
        for record in journal.records():
            kind = record.get("kind")
            if kind == "bring" and record.get("ok"):
                self.brought[str(record["source"])] = record
            elif kind == "check" and record.get("ok"):
                self.checked.add(str(record["id"]))
            elif kind == "back":
                gone = set(record.get("ids", []))
                self.brought = {source: one for source, one in self.brought.items() if one["id"] not in gone}
                self.checked -= gone
        for session in journal.sessions():
            runs = journal.begun(session).get("runs")
            self.runs.update(map(str, runs if isinstance(runs, list) else ()))
