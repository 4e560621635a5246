"""What a store of bytes is: its operations and what each promises.

Keys are relative paths with ``/``. Every operation raises ``StoreUnavailable`` (``NoSpace``) when the store refuses, and
``CheckpointNotFound`` when a key to be read is not there. None of them retries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from relight.errors import StoreUnavailable, UnsafeContent
from relight.store.buffers import page_buffer


class Uncertain(StoreUnavailable):
    """A creation may or may not have taken effect: only reading the store again can tell. Nothing may be deleted on the strength of it."""

    kind = "uncertain"


class Properties(NamedTuple):
    """What a store honours."""

    exclusive_create: bool
    """``put_once`` has one winner among all processes and machines."""
    durable: bool
    """What was settled survives a power cut."""


class Entry(NamedTuple):
    """One name in a listing."""

    name: str
    is_dir: bool


class Upload(NamedTuple):
    """A file whose writing was begun and not ended, which takes room and is in no listing: an object store's multipart upload."""

    key: str
    id: str


class Writer(Protocol):
    """A new file being written, positioned by offset, from any thread."""

    align: int
    """Offsets, lengths and addresses handed to ``write_at`` are multiples of this; 1 if it doesn't matter. The last write may be padded."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of ``data``, which is the caller's again when this returns. Pieces of a file larger than 64 MiB come nearly in order:
        an object store keeps no more than that of what lies behind a gap."""

    def finish(self, size: int | None = None) -> None:
        """Make the bytes durable and close; the name needs ``sync``. After an error the file is poisoned: abort, never finish again.

        ``size``: the file ends there, sooner than was announced.
        """

    def abort(self) -> None:
        """Close and remove. Never raises."""


PAGE = 4096


class Reader(Protocol):
    """An open file. What is read through one reader comes from one file, whatever happens to its name."""

    size: int

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        """The bytes, read into ``room`` past the page cache, which other programs need more than a file that is read once.

        None if ``read_into`` is the better way: they are in the page cache, or the file system has no other. ``room`` is page-aligned
        and two ``PAGE``s longer than ``length``. ``CorruptCheckpoint`` if the file is shorter. Any thread.
        """

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset``; ``CorruptCheckpoint`` if the file is shorter. Any thread."""

    def close(self) -> None:
        """Let it go."""


class ByteStore(Protocol):
    """The operations."""

    url: str
    parallel_reads: int
    """How many reads at once are worth while."""
    shared: bool
    """Whether another process that opens ``url`` finds the same files."""
    needs_sync: bool
    """Whether ``sync`` has anything to do: False where what was answered is durable by name, too."""

    def properties(self) -> Properties:
        """What it honours."""

    def put_once(self, key: str, data: bytes) -> bool:
        """Create ``key`` with ``data``, durably, or return False if it is there already. ``Uncertain`` if neither can be told."""

    def write(self, key: str, size: int) -> Writer:
        """A writer for a new file of ``size`` bytes. Fails if the key exists, or if there is no room for it."""

    def sync(self, prefix: str) -> None:
        """Make the names directly below ``prefix`` durable."""

    def get(self, key: str, limit: int) -> bytes:
        """The whole of a small file; ``UnsafeContent`` if it is longer than ``limit``."""

    def open(self, key: str) -> Reader:
        """Open for reading."""

    def list(self, prefix: str) -> Iterator[Entry]:
        """Names directly below ``prefix``, in no order; nothing if there is no such prefix."""

    def delete(self, key: str) -> None:
        """Remove a file; one that is not there is fine."""

    def delete_dir(self, prefix: str) -> bool:
        """Remove an empty directory; False if it is not empty."""

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Writings below ``prefix``, at any depth, that were begun and not ended, live ones too. None where there is no such thing."""

    def drop_upload(self, upload: Upload) -> None:
        """Call one off and free its room; one that is gone is fine."""

    def free_bytes(self) -> int | None:
        """Room left, in bytes; None if unknown or without limit."""


def check_key(key: str, *, file: bool = False) -> str:
    """``UnsafeContent`` for what is no name inside a store; "" is the store itself, and no ``file``."""
    if file and not key:
        raise UnsafeContent("an empty name is no name inside a store")
    if key and any(part in ("", ".", "..") or "\0" in part for part in key.split("/")):
        raise UnsafeContent(f"{key[:80]!r} is no name inside a store")
    return key


def lanes_of(store: ByteStore) -> int:
    """How many packs at once a store takes faster than one: one for each of its drives, where it has several."""
    found: int = getattr(store, "lanes", 1)
    return found


def without_cache(store: ByteStore) -> ByteStore:
    """``store`` without the copies that it may keep nearby: for whoever asks whether the bytes lie where they should."""
    found: ByteStore = getattr(store, "without_cache", store)
    return found


class Rewrites(Protocol):
    """What a store can do besides whose files can be replaced by others that mean the same: encrypted anew, or mended. A name stands for
    what was written under it."""

    def rewrite(self, key: str, size: int) -> Writer:
        """A writer of what is to take the place of ``key``, if there is one, whole and durable, when it is finished; until then nothing
        changes."""


def encrypts(store: ByteStore) -> bool:
    """Whether what is put there is encrypted on its way."""
    found: bool = getattr(store, "encrypts", False)
    return found


def trusts(store: ByteStore) -> bool:
    """Return whether a reader of ``store`` counts only records of named signers."""
    named: bool = getattr(store, "trusts", False)
    return named


def invalidate_cache(store: ByteStore, key: str, offset: int = 0, length: int | None = None) -> None:
    """Have that range of a file, or all of it, read from where it lies the next time, if ``store`` keeps copies nearby."""
    forget = getattr(store, "invalidate", None)
    if forget is not None:
        forget(key, offset, length)


READS_AT_ONCE = 2
"""Enough for a disk: it always has something to do while what came is hashed."""


def put(store: ByteStore, key: str, data: bytes) -> None:
    """Write a small file under a name nobody else uses, durably but for ``sync``."""
    write_whole(store.write(key, len(data)), data)


def write_whole(writer: Writer, data: bytes) -> None:
    """All of a small file at once; nothing of it stays if that fails."""
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
