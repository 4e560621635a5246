"""A store wrapper that encrypts every file except ``relight.json``, which identifies the store, and the key slots.

Callers read and write plaintext. The inner store sees only names and lengths. Nothing is written in plaintext by mistake, and a plaintext
file in the inner store is rejected.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from relight.comm.new_threads import ThreadPool
from relight.errors import CorruptCheckpoint, StoreUnavailable, UnsafeContent, WrongKey
from relight.format.cipher import (
    KEY_BYTES,
    NONCE_BYTES,
    PAGE_BYTES,
    SALT_BYTES,
    TAG_BYTES,
    TRAILER_BYTES,
    DataKey,
    FileCipher,
    Secret,
    Trailer,
    decrypt_pages,
    encrypt_file,
    is_encrypted,
    new_data_key,
    pages_of,
    parse_trailer,
    ring_in,
    stored_size,
    unwrap_data_key,
)
from relight.format.keyring import KEYS_DIR
from relight.format.names import STORE_FILE, is_record_key
from relight.keys import Keychain
from relight.store.base import PAGE, ByteStore, Properties, Reader, Writer, check_key, invalidate_cache, rewrites
from relight.store.buffers import page_buffer
from relight.store.keyring import KeyRing, has_unreadable_slots, open_ring, slots_in
from relight.store.wrapper import StoreWrapper

BATCH_PAGES = 32
"""Pages per read: 4 MiB."""
WRITE_PAGES = 128
"""Pages per write to the inner store: 16 MiB, the write size of a checkpoint's writer. Each smaller write would cost a wait."""
ROOMS = 3
"""Write buffers: one is filled while the others are written, so that the device is always busy."""
_TRIES = 2
_REREADS = 2
"""Tags and pages may come from different drives, so the second of them is tried after the first one's bytes were refused twice."""


def is_clear(key: str) -> bool:
    """Return whether the file at ``key`` is never encrypted."""
    return key == STORE_FILE or key.startswith(f"{KEYS_DIR}/")


