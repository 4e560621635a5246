"""The audit log: who did what to which object, with which outcome; and a check whether the log was changed or truncated."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from relight.audit.facts import ActionFacts, cut, without_secrets
from relight.errors import CheckpointNotFound, ConfigError, RelightError
from relight.format import Record
from relight.format.records import Body
from relight.format.topics import AUDIT, SUMMARY
from relight.log import Log, read_store
from relight.observe import emit
from relight.settings.environment import environment
from relight.store import ByteStore, open_bytes
from relight.store.urls import absolute

RUN = "audit"
WORDS_MAX = 500
RECORDS_KEPT = 4
"""Records kept in memory for each shown entry: its first record, its outcome, and room for log summaries."""
SPAN = 256
"""Records read at once, from the newest backwards."""
_ENTRY = frozenset({"who", "role", "token", "what", "on"})
_recording: ContextVar[bool] = ContextVar("_recording", default=False)
"""Whether this context is inside an action that already has an entry."""
_ANCHOR = re.compile(r"([0-9]{1,12})-([0-9a-f]{64})\Z")


class AuditEntry(NamedTuple):
    """An action of a user. ``how``: ``ok``, ``failed`` or ``refused``; empty until the outcome is recorded."""

    seq: int
    at: str
    who: str
    role: str
    what: str
    on: str
    how: str = ""
    says: str = ""
    """The outcome in words, or the reason of a failure."""
    token: str = ""
    """Id of the token that authenticated the caller; empty without one."""
    fields: tuple[tuple[str, str], ...] = ()
    """Run, checkpoint, values before and after, reason, and the arguments as ``given.NAME``: see ``ActionFacts``."""


class AuditLog:
    """The log of one audit store, created at the first entry. Several processes may append to it. Thread-safe."""

    def __init__(self, store: ByteStore) -> None:
        self.store = store
        self._log = Log(store, RUN)
        self._lock = threading.Lock()
        self._started = False
        self._newest: list[Record] = []
        """The newest records that ``newest`` has read, oldest first."""

    def begin(
        self, who: str, what: str, on: str, role: str = "", *, token: str = "", facts: ActionFacts | None = None
    ) -> int:
        """Record an action before it is executed, with all its fields. Return the number for ``end``. ``token`` is the token's id.

        Cost: one record. If this raises, the caller must not execute the action.
        """
        words = {"who": who, "role": role, "token": token, "what": what, "on": on}
        facts = ActionFacts() if facts is None else facts
        return self._write(
            {**{name: cut(without_secrets(value), WORDS_MAX) for name, value in words.items()}, **facts.record()}
        )

    def end(self, seq: int, how: str, says: str = "") -> None:
        """Record the outcome of action ``seq``. Cost: one record."""
        self._write({"begun": seq, "how": how, "says": cut(without_secrets(says), WORDS_MAX)})

    @contextmanager
    def doing(
        self, who: str, what: str, on: str, role: str = "", *, facts: ActionFacts | None = None
    ) -> Iterator[list[str]]:
        """Record an action and its outcome. The texts that the caller appends to the yielded list are recorded with the outcome.

        An exception is recorded as the outcome, and raised again.
        """
        seq = self.begin(who, what, on, role, facts=facts)
        details: list[str] = []
        try:
            yield details
        except BaseException as error:
            self.end(seq, "refused" if isinstance(error, ConfigError) else "failed", f"{type(error).__name__}: {error}")
            raise
        self.end(seq, "ok", ", ".join(details))

    def entries(self) -> list[AuditEntry]:
        """Return all entries, oldest first; empty if the log does not exist. Cost: reads every record into memory."""
        try:
            return entries_of(Log(self.store, RUN, whole=True).read().records)
        except CheckpointNotFound:
            return []

    def newest(self, count: int) -> list[AuditEntry]:
        """Return the newest ``count`` entries, oldest first.

        Cost: each record is read once. Memory: at most ``RECORDS_KEPT * count`` records.
        """
        with self._lock:
            try:
                view = self._log.read()
            except CheckpointNotFound:
                return []
            top = self._newest[-1].seq if self._newest else view.head
            if top > view.head:  # the log was truncated
                self._newest, top = [], view.head
            self._newest = [*self._newest, *self._log.span(top + 1, view.head)][-RECORDS_KEPT * count :]
            low = self._newest[0].seq if self._newest else view.head + 1
            while (
                low > 0
                and len(entries := entries_of(self._newest)) < count
                and len(self._newest) < RECORDS_KEPT * count
            ):
                first = max(0, low - SPAN)
                self._newest, low = [*self._log.span(first, low - 1), *self._newest], first
            entries = entries_of(self._newest)
            return entries[max(0, len(entries) - count) :]

    def _write(self, data: dict[str, str | int | float | bool | None]) -> int:
        with self._lock:
            if not self._started:
                self._log.start()
                self._started = True
            note: Body = AUDIT.note(data)
            written = self._log.append(lambda _: (note, 0))
            assert written is not None
            return written.seq


def entries_of(records: Iterable[Record]) -> list[AuditEntry]:
    """Return the entries in ``records``: each first record with its outcome."""
    entries: dict[int, AuditEntry] = {}
    for record, data in AUDIT.among(records):
        texts = {name: str(value) for name, value in data.items()}
        begun = data.get("begun")
        if begun is None:
            entries[record.seq] = AuditEntry(
                record.seq, record.time, texts.get("who", ""), texts.get("role", ""), texts.get("what", ""), texts.get("on", ""),
                token=texts.get("token", ""), fields=tuple((name, text) for name, text in texts.items() if name not in _ENTRY),
            )  # fmt: skip
        elif type(begun) is int and begun in entries:
            entries[begun] = entries[begun]._replace(how=texts.get("how", ""), says=texts.get("says", ""))
    return list(entries.values())


class AuditCheck(NamedTuple):
    """Result of a check: the number of entries, the faults, and the anchor to keep outside the audit store."""

    entries: int
    faults: list[str]
    anchor: str


def check(store: ByteStore, anchor: str = "") -> AuditCheck:
    """Read the whole log and check it. ``anchor`` is the ``NUMBER-HASH`` of an earlier check: it reveals a truncated or rewritten log."""
    read_store(store)
    view = Log(store, RUN, whole=True).read()
    faults = [f"record {fault.seq}: {fault.reason}" for fault in view.faults]
    faults += [
        f"record {record.seq}: a {record.kind}, which no audit log has"
        for record in view.records[1:]
        if not _is_ours(record.body)
    ]
    if anchor:
        parsed = _ANCHOR.match(anchor.strip())
        if parsed is None:
            raise ConfigError(
                f"{anchor.strip()[:80]!r} is not an anchor",
                hint="give NUMBER-HASH, as relight log --audit --check prints it",
            )
        seq = int(parsed[1])
        hashes = {record.seq: record.file_hash for record in view.records}
        if view.head >= 0:
            hashes[view.head] = view.head_hash
        if seq > view.head:
            faults.append(f"it ends at record {view.head}, and once had record {seq}: its end was truncated")
        elif hashes.get(seq, parsed[2]) != parsed[2]:
            faults.append(f"record {seq} differs from the anchored one: the log was rewritten")
    return AuditCheck(len(entries_of(view.records)), faults, f"{view.head}-{view.head_hash}")


def _is_ours(body: Body) -> bool:
    return AUDIT.read(body) is not None or SUMMARY.read(body) is not None


def book_from_settings() -> AuditLog | None:
    """Return the audit log that ``RELIGHT_AUDIT`` names; None if it is not set."""
    url = environment().audit
    return AuditLog(open_bytes(absolute(url))) if url else None


@contextmanager
def recorded(what: str, on: str, facts: ActionFacts | None = None) -> Iterator[list[str]]:
    """Record an action of a command or of the library if ``RELIGHT_AUDIT`` is set.

    Library calls inside a command belong to the command's entry. The texts that the caller appends to the yielded list are recorded
    with the outcome.
    """
    book = None if _recording.get() else book_from_settings()
    if book is None:
        yield []
        return
    with book.doing(user(), what, on, facts=facts) as details:
        within = _recording.set(True)
        try:
            yield details
        finally:
            _recording.reset(within)


@contextmanager
def record_if_possible(what: str, on: str, facts: ActionFacts | None = None) -> Iterator[list[str]]:
    """Record an action like ``recorded``. If the audit store cannot be written, emit a warning and execute the action anyway.

    For actions that must not depend on the audit store, such as a job's own restore.
    """
    details: list[str] = []
    try:
        book = None if _recording.get() else book_from_settings()
        seq = book.begin(user(), what, on, facts=facts) if book is not None else 0
    except (RelightError, OSError) as error:
        book, seq = None, 0
        _unwritten(what, on, error)
    how = "ok"
    try:
        yield details
    except BaseException as error:
        how = "failed"
        details[:] = [f"{type(error).__name__}: {error}"]
        raise
    finally:
        if book is not None:
            try:
                book.end(seq, how, ", ".join(details))
            except (RelightError, OSError) as error:
                _unwritten(what, on, error)


def user() -> str:
    """Return the name of the user that runs this process, by its real user id; ``uid N`` if the machine has no name for it.

    ``LOGNAME`` and other variables do not count: any user can set them to the name of another one.
    """
    with contextlib.suppress(KeyError):
        if (name := pwd.getpwuid(os.getuid()).pw_name).isprintable():
            return name[:64]
    return f"uid {os.getuid()}"


def _unwritten(what: str, on: str, error: Exception) -> None:
    emit("audit.failed", f"{what} of {on} is not in the audit log: {error}", error=str(error)[:WORDS_MAX])
