"""Files of a mirrored store: written to two drives at once, read from the faster one.

All calls to a drive use buffers of this module, because a call that hangs ends after the caller has continued with the other drive.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from relight.errors import CheckpointNotFound, NoSpace, RelightError, StoreUnavailable
from relight.store.base import PAGE, Reader, Writer
from relight.store.buffers import page_buffer
from relight.store.local import LocalStore
from relight.store.mirror_calls import CallBuffers, Drive, Outcome, run_on

HEDGE_S = 0.5
"""Shortest time after which a read is also sent to the other drive."""
HEDGE_FACTOR = 4
"""Multiple of a read's usual time after which it is also sent to the other drive."""
COPY_BYTES = 4 << 20


class _UnfinishedCopy:
    """One copy that is being written. Its file is closed after the last call has ended: the number of a closed file is used again."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self.align = writer, writer.align
        self._calls, self._aborted = 0, False
        self._lock = threading.Lock()

    def call(self, work: Callable[[Writer], None]) -> None:
        with self._lock:
            if self._aborted:
                raise StoreUnavailable("this copy was aborted")
            self._calls += 1
        try:
            work(self._writer)
        finally:
            with self._lock:
                self._calls -= 1
                ends = self._aborted and not self._calls
            if ends:
                self._writer.abort()

    def abort(self) -> None:
        with self._lock:
            ends, self._aborted = not self._calls, True
        if ends:
            self._writer.abort()


class Mirror(Protocol):
    """What a file needs of its ``MirroredStore``, which documents it."""

    rooms: CallBuffers

    def order(self, key: str) -> Sequence[int]:
        """See ``MirroredStore``."""

    def copies_of(self, key: str) -> tuple[int, int]:
        """See ``DriveStates``."""

    def drive(self, number: int) -> Drive:
        """See ``DriveStates``."""

    def good_drives(self) -> list[Drive]:
        """See ``DriveStates``."""

    def failed(self, number: int, error: RelightError) -> None:
        """See ``DriveStates``."""

    def doubt(self, number: int, why: str, *, required: bool = False) -> None:
        """See ``DriveStates``."""

    def has_lost(self, number: int, key: str) -> bool:
        """See ``DriveStates``."""

    def read_failed(self, number: int, key: str, error: RelightError) -> None:
        """See ``MirroredStore``."""

    def copy_file(self, key: str, source: int, target: int) -> int:
        """See ``MirroredStore``."""

    def served(self, key: str, offset: int, length: int, number: int) -> None:
        """See ``MirroredStore``."""

    def suspect(self, key: str) -> tuple[int, int, int] | None:
        """See ``MirroredStore``."""

    def compared(self, key: str) -> None:
        """See ``MirroredStore``."""


class MirrorWriter:
    """Writes each copy of a file. A drive that fails is set away, durably, before ``finish`` returns. See ``Writer``."""

    def __init__(self, store: Mirror, key: str, size: int, make: Callable[[Drive], Writer]) -> None:
        self._store, self._key = store, key
        self._copies: dict[int, _UnfinishedCopy] = {}
        self._dropped: dict[int, _UnfinishedCopy] = {}
        self._lock = threading.Lock()
        order = store.order(key)
        good = {drive.number for drive in store.good_drives()}
        # the place that decides first, so that no reader finds the file at the other alone and completes it
        for number in sorted(order, key=lambda number: (number not in good, -order.index(number))):
            self._open(number, make, doubted=number not in good)
        self._whole = good & set(self._copies)
        self.align = max(copy.align for copy in self._copies.values())

    def _open(self, number: int, make: Callable[[Drive], Writer], *, doubted: bool) -> None:
        drive = self._store.drive(number)
        for last in (False, True):
            outcome = run_on([drive], make, self._store.good_drives())[number]
            if not isinstance(outcome, RelightError):
                self._copies[number] = _UnfinishedCopy(outcome)
                return
            if (
                doubted and not last and isinstance(outcome.__cause__, FileExistsError)
            ):  # what an earlier writer or a rebuild left
                drive.place.delete(self._key)
                continue
            try:
                self._store.failed(number, outcome)
            except RelightError:
                self.abort()
                raise
            return

    def write_at(self, offset: int, data: memoryview) -> None:
        """See ``Writer``."""
        data = data.cast("B")
        room = self._store.rooms.take(len(data))
        piece = room[: len(data)]
        piece[:] = data
        if self._on_all(lambda writer: writer.write_at(offset, piece)):
            self._store.rooms.give(room)

    def finish(self, size: int | None = None) -> None:
        """See ``Writer``."""
        self._on_all(lambda writer: writer.finish(size))
        # a drive that is being rebuilt since this writer began has no copy yet
        for number in self._store.order(self._key):
            if number not in self._copies:
                try:
                    self._store.copy_file(self._key, next(iter(self._copies)), number)
                except RelightError as error:
                    self._store.failed(number, error)
        with self._lock:
            left = self._whole & set(self._copies)
        if not left & set(self._store.order(self._key)):
            raise StoreUnavailable("no drive has the whole file any more", where=self._key)

    def abort(self) -> None:
        """See ``Writer``. Deletes at the first place first, like ``delete``."""
        with self._lock:
            copies = {**self._dropped, **self._copies}
        first = self._store.copies_of(self._key)[0]
        for number in sorted(copies, key=lambda number: number != first):
            self._abort(number, copies[number])

    def _abort(self, number: int, copy: _UnfinishedCopy) -> None:
        drive = self._store.drive(number)
        if number in self._dropped:
            drive.submit(copy.abort)
        else:
            run_on([drive], lambda _: copy.abort(), self._store.good_drives())

    def _on_all(self, work: Callable[[Writer], None]) -> bool:
        """Do ``work`` for each copy. Return whether no call is still under way."""
        with self._lock:
            copies = dict(self._copies)
        drives = [self._store.drive(number) for number in copies]
        outcome: Outcome = run_on(drives, lambda drive: copies[drive.number].call(work), self._store.good_drives())
        errors = {number: error for number, error in outcome.items() if isinstance(error, RelightError)}
        if len(errors) == len(outcome):
            raise next((error for error in errors.values() if isinstance(error, NoSpace)), next(iter(errors.values())))
        for number, error in errors.items():
            self._store.failed(number, error)
            with self._lock:
                if number in self._copies:
                    self._dropped[number] = self._copies.pop(number)
                    self._abort(number, self._dropped[number])
        return not errors


class MirrorReader:
    """Reads a file from the faster of its drives. Takes the other if one fails, or takes long. See ``Reader``."""

    def __init__(self, store: Mirror, key: str, drives: Sequence[Drive]) -> None:
        self._store, self._key = store, key
        outcome = run_on(drives, lambda drive: drive.place.open(key), store.good_drives())
        self._readers: dict[int, Reader] = {
            number: reader for number, reader in outcome.items() if not isinstance(reader, RelightError)
        }
        self._drives = {drive.number: drive for drive in drives if drive.number in self._readers}
        errors = {drive.number: outcome[drive.number] for drive in drives if drive.number not in self._readers}
        if not self._readers:
            raise self._why_not(errors)
        self.size = max(reader.size for reader in self._readers.values())
        for number, reader in list(self._readers.items()):
            if reader.size < self.size:
                errors[number] = CheckpointNotFound(f"only {reader.size} of {self.size} bytes are there", where=key)
                self._drives.pop(number)
        for number, error in errors.items():
            if number in self._readers or not isinstance(error, CheckpointNotFound) or store.has_lost(number, key):
                store.read_failed(number, key, error)

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        """See ``Reader``."""
        self.read_into(offset, room[:length])
        return room[:length]

    def read_into(self, offset: int, into: memoryview) -> None:
        """See ``Reader``."""
        into = into.cast("B")
        left, suspect = self._in_turn(len(into)), self._store.suspect(self._key)
        running: dict[Future[tuple[memoryview, memoryview]], Drive] = {}
        errors: dict[int, RelightError] = {}
        while True:
            if left and not running:
                running |= self._start(left.pop(0), offset, len(into))
            usual_s = len(into) / max(drive.rate_bps for drive in self._drives.values())
            # a drive with bytes that the caller has refused is no help against a slow one
            may_hedge = left and (suspect is None or left[0].number != suspect[0])
            hedge_s = max(HEDGE_S, HEDGE_FACTOR * usual_s) if may_hedge else None
            done, _ = concurrent.futures.wait(running, hedge_s, concurrent.futures.FIRST_COMPLETED)
            if not done:
                running |= self._start(left.pop(0), offset, len(into))
            for future in done:
                drive = running.pop(future)
                error = future.exception()
                if error is None:
                    room, data = future.result()
                    into[:] = data
                    self._store.rooms.give(room)
                    self._finished(drive, offset, into, running, errors)
                    return
                if not isinstance(error, RelightError):
                    raise error
                errors[drive.number] = error
                if not running and not left:
                    raise error

    def close(self) -> None:
        """See ``Reader``."""
        for reader in self._readers.values():
            reader.close()

    def _why_not(self, errors: dict[int, RelightError]) -> RelightError:
        """Return the error if no drive opened the file. It does not exist if a good drive does not have it."""
        good = {drive.number for drive in self._store.good_drives()}
        mine = {number: error for number, error in errors.items() if number in good} or errors
        missing = next((error for error in mine.values() if isinstance(error, CheckpointNotFound)), None)
        for number, error in mine.items() if missing is not None else ():
            if not isinstance(error, CheckpointNotFound):
                self._store.doubt(number, f"{self._key}: {error.what}", required=True)
        return missing or next(iter(mine.values()))

    def _in_turn(self, length: int) -> list[Drive]:
        """Return the drives in the order in which they are tried: the one that would have the bytes first comes first."""
        suspect, whole = self._store.suspect(self._key), {drive.number for drive in self._store.good_drives()}

        def wait(drive: Drive) -> tuple[bool, bool, float]:
            refused = suspect is not None and drive.number == suspect[0]
            return refused, drive.number not in whole, (drive.queued + length) / drive.rate_bps

        return sorted(self._drives.values(), key=wait)

    def _start(self, drive: Drive, offset: int, length: int) -> dict[Future[tuple[memoryview, memoryview]], Drive]:
        drive.queued += length
        future = drive.submit(partial(self._read, drive, offset, length))
        return {future: drive}

    def _read(self, drive: Drive, offset: int, length: int) -> tuple[memoryview, memoryview]:
        reader, room, began = self._readers[drive.number], self._store.rooms.take(length + 2 * PAGE), time.monotonic()
        try:
            data = reader.fetch(offset, length, room[: length + 2 * PAGE])
            if data is None:
                data = room[:length]
                reader.read_into(offset, data)
        finally:
            drive.queued -= length
        drive.measured(length, time.monotonic() - began)
        return room, data

    def _finished(
        self,
        drive: Drive,
        offset: int,
        data: memoryview,
        running: dict[Future[tuple[memoryview, memoryview]], Drive],
        errors: dict[int, RelightError],
    ) -> None:
        for slower in running.values():  # it counts as slow until a read shows otherwise
            slower.rate_bps = min(slower.rate_bps, drive.rate_bps / HEDGE_FACTOR)
        for other in self._drives.values():
            if other is not drive and not running:
                other.rate_bps = max(other.rate_bps, min(other.rate_bps * 1.02, drive.rate_bps))
        self._store.served(self._key, offset, len(data), drive.number)
        for number, error in errors.items():
            self._store.read_failed(number, self._key, error)
        suspect = self._store.suspect(self._key)
        if suspect is not None and suspect[0] != drive.number:
            self._compare(drive, *suspect)

    def _compare(self, drive: Drive, suspect: int, offset: int, length: int) -> None:
        """Doubt a drive if a caller refused its bytes, and they differ from the other's."""
        copies = [memoryview(bytearray(length)) for _ in range(2)]
        self._store.compared(self._key)
        with contextlib.suppress(RelightError, KeyError):
            for number, copy in zip((suspect, drive.number), copies, strict=True):
                self._readers[number].read_into(offset, copy)
            if copies[0] != copies[1]:
                self._store.doubt(suspect, f"{self._key} is damaged there, at byte {offset} or after it")


def copy_bytes_of(
    source: LocalStore,
    target: LocalStore,
    key: str,
    progress: Callable[[int], None] | None = None,
    *,
    only_if_missing: bool = False,
) -> int:
    """Copy a file from one directory to another. Return its bytes."""
    reader = source.open(key)
    try:
        writer = target.install(key, reader.size, only_if_missing=only_if_missing)
        try:
            room = page_buffer(min(COPY_BYTES, -(-max(reader.size, 1) // PAGE) * PAGE))
            for offset in range(0, reader.size, COPY_BYTES):
                length = min(COPY_BYTES, reader.size - offset)
                reader.read_into(offset, room[:length])
                writer.write_at(offset, room[: -(-length // writer.align) * writer.align])
                if progress is not None:
                    progress(length)
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        return reader.size
    finally:
        reader.close()
