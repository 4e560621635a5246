"""Several local directories as one store in which each file is on two of them (mirroring), so that any one drive may be lost.

A file of place p is also at place p + 1. *Good* drives have every file. A drive that fails is set *away*, durably on the others, before
anything is written without it; it then counts as empty until ``relight scrub`` has rebuilt it. A drive that gave wrong bytes, or is being
rebuilt, is *doubted*: it is written, and read last. The last good copy of anything is never set away.

*Orders of the two calls*, of which a power cut may prevent the second. A name is created (``put_once``) at p first, and exists once it is at
p + 1: whoever finds it at p alone completes it. Files are written at p + 1 first and deleted at p first, so they are never completed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from relight.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptCheckpoint,
    NoSpace,
    RelightError,
    StoreUnavailable,
)
from relight.format.names import MIRRORS_FILE, STRIPE_FILE, is_record_key
from relight.format.records import StripeRecord, encode_stripe
from relight.format.strict import SEALED_BYTES_MAX, sealed_payload
from relight.observe import emit
from relight.settings.environment import environment
from relight.store.base import Entry, Reader, Uncertain, Writer, check_key, write_whole
from relight.store.disk import Disk
from relight.store.durable import temporary_of
from relight.store.local import LocalStore
from relight.store.mirror_drive import Drive, Outcome, Rooms, run_on
from relight.store.mirror_files import MirrorReader, MirrorWriter, copy_bytes_of
from relight.store.mirror_state import AWAY, DOUBTED, GOOD, KEPT, MirrorState, covers, numbers_in, read_states, state_file
from relight.store.striped import MIRRORS, SCHEME, StripedStore

COPIES = 2
_SERVED = 512
_TRIES = 20
CHANGE_S, CHANGE_TRIES = 0.5, 5
"""Seconds within which a process that changes the state reaches all drives, and in how many looks that is checked."""


class MirrorView(NamedTuple):
    """The drives' states at one time: the number of the state, and the status of each place."""

    number: int
    statuses: tuple[str, ...]


class DriveStatus(NamedTuple):
    """A drive of a mirrored store, for people."""

    path: str
    status: str
    since: str
    why: str


