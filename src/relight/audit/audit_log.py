"""The audit log: entries with who, what, on which, and how it ended; and whether any of it was changed or cut off."""

from __future__ import annotations

import getpass
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from relight.audit.facts import ActionFacts, cut, without_secrets
from relight.errors import CheckpointNotFound, ConfigError, RelightError
from relight.format import Record
from relight.format.records import Body, NoteBody
from relight.log import Log, read_store
from relight.log.summary import TOPIC as SUMMARY_TOPIC
from relight.observe import emit
from relight.store import ByteStore, open_bytes
from relight.store.urls import absolute

SETTING = "RELIGHT_AUDIT"
RUN, TOPIC = "audit", "audit"
WORDS_MAX = 500
RECORDS_KEPT = 4
"""Records that are kept in memory for each entry that is shown: its beginning, its end, and room for summaries."""
SPAN = 256
"""Records that are read at once, from the newest backwards."""
_ENTRY = frozenset({"who", "role", "token", "what", "on"})
_telling: ContextVar[bool] = ContextVar("_telling", default=False)
"""Whether this thread is within something that is written down already."""
_ANCHOR = re.compile(r"([0-9]{1,12})-([0-9a-f]{64})\Z")


class AuditEntry(NamedTuple):
    """Something that somebody did, or began to do. ``how``: ``ok``, ``failed``, ``refused``; empty as long as its end is not written."""

    seq: int
    at: str
    who: str
    role: str
    what: str
    on: str
    how: str = ""
    says: str = ""
    """What came of it, or why not."""
    token: str = ""
    """The id of the token that let the asker in; empty without one."""
    fields: tuple[tuple[str, str], ...] = ()
    """Run, checkpoint, values before and after, reason, and the arguments as ``given.NAME``: see ``Facts``."""


class AuditLog:
    """The log of one audit store; made if there is none. Several processes may write to one. Thread-safe."""

    def __init__(self, store: ByteStore) -> None:
        self.store = store
        self._log = Log(store, RUN)
        self._lock = threading.Lock()
        self._started = False
        self._newest: list[Record] = []
        """The newest records, in order, as far as they were asked for."""

    def begin(self, who: str, what: str, on: str, role: str = "", *, token: str = "", facts: ActionFacts | None = None) -> int:
        """Record what is about to be done, with all its fields; return the number to end it by. ``token`` is the token's id.

        Cost: one record. If the store fails, the action must not be done.
        """
        words = {"who": who, "role": role, "token": token, "what": what, "on": on}
        facts = ActionFacts() if facts is None else facts
        return self._write({**{name: cut(without_secrets(value), WORDS_MAX) for name, value in words.items()}, **facts.record()})

    def end(self, seq: int, how: str, says: str = "") -> None:
        """How it ended. Cost: one record."""
        self._write({"begun": seq, "how": how, "says": cut(without_secrets(says), WORDS_MAX)})

    @contextmanager
    def doing(self, who: str, what: str, on: str, role: str = "", *, facts: ActionFacts | None = None) -> Iterator[list[str]]:
        """Around what is done. What it raises is its end, and goes on. What is put into the list that it gives is recorded at the end."""
        seq = self.begin(who, what, on, role, facts=facts)
        says: list[str] = []
        try:
            yield says
        except BaseException as error:
            self.end(seq, "refused" if isinstance(error, ConfigError) else "failed", f"{type(error).__name__}: {error}")
            raise
        self.end(seq, "ok", ", ".join(says))

    def entries(self) -> list[AuditEntry]:
        """All, oldest first; empty if nothing was ever written. Cost: every record is read, and is in memory meanwhile."""
        try:
            return entries_of(Log(self.store, RUN, whole=True).read().records)
        except CheckpointNotFound:
            return []

    def newest(self, count: int) -> list[AuditEntry]:
        """The newest ``count`` entries, oldest first. Cost: each record is read once; memory for the records of so many entries."""
        with self._lock:
            try:
                view = self._log.read()
            except CheckpointNotFound:
                return []
            top = self._newest[-1].seq if self._newest else view.head
            if top > view.head:  # the log was cut off
                self._newest, top = [], view.head
            self._newest = [*self._newest, *self._log.span(top + 1, view.head)][-RECORDS_KEPT * count :]
            low = self._newest[0].seq if self._newest else view.head + 1
            while low > 0 and len(found := entries_of(self._newest)) < count and len(self._newest) < RECORDS_KEPT * count:
                first = max(0, low - SPAN)
                self._newest, low = [*self._log.span(first, low - 1), *self._newest], first
            found = entries_of(self._newest)
            return found[max(0, len(found) - count) :]

    def _write(self, data: dict[str, str | int | float | bool | None]) -> int:
        with self._lock:
            if not self._started:
                self._log.start()
                self._started = True
            note: Body = NoteBody(topic=TOPIC, data=data)
            written = self._log.append(lambda _: (note, 0))
            assert written is not None
            return written.seq


