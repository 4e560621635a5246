"""Audit log: who did what to which checkpoint. A hash-chained log like a run's, in its own store.

Invariants: a record is written before each action, and one with the outcome after it. Records never change, and each contains the
hash of the previous one. If the first record cannot be written, the action is not executed; only ``record_if_possible`` executes it
anyway. May import: ``log``, ``store``, ``format``, ``observe``, ``errors``. Torch-free.
"""

from relight.audit.audit_log import AuditEntry, AuditLog, book_from_settings, check, record_if_possible, recorded

__all__ = ["AuditEntry", "AuditLog", "book_from_settings", "check", "record_if_possible", "recorded"]