class MirroredStore(StripedStore):
    """The directories ``places``, in this order, as one store in which each file is in two of them.

    Construction does not touch a disk. Thread-safe. ``wait_s``: how long a drive may keep the others waiting, in addition to a tenth of the
    time, before it is set away; None: the setting. ``threads``: False makes all calls in the caller's thread, without that limit.
    """

    mirrors = COPIES

    def __init__(
        self,
        places: Sequence[str | os.PathLike[str]],
        *,
        disk: Disk | None = None,
        direct: bool = True,
        wait_s: float | None = None,
        threads: bool = True,
    ) -> None:
        super().__init__(places, disk=disk, direct=direct)
        self._properties = replace(self._properties, lanes=max(1, len(self._places) // COPIES))
        self.url = f"{SCHEME}{MIRRORS}{','.join(self._roots)},"
        self._wait_s, self._with_threads = wait_s, threads
        limit_s = environment().mirror_wait_s if wait_s is None else wait_s
        self._drives = [Drive(number, place, limit_s, threads=threads) for number, place in enumerate(self._places)]
        self._state: MirrorState | None = None
        """None: not read yet, or the store does not exist."""
        self._stripe_id = ""
        self._seen_at: dict[int, tuple[int, int]] = {}
        """Device and inode of the stripe file of each place that is there."""
        self._absent: dict[int, str] = {}
        """Places that are not usable in this process, though no state says so, with the reason."""
        self._served: deque[tuple[str, int, int, int]] = deque(maxlen=_SERVED)
        """Key, offset, length and place of the latest reads."""
        self._suspects: dict[str, tuple[int, int, int]] = {}
        """Place, offset and length of bytes that a caller refused."""
        self._changing = threading.RLock()
        self.rooms = Rooms()

    def __repr__(self) -> str:
        return f"MirroredStore({self._roots!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (MirroredStore, (self._roots,))

    def copies_of(self, key: str) -> tuple[int, int]:
        """Return the places of a file's two copies."""
        first = self.place_of(key)
        return first, (first + 1) % len(self._places)

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``. Its creation at the last good place decides."""
        self._at(key)
        self._make()
        made_at: set[int] = set()
        for _ in range(_TRIES):
            view = self.view(writing=True)
            content, order = self._create(view, key, data, made_at)
            if self.view(writing=True).number == view.number and order:
                return order[0] in made_at and content == data
        raise StoreUnavailable("the state of the store's drives keeps changing", where=self.url)

    def _create(self, view: MirrorView, key: str, data: bytes, made_at: set[int]) -> tuple[bytes, list[int]]:
        """Create ``key`` in its places. Return what it holds, and the places; none if the state of the drives changed meanwhile."""
        content, order = data, self._order(view, key)
        for index, number in enumerate(order):
            drive, held = self._drives[number], content

            def create(drive: Drive, held: bytes = held) -> bytes | None:
                if drive.place.put_once(key, held):
                    return None
                with contextlib.suppress(CheckpointNotFound):  # deleted meanwhile
                    return drive.place.get(key, max(len(held), SEALED_BYTES_MAX))
                return held

            outcome = run_on([drive], create, self._witnesses(view))[number]
            if isinstance(outcome, RelightError):
                try:
                    self.failed(number, outcome)
                except RelightError as error:
                    if index:
                        raise Uncertain(f"created on one drive of two: {error.what}", where=key) from error
                    raise
                return content, []
            if outcome is None:
                made_at.add(number)
            elif outcome != content:
                if index and self.view().number != view.number:
                    return content, []
                if view.statuses[number] == GOOD and (not index or self._is_better(outcome, content)):
                    content = outcome
                    for earlier in order[:index]:
                        made_at.discard(earlier)
                        self._install(earlier, key, content)
                else:  # a doubted drive's, or damage
                    self._install(number, key, content)
        return content, order

    def _is_better(self, later: bytes, earlier: bytes) -> bool:
        """Return whether, of two contents of one name, the later place's counts. It does, unless only the earlier one's is sealed."""
        return is_sealed(later) or not is_sealed(earlier)

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``. The two copies are written at once."""
        self._at(key)
        self._make()
        return MirrorWriter(self, key, size, lambda drive: drive.place.write(key, size))

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``. A power cut may leave the one copy replaced, and the other not."""
        self._at(key)
        return MirrorWriter(self, key, size, lambda drive: drive.place.install(key, size))

    def sync(self, prefix: str) -> None:
        """See ``ByteStore``. In every place that has the directory."""
        check_key(prefix)
        if not self._is_there():
            self._places[0].sync(prefix)
            return
        for _ in range(_TRIES):
            view = self.view(writing=True)
            outcome = self._on_all(view, lambda drive: drive.place.sync(prefix))
            failed = {
                number: error
                for number, error in outcome.items()
                if isinstance(error, RelightError) and self._is_fault(number, error)
            }
            for number, error in failed.items():
                self.failed(number, error)
            if not failed and self.view().number == view.number:
                if all(isinstance(error, CheckpointNotFound) for error in outcome.values()):
                    raise next(iter(outcome.values()))
                return
        raise StoreUnavailable("the state of the store's drives keeps changing", where=self.url)

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``. Both copies are read and compared."""
        self._at(key)
        if not self._is_there():
            raise CheckpointNotFound("no such file: the store does not exist yet", where=key)
        for _ in range(_TRIES):
            view = self.view()
            order = self._order(view, key, doubted=False)
            outcome = self._run(view, order, lambda drive: drive.place.get(key, limit))
            data = {number: value for number, value in outcome.items() if not isinstance(value, RelightError)}
            if self.view() != view:
                continue
            if not data or (len(order) == 1 and self._suspects.get(key, (-1,))[0] == order[0]):
                data = self._doubted_copy(view, key, limit, outcome) or data
            if not data:
                number, error = next(
                    (each for each in outcome.items() if not isinstance(each[1], CheckpointNotFound)),
                    next(iter(outcome.items())),
                )
                # a file that one drive does not have and the other cannot read: without the other, it does not exist
                if len(order) > 1 and isinstance(error, StoreUnavailable):
                    self.doubt(number, f"{key}: {error.what}", required=True)
                    continue
                raise error
            if len(data) < len(order):
                self._complete(key, data, outcome)
            return self._chosen(key, data)
        raise StoreUnavailable("the state of the store's drives keeps changing", where=self.url)

    def _doubted_copy(self, view: MirrorView, key: str, limit: int, outcome: Outcome) -> dict[int, bytes]:
        """Return a doubted drive's copy of a file that is there, and is unreadable or was refused. Its absence there proves nothing."""
        if all(isinstance(error, CheckpointNotFound) for error in outcome.values()):
            return {}
        doubted = [number for number in self._order(view, key) if view.statuses[number] == DOUBTED]
        more = self._run(view, doubted, lambda drive: drive.place.get(key, limit)) if doubted else {}
        return {number: value for number, value in more.items() if not isinstance(value, RelightError)}

    def _complete(self, key: str, data: dict[int, bytes], outcome: Outcome) -> None:
        """Handle a file that only one of its two good drives has, or can read."""
        (having, content), *_ = data.items()
        for number, error in outcome.items():
            if not isinstance(error, RelightError):
                continue
            if not isinstance(error, CheckpointNotFound):
                self.doubt(number, f"{key}: {error.what}")
            elif number == self.copies_of(key)[1]:  # its creation was interrupted
                with contextlib.suppress(RelightError):
                    self._places[having].get(key, len(content))  # not deleted meanwhile
                    self._places[number].put_once(key, content)
            elif is_record_key(key):
                self.doubt(number, f"{key} is missing there")

    def _chosen(self, key: str, data: dict[int, bytes]) -> bytes:
        """Return the copy that counts, of one or two."""
        numbers = list(data)
        refused = self._suspects.pop(key, (-1, 0, 0))[0]
        if len(numbers) > 1 and data[numbers[0]] != data[numbers[1]]:
            sealed = [number for number in numbers if is_sealed(data[number])]
            if len(sealed) == 1:
                self.doubt(next(number for number in numbers if number != sealed[0]), f"{key} is damaged there")
                numbers = sealed
            elif refused in numbers:
                self.doubt(refused, f"{key} is damaged there")
                numbers.remove(refused)
        number = numbers[-1]  # the copy at the second place decides
        self.served(key, 0, len(data[number]), number)
        return data[number]

    def open(self, key: str) -> Reader:
        """See ``ByteStore``. Reads go to the faster drive, and to the other if it fails or takes long."""
        self._at(key)
        if not self._is_there():
            raise CheckpointNotFound("no such file: the store does not exist yet", where=key)
        for _ in range(_TRIES):
            view = self.view()
            try:
                return MirrorReader(self, key, [self._drives[number] for number in self._order(view, key)])
            except CheckpointNotFound:
                if self.view() == view:
                    raise
        raise StoreUnavailable("the state of the store's drives keeps changing", where=self.url)

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``. Lists the union of the good places."""
        check_key(prefix)
        for _ in range(_TRIES):
            if not self._is_there():
                return iter(())
            view = self.view()
            outcome = self._on_all(view, lambda drive: list(drive.place.list(prefix)), doubted=False)
            for number, error in outcome.items():
                if isinstance(error, RelightError) and self._looks_there(number):
                    if not self._is_fault(number, error):
                        raise error
                    self.doubt(number, f"{prefix}: {error.what}", required=True)
            if self.view() == view:
                entries = {entry.name: entry for listed in reversed(outcome.values()) for entry in listed}
                if not prefix:
                    entries = {name: entry for name, entry in entries.items() if not is_own(name)}
                return iter(entries.values())
        raise StoreUnavailable("the state of the store's drives keeps changing", where=self.url)

    def delete(self, key: str) -> None:
        """See ``ByteStore``. At the first place first: a name that only the first place has is completed by readers."""
        self._at(key)
        if not self._is_there():
            return
        view = self.view(writing=True)
        for number in self._order(view, key):
            outcome = run_on([self._drives[number]], lambda drive: drive.place.delete(key), self._witnesses(view))
            if isinstance(outcome[number], RelightError):
                self.failed(number, outcome[number])

    def delete_dir(self, prefix: str) -> bool:
        """See ``ByteStore``."""
        check_key(prefix)
        if not self._is_there():
            return True
        if any(True for _ in self.list(prefix)):
            return False
        gone = True
        for number, outcome in self._on_all(self.view(writing=True), lambda drive: drive.place.delete_dir(prefix)).items():
            if isinstance(outcome, RelightError):
                self.failed(number, outcome)
            elif self.view().statuses[number] == GOOD:
                gone = gone and outcome
        return gone

    def free_bytes(self) -> int | None:
        """Return the bytes that evenly distributed packs can take, each twice, before the first drive is full."""
        view = self.view() if self._state is not None else None
        rooms = []
        for number, (root, place) in enumerate(zip(self._roots, self._places, strict=True)):
            if view is None or view.statuses[number] != AWAY:
                room = place.free_bytes()
                if room is None:
                    return None
                rooms.append((room, sum(self._device(root) == self._device(other) for other in self._roots)))
        return min((room * len(self._places) // (COPIES * share) for room, share in rooms), default=None)

    def without_cache(self) -> MirroredStore:
        """See ``CachesBlocks``. There is no cache; but ``invalidate`` makes the next read come from the other drive."""
        return self

    def invalidate(self, key: str, offset: int = 0, length: int | None = None) -> None:
        """See ``CachesBlocks``. The caller refuses what it read: the next read comes from the other drive, and is compared."""
        for served, start, size, number in reversed(self._served):
            if served == key and start < offset + (size if length is None else length) and offset < start + size:
                self._suspects[key] = (number, start, size)
                return

    def served(self, key: str, offset: int, length: int, number: int) -> None:
        """Remember which drive a range was read from."""
        self._served.append((key, offset, length, number))

    def suspect(self, key: str) -> tuple[int, int, int] | None:
        """Return place, offset and length of bytes of ``key`` that a caller refused."""
        return self._suspects.get(key)

    def compared(self, key: str) -> None:
        """Forget what was refused, after it was compared with the other drive's."""
        self._suspects.pop(key, None)

    # -- the drives' states

    def statuses(self) -> list[DriveStatus]:
        """Return the drives and their states, for people. Reads the present state, and changes nothing."""
        if not self._is_there():
            return [DriveStatus(root, GOOD, "", "") for root in self._roots]
        view, state = self.view(), self._state or MirrorState()
        rows = []
        for number, root in enumerate(self._roots):
            record = state.drives.get(number)
            since, why = (record.since, record.why) if record is not None else ("", self._absent.get(number, ""))
            rows.append(DriveStatus(root, view.statuses[number], since, why))
        return rows

    def drive(self, number: int) -> Drive:
        """Return the drive with this number."""
        return self._drives[number]

    def order(self, key: str) -> list[int]:
        """Return the places in which ``key`` is written now."""
        return self._order(self.view(writing=True), key)

    def view(self, *, writing: bool = False) -> MirrorView:
        """Return the drives' present states.

        ``writing``: before anything is written without a drive that is missing, set it away durably. Raise ``StoreUnavailable`` if no whole
        copy is left.
        """
        with self._changing:
            state = self._current()
            for _ in range(_TRIES):
                statuses = tuple(
                    AWAY if number in self._absent else state.status(number) for number in range(len(self._drives))
                )
                if not covers(statuses):
                    self._refuse(statuses)
                lost = {number: why for number, why in self._absent.items() if state.status(number) != AWAY}
                if not writing or not lost:
                    return MirrorView(state.number, statuses)
                self.change({number: AWAY for number in lost}, "; ".join(lost.values()))
                state = self._current()
        raise StoreUnavailable("the state of the store's drives keeps changing", where=self.url)

    def change(self, changes: dict[int, str], why: str, *, also: Sequence[int] = ()) -> None:
        """Publish a state in which ``changes`` hold. ``also``: further places that must have it. Return without a change if another
        process was first."""
        with self._changing:
            state = self._current(required=False)
            if all(state.status(number) == status for number, status in changes.items()):
                return
            new = state.changed(changes, why)
            statuses = [new.status(number) for number in range(len(self._drives))]
            if not covers(statuses):
                self._refuse(statuses, why)
            if not self._publish(new, {number for number, status in enumerate(statuses) if status == GOOD} | set(also)):
                self._state = None
                self._load()
                return
            self._state = new
        for number, status in changes.items():
            report(self._roots[number], status, why)

    def doubt(self, number: int, why: str, *, required: bool = False) -> None:
        """Note that a drive gave wrong bytes, or none, so that it is read last until it was scrubbed.

        ``required``: raise if that is not possible, as another drive is not whole either.
        """
        if self._status(number) != GOOD:
            return
        try:
            self.change({number: DOUBTED}, why)
        except StoreUnavailable:
            if required:
                raise

    def _status(self, number: int) -> str:
        return AWAY if number in self._absent else (self._state or MirrorState()).status(number)

    def _publish(self, new: MirrorState, needed: set[int]) -> bool:
        """Create the state's file on each drive that can be reached. Return False if another state has its number."""
        data, key = new.encode(self._stripe_id), state_file(new.number)

        def create(drive: Drive) -> bool:
            return drive.place.put_once(key, data) or drive.place.get(key, SEALED_BYTES_MAX) == data

        for drive in self._drives:
            if drive.number not in needed and not self._looks_there(drive.number):
                continue
            witnesses = [other for other in self._drives if other.number in needed]
            outcome = run_on([drive], create, witnesses)[drive.number]
            if outcome is False:
                return False
            if isinstance(outcome, RelightError) and drive.number in needed:
                raise outcome
        for number in needed:
            with contextlib.suppress(RelightError):
                place = self._places[number]
                for old in sorted(numbers_in(entry.name for entry in place.list("")))[:-KEPT]:
                    place.delete(state_file(old))
        return True

    def _is_there(self) -> bool:
        with self._changing:
            return self._state is not None or self._load()

    def _current(self, *, required: bool = True) -> MirrorState:
        """Return the newest state, and update which places are there."""
        if self._state is None and not self._load():
            raise StoreUnavailable("the store's files vanish while it is used", where=self.url)
        assert self._state is not None
        following = state_file(self._state.number + 1)
        for number in range(len(self._drives)):
            if self._state.status(number) == AWAY:
                continue
            if not self._looks_there(number):
                self._absent[number] = self._why_missing(number)
                continue
            self._absent.pop(number, None)
            if self._stat(os.path.join(self._roots[number], following)) is not None:
                self._state = None
                return self._current(required=required)
        if required and len(self._absent) == len(self._drives):
            raise StoreUnavailable("its places are gone", where=self.url, hint="are the drives mounted?")
        return self._state

    def _looks_there(self, number: int) -> bool:
        """Return whether the place has its stripe file. A remounted drive is recognised by that file's contents."""
        found = self._stat(os.path.join(self._roots[number], STRIPE_FILE))
        if found is None:
            return False
        if self._seen_at.get(number) == found:
            return True
        try:
            record = self._record(self._roots[number], self._places[number])
        except RelightError:
            return False
        if record is None or record.id != self._stripe_id or record.place != number:
            return False
        self._seen_at[number] = found
        return True

    def _stat(self, path: str) -> tuple[int, int] | None:
        try:
            status = self._disk.lstat(path)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _why_missing(self, number: int) -> str:
        root = self._roots[number]
        if not os.path.isdir(root):
            return f"{root} is not there"
        return f"{root} holds no {STRIPE_FILE}, or a damaged one"

    def _load(self) -> bool:
        """Read identity and state of all places. Return False if the store does not exist yet."""
        records, faults = self._records()
        if not records:
            if self._stripe_id or faults:
                raise next(iter(faults.values()), StoreUnavailable("its places are gone", where=self.url))
            return False
        self._compare([records.get(number) for number in range(len(self._roots))])
        there = {number: self._places[number] for number in records}
        if not self._stripe_id and len(records) < len(self._roots) and not faults and self._is_unfinished(there):
            return False
        self._stripe_id = next(iter(records.values())).id
        states: dict[int, MirrorState] = {}
        for number, place in list(there.items()):
            try:
                states |= read_states({number: place}, self._stripe_id, self.url)
            except StoreUnavailable as error:
                faults[number] = error
                del there[number]
        read_states(there, self._stripe_id, self.url)  # refuses drives that were used without each other
        self._state = max(states.values(), key=lambda state: state.number, default=MirrorState())
        self._absent = {
            number: str(faults[number].what) if number in faults else self._why_missing(number)
            for number in range(len(self._roots))
            if number not in there and self._state.status(number) != AWAY
        }
        for number, own in states.items():
            if own.number < self._state.number and self._state.status(number) == GOOD and self._missed_a_change(number):
                self._doubt_old(number)
        return True

    def _records(self) -> tuple[dict[int, StripeRecord], dict[int, RelightError]]:
        records, faults = dict[int, StripeRecord](), dict[int, RelightError]()
        for number, (root, place) in enumerate(zip(self._roots, self._places, strict=True)):
            try:
                record = self._record(root, place)
            except RelightError as error:
                faults[number] = error
                continue
            if record is not None:
                records[number] = record
                found = self._stat(os.path.join(root, STRIPE_FILE))
                if found is not None:
                    self._seen_at[number] = found
        return records, faults

    def _missed_a_change(self, number: int) -> bool:
        """Return whether a good drive lacks the newest state, and no process is just writing it there."""
        assert self._state is not None
        for _ in range(CHANGE_TRIES):
            time.sleep(CHANGE_S / CHANGE_TRIES)
            with contextlib.suppress(RelightError):
                if read_states({number: self._places[number]}, self._stripe_id, "")[number].number >= self._state.number:
                    return False
        return True

    def _doubt_old(self, number: int) -> None:
        """Doubt a good drive without the newest state: it came back with old contents, or a power cut interrupted the change."""
        assert self._state is not None
        new = self._state.changed({number: DOUBTED}, "it lacks the newest state: an interrupted change, or old contents")
        if covers([new.status(place) for place in range(len(self._drives))]):
            with contextlib.suppress(RelightError):  # without the right to write, only this process knows
                self._publish(new, {place for place in range(len(self._drives)) if new.status(place) == GOOD})
            self._state = new
            report(self._roots[number], DOUBTED, new.drives[number].why)

    def _is_unfinished(self, there: dict[int, LocalStore]) -> bool:
        """Return whether the creation of the store was interrupted: no place has more than its stripe file."""
        names = {entry.name for place in there.values() for entry in place.list("")} - {"lost+found"}
        return all(is_own(name, states=False) for name in names)

    def _refuse(self, statuses: Sequence[str], why: str = "") -> NoReturn:
        bad = [f"{root} ({status})" for root, status in zip(self._roots, statuses, strict=True) if status != GOOD]
        reasons = [self._absent.get(number, "") for number in range(len(statuses))]
        details = [reason for reason in (*reasons, why) if reason]
        raise StoreUnavailable(
            f"no whole copy is left: {', '.join(bad)}",
            where=self.url,
            details=details,
            hint="mount the drives; if one was rebuilt only in part, relight scrub completes it",
        )

    # -- calls

    def _order(self, view: MirrorView, key: str, *, doubted: bool = True) -> list[int]:
        """Return the places of ``key`` in the order of creation: the good ones, then those that are doubted."""
        copies = self.copies_of(key)
        kinds = (GOOD, DOUBTED) if doubted else (GOOD,)
        return [number for kind in kinds for number in copies if view.statuses[number] == kind]

    def _witnesses(self, view: MirrorView) -> list[Drive]:
        return [drive for drive in self._drives if view.statuses[drive.number] == GOOD]

    def _run(self, view: MirrorView, numbers: Sequence[int], work: Callable[[Drive], Any]) -> Outcome:
        outcome = run_on([self._drives[number] for number in numbers], work, self._witnesses(view))
        return {number: outcome[number] for number in numbers}

    def _on_all(self, view: MirrorView, work: Callable[[Drive], Any], *, doubted: bool = True) -> Outcome:
        kinds = (GOOD, DOUBTED) if doubted else (GOOD,)
        return self._run(view, [number for number, status in enumerate(view.statuses) if status in kinds], work)

    def _is_fault(self, number: int, error: RelightError) -> bool:
        """Return whether an error of one drive is the drive's, so that the other is to be used alone."""
        if isinstance(error, NoSpace) or isinstance(error.__cause__, FileExistsError):
            return False
        if isinstance(error, CheckpointNotFound):
            return not self._looks_there(number)
        return isinstance(error, (StoreUnavailable, CorruptCheckpoint))

    def failed(self, number: int, error: RelightError) -> None:
        """Set a drive away, durably, after a call that changes the store failed there. Raise ``error`` if it is not the drive's."""
        if not self._is_fault(number, error):
            raise error
        try:
            self.change({number: AWAY}, f"{self._roots[number]}: {error.what}")
        except StoreUnavailable as second:
            raise error from second

    def read_failed(self, number: int, key: str, error: RelightError) -> None:
        """Note that one drive could not read what the other could."""
        if self._looks_there(number):
            self.doubt(number, f"{key}: {error.what}")

    def good_drives(self) -> list[Drive]:
        """Return the good drives, as known without a look at them."""
        return [drive for drive in self._drives if self._status(drive.number) == GOOD]

    def _install(self, number: int, key: str, data: bytes) -> None:
        """Make a drive's copy of a small file equal to the other's."""
        try:
            write_whole(self._places[number].install(key, len(data)), data)
        except RelightError as error:
            self.failed(number, error)

    def copy_file(
        self,
        key: str,
        source: int,
        target: int,
        progress: Callable[[int], None] | None = None,
        *,
        only_if_missing: bool = False,
    ) -> int:
        """Copy a file from one place to another. Return its bytes. ``only_if_missing``: do not replace a file there."""
        return copy_bytes_of(self._places[source], self._places[target], key, progress, only_if_missing=only_if_missing)

    def is_place(self, number: int) -> bool:
        """Return whether the drive's directory is there, with the stripe file of this place."""
        return self._looks_there(number)

    def identify(self, number: int) -> None:
        """Make a new drive's directory this place. Raise ``ConfigError`` if it has other contents."""
        root, place = self._roots[number], self._places[number]
        if self.view().statuses[number] == GOOD:
            raise ConfigError(f"{root} is in use, and whole", where=self.url, hint="only a drive that is away is replaced")
        if not os.path.isdir(root):
            raise ConfigError(f"{root} is not there", where=self.url, hint="mount the new drive, and make this directory on it")
        names = {entry.name for entry in place.list("") if not is_own(entry.name)} - {"lost+found"}
        if names and not self._looks_there(number) and not self._is_damaged(number):
            raise ConfigError(f"{root} is not empty", where=self.url, hint="empty it, if it is the right directory")
        for old in numbers_in(entry.name for entry in place.list("")):
            place.delete(state_file(old))
        data = encode_stripe(StripeRecord(id=self._stripe_id, place=number, places=len(self._places), mirrors=COPIES))
        write_whole(place.install(STRIPE_FILE, len(data)), data)
        place.sync("")

    def _is_damaged(self, number: int) -> bool:
        """Return whether a directory has a stripe file that is unreadable: the remains of this place."""
        try:
            self._record(self._roots[number], self._places[number])
        except StoreUnavailable:
            return True
        return False


def is_sealed(data: bytes) -> bool:
    """Return whether ``data`` is a sealed file without damage."""
    try:
        sealed_payload(data, "")
    except RelightError:
        return False
    return True


def is_own(name: str, *, states: bool = True) -> bool:
    """Return whether a name at the top of a place is the mirrored store's own, or a temporary of it."""
    name = temporary_of(name) or name
    return name == STRIPE_FILE or (states and MIRRORS_FILE.match(name) is not None)


_EVENTS = {AWAY: "store.mirror_away", DOUBTED: "store.mirror_doubted", GOOD: "store.mirror_back"}
_THEN = {
    AWAY: "is set away; saves go on with one copy: relight doctor shows it, relight scrub rebuilds it",
    DOUBTED: "is doubted, and read last: relight scrub compares and repairs it",
    GOOD: "is whole again",
}


def report(root: str, status: str, why: str) -> None:
    """Emit that a drive's status changed."""
    emit(_EVENTS[status], f"drive {root} {_THEN[status]}" + (f" ({why})" if why else ""), folder=root, detail=why)
