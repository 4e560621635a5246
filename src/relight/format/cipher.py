"""Encrypted files: what lies in a store that is encrypted, under the names that it would have without. Pure.

A file is encrypted in pages of 128 KiB, each where it would be without encryption, so that any range can be read by itself, and past the
page cache. Behind the pages come their tags, and a trailer that says with what the file is encrypted:

========================  =================================================================================================
pages                     AES-256-GCM of the bytes, as long as they are
16 bytes a page           the pages' tags, in order
trailer, 16               which *ring key* the data key is wrapped with: its id
12 + 48                   the *data key*, wrapped: a nonce, and AES-256-GCM of it
32                        salt, drawn for this file
32                        what the file's key commits to
8                         the file's length, little-endian
16                        the trailer's tag
16                        ``RELIGHT-CIPHER-1``
========================  =================================================================================================

A store's *ring keys* are kept by whoever has a key-encryption key: see ``format.keyring``. Each writer draws a *data key*; a file's key is
HKDF-SHA256 of it and the file's salt for the store's id and the file's name, so a file is of use only under its own name in its own store,
and no two writings, of the same name neither, ever share a key. Nonces count a file's pages; the trailer's tag, which covers the
length, has one of its own. An empty file is stored as such.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

from relight.errors import ConfigError, CorruptCheckpoint, WrongKey

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
    """Bytes that appear in no message, log or traceback, and go to no other process by accident."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = bytes(value)

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a secret is not pickled")

    def reveal(self) -> bytes:
        """The bytes. Whoever asks sees to it that they go nowhere else."""
        return self._value


class DataKey(NamedTuple):
    """A key that one writer encrypts with: itself, and wrapped as each of its files' trailers has it."""

    secret: Secret
    ring: bytes
    wrapped: bytes


class Trailer(NamedTuple):
    """What stands behind an encrypted file's pages and tags."""

    ring: bytes
    wrapped: bytes
    salt: bytes
    commitment: bytes
    size: int
    tag: bytes

    @property
    def said(self) -> bytes:
        """All of it that its tag covers."""
        return _TRAILER.pack(self.ring, self.wrapped, self.salt, self.commitment, self.size)


def ring_id(ring_key: Secret) -> bytes:
    """What a ring key is called: of no use to guess it."""
    return hkdf(ring_key.reveal(), b"", b"relight ring id", RING_ID_BYTES)


def new_data_key(ring_key: Secret, store_id: str, data_key: Secret, nonce: bytes) -> DataKey:
    """``data_key``, which is 32 random bytes as ``nonce`` is 12, wrapped for the store."""
    ring = ring_id(ring_key)
    sealed = _aes(_wrapping(ring_key)).encrypt(nonce, data_key.reveal(), _wrap_data(ring, store_id))
    return DataKey(data_key, ring, nonce + sealed)


def unwrap_data_key(ring_key: Secret, ring: bytes, wrapped: bytes, store_id: str, where: str) -> DataKey:
    """The data key of a trailer. ``CorruptCheckpoint`` if it was changed, or is another store's."""
    try:
        return DataKey(_unwrapped(_ByValue(ring_key), ring, wrapped, store_id), ring, wrapped)
    except _invalid_tag():
        raise CorruptCheckpoint("its data key was changed, or is another store's", where=where) from None


class FileCipher:
    """Encrypts, or decrypts, one file of one store. Threads may share it. Cost: a pass of AES-GCM; two microseconds a page besides."""

    def __init__(self, key: DataKey, salt: bytes, store_id: str, name: str) -> None:
        both = hkdf(key.secret.reveal(), salt, b"relight file\0" + store_id.encode() + b"\0" + name.encode(), 64)
        self._aes = _aes(both[:32])
        self._key, self._salt, self.commitment, self._name = key, salt, both[32:], name

    @classmethod
    def from_trailer(cls, trailer: Trailer, key: DataKey, store_id: str, name: str) -> FileCipher:
        """For reading. ``CorruptCheckpoint`` if the trailer is not of this file of this store, or any bit of it was changed."""
        found = cls(key, trailer.salt, store_id, name)
        if found.commitment != trailer.commitment:
            raise CorruptCheckpoint("it was encrypted for another name, or another store, or was changed", where=name)
        try:
            found._aes.decrypt(_END + bytes(8), trailer.tag, trailer.said)
        except _invalid_tag():
            raise CorruptCheckpoint("what is said of its encryption was changed", where=name) from None
        return found

    def encrypt_page(self, number: int, data: memoryview, into: memoryview) -> None:
        """Page ``number`` into memory 16 bytes longer: its tag comes last. Each page once, ever: a nonce is its number."""
        self._aes.encrypt_into(_PAGE + number.to_bytes(8, "big"), data, b"", into)

    def decrypt_page(self, number: int, sealed: memoryview, into: memoryview) -> None:
        """A page with its tag behind it into memory 16 bytes shorter; ``CorruptCheckpoint`` if any bit of it was changed."""
        try:
            self._aes.decrypt_into(_PAGE + number.to_bytes(8, "big"), sealed, b"", into)
        except _invalid_tag():
            at = number * PAGE_BYTES
            raise CorruptCheckpoint(f"bytes {at}–{at + len(into)} were changed, or are not of this file", where=self._name) from None

    def trailer(self, size: int) -> bytes:
        """Of a file of ``size`` bytes. Once."""
        said = _TRAILER.pack(self._key.ring, self._key.wrapped, self._salt, self.commitment, size)
        tag: bytes = self._aes.encrypt(_END + bytes(8), b"", said)
        return said + tag + MAGIC


