"""Several local directories as one store in which each file is on two of them (mirroring), so that any one drive may be lost.

A file of place p is also at place p + 1. *Good* drives have every file. A drive that fails is set *away*, durably on the others, before
anything is written without it; it then counts as empty until ``relight verify --repair`` has rebuilt it. A drive that gave wrong bytes,
or is being rebuilt, is *doubted*: it is written, and read last. The last good copy of anything is never set away.

*Orders of the two calls.* A power cut may prevent the second one. A name is created (``put_once``) at p first, and exists once it
is at p + 1: a reader that finds it at p alone completes it. Files are written at p + 1 first and deleted at p first, so no reader
completes those.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from relight.errors import (
    CheckpointNotFound,
    RelightError,
    StoreUnavailable,
)
from relight.format.names import is_record_key
from relight.format.strict import SEALED_BYTES_MAX
from relight.store.base import Entry, Reader, Uncertain, Writer, check_key, write_whole
from relight.store.disk import Disk
from relight.store.mirror_calls import CallBuffers, Drive, DriveTooSlow, Outcome, run_on
from relight.store.mirror_drives import CHANGING, COPIES, TRIES, DriveStates, MirrorView, is_own
from relight.store.mirror_files import MirrorReader, MirrorWriter, copy_bytes_of
from relight.store.mirror_state import AWAY, DOUBTED, GOOD, is_sealed
from relight.store.striped import MIRRORS, SCHEME

_SERVED = 512


class MirroredStore(DriveStates):
    """The directories ``places``, in this order, as one store in which each file is in two of them.

    Construction does not touch a disk. Thread-safe. ``wait_s``: how long a drive may keep the others waiting, in addition to a tenth of the
    time, before it is set away; None: the setting. ``threads``: False makes all calls in the caller's thread, without that limit.
    """

    def __init__(
        self,
        places: Sequence[str | os.PathLike[str]],
        *,
        disk: Disk | None = None,
        direct: bool = True,
        wait_s: float | None = None,
        threads: bool = True,
    ) -> None:
        super().__init__(places, disk=disk, direct=direct, wait_s=wait_s, threads=threads)
        self._properties = replace(self._properties, lanes=max(1, len(self._places) // COPIES))
        self.url = f"{SCHEME}{MIRRORS}{','.join(self._roots)},"
        self._served: deque[tuple[str, int, int, int]] = deque(maxlen=_SERVED)
        """Key, offset, length and place of the latest reads."""
        self._suspects: dict[str, tuple[int, int, int]] = {}
        """Place, offset and length of bytes that a caller refused."""
        self.rooms = CallBuffers()

    def __repr__(self) -> str:
        return f"MirroredStore({self._roots!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (MirroredStore, (self._roots,))

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``. Its creation at the last good place decides."""
        self._at(key)
        self._make()
        made_at, sent_to = set[int](), set[int]()
        try:
            for _ in range(TRIES):
                view = self.view(writing=True)
                content, order = self._create(view, key, data, made_at, sent_to)
                if self.view(writing=True).number == view.number and order:
                    return order[0] in made_at and content == data
            raise StoreUnavailable(CHANGING, where=self.url)
        except Uncertain:
            raise
        except RelightError as error:
            if sent_to:
                raise Uncertain(f"it may have been created: {error.what}", where=key) from error
            raise

    def _create(
        self, view: MirrorView, key: str, data: bytes, made_at: set[int], sent_to: set[int]
    ) -> tuple[bytes, Sequence[int]]:
        """Create ``key`` in its places. Return what it holds, and the places; none if the state of the drives changed meanwhile.

        ``made_at`` gets the places that this call has created it at, ``sent_to`` also those where a late call may still create it.
        """
        content, order = data, self._order(view, key)
        for index, number in enumerate(order):
            drive, contents = self._drives[number], content

            def create(drive: Drive, contents: bytes = contents) -> bytes | None:
                if drive.place.put_once(key, contents):
                    return None
                with contextlib.suppress(CheckpointNotFound):  # deleted meanwhile
                    return drive.place.get(key, max(len(contents), SEALED_BYTES_MAX))
                return contents

            outcome = run_on([drive], create, self._witnesses(view))[number]
            if isinstance(outcome, RelightError):
                if isinstance(outcome, (Uncertain, DriveTooSlow)):
                    sent_to.add(number)
                try:
                    self.failed(number, outcome)
                except RelightError as error:
                    if index:
                        raise Uncertain(f"created on one drive of two: {error.what}", where=key) from error
                    raise
                return content, []
            if outcome is None:
                made_at.add(number)
                sent_to.add(number)
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
        for _ in range(TRIES):
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
        raise StoreUnavailable(CHANGING, where=self.url)

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``. Both copies are read and compared."""
        self._at(key)
        if not self._is_there():
            raise CheckpointNotFound("no such file: the store does not exist yet", where=key)
        for _ in range(TRIES):
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
        raise StoreUnavailable(CHANGING, where=self.url)

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
            elif is_record_key(key) and self.has_lost(number, key):
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
        for _ in range(TRIES):
            view = self.view()
            try:
                return MirrorReader(self, key, [self._drives[number] for number in self._order(view, key)])
            except CheckpointNotFound:
                if self.view() == view:
                    raise
        raise StoreUnavailable(CHANGING, where=self.url)

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``. Lists the union of the good places."""
        check_key(prefix)
        for _ in range(TRIES):
            if not self._is_there():
                return iter(())
            view = self.view()
            outcome = self._on_all(view, lambda drive: list(drive.place.list(prefix)), doubted=False)
            for number, error in outcome.items():
                if isinstance(error, RelightError) and self._is_present(number):
                    if not self._is_fault(number, error):
                        raise error
                    self.doubt(number, f"{prefix}: {error.what}", required=True)
            if self.view() == view:
                entries = {entry.name: entry for listed in reversed(outcome.values()) for entry in listed}
                if not prefix:
                    entries = {name: entry for name, entry in entries.items() if not is_own(name)}
                return iter(entries.values())
        raise StoreUnavailable(CHANGING, where=self.url)

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
        for number, outcome in self._on_all(
            self.view(writing=True), lambda drive: drive.place.delete_dir(prefix)
        ).items():
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
            if served == key and (length is None or start < offset + length) and offset < start + size:
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

    def order(self, key: str) -> Sequence[int]:
        """Return the places in which ``key`` is written now."""
        return self._order(self.view(writing=True), key)

    # -- calls

    def _order(self, view: MirrorView, key: str, *, doubted: bool = True) -> Sequence[int]:
        """Return the places of ``key`` in the order of creation: the good ones, then those that are doubted."""
        copies = self.copies_of(key)
        kinds = (GOOD, DOUBTED) if doubted else (GOOD,)
        return [number for kind in kinds for number in copies if view.statuses[number] == kind]

    def _witnesses(self, view: MirrorView) -> Sequence[Drive]:
        return [drive for drive in self._drives if view.statuses[drive.number] == GOOD]

    def _run(self, view: MirrorView, numbers: Sequence[int], work: Callable[[Drive], Any]) -> Outcome:
        outcome = run_on([self._drives[number] for number in numbers], work, self._witnesses(view))
        return {number: outcome[number] for number in numbers}

    def _on_all(self, view: MirrorView, work: Callable[[Drive], Any], *, doubted: bool = True) -> Outcome:
        kinds = (GOOD, DOUBTED) if doubted else (GOOD,)
        return self._run(view, [number for number, status in enumerate(view.statuses) if status in kinds], work)

    def read_failed(self, number: int, key: str, error: RelightError) -> None:
        """Note that one drive could not read what the other could."""
        if self._is_present(number):
            self.doubt(number, f"{key}: {error.what}")

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