class EncryptedStore(StoreWrapper):
    """``inner``, encrypted. Thread-safe. A forked process creates its own data key.

    Construction reads nothing; the first use reads the key slots once. Memory: three buffers of 16 MiB per writer; a range and two pages
    per reading thread. Cost: one pass of AES-GCM over the data, in parallel with the inner store's I/O.
    """

    def __init__(self, inner: ByteStore, keychain: Keychain, *, takes_plain: bool = False) -> None:
        """``takes_plain``: also read plaintext files, while a store is being encrypted."""
        super().__init__(inner)
        self.keychain, self.takes_plain = keychain, takes_plain
        self._lock = threading.Lock()
        self._ring: KeyRing | None = None
        self._data_key: tuple[int, DataKey] | None = None
        self._slots: frozenset[str] | None = None
        self._rings: frozenset[bytes] | None = None
        """Ids of the ring keys that had a slot when ``ring_of`` first needed them."""

    def __reduce__(self) -> tuple[object, ...]:
        return (EncryptedStore, (self.inner, self.keychain))

    def properties(self) -> Properties:
        """See ``ByteStore``."""
        return replace(self.inner.properties(), encrypted=True)

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``. Before a record is created, check whether the store was rekeyed.

        Raise ``WrongKey`` if this process's earlier files cannot be opened any more. Later files use the new ring key.
        """
        if is_clear(key) or not data:
            return self.inner.put_once(key, data)
        if is_record_key(key):
            self._read_key_slots()
        return self.inner.put_once(key, encrypt_file(self._new_cipher(key), data))

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``. An empty file marks other files as complete, so the key slots are checked first, as before a record."""
        if not size:
            self._read_key_slots()
        if is_clear(key) or not size:
            return self.inner.write(key, size)
        cipher = self._new_cipher(key)
        return _EncryptingWriter(self.inner.write(key, stored_size(size)), cipher, size, key)

    def ring_of(self, key: str) -> bytes | None:
        """Return the id of the ring key that encrypts the file; None if the file is plaintext or empty.

        Raise ``CorruptCheckpoint`` if its trailer is damaged.
        """
        reader = self.inner.open(key)
        try:
            end = bytearray(min(TRAILER_BYTES, reader.size))
            reader.read_into(reader.size - len(end), memoryview(end))
            if is_encrypted(bytes(end)):
                return parse_trailer(bytes(end), reader.size, key).ring
            if self._rings is None:
                self._rings = frozenset(bytes.fromhex(slot.ring) for slot in slots_in(self.inner))
            if ring_in(end) in self._rings:
                raise CorruptCheckpoint("the end of an encrypted file is damaged", where=key)
            return None
        finally:
            reader.close()

    def stored_size_of(self, key: str) -> int:
        """Return the file's stored length. Empty files are not encrypted."""
        reader = self.inner.open(key)
        reader.close()
        return reader.size

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``. The new file is encrypted with the newest ring key."""
        return _EncryptingWriter(rewrites(self.inner).rewrite(key, stored_size(size)), self._new_cipher(key), size, key)

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``."""
        if is_clear(check_key(key)):
            return self.inner.get(key, limit)
        for left in reversed(range(_TRIES)):  # data that was damaged in transit is good at the next read
            data = self.inner.get(key, stored_size(limit) if limit else 0)
            try:
                return self._decrypted(key, data, limit)
            except CorruptCheckpoint:
                if not left:
                    raise
                invalidate_cache(self.inner, key)
        raise AssertionError("it is read at least once")

    def seal(self, name: str, data: bytes) -> bytes:
        """Return ``data`` encrypted as a file of that name, which is not stored: a message to processes with a key."""
        return encrypt_file(self._new_cipher(name), data)

    def unseal(self, name: str, sealed: bytes) -> bytes:
        """Return the data of a message that ``seal`` made under the same name, for the same store."""
        if not is_encrypted(sealed):
            raise CorruptCheckpoint("a message that is not encrypted", where=name)
        return self._decrypted(name, sealed, len(sealed))

    def _decrypted(self, key: str, data: bytes, limit: int) -> bytes:
        if not data or (self.takes_plain and not is_encrypted(data)):
            return data
        trailer = parse_trailer(data[-TRAILER_BYTES:], len(data), key)
        if trailer.size > limit:
            raise UnsafeContent(f"{trailer.size} bytes where at most {limit} are allowed", where=key)
        plain, sealed = bytearray(trailer.size), memoryview(bytearray(data))
        tags = sealed[trailer.size :][: pages_of(trailer.size) * TAG_BYTES]
        decrypt_pages(self._cipher_of(trailer, key), 0, sealed, memoryview(bytes(tags)), memoryview(plain))
        return bytes(plain)

    def open(self, key: str) -> Reader:
        """See ``ByteStore``. Cost: also reads trailer and tags. On failure, retry once without cached copies, which may predate a rekey."""
        try:
            return self._opened(key)
        except CorruptCheckpoint:
            invalidate_cache(self.inner, key)
            return self._opened(key)

    def _opened(self, key: str) -> Reader:
        reader = self.inner.open(key)
        if is_clear(key) or not reader.size:
            return reader
        try:
            if reader.size <= TRAILER_BYTES:
                if self.takes_plain:
                    return reader
                raise CorruptCheckpoint("too short for an encrypted file", where=key)
            end = bytearray(TRAILER_BYTES)
            reader.read_into(reader.size - TRAILER_BYTES, memoryview(end))
            if self.takes_plain and not is_encrypted(bytes(end)):
                return reader
            trailer = parse_trailer(bytes(end), reader.size, key)
            cipher = self._cipher_of(trailer, key)
            return _DecryptingReader(reader, cipher, trailer.size, key, partial(invalidate_cache, self.inner, key))
        except BaseException:
            reader.close()
            raise

    def invalidate(self, key: str, offset: int = 0, length: int | None = None) -> None:
        """See ``CachesBlocks``. Invalidate the whole file: its tags and its trailer, at its end, may be older than the range."""
        invalidate_cache(self.inner, key)

    def _ring_now(self, make: bool = False) -> KeyRing:
        with self._lock:
            if self._ring is None:
                # before the ring is opened, so that a slot added in between is detected as new
                names = self._slot_names()
                self._ring, self._slots = open_ring(self.inner, self.keychain, make=make), names
            return self._ring

    def _slot_names(self) -> frozenset[str]:
        return frozenset(entry.name for entry in self.inner.list(KEYS_DIR))

    def _ring_with(self, ring: bytes, where: str) -> Secret:
        """Return the ring key with this id. If this process does not have it, read the key slots again."""
        key = self._ring_now().keys.get(ring)
        if key is None:
            with self._lock:
                self._ring = open_ring(self.inner, self.keychain)
                key = self._ring.keys.get(ring)
        if key is None and (
            has_unreadable_slots(self.inner) or any(bytes.fromhex(slot.ring) == ring for slot in slots_in(self.inner))
        ):
            raise WrongKey(
                "none of the keys at hand opens what it is encrypted with",
                where=where,
                hint="relight keys status STORE",
            )
        if key is None:
            raise CorruptCheckpoint(
                "it is encrypted with a ring key without a slot in this store: it was changed, or all keys that could open it were revoked",
                where=where,
            )
        return key

    def _read_key_slots(self) -> None:
        names = self._slot_names()
        with self._lock:
            known, self._slots = self._slots, names
            if self._ring is None or known in (None, names):
                return
            used = None if self._data_key is None else self._data_key[1].ring
            try:
                self._ring = open_ring(self.inner, self.keychain)
            except WrongKey:
                newest = max(slots_in(self.inner), key=lambda slot: slot.generation, default=None)
                if newest is None or bytes.fromhex(newest.ring) != used:
                    raise
                return  # only key-encryption keys changed, not the ring key: this process continues with the key it has
            if self._ring.is_current and used in (None, self._ring.newest):
                return
            self._data_key = None
            self._require_current(self._ring)
        raise WrongKey("the store was rekeyed meanwhile", where=self.url, hint="the next save uses its new key")

    def _require_current(self, ring: KeyRing) -> None:
        """Raise ``WrongKey`` if the store has a newer ring key: the keys at hand may have leaked, and would open new files."""
        if not ring.is_current:
            raise WrongKey(
                "the store was encrypted again with a newer key, which is not at hand",
                where=self.url,
                hint="give it first: RELIGHT_KEY=; relight keys status STORE",
            )

    def _cipher_of(self, trailer: Trailer, key: str) -> FileCipher:
        ring_key, store_id = self._ring_with(trailer.ring, key), self._ring_now().store_id
        data_key = unwrap_data_key(ring_key, trailer.ring, trailer.wrapped, store_id, key)
        return FileCipher.from_trailer(trailer, data_key, store_id, key)

    def _new_cipher(self, key: str) -> FileCipher:
        check_key(key, file=True)
        ring, here = self._ring_now(make=True), os.getpid()
        with self._lock:
            if self._data_key is None or self._data_key[0] != here:
                self._require_current(ring)
                secret = Secret(secrets.token_bytes(KEY_BYTES))
                self._data_key = here, new_data_key(ring.key, ring.store_id, secret, secrets.token_bytes(NONCE_BYTES))
            data_key = self._data_key[1]
        return FileCipher(data_key, secrets.token_bytes(SALT_BYTES), ring.store_id, key)


