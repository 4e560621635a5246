"""Files of a log's records: in ``log/`` and its folders of 1,024 records each. Separates stray files from records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from relight.errors import UnsafeContent
from relight.format import names
from relight.format.names import (
    LOG_DIR,
    flat_record_file,
    folder_name,
    parse_record_file,
    parse_record_folder,
    record_file,
    record_folder,
)
from relight.store import ByteStore

RECORDS_MAX = 2_000_000
"""Most records in one listing."""
GAP_MAX = 1000
"""Most consecutive records that may be missing. Records above a wider gap belong to the log only if they are chained to each other."""
RECORD_NUMBERS_MAX = 10**12
"""Record numbers are below this: a file name has twelve digits."""
TORN_MAX = 64
"""Distance below the highest number within which a record that a listing lacks is read by name."""


@dataclass(slots=True)
class LogListing:
    """Contents of ``log/`` as listed."""

    flat: set[int]
    """Numbers of the records directly in ``log/``: those below 1,024, and all of a log that an earlier version wrote."""
    folders: list[int]
    """Numbers of the folders, in order."""


class Folders:
    """Folders of one run's log. ``is_chained``: returns whether a record is chained to the one before it."""

    def __init__(self, store: ByteStore, run: str, is_chained: Callable[[int], bool] = lambda _: False) -> None:
        self._store, self.place, self._is_chained = store, f"{run}/{LOG_DIR}", is_chained
        self.flat_top = -1
        """The last record that an earlier version wrote directly into ``log/``; −1 if there is none above 1,023."""
        self.strays: dict[int, str] = {}
        """Keys of listed files that are not records of this log, by number."""

    def key(self, seq: int) -> str:
        """Return the key of record ``seq``."""
        return f"{self.place}/{flat_record_file(seq) if seq <= self.flat_top else record_file(seq)}"

    def folder(self, seq: int) -> str:
        """Return the key of the folder of record ``seq``."""
        return self.key(seq).rpartition("/")[0]

    def sync(self, seq: int) -> None:
        """Make the directory entries of record ``seq`` and of its folder durable: its writer may have been killed before it did so."""
        folder = self.folder(seq)
        self._store.sync(folder)
        if folder != self.place:
            self._store.sync(self.place)

    def all(self) -> LogListing:
        """List the records and folders in ``log/``. Cost: one listing; two if an earlier version wrote the log."""
        flat, folders = set[int](), set[int]()
        seq_of = _record_files(0, names.FOLDER_RECORDS).get
        for name, _ in self._store.list(self.place):
            if (seq := seq_of(name)) is not None or (seq := parse_record_file(name)) is not None:
                flat.add(seq)
            elif (folder := parse_record_folder(name)) is not None:
                folders.add(folder)
            if len(flat) > RECORDS_MAX:
                raise UnsafeContent(f"more than {RECORDS_MAX} records", where=self.place)
        self.strays = {}
        # of an earlier version, or strays; a flat record is below all records in folders
        if any(seq >= names.FOLDER_RECORDS for seq in flat):
            lowest = min((min(self.numbers(folder), default=2**62) for folder in sorted(folders)[:1]), default=2**62)
            own, _ = without_strays((seq for seq in flat if seq < lowest), -1, self._is_chained_flat)
            self.flat_top = max((seq for seq in own if seq >= names.FOLDER_RECORDS), default=-1)
            above = max(self.flat_top, names.FOLDER_RECORDS - 1)
            self.strays = {seq: f"{self.place}/{flat_record_file(seq)}" for seq in flat if seq > above}
        return LogListing(flat - self.strays.keys(), sorted(folders))

    def numbers(self, folder: int) -> set[int]:
        """Return the numbers of the records in one folder. Cost: one listing."""
        seq_of = _record_files(folder, names.FOLDER_RECORDS).get
        listed = self._store.list(f"{self.place}/{folder_name(folder)}")
        return {seq for name, _ in listed if (seq := seq_of(name)) is not None}

    def since(self, listing: LogListing, head: int) -> set[int]:
        """Return the record numbers in the folder of record ``head`` and in all folders after it; all numbers if ``head`` is −1."""
        first = head // names.FOLDER_RECORDS if head > self.flat_top else 0
        numbers = set(listing.flat) if first <= 0 else set[int]()
        for folder in listing.folders:
            if folder >= first:
                numbers |= self.numbers(folder)
        return self._own(numbers, -1 if first <= 0 else first * names.FOLDER_RECORDS - 1)

    def newest(self, listing: LogListing) -> set[int]:
        """Return the record numbers in the newest folder that is not empty; those directly in ``log/`` if there is none."""
        for index, folder in reversed(list(enumerate(listing.folders))):
            first = folder * names.FOLDER_RECORDS
            is_next = folder - 1 == (listing.folders[index - 1] if index else 0)
            if numbers := self._own(self.numbers(folder), first - 1 if is_next else first - 2 - GAP_MAX):
                return numbers
        return self._own(listing.flat, -1)

    def after(self, head: int) -> set[int]:
        """List the folder of record ``head`` and those after it. Return the record numbers, or an empty set if ``log/`` must be listed."""
        numbers_found = set[int]()
        if not record_folder(head) or head <= self.flat_top:
            return numbers_found
        folder = head // names.FOLDER_RECORDS
        while True:
            numbers = self.numbers(folder)
            numbers_found |= numbers
            folder += 1
            if max(numbers, default=-1) < folder * names.FOLDER_RECORDS - TORN_MAX:
                return self._own(numbers_found, head)

    def _own(self, numbers: Iterable[int], floor: int) -> set[int]:
        own, strays = without_strays(numbers, floor, self._is_chained)
        self.strays |= {seq: self.key(seq) for seq in strays}
        return set(own)

    def _is_chained_flat(self, seq: int) -> bool:
        top, self.flat_top = self.flat_top, seq
        try:
            return self._is_chained(seq)
        finally:
            self.flat_top = top


