"""Reading and appending records: numbering, chaining, what a damaged one means."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from itertools import islice

import msgspec

from relight.comm.new_threads import ThreadPool
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, RunRemoved, StoreUnavailable, UnsafeContent, WrongKey
from relight.format import Record, decode_record, encode_record, hexdigest
from relight.format import names as format_names
from relight.format.digest import ZERO_HEX
from relight.format.names import LOG_DIR, check_run_name
from relight.format.records import Body, RunBody
from relight.format.strict import SEALED_BYTES_MAX
from relight.log import anchoring
from relight.log import summary as summaries
from relight.log.identity import checkpoint_dirs, now_text, read_store, require_store
from relight.log.listing import GAP_MAX, TORN_MAX, Folders, LogListing
from relight.log.nested import refuse_store_as_run
from relight.log.slots import Slot, most_common, recorded_run, recorded_store, why_void
from relight.log.summarizing import Summaries
from relight.log.summary import vouched
from relight.log.view import Fault, LogSummary, LogView
from relight.store import ByteStore
from relight.store.anchored import anchor_of
from relight.store.base import READS_AT_ONCE, Uncertain
from relight.store.retry import decode_with_reread, sleep

NAMES_MAX = 1000
"""Runs among which the one that a misspelt name means is looked for."""
APPEND_TRIES = 1000
SHOWN_PAUSE_S = 0.02
SHOWN_PAUSE_MAX_S = 60.0
"""Two minutes in all: longer than such a cache lasts as a rule."""
BELIEVED = 6
"""How many times the same bytes must have come until a record counts as damaged where it lies: whoever chains his own to it makes it so."""
MISSING_PAUSES_S = (0.05, 0.2)
"""Seconds between looks at a log that seems to be missing, before it counts as missing."""
NOTE_TRIES = 5
"""How many times the NOTE of a summary is appended again after another process took its number."""
NAMES_SHOWN = 8
"""Directories that an error lists."""
MANY = 8
"""From so many on, records are read side by side from a store that is far away."""
_damaged: dict[tuple[str, str], str] = {}
"""By store and key, the hash of each file that this process has found to be damaged: a new log reads it once, not ``BELIEVED`` times."""
FORGET_ABOVE = 4
"""A log that has read so many times ``SUMMARY_EVERY`` records since its summary takes a newer summary in their place."""
STRAYS_NAMED = 8
"""Records above a gap that are named as faults."""
STRAY = f"the record is more than {GAP_MAX} numbers above the log's end, and no record before it is chained to it"
BATCH = 64
"""Records that are read at once, from the newest down, until one vouches for a summary."""


class Log:
    """One run's log. Not thread-safe. Records are immutable, so each is read once; damage that comes later is ``verify``'s to find.

    A reader begins at the newest summary that a record vouches for. ``whole``: read every record instead. Memory grows with what the
    summary holds and the records after it, not with the length of the log; with ``whole``, with the number of records.
    """

    def __init__(self, store: ByteStore, run: str, *, now: Callable[[], str] = now_text, whole: bool = False) -> None:
        self._store, self._run, self._now, self._whole = store, check_run_name(run), now, whole
        self._folders = Folders(store, self._run, self._is_chained)
        self._summaries = Summaries(store, self._run)
        self._summary: LogSummary | None = None
        self._vouched = -1
        """The last record that a summary covers for which a record vouches that counts."""
        self._tried_at = -1
        """The record after which this process wrote a summary, or tried to."""
        self._first: dict[int, Slot] | None = None
        """Records 0 and 1, once they were read to compare a summary with them."""
        self._anchor = anchor_of(store)
        self._writer = f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"
        self._slots: dict[int, Slot] = {}
        self._unread: set[int] = set()
        self._store_id = ""
        self._run_id = ""
        self._settled = False
        self._settled_folders: set[str] = set()
        self._own_head = self._newest = -1
        self._looked = False
        self._judged: LogView | None = None
        """The last view, as long as nothing was read or written since."""
        self._checked: LogView | None = None
        """The last view that was compared with the anchor."""
        self._absent: set[int] = set()
        """Numbers below the head that were asked for by name, and are missing."""
        self._texts: dict[str, str] = {}

    @property
    def run(self) -> str:
        """The run's name."""
        return self._run

    def read(self) -> LogView:
        """The log as it is now. ``CheckpointNotFound`` if there is no such run."""
        view = self._view()
        if view.head < 0:
            view = self._view_or_refuse()
        if view.head < 0:
            close = get_close_matches(self._run, islice((entry.name for entry in self._store.list("") if entry.is_dir), NAMES_MAX), 1)
            hint = f"did you mean {close[0]}?" if close else "relight ls STORE shows its runs"
            raise CheckpointNotFound(f"no run {self._run!r} here", where=self._store.url, hint=hint)
        return view

    def start(self) -> LogView:
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

    def _view_or_refuse(self) -> LogView:
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
                sleep(pause_s)
        where = f"{self._store.url.rstrip('/')}/{self._run}"
        raise CorruptCheckpoint(
            f"this run's log is missing, and {len(names)} checkpoint directories are there",
            where=where,
            details=[*names[:NAMES_SHOWN], *(["…"] if len(names) > NAMES_SHOWN else [])],
            hint=f"copy the directory {LOG_DIR}/ back from where the run came from; or rebuild the log: relight recover {where}",
        )

    def begin_rebuilt(self, run_id: str) -> LogView:
        """Make record 0 of a run whose log was lost, for the run id that its checkpoints have. Return the log with it.

        ``CorruptCheckpoint`` if there is a log after all, or the store has no id.
        """
        self._store_id = require_store(self._store).id
        self._judged = None
        view = self._view()
        if view.head >= 0 or self._append(view, RunBody(name=self._run), epoch=0, run_id=run_id) is None:
            raise CorruptCheckpoint("the log that was missing is there again", where=f"{self._store.url.rstrip('/')}/{self._run}")
        return self._view()

    def append(self, decide: Callable[[LogView], tuple[Body, int] | None]) -> Record | None:
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
                sleep(pause)
                pause *= 2
                continue
            wanted = decide(view)
            if wanted is None:
                return None
            if view.head < 0:
                where, hint = f"{self._store.url.rstrip('/')}/{self._run}", "move it back; or stop, and start again where it is now"
                hint += "; or begin a new log there: on_failure=relight.failure_policy(begin_again=True)"
                raise RunRemoved("the run's log is gone: its directory was moved or deleted", where=where, hint=hint)
            record = self._append(view, *wanted, run_id=view.run_id)
            if record is not None:
                self._summarize(record)
                return record
            taken = self._newest = max(self._newest, view.head + 1)
        raise StoreUnavailable(f"lost the race for the next record {APPEND_TRIES} times", where=f"{self._run}/{LOG_DIR}")

    def span(self, first: int, last: int) -> list[Record]:
        """Read the records from ``first`` to ``last`` that count, in order, also those that a summary stands for. The log was read before.

        Cost: one read for each; nothing of them is kept.
        """
        wanted = [seq for seq in range(max(0, first), last + 2) if seq not in self._slots and seq <= max(last, self._base)]
        slots = {**self._slots, **dict(self._load_all(wanted))}
        found: list[Record] = []
        following = slots[last + 1].record if last + 1 in slots else None
        for seq in range(last, max(0, first) - 1, -1):
            slot = slots.get(seq)
            is_good = slot is not None and not why_void(slot, self._store_id, self._run_id, following)
            following = slot.record if is_good and slot is not None else None
            if following is not None:
                found.append(following)
        return found[::-1]

    def sync(self, seq: int) -> None:
        """Make record ``seq`` durable by name: another process may have appended it, and been killed before that."""
        self._folders.sync(seq)

    def _append(self, view: LogView, body: Body, epoch: int, run_id: str) -> Record | None:
        unread = next((seq for seq in self._unread if seq <= view.head), None)
        if unread is not None:  # it may be a FENCE, or the very COMMIT that is to be appended
            reason = self._slots[unread].reason
            raise StoreUnavailable(f"a record of the log cannot be read just now: {reason}", where=self._key(unread))
        self._sync_parents(view)
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
        created = self._store.put_once(key, data)
        if not created and not self._is_ours(key, data):
            return None
        folder = self._folders.folder(record.seq)
        is_new = folder != self._folders.place and folder not in self._settled_folders
        if not created or (is_new and self._store.needs_sync):  # the writer that made the folder may have been killed before it was durable
            try:
                for each in (folder, self._folders.place) if is_new else (folder,):
                    self._store.sync(each)
            except StoreUnavailable as error:
                raise Uncertain(f"created, but its name may not be durable: {error.what}", where=key) from error
            self._settled_folders = {folder}
        self._own_head = self._newest = record.seq
        written = decode_record(data, record.seq, key)
        self._put(record.seq, Slot(written.file_hash, self._shared(written)))
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

    def _sync_parents(self, view: LogView) -> None:
        """Before the first append, and whenever the head is another writer's, make durable what we are about to stand on.

        Whoever made the directories or the head record may have been killed between making and fsyncing them.
        """
        if not self._store.needs_sync:
            return
        if not self._settled:
            there = [prefix for prefix in ("", self._run) if any(True for _ in self._store.list(prefix))]
            for prefix in there:
                self._store.sync(prefix)
            self._settled = len(there) == 2  # else somebody may be making them this very moment: look again at the next append
        if view.head >= 0 and view.head != self._own_head:
            self._folders.sync(view.head)

    def _key(self, seq: int) -> str:
        return self._folders.key(seq)

    def _summarize(self, record: Record) -> None:
        """Write a summary if enough records came since the last one, and append the NOTE that vouches for it.

        ``record``: just appended, and durable. No failure of the summary is one of its append.
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
                if record.seq - self._vouched < every or self._append(view, note, record.epoch, view.run_id) is not None:
                    return
        except RelightError as error:
            self._summaries.failed(error)

    def _is_chained(self, seq: int) -> bool:
        """Whether a record is chained to the one before it."""
        before, record = self._load(seq - 1), self._load(seq).record
        return before.file_hash is not None and record is not None and record.prev == before.file_hash

    def _has_unlisted(self, view: LogView) -> bool:
        """Whether a record that seems missing is there after all: a listing may have been older than the record."""
        missing = [fault.seq for fault in view.faults if view.base < fault.seq <= view.head and fault.seq not in self._slots]
        for seq in missing[:GAP_MAX]:
            slot = self._load(seq)
            if slot.file_hash is not None or slot.unreadable:
                self._put(seq, slot)
        return any(seq in self._slots for seq in missing)

    def _view(self) -> LogView:
        """The log as it is now. ``CorruptCheckpoint`` if the store's anchor remembers what the log lacks."""
        if self._anchor is None:
            return self._list_and_read()
        memory = anchoring.recall(self._anchor, self._run)  # before the listing, which must have that much
        self._newest = max(self._newest, memory.top)
        view = self._list_and_read()
        if view.head >= memory.top and view is self._checked:
            return view
        view = self._with_unlisted(view, anchoring.doubtful(memory, view))
        anchoring.check(self._anchor, view, memory, self._unread)
        self._checked = view
        return view

    def _with_unlisted(self, view: LogView, numbers: list[int]) -> LogView:
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

    def _list_and_read(self) -> LogView:
        numbers = self._listed()
        head = self._unlisted(max(numbers, default=-1))
        if head < self._base:  # the log was cut back to before the summary
            self._begin_again()
            return self._list_and_read()
        known = self._slots.keys() - self._unread
        for seq, slot in self._load_all(sorted(seq for seq in numbers - known if seq > self._base)):
            self._put(seq, slot)
        for seq in range(max(0, self._base + 1, head - TORN_MAX), head):
            if seq not in numbers and seq not in known:  # a listing that was going on while records came may miss one and show the next
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
        """The numbers after the summary that a listing shows, without strays. The first listing finds the summary to begin at."""
        if self._looked and (numbers := self._folders.after(self._newest)):
            if max(numbers) - self._newest > FORGET_ABOVE * format_names.FOLDER_RECORDS and not self._whole:
                self._begin_again()  # so many came since that a newer summary is there
            else:
                return numbers
        listing = self._folders.all()
        if self._looked or self._whole or (not listing.folders and len(listing.flat) < MANY):
            return self._folders.since(listing, self._base)
        return self._begun(listing)

    def _begun(self, listing: LogListing) -> set[int]:
        """Read records from the newest down to a summary that one of them vouches for; all of them if there is none."""
        found = self._folders.newest(listing)
        lowest, todo = min(found, default=0), sorted(found)
        lower = [folder for folder in listing.folders if (folder + 1) * format_names.FOLDER_RECORDS <= lowest]
        in_flat = not found or found <= listing.flat
        while True:
            batch, todo = todo[-BATCH:], todo[:-BATCH]
            for seq, slot in self._load_all([seq for seq in batch if seq not in self._slots]):
                self._put(seq, slot)
            if found and self._takes_summary(max(found)):
                return {seq for seq in found if seq > self._base}
            if todo:
                continue
            if in_flat:
                return found
            in_flat = not lower
            more = self._folders.numbers(lower.pop()) if lower else {seq for seq in listing.flat if seq < min(found)}
            todo, found = sorted(more), found | more

    def _takes_summary(self, head: int) -> bool:
        """Begin at the newest summary for which a record that was read vouches; False if every such record is still to be found."""
        notes = [slot.record for _, slot in sorted(self._slots.items(), reverse=True) if slot.record is not None]
        lowest = min(self._slots, default=0)
        return any(found[0] + 1 >= lowest and self._takes(note, head) for note in notes if (found := vouched(note)) is not None)

    def _takes(self, note: Record, head: int) -> bool:
        """Begin at the summary that a NOTE vouches for, if the NOTE counts, and the records after the summary are chained to it."""
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
        """Whether records 0 and 1 are not of another run than the summary."""
        if self._first is None:
            self._first = {seq: self._slots.get(seq) or self._load(seq) for seq in (0, 1)}
        first, second = self._first[0], self._first[1]
        if first.record is None or second.record is None or second.record.prev != first.file_hash:
            return True
        return (first.record.store, first.record.run) == (summary.store, summary.run)

    def _forget(self, view: LogView) -> None:
        """Take a newer summary in the place of the records that it covers, so that memory stays bounded."""
        notes = [record for record in reversed(view.newer) if vouched(record) is not None]
        for note in notes[:1]:
            if self._takes(note, view.head):
                self._judged = self._judge(view.head)

    def _begin_again(self) -> None:
        self._slots, self._unread, self._absent = {}, set(), set()
        self._summary, self._judged, self._looked, self._vouched, self._first = None, None, False, -1, None

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

    def _load_all(self, numbers: list[int]) -> Iterable[tuple[int, Slot]]:
        """Each with what lies there; many at once where each takes its time to come."""
        at_once = self._store.parallel_reads
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

        known = _damaged.get((self._store.url, key))  # read so often before in this process that it counts as damaged where it is stored
        try:
            try:
                record = decode_with_reread(get, lambda data: decode_record(data, seq, key), key, 1 if known else BELIEVED)
            except RelightError:
                if not read or not known or hexdigest(read[-1]) == known:
                    raise
                record = decode_with_reread(get, lambda data: decode_record(data, seq, key), key, BELIEVED)
            return Slot(record.file_hash, self._shared(record))
        except StoreUnavailable as error:
            return Slot(None, None, error.what, unreadable=True)
        except WrongKey:  # it says nothing of the record: another key may open it
            raise
        except RelightError as error:
            hash = hexdigest(read[-1]) if read else None
            if hash is not None and self._store.shared and len(_damaged) < GAP_MAX:
                _damaged[self._store.url, key] = hash
            return Slot(hash, None, error.what)

    def _shared(self, record: Record) -> Record:
        """The record, holding once what many hold: a log of a long run is kept in memory by all who append to it."""
        for name in ("store", "run", "writer", "file_hash", "prev"):
            held = getattr(record, name)
            msgspec.structs.force_setattr(record, name, self._texts.setdefault(held, held))
        self._texts.pop(record.prev, None)  # the next record chains to another
        return record

    def _judge(self, head: int) -> LogView:
        """Which records count: right store and run, and the bytes their successor chained to."""
        slots, summary = self._slots, self._summary
        self._name_store_and_run()
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
        faults += [Fault(seq, key, STRAY) for seq, key in sorted(self._folders.strays.items())[:STRAYS_NAMED] if seq > head]
        last = slots.get(head)
        head_hash = ZERO_HEX if last is None else (last.file_hash or ZERO_HEX)
        self._vouched = max([found[0] for one in good if (found := vouched(one)) is not None], default=self._base)
        if summary is None:
            return LogView(self._run, self._store_id, self._run_id, tuple(good), tuple(faults), head, head_hash)
        if head == summary.upto:
            head_hash = summary.hash
        return LogView(
            self._run, self._store_id, self._run_id, (*summary.records, *good), (*summary.faults, *faults), head, head_hash,
            summary,
        )  # fmt: skip

    def _name_store_and_run(self) -> None:
        """Find out which store and run the log is of."""
        slots = self._slots
        if self._summary is not None:
            self._store_id, self._run_id = self._summary.store, self._summary.run
            return
        if not self._store_id:
            try:
                self._store_id = read_store(self._store).id
            except (CheckpointNotFound, CorruptCheckpoint, UnsafeContent):
                self._store_id = most_common([slot.record.store for slot in slots.values() if slot.record])
        if recorded := recorded_store(slots):  # a run that was moved or copied into another store keeps the id of its own
            self._store_id = recorded
        if not self._run_id:
            self._run_id = recorded_run(slots)

    def _missing(self, start: int, end: int) -> list[Fault]:
        """A fault for each number that is missing, highest first; one for all of a gap that no accident makes."""
        if end - start > GAP_MAX:
            return [Fault(start, self._key(start), f"the records from here to {end - 1} are missing")]
        return [Fault(seq, self._key(seq), "the record is missing") for seq in reversed(range(start, end))]
