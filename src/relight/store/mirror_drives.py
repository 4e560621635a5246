"""Drives of a mirrored store: which are present, which are whole, and how that changes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, NoSpace, RelightError, StoreUnavailable
from relight.format.names import MIRRORS_FILE, STRIPE_FILE
from relight.format.records import StripeRecord, encode_stripe
from relight.format.strict import SEALED_BYTES_MAX
from relight.observe import emit
from relight.settings.environment import environment
from relight.store.base import write_whole
from relight.store.disk import Disk
from relight.store.durable import temporary_of
from relight.store.local import LocalStore
from relight.store.mirror_calls import Drive, run_on
from relight.store.mirror_state import (
    AWAY,
    DOUBTED,
    GOOD,
    KEPT,
    MirrorState,
    covers,
    is_sealed,
    numbers_in,
    read_states,
    state_file,
)
from relight.store.striped import StripedStore

COPIES = 2
TRIES = 20
CHANGING = "the operation was repeated too often: the state of the store's drives keeps changing"
CHANGE_S, CHANGE_TRIES = 0.5, 5
"""Seconds within which a process that changes the state, creates a file or deletes one reaches all drives, and the number of checks
meanwhile."""


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


class DriveStates(StripedStore):
    """A striped store with each file in two places, as far as its drives' states go. ``MirroredStore`` has the operations."""

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
        limit_s = environment().mirror_wait_s if wait_s is None else wait_s
        self._drives = [Drive(number, place, limit_s, threads=threads) for number, place in enumerate(self._places)]
        self._state: MirrorState | None = None
        """None: not read yet, or the store does not exist."""
        self._stripe_id = ""
        self._seen_at: dict[int, tuple[int, int]] = {}
        """Device and inode of the stripe file of each place that is there."""
        self._absent: dict[int, str] = {}
        """Places that are not usable in this process, though no state has it, with the reason."""
        self._changing = threading.RLock()

    def copies_of(self, key: str) -> tuple[int, int]:
        """Return the places of a file's two copies."""
        first = self.place_of(key)
        return first, (first + 1) % len(self._places)

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

    def view(self, *, writing: bool = False) -> MirrorView:
        """Return the drives' present states.

        ``writing``: before anything is written without a drive that is missing, set it away durably. Raise ``StoreUnavailable`` if no whole
        copy is left.
        """
        with self._changing:
            state = self._current()
            for _ in range(TRIES):
                statuses = tuple(
                    AWAY if number in self._absent else state.status(number) for number in range(len(self._drives))
                )
                if not covers(statuses):
                    self._refuse(statuses)
                lost = {number: why for number, why in self._absent.items() if state.status(number) != AWAY}
                if not writing or not lost:
                    return MirrorView(state.number, statuses)
                self.change(dict.fromkeys(lost, AWAY), "; ".join(lost.values()))
                state = self._current()
        raise StoreUnavailable(CHANGING, where=self.url)

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
            else:
                self._state = new
            self._report_since(state)

    def _report_since(self, before: MirrorState) -> None:
        """Emit what has changed since a state: this process changed it, or it has just read what another process changed."""
        now = self._state or before
        for number, root in enumerate(self._roots):
            if now.status(number) != before.status(number):
                report(root, now.status(number), now.drives[number].why if number in now.drives else "")

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

    def has_lost(self, number: int, key: str) -> bool:
        """Return whether a good drive lacks a file that the other has. Wait for a process that is creating or deleting it."""
        if self._status(number) != GOOD:
            return False
        drives = [self._drives[place] for place in self.copies_of(key)]
        for _ in range(CHANGE_TRIES):
            time.sleep(CHANGE_S / CHANGE_TRIES)
            has = run_on(drives, lambda drive: _has(drive.place, key), self.good_drives())
            if any(present is not (place != number) for place, present in has.items()):
                return False
        return True

    def _status(self, number: int) -> str:
        return AWAY if number in self._absent else (self._state or MirrorState()).status(number)

    def _publish(self, new: MirrorState, needed: set[int]) -> bool:
        """Create the state's file on each drive that can be reached. Return False if another state has its number."""
        data, key = new.encode(self._stripe_id), state_file(new.number)

        def create(drive: Drive) -> bool:
            if drive.place.put_once(key, data):
                return True
            existing = drive.place.get(key, SEALED_BYTES_MAX)
            if not is_sealed(existing):  # damage
                write_whole(drive.place.install(key, len(data)), data)
                return True
            return existing == data

        for drive in self._drives:
            if drive.number not in needed and not self._is_present(drive.number):
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
        state = self._state if self._state is not None else self._reloaded()
        following = state_file(state.number + 1)
        for number in range(len(self._drives)):
            if state.status(number) == AWAY:
                continue
            if not self._is_present(number):
                self._absent[number] = self._why_missing(number)
                continue
            self._absent.pop(number, None)
            has_more = self._stat(os.path.join(self._roots[number], following)) is not None
            if has_more and self._reloaded().number > state.number:  # else that file is damaged
                self._report_since(state)
                return self._current(required=required)
        if len(self._absent) == len(self._drives) and self._is_another_store():
            return self._reloaded()
        if required and len(self._absent) == len(self._drives):
            raise StoreUnavailable(
                "all directories of this store are missing", where=self.url, hint="are the drives mounted?"
            )
        return state

    def _is_another_store(self) -> bool:
        """Return whether the store was deleted, and a new one was created in all places. Then forget the first one."""
        seen = dict(self._seen_at)
        records, _ = self._records()
        ids = {record.id for record in records.values()}
        if len(records) < len(self._roots) or len(ids) != 1 or self._stripe_id in ids:
            self._seen_at = seen
            return False
        self._stripe_id, self._absent = "", {}
        return True

    def _reloaded(self) -> MirrorState:
        self._state = None
        if self._load() and (state := self._state) is not None:
            return state
        raise StoreUnavailable("another process deletes the store's files while it is used", where=self.url)

    def _is_present(self, number: int) -> bool:
        """Return whether the place has its stripe file. A remounted drive is recognised by that file's contents."""
        identity = self._stat(os.path.join(self._roots[number], STRIPE_FILE))
        if identity is None:
            return False
        if self._seen_at.get(number) == identity:
            return True
        try:
            record = self._record(self._roots[number], self._places[number])
        except RelightError:
            return False
        if record is None or record.id != self._stripe_id or record.place != number:
            return False
        self._seen_at[number] = identity
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
                raise next(
                    iter(faults.values()), StoreUnavailable("all directories of this store are missing", where=self.url)
                )
            return False
        self._compare([records.get(number) for number in range(len(self._roots))])
        present = {number: self._places[number] for number in records}
        if not self._stripe_id and len(records) < len(self._roots) and not faults and self._is_unfinished(present):
            return False
        self._stripe_id = next(iter(records.values())).id
        states: dict[int, MirrorState] = {}
        for number, place in list(present.items()):
            try:
                states |= read_states({number: place}, self._stripe_id, self.url)
            except StoreUnavailable as error:
                faults[number] = error
                del present[number]
        read_states(present, self._stripe_id, self.url)  # refuses drives that were used without each other
        for place in self._places:
            place.must_exist = True
        self._state = max(states.values(), key=lambda state: state.number, default=MirrorState())
        self._absent = {
            number: str(faults[number].what) if number in faults else self._why_missing(number)
            for number in range(len(self._roots))
            if number not in present and self._state.status(number) != AWAY
        }
        for number, own in states.items():
            if own.number < self._state.number and self._state.status(number) == AWAY:
                self._inform(number)
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
                identity = self._stat(os.path.join(root, STRIPE_FILE))
                if identity is not None:
                    self._seen_at[number] = identity
        return records, faults

    def _inform(self, number: int) -> None:
        """Write to a drive that is back that it is away: else it would count as whole if the other were lost now."""
        assert self._state is not None
        with contextlib.suppress(RelightError):
            self._places[number].put_once(state_file(self._state.number), self._state.encode(self._stripe_id))

    def _missed_a_change(self, number: int) -> bool:
        """Return whether a good drive lacks the newest state, and no process is just writing it there."""
        assert self._state is not None
        for _ in range(CHANGE_TRIES):
            time.sleep(CHANGE_S / CHANGE_TRIES)
            with contextlib.suppress(RelightError):
                if (
                    read_states({number: self._places[number]}, self._stripe_id, "")[number].number
                    >= self._state.number
                ):
                    return False
        return True

    def _doubt_old(self, number: int) -> None:
        """Doubt a good drive without the newest state: it came back with old contents, or a power cut interrupted the change."""
        assert self._state is not None
        new = self._state.changed(
            {number: DOUBTED}, "it lacks the newest state: an interrupted change, or old contents"
        )
        if covers([new.status(place) for place in range(len(self._drives))]):
            with contextlib.suppress(RelightError):  # without the right to write, only this process knows
                self._publish(new, {place for place in range(len(self._drives)) if new.status(place) == GOOD})
            self._state = new
            report(self._roots[number], DOUBTED, new.drives[number].why)

    def _is_unfinished(self, present: dict[int, LocalStore]) -> bool:
        """Return whether the creation of the store was interrupted: no place has more than its stripe file."""
        names = {entry.name for place in present.values() for entry in place.list("")} - {"lost+found"}
        return all(is_own(name, states=False) for name in names)

    def _refuse(self, statuses: Sequence[str], why: str = "") -> NoReturn:
        bad = [f"{root} ({status})" for root, status in zip(self._roots, statuses, strict=True) if status != GOOD]
        reasons = [self._absent.get(number, "") for number in range(len(statuses))]
        details = [reason for reason in (*reasons, why) if reason]
        raise StoreUnavailable(
            f"no whole copy is left: {', '.join(bad)}",
            where=self.url,
            details=details,
            hint="mount the drives; if one was rebuilt only in part, relight verify --repair completes it",
        )

    def is_place(self, number: int) -> bool:
        """Return whether the drive's directory is present, with the stripe file of this place."""
        return self._is_present(number)

    def identify(self, number: int) -> None:
        """Make a new drive's directory this place. Raise ``ConfigError`` if it has other contents."""
        root, place = self._roots[number], self._places[number]
        if self.view().statuses[number] == GOOD:
            raise ConfigError(
                f"{root} is in use, and whole", where=self.url, hint="only a drive that is away is replaced"
            )
        if not os.path.isdir(root):
            raise ConfigError(
                f"{root} is not there", where=self.url, hint="mount the new drive, and make this directory on it"
            )
        names = {entry.name for entry in place.list("") if not is_own(entry.name)} - {"lost+found"}
        if names and not self._is_present(number) and not self._is_damaged(number):
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

    def good_drives(self) -> list[Drive]:
        """Return the good drives, as known without a check."""
        return [drive for drive in self._drives if self._status(drive.number) == GOOD]

    def failed(self, number: int, error: RelightError) -> None:
        """Set a drive away, durably, after a call that changes the store failed there. Raise ``error`` if it is not the drive's."""
        if not self._is_fault(number, error):
            raise error
        try:
            self.change({number: AWAY}, f"{self._roots[number]}: {error.what}")
        except StoreUnavailable as second:
            raise error from second

    def _is_fault(self, number: int, error: RelightError) -> bool:
        """Return whether an error of one drive is the drive's, so that the other must be used alone."""
        if isinstance(error, NoSpace) or isinstance(error.__cause__, FileExistsError):
            return False
        if isinstance(error, CheckpointNotFound):
            return not self._is_present(number)
        return isinstance(error, (StoreUnavailable, CorruptCheckpoint))


def _has(place: LocalStore, key: str) -> bool:
    """Return whether a directory has a file."""
    try:
        place.open(key).close()
    except CheckpointNotFound:
        return False
    return True


def is_own(name: str, *, states: bool = True) -> bool:
    """Return whether a name at the top of a place is the mirrored store's own, or a temporary of it."""
    name = temporary_of(name) or name
    return name == STRIPE_FILE or (states and MIRRORS_FILE.match(name) is not None)


_THEN = {
    AWAY: "is set away; saves continue with one copy: relight doctor shows it, relight verify --repair rebuilds it",
    DOUBTED: "is doubted, and read last: relight verify --repair compares and repairs it",
    GOOD: "is whole again",
}


def report(root: str, status: str, why: str) -> None:
    """Emit that a drive's status changed."""
    text = f"drive {root} {_THEN[status]}" + (f" ({why})" if why else "")
    if status == AWAY:
        emit("store.mirror_away", text, folder=root, detail=why)
    elif status == DOUBTED:
        emit("store.mirror_doubted", text, folder=root, detail=why)
    else:
        emit("store.mirror_back", text, folder=root, detail=why)