@lru_cache(maxsize=4)
def _record_files(folder: int, folder_records: int) -> dict[str, int]:
    """Return the number of each record that one folder can hold, by file name: a lookup costs less than parsing a name."""
    seqs = range(folder * folder_records, min((folder + 1) * folder_records, RECORD_NUMBERS_MAX))
    return {flat_record_file(seq): seq for seq in seqs}


def newest_records(store: ByteStore, run: str, count: int) -> list[tuple[int, str]]:
    """Return number and key of the newest ``count`` records, newest first. Cost: one listing, and one for each folder read."""
    folders = Folders(store, run)
    listing = folders.all()
    records: list[tuple[int, str]] = []
    for folder in reversed(listing.folders):
        records += [
            (seq, f"{folders.place}/{record_file(seq)}") for seq in sorted(folders.numbers(folder), reverse=True)
        ]
        if len(records) >= count:
            return records[:count]
    records += [(seq, f"{folders.place}/{flat_record_file(seq)}") for seq in sorted(listing.flat, reverse=True)]
    return records[:count]


def has_records(store: ByteStore, run: str) -> bool:
    """Return whether a run's log has a record. An empty folder is not a record: its writer was killed before it wrote one."""
    folders = Folders(store, run)
    listing = folders.all()
    return bool(listing.flat) or any(folders.numbers(folder) for folder in listing.folders)


def log_folders(store: ByteStore, run: str) -> list[str]:
    """Return the keys of ``log/`` and its folders. Cost: one listing."""
    place = f"{run}/{LOG_DIR}"
    folders = sorted(
        entry.name for entry in store.list(place) if entry.is_dir and parse_record_folder(entry.name) is not None
    )
    return [place, *(f"{place}/{name}" for name in folders)]


def without_strays(
    numbers: Iterable[int], floor: int, is_chained: Callable[[int], bool]
) -> tuple[list[int], list[int]]:
    """Split ``numbers`` into the log's record numbers, in order, and the strays above a gap of more than ``GAP_MAX``.

    ``floor``: the highest number below these. ``is_chained``: returns whether a record is chained to the one before it.
    """
    order = sorted(set(numbers))
    # fewer are missing in all than in a wide gap
    if not order or order[-1] - min(floor, order[0] - 1) - len(order) <= GAP_MAX:
        return order, []
    begins = [index for index, seq in enumerate(order) if seq - (order[index - 1] if index else floor) > GAP_MAX + 1]
    for index, begin in reversed(list(enumerate(begins))):
        group = order[begin : begins[index + 1] if index + 1 < len(begins) else len(order)]
        if any(second == first + 1 and is_chained(second) for first, second in zip(group[::-1][1:], group[::-1])):
            return order[: begin + len(group)], order[begin + len(group) :]
    return (order[: begins[0]], order[begins[0] :]) if begins else (order, [])
