"""Rollback protection: another store, the *anchor*, remembers how far each run's log has come.

The anchor should be a store that a writer of this store cannot write to. Its folder for a run has empty files. Their names are the data:
``<number>-<hash>-whole``, a *pin*: this record existed, and all records before it were valid; ``gap-<first>-<last>-<hash>``: these records
were invalid when the anchor advanced past them, and the record before them has that hash. A pin without ``-whole`` was written by an
earlier version, which recorded no gaps. Folders are ``<hash of the store's URL>/<run>``: the store's own id may have been replaced.

``relight.log.anchoring`` compares a log with the anchor and advances it. This module only stores the facts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, UnsafeContent
from relight.format import hexdigest
from relight.format.names import LOG_DIR, flat_record_file, is_record_key, is_run_name, record_file
from relight.format.signed import Signature, apart
from relight.format.strict import SEALED_BYTES_MAX
from relight.keys.signing import Trust
from relight.observe import emit
from relight.store.base import ByteStore
from relight.store.wrapper import StoreWrapper, layer_of

_PIN = re.compile(r"([0-9]{12})-([0-9a-f]{64})(-whole)?\Z")
_GAP = re.compile(r"gap-([0-9]{12})-([0-9]{12})-([0-9a-f]{64})\Z")
_ROOM = 512


class Pin(NamedTuple):
    """A record that existed: its number, and the hash of its file's bytes including the signature."""

    seq: int
    hash: str
    whole: bool = True
    """Whether all records before it were valid, except those of the gaps. False for a pin of an earlier version."""

    @property
    def name(self) -> str:
        """The pin's file name in the anchor."""
        return f"{self.seq:012d}-{self.hash}{'-whole' if self.whole else ''}"


class Gap(NamedTuple):
    """Records ``first`` to ``last``, invalid when the anchor advanced past them. ``below``: chain hash of the record before them."""

    first: int
    last: int
    below: str

    @property
    def name(self) -> str:
        """The gap's file name in the anchor."""
        return f"gap-{self.first:012d}-{self.last:012d}-{self.below}"


class RawRecord(NamedTuple):
    """A record's file: the hash of all its bytes, the hash that the next record chains to, and its signature."""

    hash: str
    chain_hash: str
    signature: Signature | None
    trusted: bool
    """Whether a trusted signer signed it. True for every record if no signers are named."""


class AnchorMemory(NamedTuple):
    """State of one run in the anchor."""

    pins: tuple[Pin, ...] = ()
    gaps: tuple[Gap, ...] = ()
    newest: RawRecord | None = None
    """The record of the highest pin, once this process has confirmed it."""

    @property
    def top(self) -> int:
        """Number of the highest pinned record; −1 if none."""
        return max((pin.seq for pin in self.pins), default=-1)


class HighestRecord(NamedTuple):
    """The highest valid record in a log of this process, and its chain hash."""

    seq: int = -1
    hash: str = ""


