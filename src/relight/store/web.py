"""A read-only store on a web server that serves files with their length and supports range requests. No directory listing is needed.

Records of a log are numbered without gaps, so the newest is found by requests: for 1, 2, 4, 8 and so on until one is missing, then by
binary search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

from relight.errors import ConfigError
from relight.format.names import (
    FOLDER_RECORDS,
    LOG_DIR,
    flat_record_file,
    folder_name,
    parse_record_folder,
    record_file,
)
from relight.store.base import Entry, Properties, Upload, Writer
from relight.store.object_client import RetryTimes
from relight.store.objects import ObjectStore

_AHEAD = 8
"""Records that are requested after the first missing one, as a single record may be lost."""
_SEQ_MAX = 1 << 31


class WebStore(ObjectStore):
    """``https://host/path`` with a store's files, unchanged. Every write is refused."""

    def __init__(self, url: str, *, patience: RetryTimes | None = None) -> None:
        super().__init__(url, patience=patience)
        self._counts: dict[str, int] = {}
        """Number of records at the last listing, by log."""

    def properties(self) -> Properties:
        """Return no guarantees of writes, as the store is read-only."""
        return replace(super().properties(), exclusive_create=False, durable=False)

    def list(self, prefix: str) -> Iterator[Entry]:
        """List a log's records and folders, found by their numbers. Other directories are empty: they cannot be listed."""
        self._path(prefix)
        above, _, name = prefix.rpartition("/")
        folder = parse_record_folder(name) if above.rpartition("/")[2] == LOG_DIR else 0 if name == LOG_DIR else None
        if folder is None:
            return iter(())
        place = above if folder else prefix
        count = self._count(place)
        first = folder * FOLDER_RECORDS
        records = [Entry(flat_record_file(seq), False) for seq in range(first, min(first + FOLDER_RECORDS, count))]
        folders = range(1, -(-count // FOLDER_RECORDS)) if not folder else ()
        return iter([*records, *(Entry(folder_name(number), True) for number in folders)])

    def _count(self, prefix: str) -> int:
        """Return the number of records, found by requests. The search begins at the number of the last listing."""
        low, step = self._counts.get(prefix, 1) - 1, 1  # record ``low`` exists
        if not self._has(prefix, low) and (low == 0 or not self._has(prefix, low := 0)):
            return 0
        while low + step < _SEQ_MAX and self._has(prefix, low + step):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._has(prefix, middle) else (low, middle)
        self._counts[prefix] = low + 1
        later = [seq for seq in range(low + 2, low + 2 + _AHEAD) if self._has(prefix, seq)]
        return max([low, *later]) + 1

    def _has(self, prefix: str, seq: int) -> bool:
        return self._size(self._path(f"{prefix}/{record_file(seq)}", file=True)) is not None

    def put_once(self, key: str, data: bytes) -> bool:
        """Refused."""
        self._refuse()

    def write(self, key: str, size: int) -> Writer:
        """Refused."""
        self._refuse()

    def delete(self, key: str) -> None:
        """Refused."""
        self._refuse()

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Return nothing: the store is read-only."""
        return []

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            "a store on a web server is read-only",
            where=self.url,
            hint="save to a path or a bucket; relight cp copies from here",
        )
