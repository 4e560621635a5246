"""Format of encrypted files. Names are the same as without encryption. Pure.

A file is encrypted in pages of 128 KiB, each at its unencrypted offset, so that any range can be read alone, also with direct I/O. After
the pages follow their tags, and a trailer with the keys of the file:

========================  =================================================================================================
pages                     AES-256-GCM of the bytes, of the same length
16 bytes a page           the pages' tags, in order
trailer, 16               id of the *ring key* that wraps the data key
12 + 48                   the wrapped *data key*: a nonce, and AES-256-GCM of the key
32                        random salt of this file
32                        commitment to the file's key
8                         the file's length, little-endian
16                        the trailer's tag
16                        ``RELIGHT-CIPHER-1``
========================  =================================================================================================

A store's *ring keys* are stored in slots, each wrapped by a key-encryption key: see ``format.keyring``. Each writer generates a *data
key*. A file's key is HKDF-SHA256 of the data key and the file's salt, bound to the store's id and the file's name. So a file can be
decrypted only under its own name in its own store, and no two written files share a key, not even under the same name. Nonces are page
numbers. The trailer's tag, which covers the length, has its own nonce. An empty file is stored empty.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

from relight.errors import ConfigError, CorruptCheckpoint, WrongKey, extra_hint

PAGE_BYTES = 128 << 10
TAG_BYTES = 16
MAGIC = b"RELIGHT-CIPHER-1"
KEY_BYTES = 32
RING_ID_BYTES = 16
SALT_BYTES = 32
NONCE_BYTES = 12
_WRAPPED_BYTES = NONCE_BYTES + KEY_BYTES + TAG_BYTES
_TRAILER = struct.Struct(f"<{RING_ID_BYTES}s{_WRAPPED_BYTES}s{SALT_BYTES}s32sQ")
TRAILER_BYTES = _TRAILER.size + TAG_BYTES + len(MAGIC)
SIZE_MAX = 1 << 62
_PAGE, _END = b"\0\0\0\0", b"\0\0\0\1"


class Secret:
    """Bytes that never appear in messages, logs or tracebacks, and cannot be pickled by accident."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = bytes(value)

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a secret cannot be pickled")

    def reveal(self) -> bytes:
        """Return the bytes. The caller must not let them leave the process."""
        return self._value


class DataKey(NamedTuple):
    """A writer's key: the secret, and its wrapped form for the trailers of the files."""

    secret: Secret
    ring: bytes
    wrapped: bytes


class Trailer(NamedTuple):
    """Fields of the trailer after an encrypted file's pages and tags."""

    ring: bytes
    wrapped: bytes
    salt: bytes
    commitment: bytes
    size: int
    tag: bytes

    @property
    def associated_data(self) -> bytes:
        """The encoded fields that the tag covers."""
        return _TRAILER.pack(self.ring, self.wrapped, self.salt, self.commitment, self.size)


def ring_id(ring_key: Secret) -> bytes:
    """Return the id of a ring key, from which the key cannot be guessed."""
    return hkdf(ring_key.reveal(), b"", b"relight ring id", RING_ID_BYTES)


def new_data_key(ring_key: Secret, store_id: str, data_key: Secret, nonce: bytes) -> DataKey:
    """Return ``data_key`` (32 random bytes) wrapped for the store with ``nonce`` (12 random bytes)."""
    ring = ring_id(ring_key)
    sealed = _aes(_wrapping(ring_key)).encrypt(nonce, data_key.reveal(), _wrap_data(ring, store_id))
    return DataKey(data_key, ring, nonce + sealed)


def unwrap_data_key(ring_key: Secret, ring: bytes, wrapped: bytes, store_id: str, where: str) -> DataKey:
    """Return the data key of a trailer. Raise ``CorruptCheckpoint`` if it was changed, or belongs to another store."""
    try:
        return DataKey(_unwrapped(_ByValue(ring_key), ring, wrapped, store_id), ring, wrapped)
    except _invalid_tag():
        raise CorruptCheckpoint("its data key was changed, or belongs to another store", where=where) from None


