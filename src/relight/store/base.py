"""Interface of a store of bytes: its operations and their guarantees.

Keys are relative paths with ``/``. Every operation raises ``StoreUnavailable`` (``NoSpace``) if the store refuses, and
``CheckpointNotFound`` if a key to read does not exist. Callers retry where that is safe.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import NamedTuple, Protocol, runtime_checkable

from relight.errors import StoreUnavailable, UnsafeContent
from relight.store.buffers import page_buffer


class Uncertain(StoreUnavailable):
    """A creation may or may not have taken effect. Only another read of the store can decide. Do not delete anything on this error."""

    kind = "uncertain"


READS_AT_ONCE = 2
"""Parallel reads for a disk: it reads one range while another is hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """Declared properties of a store. A store states what differs from the defaults, which promise nothing."""

    exclusive_create: bool = False
    """``put_once`` has one winner among all processes and machines."""
    durable: bool = False
    """Files survive a power cut after ``sync``."""
    needs_sync: bool = True
    """Whether names need ``sync``. False if an acknowledged name is durable."""
    shared: bool = False
    """Whether another process that opens ``url`` finds the same files."""
    remote: bool = False
    """Whether operations are requests to another machine."""
    parallel_reads: int = READS_AT_ONCE
    """Parallel reads that the store can use."""
    lanes: int = 1
    """Packs that the store can write in parallel: one for each of its drives."""
    encrypted: bool = False
    """Whether the store encrypts files before it stores them."""
    signed: bool = False
    """Whether readers accept only log records of trusted signers."""
    trusts_itself: bool = True
    """Whether this process accepts the log records that it writes itself."""


class Entry(NamedTuple):
    """One name in a listing."""

    name: str
    is_dir: bool


class Upload(NamedTuple):
    """An unfinished multipart upload of an object store: it takes space and is in no listing."""

    key: str
    id: str


class Writer(Protocol):
    """A new file being written, positioned by offset, from any thread."""

    align: int
    """Offsets, lengths and addresses handed to ``write_at`` are multiples of this; 1 if it doesn't matter. The last write may be padded."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of ``data``. The caller may reuse ``data`` after the return.

        Pieces of a file larger than 64 MiB must arrive nearly in order: an object store buffers at most 64 MiB after a gap.
        """

    def finish(self, size: int | None = None) -> None:
        """Make the bytes durable and close; the name needs ``sync``. After an error, call ``abort``, never ``finish`` again.

        ``size``: final length, if shorter than announced.
        """

    def abort(self) -> None:
        """Close and delete the new file, also after ``finish``. A file that was replaced stays. Never raises."""


PAGE = 4096


class Reader(Protocol):
    """An open file. All reads come from the same file, even if its name is replaced or deleted."""

    size: int

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        """Read a range into ``room`` with direct I/O, which leaves the page cache to other programs, and return the part with the range.

        Return None if the caller should use ``read_into``: the range is in the page cache, or the file system has no direct I/O. ``room``
        is page-aligned and two ``PAGE``s longer than ``length``. Raise ``CorruptCheckpoint`` if the file is shorter. Any thread.
        """

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset``. Raise ``CorruptCheckpoint`` if the file is shorter. Any thread."""

    def close(self) -> None:
        """Close the file."""


@runtime_checkable
class MapsFile(Protocol):
    """A reader of a file that can be mapped into memory."""

    def map(self) -> mmap:
        """Return a private mapping of the file, which is valid after ``close``."""


@runtime_checkable
class ByteStore(Protocol):
    """Operations of a store."""

    url: str

    def properties(self) -> Properties:
        """Return the store's properties. They are constant, also before the store exists. No request is sent."""

    def verify_exclusive_create(self) -> bool:
        """Return whether ``put_once`` has one winner, by a trial if that depends on a server."""

    def put_once(self, key: str, data: bytes) -> bool:
        """Create ``key`` with ``data``, durably. Return False if it exists. Raise ``Uncertain`` if the outcome is unknown."""

    def write(self, key: str, size: int) -> Writer:
        """Return a writer for a new file of ``size`` bytes. Raise if the key exists, or if there is no space."""

    def sync(self, prefix: str) -> None:
        """Make the names directly below ``prefix`` durable."""

    def get(self, key: str, limit: int) -> bytes:
        """Return the contents of a small file. Raise ``UnsafeContent`` if it is longer than ``limit`` bytes."""

    def open(self, key: str) -> Reader:
        """Open for reading."""

    def list(self, prefix: str) -> Iterator[Entry]:
        """Iterate over the names directly below ``prefix``, in no order; none if the prefix does not exist."""

    def delete(self, key: str) -> None:
        """Delete a file. A missing file is no error."""

    def delete_dir(self, prefix: str) -> bool:
        """Delete an empty directory. Return False if it is not empty."""

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Return the unfinished uploads below ``prefix``, at any depth, including active ones. Empty for stores without uploads."""

    def drop_upload(self, upload: Upload) -> None:
        """Abort an upload and free its space. A missing upload is no error."""

    def free_bytes(self) -> int | None:
        """Return the free space in bytes; None if unknown or unlimited."""


def check_key(key: str, *, file: bool = False) -> str:
    """Return ``key``. Raise ``UnsafeContent`` for an invalid key. "" is the store itself, and invalid for a ``file``."""
    if file and not key:
        raise UnsafeContent("an empty name is an invalid name in a store")
    if key and any(part in ("", ".", "..") or "\0" in part for part in key.split("/")):
        raise UnsafeContent(f"{key[:80]!r} is an invalid name in a store")
    return key


class StoreBase(ABC):
    """Base class of stores: defaults of operations that need no more than the abstract ones."""

    url: str

    def properties(self) -> Properties:
        """See ``ByteStore``."""
        return Properties()

    def verify_exclusive_create(self) -> bool:
        """Return the declared property."""
        return self.properties().exclusive_create

    @abstractmethod
    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""

    @abstractmethod
    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``."""

    def sync(self, prefix: str) -> None:
        """Do nothing: names need no ``sync``."""
        check_key(prefix)

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``."""
        reader = self.open(key)
        try:
            if reader.size > limit:
                raise UnsafeContent(f"{reader.size} bytes where at most {limit} are allowed", where=key)
            data = bytearray(reader.size)
            reader.read_into(0, memoryview(data))
            return bytes(data)
        finally:
            reader.close()

    @abstractmethod
    def open(self, key: str) -> Reader:
        """See ``ByteStore``."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """See ``ByteStore``."""

    def delete_dir(self, prefix: str) -> bool:
        """Return whether ``prefix`` has no files: directories are only prefixes."""
        return not any(True for _ in self.list(prefix))

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Return nothing: the store has no uploads."""
        return []

    def drop_upload(self, upload: Upload) -> None:
        """Do nothing: the store has no uploads."""
        check_key(upload.key)

    def free_bytes(self) -> int | None:
        """Return None: unknown."""
        return None