def pages_of(size: int) -> int:
    """How many pages so many bytes take."""
    return -(-size // PAGE_BYTES)


def stored_size(size: int) -> int:
    """What a file of ``size`` bytes takes, encrypted."""
    return size + pages_of(size) * TAG_BYTES + TRAILER_BYTES if size else 0


def is_encrypted(data: bytes | memoryview) -> bool:
    """Whether these are an encrypted file's bytes, or its last ones."""
    return len(data) >= len(MAGIC) and data[-len(MAGIC) :] == MAGIC


def parse_trailer(data: bytes | memoryview, stored: int, where: str) -> Trailer:
    """The last ``TRAILER_BYTES`` of a file of ``stored`` bytes. ``CorruptCheckpoint`` if they are no trailer of such a file."""
    if len(data) != TRAILER_BYTES or not is_encrypted(data):
        raise CorruptCheckpoint(
            "it is not encrypted, and this store is", where=where, hint="somebody put it there, or it was cut short: nothing of it is used"
        )
    ring, wrapped, salt, commitment, size = _TRAILER.unpack_from(data)
    if not 0 < size < SIZE_MAX or stored_size(size) != stored:
        raise CorruptCheckpoint(f"{stored} bytes long, which is not what is said at its end", where=where)
    return Trailer(ring, wrapped, salt, commitment, size, bytes(data[_TRAILER.size : _TRAILER.size + TAG_BYTES]))


def encrypt_file(cipher: FileCipher, data: bytes | memoryview) -> bytes:
    """All of a small file."""
    view, size = memoryview(data), len(data)
    found = bytearray(stored_size(size))
    out, tags, at = memoryview(found), bytearray(), 0
    for number in range(pages_of(size)):
        page = view[at : at + PAGE_BYTES]
        cipher.encrypt_page(number, page, out[at : at + len(page) + TAG_BYTES])
        at += len(page)
        tags += out[at : at + TAG_BYTES]
    out[at:] = bytes(tags) + cipher.trailer(size)
    return bytes(found)


def decrypt_pages(cipher: FileCipher, first: int, sealed: memoryview, tags: memoryview, into: memoryview) -> None:
    """Whole pages from number ``first`` on, the last perhaps a short one, into memory of their length. ``tags``: theirs alone. ``sealed``
    is writable for 16 bytes behind its end, too: its memory is used."""
    at = 0
    for number in range(pages_of(len(into))):
        length = min(PAGE_BYTES, len(into) - at)
        behind = slice(at + length, at + length + TAG_BYTES)
        kept = bytes(sealed[behind])
        sealed[behind] = tags[number * TAG_BYTES : (number + 1) * TAG_BYTES]
        cipher.decrypt_page(first + number, sealed[at : at + length + TAG_BYTES], into[at : at + length])
        sealed[behind] = kept
        at += length


def hkdf(key: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """HKDF-SHA256."""
    need_library()
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=hashes.SHA256(), length=length, salt=salt or None, info=info).derive(key)


def wrap(key: Secret, nonce: bytes, data: bytes, said: bytes) -> bytes:
    """``data`` under a key-encryption key, bound to what is ``said`` of it."""
    sealed: bytes = _aes(key.reveal()).encrypt(nonce, data, said)
    return nonce + sealed


def unwrap(key: Secret, wrapped: bytes, said: bytes, where: str) -> Secret:
    """What was wrapped. ``WrongKey`` if it was not with that key, or not of that."""
    try:
        return Secret(_aes(key.reveal()).decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], said))
    except (_invalid_tag(), ValueError):
        raise WrongKey("this key does not open it, or it was changed", where=where) from None


class _ByValue:
    """A secret that a cache knows again."""

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
    """``ConfigError`` that says what to install, if it is not there."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError("encryption needs the library cryptography", hint="pip install 'relight[encryption]'") from None
