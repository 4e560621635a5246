"""Several local directories as one store (striping): packs are distributed over all of them, everything else is in the first.

Each *place* has a small file with the stripe's id, the place's number and the number of places. Every operation requires all places, in
order. So an unmounted drive never counts as empty, nothing is deleted partially, and nothing is written to the mount point of a missing
drive.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from relight.errors import CheckpointNotFound, ConfigError, RelightError, StoreUnavailable, UnsafeContent
from relight.format.names import STORE_FILE, STRIPE_FILE, parse_dir, parse_pack_file
from relight.format.records import StripeRecord, decode_stripe, encode_stripe
from relight.format.strict import SEALED_BYTES_MAX
from relight.store.base import READS_AT_ONCE, Entry, Properties, Reader, StoreBase, Writer, check_key
from relight.store.disk import Disk
from relight.store.durable import TMP_PREFIX, rewritten_of, temporary_of
from relight.store.local import LocalStore

T = TypeVar("T")
SCHEME = "stripe:"
MIRRORS = "mirrors=2,"
"""Begins the places of a store that has each file on two of them (``MirroredStore``)."""
_Seen = tuple[tuple[int, int], ...]
_MOUNTED = "is its drive mounted?"


class StripedStore(StoreBase):
    """The directories ``places``, in this order, as one store. The first write creates the directories and their stripe files.

    Construction does not touch a disk. Thread-safe. If N places differ in free space, N times the smallest can be used.
    """

    mirrors = 1
    """Number of places that have each file."""

    def __init__(
        self, places: Sequence[str | os.PathLike[str]], *, disk: Disk | None = None, direct: bool = True
    ) -> None:
        self._disk = disk or Disk()
        self._roots = [os.path.abspath(os.fspath(place)) for place in places]
        if len(self._roots) < 2 or len(set(self._roots)) < len(self._roots):
            raise ConfigError(
                "a stripe is of two or more directories, each named once", where=SCHEME + ",".join(self._roots)
            )
        if any("," in root for root in self._roots):
            raise ConfigError(
                "a stripe's directories have no comma in their names", where=SCHEME + " ".join(self._roots)
            )
        self._places = [LocalStore(root, disk=self._disk, direct=direct) for root in self._roots]
        self._known: _Seen = ()
        """Device and inode of each place's stripe file, after all were verified."""
        lanes = len(self._places)
        self._properties = replace(self._places[0].properties(), lanes=lanes, parallel_reads=READS_AT_ONCE * lanes)
        self.url = f"{SCHEME}{','.join(self._roots)},"

    def __repr__(self) -> str:
        return f"StripedStore({self._roots!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (StripedStore, (self._roots,))

    def place_of(self, key: str) -> int:
        """Return the number of a file's place. A checkpoint's packs go round-robin over the places, by rank and by pack number.

        The first place depends on the checkpoint's id, so that small checkpoints of one pack fill all places evenly.
        """
        above, _, name = key.rpartition("/")
        pack, directory = parse_pack_file(rewritten_of(name) or name), parse_dir(above.rpartition("/")[2])
        if pack is None or directory is None:
            return 0
        return (int(directory.id, 36) + sum(pack)) % len(self._places)

    def properties(self) -> Properties:
        """See ``ByteStore``."""
        return self._properties

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""
        number = self._at(key)
        self._make()
        return self._places[number].put_once(key, data)

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``."""
        number = self._at(key)
        self._make()
        return self._places[number].write(key, size)

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``."""
        return self._places[self._at(key)].rewrite(key, size)

    def sync(self, prefix: str) -> None:
        """See ``ByteStore``. In every place that has the directory."""
        check_key(prefix)
        if not self._is_there():
            self._places[0].sync(prefix)
            return
        settled = 0
        for place in reversed(self._places):  # the first place last: its files refer to files in the others
            try:
                place.sync(prefix)
                settled += 1
            except CheckpointNotFound:
                if place is self._places[0] and not settled:
                    self._require()
                    raise
        self._require()

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``."""
        return self._read(key, lambda place: place.get(key, limit))

    def open(self, key: str) -> Reader:
        """See ``ByteStore``."""
        return self._read(key, lambda place: place.open(key))

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``. Lists the union of all places."""
        check_key(prefix)
        if not self._is_there():
            return iter(())
        entries = {entry.name: entry for place in reversed(self._places) for entry in place.list(prefix)}
        self._require()
        if not prefix:
            entries = {name: entry for name, entry in entries.items() if STRIPE_FILE not in (name, temporary_of(name))}
        return iter(entries.values())

    def delete(self, key: str) -> None:
        """See ``ByteStore``."""
        number = self._at(key)
        if self._is_there():
            self._places[number].delete(key)
            self._require()

    def delete_dir(self, prefix: str) -> bool:
        """See ``ByteStore``. Deletes in the first place last, so that the directory stays visible while any place has it."""
        check_key(prefix)
        if not self._is_there():
            return True
        if any(True for place in self._places for _ in place.list(prefix)):
            self._require()
            return False
        gone = all(place.delete_dir(prefix) for place in reversed(self._places))
        self._require()
        return gone

    def free_bytes(self) -> int | None:
        """Return the bytes that evenly distributed packs can take before the first file system is full. Two places may share one."""
        shares = Counter(self._device(root) for root in self._roots)
        rooms = [
            (place.free_bytes(), shares[self._device(root)])
            for place, root in zip(self._places, self._roots, strict=True)
        ]
        known = [room * len(self._places) // share for room, share in rooms if room is not None]
        return min(known) if len(known) == len(rooms) else None

    # -- inside

    def _at(self, key: str) -> int:
        if check_key(key, file=True) == STRIPE_FILE:
            raise UnsafeContent("that name is the stripe's own", where=key)
        return self.place_of(key)

    def _read(self, key: str, read: Callable[[LocalStore], T]) -> T:
        number = self._at(key)
        if not self._is_there():
            raise CheckpointNotFound("no such file: the store does not exist yet", where=key)
        try:
            return read(self._places[number])
        except CheckpointNotFound:
            self._require()  # a drive that vanished meanwhile also reports "not found"
            raise

    def _require(self) -> None:
        """Raise ``StoreUnavailable`` if the store is no longer there: "not found" was then caused by a missing drive."""
        if not self._is_there():
            raise StoreUnavailable(
                "all directories of this store are missing", where=self.url, hint="are the drives mounted?"
            )

    def _is_there(self) -> bool:
        """Return whether the whole store exists; False if it was never created.

        Raise ``StoreUnavailable`` for a missing place, ``ConfigError`` for places that do not match the URL.
        """
        known = self._known
        if known and known == self._seen():
            return True
        # Another process may be creating it. Check ``_is_new`` first: then the first place has nothing but stripe files, or all places
        # have theirs. Creation begins with the first place, so read it last: if any other record exists, its record does too.
        is_new = self._is_new()
        records = [
            self._record(root, place) for root, place in reversed([*zip(self._roots, self._places, strict=True)])
        ][::-1]
        if not any(records) and not known:
            return False
        self._compare(records)
        missing = [root for root, record in zip(self._roots, records, strict=True) if record is None]
        if missing and is_new and records[0] is not None and not known:
            return False
        if missing:
            what = f"holds no {STRIPE_FILE}" if os.path.isdir(missing[0]) else "is not there"
            raise StoreUnavailable(
                f"{', '.join(missing)} {what}, and is one of {len(records)} places of this store",
                where=self.url,
                hint=_MOUNTED,
            )
        self._known = self._seen()
        return True

    def _seen(self) -> _Seen:
        """Return device and inode of each place's stripe file; zeros if it is missing."""
        files = []
        for root in self._roots:
            try:
                seen = self._disk.lstat(os.path.join(root, STRIPE_FILE))
                files.append((seen.st_dev, seen.st_ino))
            except OSError:
                files.append((0, 0))
        return tuple(files)

    def _record(self, root: str, place: LocalStore) -> StripeRecord | None:
        where = os.path.join(root, STRIPE_FILE)
        try:
            return decode_stripe(place.get(STRIPE_FILE, SEALED_BYTES_MAX), where)
        except CheckpointNotFound:
            return None
        except StoreUnavailable:
            raise
        except RelightError as error:
            raise StoreUnavailable(
                f"cannot determine whether this is one of the store's places: {error.what}",
                where=where,
                hint="if it is, and only this file is damaged, remove it and put it there again (docs/format.md)",
                retryable=False,
            ) from error

    def _compare(self, records: Sequence[StripeRecord | None]) -> None:
        """Raise ``ConfigError`` if a place belongs to another store, or the order differs from the URL."""
        known = [(number, self._roots[number], record) for number, record in enumerate(records) if record is not None]
        for _, root, record in known:
            if record.id != known[0][2].id:
                raise ConfigError(f"{root} is of another store than {known[0][1]}", where=self.url)
            if record.mirrors != self.mirrors:
                url = f"{SCHEME}{MIRRORS if record.mirrors > 1 else ''}{','.join(self._roots)},"
                raise ConfigError(
                    f"this store has {record.mirrors} of each file, not {self.mirrors}",
                    where=self.url,
                    hint=f"name it {url}",
                )
            if record.places != len(self._roots):
                raise ConfigError(
                    f"this store has {record.places} places, and {len(self._roots)} are named",
                    where=self.url,
                    hint="name all, in order",
                )
        if any(record.place != number for number, _, record in known):
            right = ", ".join(f"{root} is number {record.place + 1}" for _, root, record in known)
            raise ConfigError(f"its places are in another order: {right}", where=self.url)

    def _is_new(self) -> bool:
        """Return whether the first place has only files of an unfinished creation."""
        names = {entry.name for entry in self._places[0].list("")}
        return all(name == STRIPE_FILE or name.startswith(TMP_PREFIX) for name in names)

    def _make(self) -> None:
        """Create the store's missing places, if it does not exist yet. The first place's file has the store's identity.

        No other file is written before all places have their stripe files. So an interrupted creation can be distinguished from a
        missing drive, and is completed.
        """
        if self._is_there():
            return
        for root, place in zip(self._roots, self._places, strict=True):
            if any(entry.name == STORE_FILE for entry in place.list("")):
                raise ConfigError(
                    f"{root} is a store of its own",
                    where=self.url,
                    hint="stripe empty directories, and relight cp the runs there",
                )
        for number, place in enumerate(self._places):
            record = self._record(self._roots[0], self._places[0]) if number else None
            stripe_id = record.id if record is not None else secrets.token_hex(16)
            place.put_once(
                STRIPE_FILE,
                encode_stripe(StripeRecord(id=stripe_id, place=number, places=len(self._places), mirrors=self.mirrors)),
            )
        for place in self._places:
            place.sync("")
        if not self._is_there():
            raise StoreUnavailable("another process deletes the store's files while it is created", where=self.url)

    def _device(self, root: str) -> int:
        while True:
            try:
                return self._disk.lstat(root).st_dev
            except OSError:
                parent = os.path.dirname(root)
                if parent == root:
                    return 0
                root = parent


def places_in(url: str) -> tuple[list[str], str]:
    """Return ``(directories, path below each)`` of a stripe's URL. A comma ends each directory; the path follows the last comma.

    ``mirrors=2,`` before the directories is not one of them: see ``is_mirrored``.

    >>> places_in("stripe:/nvme0,/nvme1,/ckpts/demo")
    (['/nvme0', '/nvme1'], '/ckpts/demo')
    """
    *places, below = url.removeprefix(SCHEME).removeprefix(MIRRORS).split(",")
    if places and places[0].startswith("mirrors="):
        raise ConfigError(
            f"{places[0][:80]!r}: a store has 1 or 2 of each file", where=url, hint="write stripe:mirrors=2,…"
        )
    if len(places) < 2 or not all(places) or (below and not below.startswith("/")):
        raise ConfigError(
            f"{url[:200]!r}: a comma must end each of a stripe's directories, and the path inside them follows the last comma",
            hint="for example stripe:/nvme0,/nvme1,/ckpts/demo: the run demo in a store of /nvme0/ckpts and /nvme1/ckpts",
        )
    return places, below.rstrip("/")


def is_mirrored(url: str) -> bool:
    """Return whether a stripe's URL names a store that has each file on two drives.

    >>> is_mirrored("stripe:mirrors=2,/nvme0/ckpts,/nvme1/ckpts,/ckpts/demo")
    True
    """
    return url.startswith(SCHEME + MIRRORS)