@runtime_checkable
class CachesBlocks(Protocol):
    """A store that may have local copies of blocks of its files."""

    def without_cache(self) -> ByteStore:
        """Return an equal store without local copies."""

    def invalidate(self, key: str, offset: int = 0, length: int | None = None) -> None:
        """Drop the local copies of a range of a file, or of all of it."""


@runtime_checkable
class Rewrites(Protocol):
    """A store that can replace a file by an equivalent one: re-encrypted or repaired.

    A name keeps its contents otherwise.
    """

    def rewrite(self, key: str, size: int) -> Writer:
        """Return a writer.

        Its ``finish`` replaces the file at ``key``, atomically and durably. Until then, nothing changes.
        """


def rewrites(store: ByteStore) -> Rewrites:
    """Return ``store`` as ``Rewrites``. Raise ``StoreUnavailable`` if its files cannot be replaced."""
    if not isinstance(store, Rewrites):
        raise StoreUnavailable("no file can take another's place in this store", where=store.url, retryable=False)
    return store


@runtime_checkable
class SharesWrites(Protocol):
    """A store in which several processes can write one file."""

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``."""

    def share(self, writer: Writer) -> str:
        """Return the name by which other processes ``join`` a writer of ``rewrite``. Its ``finish`` follows all of theirs."""

    def join(self, name: str) -> Writer:
        """Return a writer for ranges of that file. Its ``finish`` makes them durable; only the first writer's gives the file its name."""


def without_cache(store: ByteStore) -> ByteStore:
    """Return ``store`` without its local cache, to check the stored bytes themselves."""
    return store.without_cache() if isinstance(store, CachesBlocks) else store


def invalidate_cache(store: ByteStore, key: str, offset: int = 0, length: int | None = None) -> None:
    """Drop cached copies of a range of a file, or of all of it, if ``store`` has a local cache."""
    if isinstance(store, CachesBlocks):
        store.invalidate(key, offset, length)


def reread(store: ByteStore, key: str, get: Callable[[], bytes]) -> Callable[[], bytes]:
    """Return a function that reads a file by ``get``. From its second call on it refuses what the first returned.

    A cached copy, or one drive's of two, may be the damaged one.
    """
    tries = itertools.count()

    def read() -> bytes:
        if next(tries):
            invalidate_cache(store, key)
        return get()

    return read


def put(store: ByteStore, key: str, data: bytes) -> None:
    """Write a small file under a name that no other process uses. Its name needs ``sync``."""
    write_whole(store.write(key, len(data)), data)


def write_whole(writer: Writer, data: bytes) -> None:
    """Write a small file at once. Delete it if that fails."""
    try:
        if data:
            writer.write_at(0, memoryview(_aligned(data, writer.align)))
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def _aligned(data: bytes, align: int) -> bytes | memoryview:
    if align == 1:
        return data
    buffer = page_buffer(-(-len(data) // align) * align)
    buffer[: len(data)] = data
    return buffer