class _EncryptingWriter:
    """Encrypts whole pages as they arrive. A thread writes them while the next pages are encrypted. A partial page waits for its rest.

    Each page is encrypted and written exactly once.
    """

    align = 1

    def __init__(self, inner: Writer, cipher: FileCipher, size: int, key: str) -> None:
        self._inner, self._cipher, self._size, self._key = inner, cipher, size, key
        self._lock = threading.Lock()
        self._tags: dict[int, bytes] = {}
        self._parts: dict[int, tuple[bytearray, int]] = {}
        """Partial pages: bytes, and number of bytes received. Usually one, as pieces arrive in order."""
        self._last: tuple[int, bytearray] | None = None
        """The page with the highest number. It is written at the end, together with tags and trailer."""
        self._rooms: list[memoryview] = []
        self._turn = 0
        self._writing: list[Future[None] | None] = [None] * ROOMS
        self._thread: ThreadPool | None = None

    def write_at(self, offset: int, data: memoryview) -> None:
        data = data.cast("B")[: max(0, self._size - offset)]  # bytes beyond the size only pad the last block
        with self._lock:
            while data:
                number, within = divmod(offset, PAGE_BYTES)
                pages = 0 if within else self._whole(number, len(data))
                if pages:
                    self._encrypt(number, data[: pages * PAGE_BYTES])
                    step = pages * PAGE_BYTES
                else:
                    step = min(PAGE_BYTES - within, len(data))
                    self._gather(number, within, data[:step])
                offset, data = offset + step, data[step:]

    def finish(self, size: int | None = None) -> None:
        with self._lock:
            size = self._size if size is None else min(size, self._size)
            left = size - size // PAGE_BYTES * PAGE_BYTES if size % PAGE_BYTES else PAGE_BYTES
            last = pages_of(size) - 1
            for number, (page, length) in list(self._parts.items()):
                if number > last:
                    continue
                if length < (left if number == last else PAGE_BYTES):
                    raise StoreUnavailable(
                        "a file that was not written whole cannot be finished", where=self._key, retryable=False
                    )
                self._page(number, memoryview(page)[: left if number == last else PAGE_BYTES])
            self._write_trailer()
            if sorted(self._tags) != list(range(last + 1)):
                raise StoreUnavailable(
                    "a file that was not written whole cannot be finished", where=self._key, retryable=False
                )
            self._end(size, last)
            self._inner.finish(stored_size(size))
            self._stop()

    def abort(self) -> None:
        self._stop()
        self._inner.abort()

    def _whole(self, number: int, length: int) -> int:
        """Return how many whole pages from ``number`` on can be encrypted directly. The file's last page waits for ``finish``."""
        last = pages_of(self._size) - 1
        return max(0, min(length // PAGE_BYTES, last - number)) if number not in self._parts else 0

    def _gather(self, number: int, within: int, data: memoryview) -> None:
        page, length = self._parts.get(number) or (bytearray(PAGE_BYTES), 0)
        page[within : within + len(data)] = data
        length += len(data)
        self._parts[number] = page, length
        if length == PAGE_BYTES and number < pages_of(self._size) - 1:
            del self._parts[number]
            self._encrypt(number, memoryview(page))

    def _encrypt(self, number: int, data: memoryview) -> None:
        """Encrypt whole pages, in batches, and write them."""
        done = 0
        while done < len(data):
            batch = data[done : done + WRITE_PAGES * PAGE_BYTES]
            room, mine = self._room(len(batch))
            first = number + done // PAGE_BYTES
            for page in range(len(batch) // PAGE_BYTES):
                self._seal(first + page, batch[page * PAGE_BYTES : (page + 1) * PAGE_BYTES], room[page * PAGE_BYTES :])
            self._hand_on(mine, first * PAGE_BYTES, room[: len(batch)])
            done += len(batch)

    def _page(self, number: int, data: memoryview) -> None:
        """Encrypt the last page, which may be short, and keep it for ``finish``."""
        room = bytearray(len(data) + TAG_BYTES)
        self._seal(number, data, memoryview(room))
        self._last = number, room[: len(data)]

    def _seal(self, number: int, data: memoryview, room: memoryview) -> None:
        if number in self._tags:
            raise StoreUnavailable("a page of an encrypted file was written twice", where=self._key, retryable=False)
        self._cipher.encrypt_page(number, data, room[: len(data) + TAG_BYTES])
        self._tags[number] = bytes(room[len(data) : len(data) + TAG_BYTES])

    def _room(self, length: int) -> tuple[memoryview, int]:
        """Return the next buffer and its index, after its previous contents were written."""
        turn = self._turn = (self._turn + 1) % ROOMS
        if not self._rooms:
            size = min(WRITE_PAGES, pages_of(self._size)) * PAGE_BYTES + PAGE
            self._rooms = [page_buffer(size) for _ in range(ROOMS)]
        self._wait(turn)
        return self._rooms[turn], turn

    def _hand_on(self, number: int, offset: int, data: memoryview) -> None:
        if self._size <= WRITE_PAGES * PAGE_BYTES:
            self._inner.write_at(offset, data)
            return
        if self._thread is None:
            self._thread = ThreadPool(ROOMS - 1, "relight-cipher")
        self._writing[number] = self._thread.submit(self._inner.write_at, offset, data)

    def _wait(self, turn: int) -> None:
        writing, self._writing[turn] = self._writing[turn], None
        if writing is not None:
            writing.result()

    def _write_trailer(self) -> None:
        for turn in range(ROOMS):
            self._wait(turn)

    def _end(self, size: int, last: int) -> None:
        """Write the last page, if it was not written yet, the tags and the trailer in one write."""
        begin, body = size, b""
        if self._last is not None:
            begin, body = last * PAGE_BYTES, bytes(self._last[1])
        data = body + b"".join(self._tags[number] for number in range(last + 1)) + self._cipher.trailer(size)
        if self._last is None and begin % self._inner.align:
            raise AssertionError("the last page was written too early")
        room = page_buffer(-(-len(data) // PAGE) * PAGE)
        room[: len(data)] = data
        step = WRITE_PAGES * PAGE_BYTES
        for start in range(0, len(data), step):
            piece = min(step, len(data) - start)
            self._inner.write_at(
                begin + start, room[start : start + -(-piece // self._inner.align) * self._inner.align]
            )

    def _stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)


class _ThreadBuffer(threading.local):
    """The calling thread's buffer for direct reads."""

    scratch = memoryview(b"")


class _DecryptingReader:
    def __init__(self, inner: Reader, cipher: FileCipher, size: int, key: str, refuse: Callable[[], None]) -> None:
        """``refuse``: called if the bytes that were read are not what was encrypted: the store takes the next ones from elsewhere."""
        self._inner, self._cipher, self.size, self._key, self._refuse = inner, cipher, size, key, refuse
        self._thread = _ThreadBuffer()
        self._tags = self._read_tags()

    def _read_tags(self) -> memoryview:
        tags = memoryview(bytearray(pages_of(self.size) * TAG_BYTES))
        self._inner.read_into(self.size, tags)
        return tags

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        first, count, begin, end = self._span(offset, length)
        scratch = self._scratch(end - begin)
        sealed = self._inner.fetch(begin, end - begin, scratch)
        if sealed is None:
            return None
        self._open_or_reread(sealed, scratch, first, count, offset, room[:length])
        return room[:length]

    def read_into(self, offset: int, into: memoryview) -> None:
        into = into.cast("B")
        if offset < 0 or offset + len(into) > self.size:
            raise CorruptCheckpoint(f"the file ends at byte {self.size}, and is truncated", where=self._key)
        step = BATCH_PAGES * PAGE_BYTES
        while into:
            length = min(len(into), step - offset % PAGE_BYTES)
            first, count, begin, end = self._span(offset, length)
            scratch = self._scratch(end - begin)
            self._inner.read_into(begin, scratch[: end - begin])
            self._open_or_reread(scratch[: end - begin], scratch, first, count, offset, into[:length])
            offset, into = offset + length, into[length:]

    def close(self) -> None:
        self._inner.close()

    def _span(self, offset: int, length: int) -> tuple[int, int, int, int]:
        """Return the pages that hold a range: first page, number of pages, and their begin and end in bytes."""
        if offset + length > self.size:
            raise CorruptCheckpoint(f"the file ends at byte {self.size}, and is truncated", where=self._key)
        first, end = offset // PAGE_BYTES, pages_of(offset + length)
        return first, end - first, first * PAGE_BYTES, min(end * PAGE_BYTES, self.size)

    def _scratch(self, length: int) -> memoryview:
        """Return a per-thread buffer for a direct read of ``length`` bytes, with space for a tag after them."""
        scratch = self._thread.scratch
        if len(scratch) < length + 2 * PAGE:
            scratch = self._thread.scratch = page_buffer(-(-length // PAGE) * PAGE + 3 * PAGE)
        return scratch

    def _open_or_reread(
        self, sealed: memoryview, scratch: memoryview, first: int, count: int, offset: int, into: memoryview
    ) -> None:
        """Decrypt as ``_open`` does. If that fails, read tags and pages again: only the way, or one drive of two, may have damaged them."""
        begin, length = first * PAGE_BYTES, len(sealed)
        for left in reversed(range(_REREADS + 1)):
            try:
                self._open(sealed, scratch, first, count, offset, into)
                return
            except CorruptCheckpoint:
                if not left:
                    raise
            self._refuse()
            self._tags = self._read_tags()
            sealed = scratch[:length]
            self._inner.read_into(begin, sealed)

    def _open(
        self, sealed: memoryview, scratch: memoryview, first: int, count: int, offset: int, into: memoryview
    ) -> None:
        """Decrypt ``count`` pages from ``first`` on, and copy the bytes from ``offset`` on to ``into``. ``sealed`` is in ``scratch``."""
        lead = offset - first * PAGE_BYTES
        tags = self._tags[first * TAG_BYTES : (first + count) * TAG_BYTES]
        whole = sealed if len(sealed) == 0 else _with_room(sealed, scratch)
        if lead == 0 and len(into) == len(sealed):
            decrypt_pages(self._cipher, first, whole, tags, into)
            return
        at = 0
        edge: memoryview | None = None
        for number in range(count):
            length = min(PAGE_BYTES, len(sealed) - at)
            start, stop = max(at, lead), min(at + length, lead + len(into))
            tag = tags[number * TAG_BYTES : (number + 1) * TAG_BYTES]
            if (start, stop) == (at, at + length):
                decrypt_pages(self._cipher, first + number, whole[at:], tag, into[at - lead : stop - lead])
            else:
                edge = edge if edge is not None else memoryview(bytearray(PAGE_BYTES))
                decrypt_pages(self._cipher, first + number, whole[at:], tag, edge[:length])
                into[start - lead : stop - lead] = edge[start - at : stop - at]
            at += length


def _with_room(sealed: memoryview, scratch: memoryview) -> memoryview:
    """Return ``sealed``, which is part of ``scratch``, extended to the end of ``scratch``."""
    offset = ctypes.addressof(ctypes.c_char.from_buffer(sealed)) - ctypes.addressof(ctypes.c_char.from_buffer(scratch))
    return scratch[offset:]
