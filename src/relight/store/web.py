"""A store behind a web server, for reading: any that serves files, with their length and in ranges. It needs no listing.

Records of a log are numbered without gaps, so the newest is found by asking: for 1, 2, 4, 8 and so on until one is missing, then between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from relight.errors import ConfigError
from relight.format.names import LOG_DIR, record_file
from relight.store.base import Entry, Properties, Upload, Writer
from relight.store.objects import ObjectStore

_AHEAD = 8
"""Records that are asked for behind the first that is missing: one may be damaged away."""
_SEQ_MAX = 1 << 21

class WebStore(ObjectStore):
    """``https://host/path``: what a store's files are under, as they are. Every operation that would change it is refused."""

    def properties(self) -> Properties:
        """Nothing is written here."""
        return Properties(exclusive_create=False, durable=False)

    def list(self, prefix: str) -> Iterator[Entry]:
        """The records of a log, found by their numbers; of other directories nothing is known."""
        self._path(prefix)
        if prefix.rpartition("/")[2] != LOG_DIR:
            return iter(())
        return iter([Entry(record_file(seq), False) for seq in range(self._count(prefix))])

    def _count(self, prefix: str) -> int:
        """How many records there are, as far as asking tells."""
        if not self._has(prefix, 0):
            return 0
        low, step = 0, 1  # ``low`` is there
        while low + step < _SEQ_MAX and self._has(prefix, low + step):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._has(prefix, middle) else (low, middle)
        behind = [seq for seq in range(low + 2, low + 2 + _AHEAD) if self._has(prefix, seq)]
        return max([low, *behind]) + 1

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
        """There are none."""
        return []

    def _refuse(self) -> NoReturn:
        raise ConfigError("a web server is for reading", where=self.url, hint="save to a path or a bucket; relight cp copies from here")
