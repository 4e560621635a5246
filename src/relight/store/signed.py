"""A store wrapper that signs log records when they are written, and accepts only records of trusted signers when they are read.

A COMMIT record names the root by its hash, the root its parts, and the parts all bytes. So a COMMIT's signature covers the checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from relight.errors import CorruptCheckpoint
from relight.format.names import is_record_key
from relight.format.signed import apart, with_signature
from relight.keys.signing import Ed25519Signer, HashSigner, Trust
from relight.store.base import ByteStore, Properties
from relight.store.wrapper import StoreWrapper

_ROOM = 512
"""Most bytes of a signature."""


class SignedStore(StoreWrapper):
    """``inner``, with records signed by ``signer`` and verified by ``trust``. None: do not sign; accept all records."""

    def __init__(self, inner: ByteStore, signer: Ed25519Signer | HashSigner | None, trust: Trust | None) -> None:
        super().__init__(inner)
        self._signer, self._trust = signer, trust

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a store that signs is opened where it is used")

    def properties(self) -> Properties:
        """See ``ByteStore``."""
        properties = self.inner.properties()
        if self._trust is None:
            return properties
        own = self._signer is not None and self._trust.believes(b"", self._signer.sign(b""))
        return replace(properties, signed=True, trusts_itself=own)

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""
        if self._signer is not None and is_record_key(key):
            record, signature = apart(data, key)
            data = data if signature is not None else with_signature(record, self._signer.sign(record))
        return self.inner.put_once(key, data)

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``. Return a record without its signature. Raise ``CorruptCheckpoint`` if no trusted signer signed it."""
        if not is_record_key(key):
            return self.inner.get(key, limit)
        record, signature = apart(self.inner.get(key, limit + _ROOM), key)
        if self._trust is not None:
            if signature is None:
                raise CorruptCheckpoint(
                    "this record is not signed", where=key, hint="only records that are signed count: RELIGHT_TRUST"
                )
            if not self._trust.believes(record, signature):
                raise CorruptCheckpoint(
                    f"signed by {signature.by}, which is not trusted here, or changed since", where=key
                )
        return record
