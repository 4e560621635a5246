"""A long audit log: its newest entries are read backwards, each record once."""

from __future__ import annotations

from relight.audit.audit_log import AuditLog, check
from relight.store import MemoryStore


def test_the_newest_entries_are_those_of_the_whole_book() -> None:
    """A new reader and a continuing reader return the newest entries of the whole log, for any count."""
    store = MemoryStore()
    writer, reader = AuditLog(store), AuditLog(store)
    for number in range(90):
        writer.end(writer.begin("me", f"act {number}", "runs/demo"), "ok", str(number))
    for _ in range(2):
        whole = writer.entries()
        for count in (1, 7, 60, len(whole), 10_000):
            assert AuditLog(store).newest(count) == whole[-count:], count
        assert reader.newest(40) == whole[-40:]
        writer.begin("me", "one more", "runs/demo")
    assert not check(store).faults and check(store).entries == 92