def entries_of(records: Iterable[Record]) -> list[AuditEntry]:
    """What the records say: each beginning with its end."""
    found: dict[int, AuditEntry] = {}
    for record in records:
        body = record.body
        if not isinstance(body, NoteBody) or body.topic != TOPIC:
            continue
        said = {name: str(value) for name, value in body.data.items()}
        begun = body.data.get("begun")
        if begun is None:
            found[record.seq] = AuditEntry(
                record.seq, record.time, said.get("who", ""), said.get("role", ""), said.get("what", ""), said.get("on", ""),
                token=said.get("token", ""), fields=tuple((name, text) for name, text in said.items() if name not in _ENTRY),
            )  # fmt: skip
        elif type(begun) is int and begun in found:
            found[begun] = found[begun]._replace(how=said.get("how", ""), says=said.get("says", ""))
    return list(found.values())


class AuditCheck(NamedTuple):
    """What a check has found: how many entries, what is wrong, and the anchor to keep elsewhere."""

    entries: int
    faults: list[str]
    anchor: str


def check(store: ByteStore, anchor: str = "") -> AuditCheck:
    """Read all of it again. ``anchor``, ``NUMBER-HASH`` as a check before gave it, tells a log that was cut off, or written anew."""
    read_store(store)
    view = Log(store, RUN, whole=True).read()
    faults = [f"record {fault.seq}: {fault.reason}" for fault in view.faults]
    faults += [f"record {record.seq}: a {record.kind}, which no audit log has" for record in view.records[1:] if not _is_ours(record.body)]
    if anchor:
        parsed = _ANCHOR.match(anchor.strip())
        if parsed is None:
            raise ConfigError(f"{anchor.strip()[:80]!r} is no anchor", hint="it is NUMBER-HASH, as relight audit verify prints it")
        seq = int(parsed[1])
        hashes = {record.seq: record.file_hash for record in view.records}
        if view.head >= 0:
            hashes[view.head] = view.head_hash
        if seq > view.head:
            faults.append(f"it ends at record {view.head}, and went on to {seq} once: its end was cut off")
        elif hashes.get(seq, parsed[2]) != parsed[2]:
            faults.append(f"record {seq} is not the one that was there once: the log was written anew")
    return AuditCheck(len(entries_of(view.records)), faults, f"{view.head}-{view.head_hash}")


def _is_ours(body: Body) -> bool:
    return isinstance(body, NoteBody) and body.topic in (TOPIC, SUMMARY_TOPIC)


def book_from_settings() -> AuditLog | None:
    """The one that ``RELIGHT_AUDIT`` names; None if it names none."""
    url = os.environ.get(SETTING, "")
    return AuditLog(open_bytes(absolute(url))) if url else None


@contextmanager
def recorded(what: str, on: str, facts: ActionFacts | None = None) -> Iterator[list[str]]:
    """Around what a command or the library does: written down if ``RELIGHT_AUDIT`` is set; else nothing more.

    What a command has the library do is one entry, the command's. What is put into the list that it gives is recorded at the end.
    """
    book = None if _telling.get() else book_from_settings()
    if book is None:
        yield []
        return
    with book.doing(user(), what, on, facts=facts) as says:
        within = _telling.set(True)
        try:
            yield says
        finally:
            _telling.reset(within)


@contextmanager
def record_if_possible(what: str, on: str, facts: ActionFacts | None = None) -> Iterator[list[str]]:
    """As ``told``, around what has to be done even if the audit store cannot be written to, such as a job's own restore: a warning says so.

    What is put into the list that it gives stands with the end."""
    says: list[str] = []
    try:
        book = None if _telling.get() else book_from_settings()
        seq = book.begin(user(), what, on, facts=facts) if book is not None else 0
    except (RelightError, OSError) as error:
        book, seq = None, 0
        _unwritten(what, on, error)
    how = "ok"
    try:
        yield says
    except BaseException as error:
        how = "failed"
        says[:] = [f"{type(error).__name__}: {error}"]
        raise
    finally:
        if book is not None:
            try:
                book.end(seq, how, ", ".join(says))
            except (RelightError, OSError) as error:
                _unwritten(what, on, error)


def user() -> str:
    """Who runs this process, as far as the machine knows."""
    try:
        return getpass.getuser()[:64]
    except (OSError, KeyError, ImportError):
        return ""


def _unwritten(what: str, on: str, error: Exception) -> None:
    emit("audit.failed", f"{what} of {on} is not in the audit log: {error}", error=str(error)[:WORDS_MAX])
