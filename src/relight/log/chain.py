"""Reading and appending records: numbering, chaining, what a damaged one means."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice

import msgspec

from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, RunRemoved, StoreUnavailable, UnsafeContent, WrongKey
from relight.format import Record, decode_record, encode_record, hexdigest
from relight.format.digest import ZERO_HEX
from relight.format.names import LOG_DIR, check_run_name, parse_record_file, record_file
from relight.format.records import Body, RunBody
from relight.format.strict import SEALED_BYTES_MAX
from relight.log import anchoring
from relight.log.identity import checkpoint_dirs, now_text, read_store, require_store
from relight.log.nested import refuse_store_as_run
from relight.store import ByteStore
from relight.store.again import decoded, rest
from relight.store.anchored import anchor_of
from relight.store.base import READS_AT_ONCE, Uncertain
from relight.world.new_threads import ThreadPool

RECORDS_MAX = 2_000_000
NAMES_MAX = 1000
"""Runs among which the one that a misspelt name means is looked for."""
GAP_MAX = 1000
APPEND_TRIES = 1000
SHOWN_PAUSE_S = 0.02
SHOWN_PAUSE_MAX_S = 60.0
"""Two minutes in all: longer than such a cache lasts as a rule."""
BELIEVED = 6
"""How many times the same bytes must have come until a record counts as damaged where it lies: whoever chains his own to it makes it so."""
MISSING_PAUSES_S = (0.05, 0.2)
"""Seconds between looks at a log that seems to be missing, before it counts as missing."""
NAMES_SHOWN = 8
"""Directories that an error lists."""
MANY = 8
"""From so many on, records are read side by side from a store that is far away."""
TORN_MAX = 64
"""How far below the highest number one that a listing lacks is asked for by name."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that counts for nothing, and why."""

    seq: int
    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class View:
    """What the log says now. ``head`` is the highest number there, −1 if none; ``head_hash`` what the next record chains to."""

    run: str
    store_id: str
    run_id: str
    records: tuple[Record, ...]
    faults: tuple[Fault, ...]
    head: int
    head_hash: str


@dataclass(slots=True)
class _Slot:
    """One number: the hash of what lies there, and the record or what is wrong with it."""

    file_hash: str | None
    record: Record | None
    reason: str = ""
    unreadable: bool = False
    """The store failed to read it just now: it may be a good record, so nothing may be chained behind it."""


