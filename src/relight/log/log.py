"""Read and append a run's log records: numbering, hash chaining, and the effect of a damaged record."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from itertools import islice

import msgspec

from relight.comm.new_threads import ThreadPool
from relight.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    RelightError,
    RunReplaced,
    StoreUnavailable,
    UnsafeContent,
    WrongKey,
)
from relight.format import Record, decode_record, encode_record, hexdigest
from relight.format import names as format_names
from relight.format.digest import ZERO_HEX
from relight.format.names import LOG_DIR, check_run_name
from relight.format.records import Body, RunBody
from relight.format.strict import SEALED_BYTES_MAX
from relight.log import anchoring
from relight.log import summary as summaries
from relight.log.identity import check_recordable, checkpoint_dirs, now_text, read_store, require_store
from relight.log.listing import GAP_MAX, TORN_MAX, Folders, LogListing
from relight.log.nested import STORE_NOT_RUN, hint_for_store, refuse_store_as_run
from relight.log.replaced import other_runs_records, refuse_other_record, removed, without_store_id
from relight.log.slots import Slot, most_common, recorded_run, recorded_store, why_void
from relight.log.summarizing import Summaries
from relight.log.summary import vouched
from relight.log.view import Fault, LogSummary, LogView
from relight.store import ByteStore
from relight.store.anchored import anchor_of
from relight.store.base import READS_AT_ONCE, Uncertain, reread
from relight.store.retry import decode_with_reread, sleep

NAMES_MAX = 1000
"""Run names compared with a misspelt run name for the error's hint."""
APPEND_TRIES = 1000
SHOWN_PAUSE_S = 0.02
SHOWN_PAUSE_MAX_S = 60.0
"""Longest pause in seconds. The pauses double and add up to two minutes: longer than the negative caches of network file systems last."""
DAMAGED_READS = 6
"""Identical damaged reads after which a record counts as damaged where it is stored. The next record chained to it makes this final."""
MISSING_PAUSES_S = (0.05, 0.2)
"""Seconds between reads of a log that seems to be missing, before it counts as missing."""
NOTE_TRIES = 5
"""How many times the NOTE of a summary is appended again after another process took its number."""
NAMES_SHOWN = 8
"""Directories that an error lists."""
MANY = 8
"""Fewest records that are read in parallel from a remote store."""
_damaged: dict[tuple[str, str], str] = {}
"""Hash of each damaged file, by store and key. A new ``Log`` reads such a file once, not ``DAMAGED_READS`` times."""
FORGET_ABOVE = 4
"""A log in memory switches to a newer summary after this multiple of ``SUMMARY_EVERY`` records."""
STRAYS_NAMED = 8
"""Most records above a gap that are listed as faults."""
STRAY = f"the record is more than {GAP_MAX} numbers above the log's end, and no record before it is chained to it"
BATCH = 64
"""Records read in one batch, newest first, until one of them vouches for a summary."""