class FileCipher:
    """Encrypts or decrypts one file of one store. Thread-safe. Cost: one pass of AES-GCM, and 2 µs per page."""

    def __init__(self, key: DataKey, salt: bytes, store_id: str, name: str) -> None:
        both = hkdf(key.secret.reveal(), salt, b"relight file\0" + store_id.encode() + b"\0" + name.encode(), 64)
        self._aes = _aes(both[:32])
        self._key, self._salt, self.commitment, self._name = key, salt, both[32:], name

    @classmethod
    def from_trailer(cls, trailer: Trailer, key: DataKey, store_id: str, name: str) -> FileCipher:
        """Return a cipher for reading. Raise ``CorruptCheckpoint`` if the trailer was changed, or belongs to another file or store."""
        cipher = cls(key, trailer.salt, store_id, name)
        if cipher.commitment != trailer.commitment:
            raise CorruptCheckpoint("it was encrypted for another name, or another store, or was changed", where=name)
        try:
            cipher._aes.decrypt(_END + bytes(8), trailer.tag, trailer.associated_data)
        except _invalid_tag():
            raise CorruptCheckpoint("the trailer of its encryption was changed", where=name) from None
        return cipher

    def encrypt_page(self, number: int, data: memoryview, into: memoryview) -> None:
        """Encrypt page ``number`` into memory 16 bytes longer, with the tag last. Call once per page: the nonce is the page number."""
        self._aes.encrypt_into(_PAGE + number.to_bytes(8, "big"), data, b"", into)

    def decrypt_page(self, number: int, sealed: memoryview, into: memoryview) -> None:
        """Decrypt a page followed by its tag into memory 16 bytes shorter. Raise ``CorruptCheckpoint`` if any bit was changed."""
        try:
            self._aes.decrypt_into(_PAGE + number.to_bytes(8, "big"), sealed, b"", into)
        except _invalid_tag():
            offset = number * PAGE_BYTES
            raise CorruptCheckpoint(
                f"bytes {offset}–{offset + len(into)} were changed, or belong to another file", where=self._name
            ) from None

    def trailer(self, size: int) -> bytes:
        """Return the trailer of a file of ``size`` bytes. Call once per file."""
        fields = _TRAILER.pack(self._key.ring, self._key.wrapped, self._salt, self.commitment, size)
        tag: bytes = self._aes.encrypt(_END + bytes(8), b"", fields)
        return fields + tag + MAGIC