class Anchor:
    """Remembered records of one store's runs. Not thread-safe for one run. ``trust``: the signers that readers of the store trust."""

    def __init__(self, inner: ByteStore, memory: ByteStore, trust: Trust | None) -> None:
        self._inner, self._memory, self.trust = inner, memory, trust
        self.url = memory.url
        self._place = hexdigest(inner.url.encode())[:16]
        self.confirmed: dict[str, AnchorMemory] = {}
        """Contents of the anchor that this process has confirmed, by run."""
        self.seen: dict[str, HighestRecord] = {}
        """The highest valid record in any log of this process, by run. A log that is read again must still have it."""
        self.writes: set[str] = set()
        """Runs to which this process has appended. Each append advances their pins."""
        self.owed: dict[str, list[Gap]] = {}
        """Confirmed gaps that are not in the anchor yet, by run. The next ``move`` writes them first."""
        self.untrusted: dict[str, set[int]] = {}
        """Records of this process that no trusted signer signed, by run. Its other logs treat them as invalid."""
        self._written: tuple[str, bytes] = "", b""
        self._reported: set[tuple[str, str]] = set()

    def runs(self, exclude: Collection[str] = ()) -> list[str]:
        """Return the runs with a pin, without ``exclude``, sorted. Cost: one listing, and one for each run."""
        folders = [entry.name for entry in self._memory.list(self._place) if entry.is_dir and is_run_name(entry.name)]
        return sorted(run for run in folders if run not in exclude and self.read(run).pins)

    def wrote(self, key: str, data: bytes) -> None:
        """Keep the bytes of the last created record, so that they need not be read back."""
        self._written = key, data

    def read(self, run: str) -> AnchorMemory:
        """Return what is remembered of a run. Cost: one listing."""
        names = [entry.name for entry in self._memory.list(self.folder(run))]
        pins = sorted(
            Pin(int(match[1]), match[2], match[3] is not None) for name in names if (match := _PIN.match(name))
        )
        gaps = sorted(Gap(int(match[1]), int(match[2]), match[3]) for name in names if (match := _GAP.match(name)))
        return AnchorMemory(tuple(pins), tuple(gaps))

    def raw(self, run: str, seq: int) -> RawRecord | None:
        """Return a record's file; None if it is missing or not a record. Cost: one read; none for the last created record."""
        key = f"{run}/{LOG_DIR}/{record_file(seq)}"
        try:
            data = self._data(key)
        except CheckpointNotFound:  # an earlier version wrote every record directly into log/
            flat = f"{run}/{LOG_DIR}/{flat_record_file(seq)}"
            if flat == key:
                return None
            key = flat
            try:
                data = self._data(key)
            except (CorruptCheckpoint, CheckpointNotFound, UnsafeContent):
                return None
        except (CorruptCheckpoint, UnsafeContent):
            return None
        try:
            record, signature = apart(data, key)
        except (CorruptCheckpoint, UnsafeContent):
            return None
        trusted = self.trust is None or (signature is not None and self.trust.believes(record, signature))
        return RawRecord(hexdigest(data), hexdigest(record), signature, trusted)

    def _data(self, key: str) -> bytes:
        written, data = self._written
        return data if key == written else self._inner.get(key, SEALED_BYTES_MAX + _ROOM)

    def move(self, run: str, seq: int, raw: RawRecord, gaps: Sequence[Gap] = ()) -> None:
        """Pin the record in place of the confirmed pins. Its gaps are written first, and the old pins are deleted last.

        A crash may therefore leave an additional pin, but never no pin, and no pin without its gaps. If writing the pin fails, nothing is
        confirmed, ``anchor.failed`` reports it, and no save fails. The next ``move`` computes the same gaps again. Cost: one small file,
        one more for each gap, and the deletions.
        """
        before, pin, folder = self.confirmed.get(run, AnchorMemory()), Pin(seq, raw.hash), self.folder(run)
        try:
            for gap in (*self.owed.get(run, ()), *gaps):
                self._memory.put_once(f"{folder}/{gap.name}", b"")
            self._memory.put_once(f"{folder}/{pin.name}", b"")
            self.confirmed[run] = AnchorMemory((pin,), tuple(sorted({*before.gaps, *gaps})), raw)
            self.owed.pop(run, None)
            for old in before.pins:
                if old != pin:
                    self._memory.delete(f"{folder}/{old.name}")
        except RelightError as error:
            self.failed(run, error.kind, str(error))

    def failed(self, run: str, kind: str, why: str, *, once: bool = False) -> None:
        """Report that the anchor does not have the log's end. ``once``: only once for each kind, run and process."""
        if not once or (run, kind) not in self._reported:
            self._reported.add((run, kind))
            emit("anchor.failed", f"the log's end could not be recorded in {self.url}: {why}", kind=kind, run=run)

    def folder(self, run: str) -> str:
        """Return the key of a run's folder in the anchor."""
        return f"{self._place}/{run}"


class AnchoredStore(StoreWrapper):
    """``inner``, with an anchor for the logs of its runs. ``trust``: the signers that readers trust; None if none are named."""

    def __init__(self, inner: ByteStore, anchor: ByteStore, trust: Trust | None = None) -> None:
        super().__init__(inner)
        self._memory = anchor
        self.anchored = Anchor(inner, anchor, trust)

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""
        created = self.inner.put_once(key, data)
        if created and is_record_key(key):
            self.anchored.wrote(key, data)
        return created

    def __reduce__(self) -> tuple[object, ...]:
        return (AnchoredStore, (self.inner, self._memory, self.anchored.trust))

    def _over(self, below: ByteStore) -> ByteStore:
        return AnchoredStore(below, self._memory, self.anchored.trust)


def anchor_of(store: ByteStore) -> Anchor | None:
    """Return the anchor of a store; None if it has none."""
    layer = layer_of(store, AnchoredStore)
    return layer.anchored if layer is not None else None


def anchored_runs(store: ByteStore, exclude: Collection[str] = ()) -> list[str]:
    """Return the runs that the store's anchor remembers, without ``exclude``, sorted. Cost: see ``Anchor.runs``."""
    anchor = anchor_of(store)
    return anchor.runs(exclude) if anchor is not None else []
