"""A store whose logs' ends are written down elsewhere: so it is noticed if it is rolled back, though what is there then is all sound.

The *anchor* is another store, best one that whoever can write to this one cannot write to. It has an empty file for each run, whose name
says the highest number that was seen, and the hash of that record: ``<hash of the store's URL>/<run>/<number>-<hash>``. It only moves on.
It goes by the URL, as what the store says of itself may have been replaced as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, UnsafeContent
from relight.format import hexdigest
from relight.format.names import LOG_DIR, is_record_key, parse_record_file, record_file
from relight.format.records import decode_record
from relight.format.strict import SEALED_BYTES_MAX
from relight.observe import emit
from relight.store.around import Around
from relight.store.base import ByteStore, Entry

_NAME = re.compile(r"([0-9]{12})-([0-9a-f]{64})\Z")
_ROOM = 512


class Seen(NamedTuple):
    """A record that was there."""

    seq: int
    hash: str

    @property
    def name(self) -> str:
        """As the anchor has it."""
        return f"{self.seq:012d}-{self.hash}"


class AnchoredStore(Around):
    """``inner``, whose logs must not end before where ``anchor`` says that they ended. Looked at once a run and process, and moved on with
    each record that is written. Cost: one small file a record, one listing and one record read at the beginning."""

    def __init__(self, inner: ByteStore, anchor: ByteStore) -> None:
        super().__init__(inner)
        self._anchor = anchor
        self._seen: dict[str, Seen | None] = {}
        self._place = hexdigest(inner.url.encode())[:16]

    def __reduce__(self) -> tuple[object, ...]:
        return (AnchoredStore, (self.inner, self._anchor))

    def _over(self, below: ByteStore) -> ByteStore:
        return AnchoredStore(below, self._anchor)

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""
        created = self.inner.put_once(key, data)
        if created and is_record_key(key):
            run, _, name = key.split("/")
            seq = parse_record_file(name)
            assert seq is not None
            self._advance(run, Seen(seq, hexdigest(data)))
        return created

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``. ``CorruptCheckpoint`` for a log that ends before, or goes otherwise than, the anchor says."""
        found = list(self.inner.list(prefix))
        run, _, name = prefix.partition("/")
        if name == LOG_DIR:
            self._check(run, {seq for entry in found if (seq := parse_record_file(entry.name)) is not None})
        return iter(found)

    def _check(self, run: str, there: set[int]) -> None:
        head, first = max(there, default=-1), run not in self._seen
        seen = self._read(run) if first else self._seen[run]
        if seen is not None and (first or head < seen.seq):  # a listing may be older than what it lists: the record itself is asked for
            found = self._hash_of(run, seen.seq)
            if found != seen.hash:
                what = f"the log ends at record {head}; record {seen.seq}, which was seen there, is gone" if head < seen.seq else ""
                raise CorruptCheckpoint(
                    f"{what or f'record {seen.seq} is not the one that was seen there'}: it was rolled back, or its end was lost",
                    where=f"{self.url}/{run}",
                    hint=f"the anchor {self._anchor.url} says so; if that was meant, delete its {self._folder(run)}",
                )
        if first:
            self._seen[run] = seen
            for seq in sorted((one for one in there if one > (seen.seq if seen is not None else -1)), reverse=True):
                if self._is_sound(run, seq):  # the newest that is: what cannot be read may be put there by anybody
                    self._advance(run, Seen(seq, self._hash_of(run, seq)))
                    return

    def _get(self, run: str, seq: int) -> bytes:
        return self.inner.get(f"{run}/{LOG_DIR}/{record_file(seq)}", SEALED_BYTES_MAX + _ROOM)

    def _is_sound(self, run: str, seq: int) -> bool:
        try:
            decode_record(self._get(run, seq), seq, run)
        except (CorruptCheckpoint, CheckpointNotFound, UnsafeContent):
            return False
        return True

    def _hash_of(self, run: str, seq: int) -> str:
        """Of a record as it lies there; nothing of one that is not there, or cannot be read."""
        try:
            return hexdigest(self._get(run, seq))
        except (CorruptCheckpoint, CheckpointNotFound, UnsafeContent):
            return ""

    def _read(self, run: str) -> Seen | None:
        found = [match for entry in self._anchor.list(self._folder(run)) if (match := _NAME.match(entry.name))]
        newest = max(found, key=lambda match: int(match[1]), default=None)
        return Seen(int(newest[1]), newest[2]) if newest is not None else None

    def _advance(self, run: str, seen: Seen) -> None:
        """What cannot be written down is told: it keeps nobody from saving."""
        before = self._seen.get(run)
        if before is not None and before.seq >= seen.seq:
            return
        self._seen[run] = seen
        try:
            folder = self._folder(run)
            self._anchor.put_once(f"{folder}/{seen.name}", b"")
            if before is not None:
                self._anchor.delete(f"{folder}/{before.name}")
        except RelightError as error:
            emit("anchor.failed", f"the log's end could not be written down in {self._anchor.url}: {error}", kind=error.kind, run=run)

    def _folder(self, run: str) -> str:
        return f"{self._place}/{run}"