def pages_of(size: int) -> int:
    """Return the number of pages of ``size`` bytes."""
    return -(-size // PAGE_BYTES)


def stored_size(size: int) -> int:
    """Return the encrypted length of a file of ``size`` bytes."""
    return size + pages_of(size) * TAG_BYTES + TRAILER_BYTES if size else 0


def is_encrypted(data: bytes | memoryview) -> bool:
    """Return whether ``data`` is an encrypted file, or the end of one."""
    return len(data) >= len(MAGIC) and data[-len(MAGIC) :] == MAGIC


def ring_in(end: bytes | bytearray) -> bytes:
    """Return the bytes that are the ring key's id if ``end``, the last ``TRAILER_BYTES`` of a file, is a trailer."""
    return bytes(end[:RING_ID_BYTES])


def parse_trailer(data: bytes | memoryview, stored: int, where: str) -> Trailer:
    """Parse the last ``TRAILER_BYTES`` of a file of ``stored`` bytes. Raise ``CorruptCheckpoint`` if they are not a valid trailer."""
    if len(data) != TRAILER_BYTES or not is_encrypted(data):
        raise CorruptCheckpoint(
            "it is not encrypted, and this store is",
            where=where,
            hint="it was truncated, or Relight did not write it: it is not used",
        )
    ring, wrapped, salt, commitment, size = _TRAILER.unpack_from(data)
    if not 0 < size < SIZE_MAX or stored_size(size) != stored:
        raise CorruptCheckpoint(f"{stored} bytes long, but its end states another length", where=where)
    return Trailer(ring, wrapped, salt, commitment, size, bytes(data[_TRAILER.size : _TRAILER.size + TAG_BYTES]))


def encrypt_file(cipher: FileCipher, data: bytes | memoryview) -> bytes:
    """Return a small file, encrypted."""
    view, size = memoryview(data), len(data)
    encrypted = bytearray(stored_size(size))
    out, tags, offset = memoryview(encrypted), bytearray(), 0
    for number in range(pages_of(size)):
        page = view[offset : offset + PAGE_BYTES]
        cipher.encrypt_page(number, page, out[offset : offset + len(page) + TAG_BYTES])
        offset += len(page)
        tags += out[offset : offset + TAG_BYTES]
    out[offset:] = bytes(tags) + cipher.trailer(size)
    return bytes(encrypted)


def decrypt_pages(cipher: FileCipher, first: int, sealed: memoryview, tags: memoryview, into: memoryview) -> None:
    """Decrypt whole pages from number ``first`` on into memory of their length. The last page may be short.

    ``tags``: the tags of these pages. ``sealed``: must be writable, also 16 bytes after its end, as tags are placed there temporarily.
    """
    offset = 0
    for number in range(pages_of(len(into))):
        length = min(PAGE_BYTES, len(into) - offset)
        after_page = slice(offset + length, offset + length + TAG_BYTES)
        kept = bytes(sealed[after_page])
        sealed[after_page] = tags[number * TAG_BYTES : (number + 1) * TAG_BYTES]
        cipher.decrypt_page(
            first + number, sealed[offset : offset + length + TAG_BYTES], into[offset : offset + length]
        )
        sealed[after_page] = kept
        offset += length


def hkdf(key: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """Return ``length`` bytes derived from ``key`` with HKDF-SHA256."""
    need_library()
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=hashes.SHA256(), length=length, salt=salt or None, info=info).derive(key)


def wrap(key: Secret, nonce: bytes, data: bytes, associated_data: bytes) -> bytes:
    """Return ``data`` wrapped by a key-encryption key, bound to ``associated_data``."""
    sealed: bytes = _aes(key.reveal()).encrypt(nonce, data, associated_data)
    return nonce + sealed


def unwrap(key: Secret, wrapped: bytes, associated_data: bytes, where: str) -> Secret:
    """Return the wrapped data. Raise ``WrongKey`` if key or associated data differ."""
    try:
        return Secret(_aes(key.reveal()).decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], associated_data))
    except (_invalid_tag(), ValueError):
        raise WrongKey("this key does not open the slot, or the slot was changed", where=where) from None


class _ByValue:
    """A secret that is hashed and compared by value, as a cache key."""

    __slots__ = ("secret",)

    def __init__(self, secret: Secret) -> None:
        self.secret = secret

    def __hash__(self) -> int:
        return hash(self.secret.reveal())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByValue) and self.secret.reveal() == other.secret.reveal()


@lru_cache(maxsize=256)
def _unwrapped(ring_key: _ByValue, ring: bytes, wrapped: bytes, store_id: str) -> Secret:
    aes = _aes(_wrapping(ring_key.secret))
    return Secret(aes.decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], _wrap_data(ring, store_id)))


def _wrapping(ring_key: Secret) -> bytes:
    return hkdf(ring_key.reveal(), b"", b"relight wrap", KEY_BYTES)


def _wrap_data(ring: bytes, store_id: str) -> bytes:
    return b"relight data key\0" + ring + store_id.encode()


def _aes(key: bytes) -> Any:
    need_library()
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _invalid_tag() -> type[Exception]:
    from cryptography.exceptions import InvalidTag

    return InvalidTag


def need_library() -> None:
    """Raise ``ConfigError`` with the package to install if the library is missing."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError("encryption needs the library cryptography", hint=extra_hint("encryption")) from None
