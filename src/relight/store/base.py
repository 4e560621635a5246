"""Interface of a store of bytes: its operations and their guarantees.

Keys are relative paths with ``/``. Every operation raises ``StoreUnavailable`` (``NoSpace``) if the store refuses, and
``CheckpointNotFound`` if a key to read does not exist. Callers retry where that is safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from relight.errors import StoreUnavailable, UnsafeContent
from relight.store.buffers import page_buffer


class Uncertain(StoreUnavailable):
    """A creation may or may not have taken effect. Only another read of the store can decide. Do not delete anything on this error."""

    kind = "uncertain"


class Properties(NamedTuple):
    """Guarantees of a store."""

    exclusive_create: bool
    """``put_once`` has one winner among all processes and machines."""
    durable: bool
    """Files survive a power cut after ``sync``."""


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
        """Close and delete the file. Never raises."""


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


class ByteStore(Protocol):
    """Operations of a store."""

    url: str
    parallel_reads: int
    """Parallel reads that the store can use."""
    shared: bool
    """Whether another process that opens ``url`` finds the same files."""
    needs_sync: bool
    """Whether names need ``sync``. False if an acknowledged name is durable."""

    def properties(self) -> Properties:
        """Return the store's guarantees."""

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
        raise UnsafeContent("an empty name is no name inside a store")
    if key and any(part in ("", ".", "..") or "\0" in part for part in key.split("/")):
        raise UnsafeContent(f"{key[:80]!r} is no name inside a store")
    return key


def lanes_of(store: ByteStore) -> int:
    """Return how many packs the store can write in parallel: one for each of its drives."""
    lanes: int = getattr(store, "lanes", 1)
    return lanes


def without_cache(store: ByteStore) -> ByteStore:
    """Return ``store`` without its local cache, to check the stored bytes themselves."""
    bare: ByteStore = getattr(store, "without_cache", store)
    return bare


class Rewrites(Protocol):
    """A store that can replace a file by an equivalent one: re-encrypted or repaired.

    A name keeps its contents otherwise.
    """

    def rewrite(self, key: str, size: int) -> Writer:
        """Return a writer.

        Its ``finish`` replaces the file at ``key``, atomically and durably. Until then, nothing changes.
        """


def encrypts(store: ByteStore) -> bool:
    """Return whether the store encrypts files before it stores them."""
    encrypted: bool = getattr(store, "encrypts", False)
    return encrypted


def trusts(store: ByteStore) -> bool:
    """Return whether readers of ``store`` accept only records of named signers."""
    named: bool = getattr(store, "trusts", False)
    return named


def invalidate_cache(store: ByteStore, key: str, offset: int = 0, length: int | None = None) -> None:
    """Drop cached copies of a range of a file, or of all of it, if ``store`` has a local cache."""
    forget = getattr(store, "invalidate", None)
    if forget is not None:
        forget(key, offset, length)


READS_AT_ONCE = 2
"""Parallel reads for a disk: it reads one range while another is hashed."""


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