class Log:
    """One run's log. Not thread-safe. Records are immutable, so each is read once; ``verify`` finds later damage.

    A reader begins at the newest summary that a record vouches for. ``whole``: read every record instead.
    Memory grows with the size of the summary and the number of records after it. With ``whole``, it grows with the number of records.
    """

    def __init__(self, store: ByteStore, run: str, *, now: Callable[[], str] = now_text, whole: bool = False) -> None:
        self._store, self._run, self._now, self._whole = store, check_run_name(run), now, whole
        self._folders = Folders(store, self._run, self._is_chained)
        self._summaries = Summaries(store, self._run)
        self._summary: LogSummary | None = None
        self._vouched = -1
        """The last record covered by a summary that a valid record vouches for."""
        self._tried_at = -1
        """The record after which this process last tried to write a summary."""
        self._first: dict[int, Slot] | None = None
        """Records 0 and 1, cached after a summary was compared with them."""
        self._anchor = anchor_of(store)
        self._writer = f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"
        self._slots: dict[int, Slot] = {}
        self._unread: set[int] = set()
        self._store_id = self._run_id = ""
        self._settled = self._searched = False
        self._settled_folders: set[str] = set()
        self._own_head = self._newest = -1
        self._seen = (-1, "")
        """Number and hash of the newest record at the end of the last ``append``."""
        self._judged: LogView | None = None
        """The last view; None after any read or write that may change it."""
        self._checked: LogView | None = None
        """The last view that passed the comparison with the anchor."""
        self._absent: set[int] = set()
        """Record numbers below the head that are missing even when read by name."""
        self._texts: dict[str, str] = {}

    @property
    def run(self) -> str:
        """The run's name."""
        return self._run

    def read(self) -> LogView:
        """Return the current log. Raise ``CheckpointNotFound`` if the run does not exist."""
        view = self._view()
        if view.head < 0:
            view = self._view_or_refuse()
        if view.head < 0:
            raise self._no_run()
        return view

    def is_in_store(self, view: LogView) -> bool:
        """Return False if the store has another record in the place of the newest valid one of ``view``. Cost: one read."""
        # not head_hash: the record at the head may be damaged
        if view.newer:
            seq, known = view.newer[-1].seq, view.newer[-1].file_hash
        else:
            seq, known = view.base, view.summary.hash if view.summary is not None else view.head_hash
        slot = self._load(seq)
        return slot.unreadable or slot.file_hash == known

    def _no_run(self) -> CheckpointNotFound:
        if (hint := hint_for_store(self._store, self._run)) is not None:
            return CheckpointNotFound(STORE_NOT_RUN, where=f"{self._store.url.rstrip('/')}/{self._run}", hint=hint)
        names = (entry.name for entry in self._store.list("") if entry.is_dir and entry.name != self._run)
        close = get_close_matches(self._run, islice(names, NAMES_MAX), 1)
        hint = f"did you mean {close[0]}?" if close else "relight ls STORE shows its runs"
        return CheckpointNotFound(f"no run {self._run!r} here", where=self._store.url, hint=hint)

    def start(self) -> LogView:
        """Return the current log. Create record 0 if there is no record."""
        if self._anchor is not None:
            self._view()  # before require_store, which would give an emptied store a new id
        try:
            self._store_id = require_store(self._store).id
        except (CorruptCheckpoint, UnsafeContent):
            self._store_id = ""  # the records have the id: a damaged relight.json must not stop a run
        self._judged = None
        view = self._view()
        if view.head >= 0 and not view.records and any(slot.record for slot in self._slots.values()):
            raise other_runs_records(self._store, self._run)
        if view.head < 0:
            view = self._view_or_refuse()
        if view.head < 0:
            if not self._store_id:
                raise without_store_id(self._store)
            refuse_store_as_run(self._store, self._run)
            self._append(view, RunBody(name=self._run), epoch=0, run_id=secrets.token_hex(16))
            view = self._view()
        return view

    def _view_or_refuse(self) -> LogView:
        """Read a log that seemed empty again, and return it. Raise ``CorruptCheckpoint`` if it is empty but checkpoint directories exist.

        An attempt writes the log's first record before its first directory, so such a log was lost. A new attempt that starts from
        scratch would hide those checkpoints.
        """
        for pause_s in (*MISSING_PAUSES_S, None):
            names = checkpoint_dirs(self._store, self._run)
            self._searched, self._judged = False, None
            view = self._view()  # after the listing: the log of a listed directory is older than the directory
            if view.head >= 0 or not names:
                return view
            if pause_s is not None:  # a network file system caches for a while that a file was missing
                sleep(pause_s)
        where = f"{self._store.url.rstrip('/')}/{self._run}"
        rebuild = f"relight log {shlex.quote(where)} --rebuild"
        raise CorruptCheckpoint(
            f"this run's log is missing, and {len(names)} checkpoint directories are there",
            where=where,
            details=[*names[:NAMES_SHOWN], *(["…"] if len(names) > NAMES_SHOWN else [])],
            hint=f"copy the directory {LOG_DIR}/ back from where the run came from; or rebuild the log: {rebuild}",
        )

    def begin_rebuilt(self, run_id: str) -> LogView:
        """Create record 0 of a run that lost its log, with the run id that its checkpoints have. Return the new log.

        Raise ``CorruptCheckpoint`` if the log exists after all, or the store has no id.
        """
        self._store_id = require_store(self._store).id
        self._judged = None
        view = self._view()
        if view.head >= 0 or self._append(view, RunBody(name=self._run), epoch=0, run_id=run_id) is None:
            raise CorruptCheckpoint(
                "the log that was missing is there again", where=f"{self._store.url.rstrip('/')}/{self._run}"
            )
        return self._view()

    def append(self, decide: Callable[[LogView], tuple[Body, int] | None], *, commits: bool = False) -> Record | None:
        """Append the ``(body, epoch)`` that ``decide(view)`` returns. Append nothing if it returns None. This is the single commit point.

        If another writer takes the number first, ``decide`` is called again with the new view. Raise ``Uncertain`` if the store cannot
        determine whether the record exists. Nothing that the record refers to may then be deleted.
        Raise ``RunReplaced``, once, if the last record known here is gone. ``commits``: read its bytes, too, at the cost of one read.
        """
        taken, pause = -1, SHOWN_PAUSE_S
        for _ in range(APPEND_TRIES):
            view = self._view()
            if view.head < taken:  # a network file system caches for a while that a file was missing
                if pause > SHOWN_PAUSE_MAX_S:
                    raise StoreUnavailable(
                        "appending to the log failed: the file of the next record exists, but cannot be read",
                        where=self._key(taken),
                    )
                sleep(pause)
                pause *= 2
                continue
            if view.head > -1 and (commits or view.head < self._seen[0]):
                self._refuse_replaced()
            wanted = decide(view)
            if wanted is None:
                self._seen = (view.head, view.head_hash) if view.head_hash != ZERO_HEX else self._seen
                return None
            if view.head < 0:
                raise removed(self._store, self._run)
            record = self._append(view, *wanted, run_id=view.run_id)
            if record is not None:
                self._summarize(record)
                return record
            taken = self._newest = max(self._newest, view.head + 1)
        raise StoreUnavailable(
            f"appending to the log failed: other writers took the next record {APPEND_TRIES} times",
            where=f"{self._run}/{LOG_DIR}",
        )

    def check_recordable(self) -> None:
        """Raise ``ConfigError`` if a record of this process would have no effect: no trusted signer signs it."""
        check_recordable(self._store)

    def span(self, first: int, last: int) -> list[Record]:
        """Return the valid records from ``first`` to ``last``, in order, including those that a summary replaces.

        The caller has read the log before. Cost: one read per record that is not in memory; the records are not cached.
        """
        wanted = [
            seq for seq in range(max(0, first), last + 2) if seq not in self._slots and seq <= max(last, self._base)
        ]
        slots = {**self._slots, **dict(self._load_all(wanted))}
        records: list[Record] = []
        following = slots[last + 1].record if last + 1 in slots else None
        for seq in range(last, max(0, first) - 1, -1):
            slot = slots.get(seq)
            is_good = slot is not None and not why_void(slot, self._store_id, self._run_id, following)
            following = slot.record if is_good and slot is not None else None
            if following is not None:
                records.append(following)
        return records[::-1]

    def sync(self, seq: int) -> None:
        """Make the directory entry of record ``seq`` durable: its writer may have been killed before it synced the directory."""
        self._folders.sync(seq)

    def _refuse_replaced(self) -> None:
        try:
            if self._seen[0] >= 0:
                refuse_other_record(self._store, self._run, *self._seen, self._load(self._seen[0]))
        except RunReplaced:
            self._begin_again()
            self._seen, self._own_head, self._newest = (-1, ""), -1, -1
            raise

    def _append(self, view: LogView, body: Body, epoch: int, run_id: str) -> Record | None:
        unread = next((seq for seq in self._unread if seq <= view.head), None)
        if unread is not None:  # it may be a FENCE, or the same COMMIT that is being appended
            reason = self._slots[unread].reason
            raise StoreUnavailable(f"a record of the log cannot be read just now: {reason}", where=self._key(unread))
        self._sync_parents(view)
        record = Record(
            seq=view.head + 1, prev=view.head_hash, store=view.store_id, run=run_id, epoch=epoch, time=self._now(),
            writer=self._writer, body=body,
        )  # fmt: skip
        data = encode_record(record)
        if len(data) > SEALED_BYTES_MAX:
            raise UnsafeContent(f"a record of {len(data)} bytes", hint="fewer or smaller metrics")
        # never write a record that readers would reject
        decode_record(data, record.seq, "the record about to be written")
        key = self._key(record.seq)
        created = self._store.put_once(key, data)
        if not created and not self._is_ours(key, data):
            return None
        folder = self._folders.folder(record.seq)
        is_new = folder != self._folders.place and folder not in self._settled_folders
        # the writer that made the folder may have been killed before it was durable
        if not created or (is_new and self._store.properties().needs_sync):
            try:
                for each in (folder, self._folders.place) if is_new else (folder,):
                    self._store.sync(each)
            except StoreUnavailable as error:
                raise Uncertain(f"created, but its name may not be durable: {error.what}", where=key) from error
            self._settled_folders = {folder}
        written = decode_record(data, record.seq, key)
        self._own_head, self._newest, self._seen = record.seq, record.seq, (record.seq, written.file_hash)
        self._put(record.seq, Slot(written.file_hash, self._shared(written)))
        if self._anchor is not None:
            anchoring.wrote(self._anchor, view, written)
        return written

    def _is_ours(self, key: str, data: bytes) -> bool:
        """Return whether the existing file at ``key`` has our bytes: the store's reply may have been lost before a retry.

        A file that cannot be found yet is not ours: the store reported that another writer was first. ``append`` waits for that record.
        """
        try:
            return self._store.get(key, SEALED_BYTES_MAX) == data
        except CheckpointNotFound:
            return False
        except StoreUnavailable as error:
            raise Uncertain(f"cannot determine who wrote this record: {error.what}", where=key) from error

    def _sync_parents(self, view: LogView) -> None:
        """Make the parent directories and the head record durable before the first append, and if another writer appended the head.

        The process that created them may have been killed before it fsynced them.
        """
        if not self._store.properties().needs_sync:
            return
        if not self._settled:
            existing = [prefix for prefix in ("", self._run) if any(True for _ in self._store.list(prefix))]
            for prefix in existing:
                self._store.sync(prefix)
            # else another process may be creating them now: check again at the next append
            self._settled = len(existing) == 2
        if view.head >= 0 and view.head != self._own_head:
            self._folders.sync(view.head)

    def _key(self, seq: int) -> str:
        return self._folders.key(seq)

    def _summarize(self, record: Record) -> None:
        """Write a summary if enough records were appended since the last one, and append the NOTE that vouches for it.

        ``record``: appended and durable. A failed summary does not make its append fail.
        """
        every = summaries.SUMMARY_EVERY
        if not every or record.seq - max(self._vouched, self._tried_at) < every:
            return
        self._tried_at = record.seq
        try:
            view = self._judged if self._judged is not None else self._judge(record.seq)
            if view.head != record.seq or record.seq - self._vouched < every or self._has_unlisted(view):
                return
            note = self._summaries.write(view)
            for _ in range(NOTE_TRIES):
                view = self._view()
                if (
                    record.seq - self._vouched < every
                    or self._append(view, note, record.epoch, view.run_id) is not None
                ):
                    return
        except RelightError as error:
            self._summaries.failed(error)

    def _is_chained(self, seq: int) -> bool:
        """Return whether a record is chained to the one before it."""
        before, record = self._load(seq - 1), self._load(seq).record
        return before.file_hash is not None and record is not None and record.prev == before.file_hash

    def _has_unlisted(self, view: LogView) -> bool:
        """Return whether a record that the listing lacks exists after all: a listing may be older than the record."""
        missing = [
            fault.seq for fault in view.faults if view.base < fault.seq <= view.head and fault.seq not in self._slots
        ]
        for seq in missing[:GAP_MAX]:
            slot = self._load(seq)
            if slot.file_hash is not None or slot.unreadable:
                self._put(seq, slot)
        return any(seq in self._slots for seq in missing)

    def _view(self) -> LogView:
        """Return the current log. Raise ``CorruptCheckpoint`` if it lacks records that the store's anchor remembers."""
        if self._anchor is None:
            return self._list_and_read()
        memory = anchoring.recall(self._anchor, self._run)  # before the listing, which must have all remembered records
        self._newest = max(self._newest, memory.top)
        view = self._list_and_read()
        if view.head >= memory.top and view is self._checked:
            return view
        view = self._with_unlisted(view, anchoring.doubtful(memory, view))
        anchoring.check(self._anchor, view, memory, self._unread)
        self._checked = view
        return view

    def _with_unlisted(self, view: LogView, numbers: list[int]) -> LogView:
        """Read each of ``numbers`` that a listing lacked by name, once: the listing may be older. Return the log with the records found."""
        for seq in numbers:
            if seq in self._slots or seq in self._absent:
                continue
            if len(self._absent) >= GAP_MAX:  # too many missing records to be a stale listing
                break
            slot = self._load(seq)
            if slot.unreadable:
                raise StoreUnavailable(
                    f"cannot determine whether this record exists: {slot.reason}", where=self._key(seq)
                )
            if slot.file_hash is None:
                self._absent.add(seq)
            else:
                self._put(seq, slot)
        if self._judged is None:
            self._judged = self._judge(view.head)
        return self._judged

    def _list_and_read(self) -> LogView:
        numbers = self._listed()
        head = self._unlisted(max(numbers, default=-1))
        if head < self._base:  # the log was truncated to before the summary
            self._begin_again()
            return self._list_and_read()
        known = self._slots.keys() - self._unread
        for seq, slot in self._load_all(sorted(seq for seq in numbers - known if seq > self._base)):
            self._put(seq, slot)
        for seq in range(max(0, self._base + 1, head - TORN_MAX), head):
            if seq not in numbers and seq not in known:  # a listing during appends may miss a record and show the next
                slot = self._load(seq)
                if slot.file_hash is not None or slot.unreadable:
                    self._put(seq, slot)
        if self._judged is None or self._judged.head != head:
            self._judged = self._judge(head)
        if not self._whole and len(self._slots) > FORGET_ABOVE * (summaries.SUMMARY_EVERY or head + 1):
            self._forget(self._judged)
        return self._judged

    @property
    def _base(self) -> int:
        return self._summary.upto if self._summary is not None else -1

    def _listed(self) -> set[int]:
        """Return the listed record numbers after the summary, without strays. The first listing also selects the summary to begin at."""
        if self._searched and (numbers := self._folders.after(self._newest)):
            if max(numbers) - self._newest > FORGET_ABOVE * format_names.FOLDER_RECORDS and not self._whole:
                self._begin_again()  # so many records were added that a newer summary exists
            else:
                return numbers
        listing = self._folders.all()
        if self._searched or self._whole or (not listing.folders and len(listing.flat) < MANY):
            return self._folders.since(listing, self._base)
        return self._begun(listing)

    def _begun(self, listing: LogListing) -> set[int]:
        """Read records from the newest down to a summary that one of them vouches for; read all if there is no summary."""
        numbers = self._folders.newest(listing)
        lowest, todo = min(numbers, default=0), sorted(numbers)
        lower = [folder for folder in listing.folders if (folder + 1) * format_names.FOLDER_RECORDS <= lowest]
        in_flat = not numbers or numbers <= listing.flat
        while True:
            batch, todo = todo[-BATCH:], todo[:-BATCH]
            for seq, slot in self._load_all([seq for seq in batch if seq not in self._slots]):
                self._put(seq, slot)
            if numbers and self._takes_summary(max(numbers)):
                return {seq for seq in numbers if seq > self._base}
            if todo:
                continue
            if in_flat:
                return numbers
            in_flat = not lower
            more = self._folders.numbers(lower.pop()) if lower else {seq for seq in listing.flat if seq < min(numbers)}
            todo, numbers = sorted(more), numbers | more

    def _takes_summary(self, head: int) -> bool:
        """Begin at the newest usable summary that a record in memory vouches for. Return False if there is none."""
        notes = [slot.record for _, slot in sorted(self._slots.items(), reverse=True) if slot.record is not None]
        lowest = min(self._slots, default=0)
        return any(
            target[0] + 1 >= lowest and self._takes(note, head)
            for note in notes
            if (target := vouched(note)) is not None
        )

    def _takes(self, note: Record, head: int) -> bool:
        """Begin at the summary that a NOTE vouches for, if the NOTE is valid and the next record is chained to the summary."""
        summary = self._summaries.load(note)
        if summary is None or not self._is_of_this_run(summary):
            return False
        before = self._slots, self._summary, self._judged, self._unread
        self._slots = {seq: slot for seq, slot in self._slots.items() if seq > summary.upto}
        self._unread = {seq for seq in self._unread if seq > summary.upto}
        self._summary = summary
        following = self._slots.get(summary.upto + 1)
        view = self._judge(head)
        is_chained = following is None or following.record is None or following.record.prev == summary.hash
        if is_chained and any(record.seq == note.seq for record in view.newer):
            self._judged = None
            self._absent = {seq for seq in self._absent if seq > summary.upto}
            return True
        self._slots, self._summary, self._judged, self._unread = before
        self._summaries.refuse(note)
        return False

    def _is_of_this_run(self, summary: LogSummary) -> bool:
        """Return False if records 0 and 1 prove that the summary belongs to another run."""
        if self._first is None:
            self._first = {seq: self._slots.get(seq) or self._load(seq) for seq in (0, 1)}
        first, second = self._first[0], self._first[1]
        if first.record is None or second.record is None or second.record.prev != first.file_hash:
            return True
        return (first.record.store, first.record.run) == (summary.store, summary.run)

    def _forget(self, view: LogView) -> None:
        """Replace the records in memory that a newer summary covers by that summary, so that memory stays bounded."""
        notes = [record for record in reversed(view.newer) if vouched(record) is not None]
        for note in notes[:1]:
            if self._takes(note, view.head):
                self._judged = self._judge(view.head)

    def _begin_again(self) -> None:
        self._slots, self._unread, self._absent = {}, set(), set()
        self._summary, self._judged, self._searched, self._vouched, self._first = None, None, False, -1, None

    def _unlisted(self, head: int) -> int:
        """Return the highest record number that exists. ``head``: the highest number listed.

        A listing may be stale. A record that this process has seen is read by name before it counts as gone. The first call also reads
        by name the records after the last listed one.
        """
        if self._newest > head:
            slot = self._load(self._newest)
            if slot.unreadable and self._anchor is not None:  # without this error, the log would count as rolled back
                raise StoreUnavailable(
                    f"cannot determine whether this record exists: {slot.reason}", where=self._key(self._newest)
                )
            if slot.file_hash is not None:
                head = self._newest
                # another writer's record: only its number was known
                if head not in self._slots or head in self._unread:
                    self._put(head, slot)
        while not self._searched:
            slot = self._load(head + 1)
            if slot.unreadable:
                raise StoreUnavailable(
                    f"cannot determine whether a newer record exists: {slot.reason}", where=self._key(head + 1)
                )
            if slot.file_hash is None:
                self._searched = True
                break
            head += 1
            self._put(head, slot)
        self._newest = max(self._newest, head)
        return head

    def _load_all(self, numbers: list[int]) -> Iterable[tuple[int, Slot]]:
        """Return each number with its slot. Read in parallel if the store is remote and there are many."""
        at_once = self._store.properties().parallel_reads
        if at_once <= READS_AT_ONCE or len(numbers) < MANY:
            return [(seq, self._load(seq)) for seq in numbers]
        with ThreadPool(at_once, "relight-log") as pool:
            return list(zip(numbers, pool.map(self._load, numbers)))

    def _put(self, seq: int, slot: Slot) -> None:
        self._slots[seq] = slot
        self._judged = None
        self._unread.discard(seq)
        if slot.unreadable:
            self._unread.add(seq)

    def _load(self, seq: int) -> Slot:
        key, read = self._key(seq), list[bytes]()

        def get() -> bytes:
            read.append(self._store.get(key, SEALED_BYTES_MAX))
            return read[-1]

        # hash of a damaged file that this process has read ``DAMAGED_READS`` times
        known = _damaged.get((self._store.url, key))
        get_fresh = reread(self._store, key, get)
        try:
            try:
                record = decode_with_reread(
                    get_fresh, lambda data: decode_record(data, seq, key), key, 1 if known else DAMAGED_READS
                )
            except RelightError:
                if not read or not known or hexdigest(read[-1]) == known:
                    raise
                record = decode_with_reread(get_fresh, lambda data: decode_record(data, seq, key), key, DAMAGED_READS)
            return Slot(record.file_hash, self._shared(record))
        except StoreUnavailable as error:
            return Slot(None, None, error.what, unreadable=True)
        except WrongKey:  # not the record's fault: another key may open it
            raise
        except RelightError as error:
            hash = hexdigest(read[-1]) if read else None
            if hash is not None and self._store.properties().shared and len(_damaged) < GAP_MAX:
                _damaged[self._store.url, key] = hash
            return Slot(hash, None, error.what)

    def _shared(self, record: Record) -> Record:
        """Share equal strings between records: every process that appends keeps a long run's log in memory."""
        for name in ("store", "run", "writer", "file_hash", "prev"):
            text = getattr(record, name)
            msgspec.structs.force_setattr(record, name, self._texts.setdefault(text, text))
        self._texts.pop(record.prev, None)  # the next record chains to another
        return record

    def _judge(self, head: int) -> LogView:
        """Return the view with the valid records: of this store and run, with the bytes to which the next valid record is chained."""
        slots, summary = self._slots, self._summary
        self._name_store_and_run()
        good: list[Record] = []
        faults: list[Fault] = []
        following: Record | None = None
        above = head + 1
        # Downwards: only a valid record can invalidate the one before it.
        for seq in sorted((seq for seq in slots if seq <= head), reverse=True):
            if seq + 1 < above:
                faults += self._missing(seq + 1, above)
                following = None
            slot, above = slots[seq], seq
            reason = why_void(slot, self._store_id, self._run_id, following)
            following = None
            if reason:
                faults.append(Fault(seq, self._key(seq), reason))
            elif slot.record is not None:
                good.append(slot.record)
                following = slot.record
        faults += self._missing(self._base + 1, above)
        good.reverse()
        faults.reverse()
        faults += [
            Fault(seq, key, STRAY) for seq, key in sorted(self._folders.strays.items())[:STRAYS_NAMED] if seq > head
        ]
        last = slots.get(head)
        head_hash = ZERO_HEX if last is None else (last.file_hash or ZERO_HEX)
        self._vouched = max(
            [target[0] for record in good if (target := vouched(record)) is not None], default=self._base
        )
        if summary is None:
            return LogView(self._run, self._store_id, self._run_id, tuple(good), tuple(faults), head, head_hash)
        if head == summary.upto:
            head_hash = summary.hash
        return LogView(
            self._run, self._store_id, self._run_id, (*summary.records, *good), (*summary.faults, *faults), head, head_hash,
            summary,
        )  # fmt: skip

    def _name_store_and_run(self) -> None:
        """Set the store id and the run id to those of the log."""
        slots = self._slots
        if self._summary is not None:
            self._store_id, self._run_id = self._summary.store, self._summary.run
            return
        if not self._store_id:
            try:
                self._store_id = read_store(self._store).id
            except (CheckpointNotFound, CorruptCheckpoint, UnsafeContent):
                self._store_id = most_common([slot.record.store for slot in slots.values() if slot.record])
        # a run that was moved or copied into another store keeps its first store's id
        if recorded := recorded_store(slots):
            self._store_id = recorded
        if not self._run_id:
            self._run_id = recorded_run(slots)

    def _missing(self, start: int, end: int) -> list[Fault]:
        """Return a fault for each missing number, highest first; a single fault for a gap of more than ``GAP_MAX`` numbers."""
        if end - start > GAP_MAX:
            return [Fault(start, self._key(start), f"the records from here to {end - 1} are missing")]
        return [Fault(seq, self._key(seq), "the record is missing") for seq in reversed(range(start, end))]
