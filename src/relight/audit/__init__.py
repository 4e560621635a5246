"""Who did what to which checkpoint: a log as a run's, in a store of its own, written before an action and after it.

Always holds: a record is written once, and names the one before it by hash; what cannot be written down is not done. May import: ``log``,
``store``, ``format``, ``observe``, ``errors``. Torch-free.
"""

from relight.audit.audit_log import AuditEntry, AuditLog, book_from_settings, check, record_if_possible, recorded

__all__ = ["AuditEntry", "AuditLog", "book_from_settings", "check", "record_if_possible", "recorded"]