class Log:
    """One run's log. Not thread-safe. Records are immutable, so each is read once; damage that comes later is ``verify``'s to find."""

    def __init__(self, store: ByteStore, run: str, *, now: Callable[[], str] = now_text) -> None:
        self._store, self._run, self._now = store, check_run_name(run), now
        self._anchor = anchor_of(store)
        self._writer = f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"
        self._slots: dict[int, _Slot] = {}
        self._unread: set[int] = set()
        self._store_id = ""
        self._run_id = ""
        self._settled = False
        self._own_head = self._newest = -1
        self._looked = False
        self._judged: View | None = None
        """The last view, as long as nothing was read or written since."""
        self._checked: View | None = None
        """The last view that was compared with the anchor."""
        self._absent: set[int] = set()
        """Numbers below the head that were asked for by name, and are missing."""
        self._texts: dict[str, str] = {}

    @property
    def run(self) -> str:
        """The run's name."""
        return self._run

    def read(self) -> View:
        """The log as it is now. ``CheckpointNotFound`` if there is no such run."""
        view = self._view()
        if view.head < 0:
            view = self._view_or_refuse()
        if view.head < 0:
            close = get_close_matches(self._run, islice((entry.name for entry in self._store.list("") if entry.is_dir), NAMES_MAX), 1)
            hint = f"did you mean {close[0]}?" if close else "relight ls STORE shows its runs"
            raise CheckpointNotFound(f"no run {self._run!r} here", where=self._store.url, hint=hint)
        return view

    def start(self) -> View:
        """The log as it is now, with record 0 made if there is none."""
        if self._anchor is not None:
            self._view()  # first, as a store that was emptied must not be made again under another id
        try:
            self._store_id = require_store(self._store).id
        except (CorruptCheckpoint, UnsafeContent):
            self._store_id = ""  # the records know: a damaged relight.json must not stop a run
        self._judged = None
        view = self._view()
        if view.head >= 0 and not view.records and any(slot.record for slot in self._slots.values()):
            raise CorruptCheckpoint(
                "none of this run's records belongs to this store and run",
                where=f"{self._store.url}/{self._run}",
                hint="relight.json was replaced, or the run was copied here from another store",
            )
        if view.head < 0:
            view = self._view_or_refuse()
        if view.head < 0:
            if not self._store_id:
                raise CorruptCheckpoint(
                    "relight.json is damaged, and this run has no log to tell which store it is",
                    where=self._store.url,
                    hint="restore relight.json from a copy, or choose another directory",
                )
            refuse_store_as_run(self._store, self._run)
            self._append(view, RunBody(name=self._run), epoch=0, run_id=secrets.token_hex(16))
            view = self._view()
        return view

    def _view_or_refuse(self) -> View:
        """Look again at a log that seemed empty. ``CorruptCheckpoint`` if it is empty, and there are checkpoint directories: no attempt
        makes one before the log's first record, so the log was lost. An attempt that began from scratch there would hide them.
        """
        for pause_s in (*MISSING_PAUSES_S, None):
            names = checkpoint_dirs(self._store, self._run)
            self._looked, self._judged = False, None
            view = self._view()  # after the listing: what is listed was preceded by its log
            if view.head >= 0 or not names:
                return view
            if pause_s is not None:  # a network file system remembers for a while what it did not find
                rest(pause_s)
        where = f"{self._store.url.rstrip('/')}/{self._run}"
        raise CorruptCheckpoint(
            f"this run's log is missing, and {len(names)} checkpoint directories are there",
            where=where,
            details=[*names[:NAMES_SHOWN], *(["…"] if len(names) > NAMES_SHOWN else [])],
            hint=f"copy the directory {LOG_DIR}/ back from where the run came from; or rebuild the log: relight recover {where}",
        )

    def begin_rebuilt(self, run_id: str) -> View:
        """Make record 0 of a run whose log was lost, for the run id that its checkpoints have. Return the log with it.

        ``CorruptCheckpoint`` if there is a log after all, or the store has no id.
        """
        self._store_id = require_store(self._store).id
        self._judged = None
        view = self._view()
        if view.head >= 0 or self._append(view, RunBody(name=self._run), epoch=0, run_id=run_id) is None:
            raise CorruptCheckpoint("the log that was missing is there again", where=f"{self._store.url.rstrip('/')}/{self._run}")
        return self._view()

    def append(self, decide: Callable[[View], tuple[Body, int] | None]) -> Record | None:
        """Append what ``decide(view)`` gives, ``(body, epoch)``; None to append nothing. The single commit point.

        When somebody else takes the number first, ``decide`` is asked again with the new view. ``Uncertain`` if the store cannot tell
        whether the record exists: nothing that it refers to may then be deleted.
        """
        taken, pause = -1, SHOWN_PAUSE_S
        for _ in range(APPEND_TRIES):
            view = self._view()
            if view.head < taken:  # a network file system remembers for a while what it did not find
                if pause > SHOWN_PAUSE_MAX_S:
                    raise StoreUnavailable("this number is taken, and what lies there does not show", where=self._key(taken))
                rest(pause)
                pause *= 2
                continue
            wanted = decide(view)
            if wanted is None:
                return None
            if view.head < 0:
                where, hint = f"{self._store.url.rstrip('/')}/{self._run}", "move it back; or stop, and start again where it is now"
                hint += "; or begin a new log there: on_failure=relight.failures(begin_again=True)"
                raise RunRemoved("the run's log is gone: its directory was moved or deleted", where=where, hint=hint)
            record = self._append(view, *wanted, run_id=view.run_id)
            if record is not None:
                return record
            taken = self._newest = max(self._newest, view.head + 1)
        raise StoreUnavailable(f"lost the race for the next record {APPEND_TRIES} times", where=f"{self._run}/{LOG_DIR}")

    def _append(self, view: View, body: Body, epoch: int, run_id: str) -> Record | None:
        unread = next((seq for seq in self._unread if seq <= view.head), None)
        if unread is not None:  # it may be a FENCE, or the very COMMIT that is to be appended
            reason = self._slots[unread].reason
            raise StoreUnavailable(f"a record of the log cannot be read just now: {reason}", where=self._key(unread))
        self._settle(view)
        record = Record(
            seq=view.head + 1,
            prev=view.head_hash,
            store=view.store_id,
            run=run_id,
            epoch=epoch,
            time=self._now(),
            writer=self._writer,
            body=body,
        )
        data = encode_record(record)
        if len(data) > SEALED_BYTES_MAX:
            raise UnsafeContent(f"a record of {len(data)} bytes", hint="fewer or smaller metrics")
        decode_record(data, record.seq, "the record about to be written")  # what no reader would take is never written
        key = self._key(record.seq)
        if not self._store.put_once(key, data):
            if not self._is_ours(key, data):
                return None
            try:
                self._store.settle(f"{self._run}/{LOG_DIR}")
            except StoreUnavailable as error:
                raise Uncertain(f"created, but its name may not be durable: {error.what}", where=key) from error
        self._own_head = self._newest = record.seq
        written = decode_record(data, record.seq, key)
        self._put(record.seq, _Slot(written.file_hash, self._shared(written)))
        if self._anchor is not None:
            anchoring.wrote(self._anchor, view, written)
        return written

    def _is_ours(self, key: str, data: bytes) -> bool:
        """Whether what lies under a taken number is what we just wrote: a reply may have been lost, and the creation tried again.

        What does not show is not: the store has said that somebody else was first, and is waited for.
        """
        try:
            return self._store.get(key, SEALED_BYTES_MAX) == data
        except CheckpointNotFound:
            return False
        except StoreUnavailable as error:
            raise Uncertain(f"cannot tell whose record that is: {error.what}", where=key) from error

    def _settle(self, view: View) -> None:
        """Before the first append, and whenever the head is another writer's, make durable what we are about to stand on.

        Whoever made the directories or the head record may have been killed between making and fsyncing them.
        """
        if not self._store.settles:
            return
        if not self._settled:
            there = [prefix for prefix in ("", self._run) if any(True for _ in self._store.list(prefix))]
            for prefix in there:
                self._store.settle(prefix)
            self._settled = len(there) == 2  # else somebody may be making them this very moment: look again at the next append
        if view.head >= 0 and view.head != self._own_head:
            self._store.settle(f"{self._run}/{LOG_DIR}")

    def _key(self, seq: int) -> str:
        return f"{self._run}/{LOG_DIR}/{record_file(seq)}"

    def _view(self) -> View:
        """The log as it is now. ``CorruptCheckpoint`` if the store's anchor remembers what the log lacks."""
        if self._anchor is None:
            return self._look()
        memory = anchoring.recall(self._anchor, self._run)  # before the listing, which must have that much
        self._newest = max(self._newest, memory.top)
        view = self._look()
        if view.head >= memory.top and view is self._checked:
            return view
        view = self._with_unlisted(view, anchoring.doubtful(memory, view))
        anchoring.check(self._anchor, view, memory, self._unread)
        self._checked = view
        return view

    def _with_unlisted(self, view: View, numbers: list[int]) -> View:
        """Ask by name, once, for each of ``numbers`` that a listing lacked: it may have been older. Return the log with those found."""
        for seq in numbers:
            if seq in self._slots or seq in self._absent:
                continue
            if len(self._absent) >= GAP_MAX:  # no accident of a listing
                break
            slot = self._load(seq)
            if slot.unreadable:
                raise StoreUnavailable(f"cannot tell whether this record is there: {slot.reason}", where=self._key(seq))
            if slot.file_hash is None:
                self._absent.add(seq)
            else:
                self._put(seq, slot)
        if self._judged is None:
            self._judged = self._judge(view.head)
        return self._judged

    def _look(self) -> View:
        numbers = set()
        for entry in self._store.list(f"{self._run}/{LOG_DIR}"):
            seq = parse_record_file(entry.name)
            if seq is not None:
                numbers.add(seq)
                if len(numbers) > RECORDS_MAX:
                    raise UnsafeContent(f"more than {RECORDS_MAX} records", where=f"{self._run}/{LOG_DIR}")
        head = max(numbers, default=-1)
        if head > RECORDS_MAX:
            raise UnsafeContent(f"a record numbered {head}", where=f"{self._run}/{LOG_DIR}", hint="not written by Relight: remove it")
        head = self._unlisted(head)
        known = self._slots.keys() - self._unread
        for seq, slot in self._load_all(sorted(numbers - known)):
            self._put(seq, slot)
        for seq in range(max(0, head - TORN_MAX), head):
            if seq not in numbers and seq not in known:  # a listing that was going on while records came may miss one and show the next
                slot = self._load(seq)
                if slot.file_hash is not None or slot.unreadable:
                    self._put(seq, slot)
        if self._judged is None or self._judged.head != head:
            self._judged = self._judge(head)
        return self._judged

    def _unlisted(self, head: int) -> int:
        """The highest number there. A listing may be older than what it lists: a record that this process has seen is asked for by name
        before it counts as gone, and so is, at the first look, what comes behind the last one listed."""
        if self._newest > head:
            slot = self._load(self._newest)
            if slot.unreadable and self._anchor is not None:  # else the log would count as rolled back
                raise StoreUnavailable(f"cannot tell whether this record is there: {slot.reason}", where=self._key(self._newest))
            if slot.file_hash is not None:
                head = self._newest
                if head not in self._slots or head in self._unread:  # somebody else's, of which only the number was known
                    self._put(head, slot)
        while not self._looked:
            slot = self._load(head + 1)
            if slot.unreadable:
                raise StoreUnavailable(f"cannot tell whether there is a newer record: {slot.reason}", where=self._key(head + 1))
            if slot.file_hash is None:
                self._looked = True
                break
            head += 1
            self._put(head, slot)
        self._newest = max(self._newest, head)
        return head

    def _load_all(self, numbers: list[int]) -> Iterable[tuple[int, _Slot]]:
        """Each with what lies there; many at once where each takes its time to come."""
        at_once = self._store.parallel_reads
        if at_once <= READS_AT_ONCE or len(numbers) < MANY:
            return [(seq, self._load(seq)) for seq in numbers]
        with ThreadPool(at_once, "relight-log") as pool:
            return list(zip(numbers, pool.map(self._load, numbers)))

    def _put(self, seq: int, slot: _Slot) -> None:
        self._slots[seq] = slot
        self._judged = None
        self._unread.discard(seq)
        if slot.unreadable:
            self._unread.add(seq)

    def _load(self, seq: int) -> _Slot:
        key, read = self._key(seq), list[bytes]()

        def get() -> bytes:
            read.append(self._store.get(key, SEALED_BYTES_MAX))
            return read[-1]

        try:
            record = decoded(get, lambda data: decode_record(data, seq, key), key, BELIEVED)
            return _Slot(record.file_hash, self._shared(record))
        except StoreUnavailable as error:
            return _Slot(None, None, error.what, unreadable=True)
        except WrongKey:  # it says nothing of the record: another key may open it
            raise
        except RelightError as error:
            return _Slot(hexdigest(read[-1]) if read else None, None, error.what)

    def _shared(self, record: Record) -> Record:
        """The record, holding once what many hold: a log of a long run is kept in memory by all who append to it."""
        for name in ("store", "run", "writer", "file_hash", "prev"):
            held = getattr(record, name)
            msgspec.structs.force_setattr(record, name, self._texts.setdefault(held, held))
        self._texts.pop(record.prev, None)  # the next record chains to another
        return record

    def _judge(self, head: int) -> View:
        """Which records count: right store and run, and the bytes their successor chained to."""
        slots = self._slots
        if not self._store_id:
            try:
                self._store_id = read_store(self._store).id
            except (CheckpointNotFound, CorruptCheckpoint, UnsafeContent):
                self._store_id = _most_common([slot.record.store for slot in slots.values() if slot.record])
        if recorded := _recorded_store(slots):  # a run that was moved or copied into another store keeps the id of its own
            self._store_id = recorded
        if not self._run_id:
            self._run_id = _run_id(slots)
        good: list[Record] = []
        faults: list[Fault] = []
        following: Record | None = None
        above = head + 1
        # Downwards: only a record that counts can refute the one before it.
        for seq in sorted((seq for seq in slots if seq <= head), reverse=True):
            if seq + 1 < above:
                faults += self._missing(seq + 1, above)
                following = None
            slot, above = slots[seq], seq
            reason = self._reason(slot, following)
            following = None
            if reason:
                faults.append(Fault(seq, self._key(seq), reason))
            elif slot.record is not None:
                good.append(slot.record)
                following = slot.record
        faults += self._missing(0, above)
        good.reverse()
        faults.reverse()
        last = slots.get(head)
        head_hash = ZERO_HEX if last is None else (last.file_hash or ZERO_HEX)
        return View(self._run, self._store_id, self._run_id, tuple(good), tuple(faults), head, head_hash)

    def _missing(self, start: int, end: int) -> list[Fault]:
        """A fault for each number that is missing, highest first; one for all of a gap that no accident makes."""
        if end - start > GAP_MAX:
            return [Fault(start, self._key(start), f"the records from here to {end - 1} are missing")]
        return [Fault(seq, self._key(seq), "the record is missing") for seq in reversed(range(start, end))]

    def _reason(self, slot: _Slot, following: Record | None) -> str:
        if slot.record is None:
            return slot.reason
        if slot.record.store != self._store_id:
            return "the record belongs to another store"
        if slot.record.run != self._run_id:
            return "the record belongs to another run"
        if slot.record.seq == 0 and slot.record.prev != ZERO_HEX:
            return "the first record claims one before it"
        if following is not None and following.prev != slot.file_hash:
            return "the bytes are not those the next record was chained to"
        return ""


def _run_id(slots: dict[int, _Slot]) -> str:
    """Record 0 says which run this is, if record 1 was chained to it; else most of the records do."""
    first, second = slots.get(0), slots.get(1)
    if first and first.record and second and second.record and second.record.prev == first.file_hash:
        return first.record.run
    return _most_common([slot.record.run for slot in slots.values() if slot.record])


def _recorded_store(slots: dict[int, _Slot]) -> str:
    """Return the store's id in record 0, if record 1 was chained to it, or else in all records. Empty if they differ.

    A later record that names another store does not count: it would hide all others.
    """
    first, second = slots.get(0), slots.get(1)
    if first and first.record and second and second.record and second.record.prev == first.file_hash:
        return first.record.store
    stores = {slot.record.store for slot in slots.values() if slot.record}
    return stores.pop() if len(stores) == 1 else ""


def _most_common(values: list[str]) -> str:
    return max(sorted(set(values)), key=values.count, default="")
