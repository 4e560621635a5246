"""Signers of log records, and the signers that readers trust."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from typing import Any, Protocol

from blake3 import blake3

from relight.errors import ConfigError
from relight.format.cipher import Secret, hkdf, need_library
from relight.format.signed import DOMAIN, Signature
from relight.keys.files import parse_key, read_small_file
from relight.keys.providers import HeldKey

PRIVATE, PUBLIC = "relight-signing-1:", "ed25519:"
_KNOWN = "ed25519:file:PATH, hash:file:PATH, hash:env:NAME"


class Signer(Protocol):
    """Signs records."""

    spec: str

    def sign(self, record: bytes) -> Signature:
        """Return the signature of a record."""

    def resolved(self) -> bytes:
        """Return the key bytes that another Relight process needs in addition to the spec."""


class Verifier(Protocol):
    """Verifies signatures of one signer."""

    by: str
    spec: str

    def holds(self, record: bytes, signature: bytes) -> bool:
        """Return whether this signer signed the record."""

    def resolved(self) -> bytes:
        """Return the key bytes that another Relight process needs in addition to the spec."""


class Ed25519Signer:
    """Signer with a private key from a file. The public key verifies, and cannot sign."""

    def __init__(self, spec: str, private: Secret) -> None:
        need_library()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self.spec, self._private = spec, private
        self._key = Ed25519PrivateKey.from_private_bytes(private.reveal())
        self.public = self._key.public_key().public_bytes_raw()
        self.by = _signer_id("ed25519", self.public)

    def __repr__(self) -> str:
        return f"Ed25519Signer({self.by!r})"

    def sign(self, record: bytes) -> Signature:
        """See ``Signer``."""
        return Signature(self.by, self._key.sign(DOMAIN + record))

    def resolved(self) -> bytes:
        """See ``Signer``."""
        return self._private.reveal()


class Ed25519Verifier:
    """Verifier with a public key."""

    def __init__(self, spec: str, public: bytes) -> None:
        need_library()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        self.spec, self._public, self.by = spec, public, _signer_id("ed25519", public)
        self._key = Ed25519PublicKey.from_public_bytes(public)

    def __repr__(self) -> str:
        return f"Ed25519Verifier({self.by!r})"

    def holds(self, record: bytes, signature: bytes) -> bool:
        """See ``Verifier``."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, DOMAIN + record)
        except InvalidSignature:
            return False
        return True

    def resolved(self) -> bytes:
        """See ``Verifier``."""
        return self._public


class HashSigner:
    """Signer and verifier with keyed BLAKE3. A process that can verify can also sign."""

    def __init__(self, spec: str, key: Secret) -> None:
        self.spec, self._key = spec, key
        self.by = _signer_id("hash", hkdf(key.reveal(), b"", b"relight signer id", 32))

    def __repr__(self) -> str:
        return f"HashSigner({self.by!r})"

    def sign(self, record: bytes) -> Signature:
        """See ``Signer``."""
        return Signature(self.by, blake3(DOMAIN + record, key=self._key.reveal()).digest())

    def holds(self, record: bytes, signature: bytes) -> bool:
        """See ``Verifier``."""
        import hmac

        return hmac.compare_digest(blake3(DOMAIN + record, key=self._key.reveal()).digest(), signature)

    def resolved(self) -> bytes:
        """See ``Signer``."""
        return self._key.reveal()


class Trust:
    """Trusted signers: a record without a signature of one of them is invalid."""

    def __init__(self, verifiers: Sequence[Verifier]) -> None:
        if not verifiers:
            raise ConfigError("trust= names no signer, so every record would be invalid")
        self.verifiers = tuple(verifiers)

    def __repr__(self) -> str:
        return f"Trust({[verifier.by for verifier in self.verifiers]!r})"

    def believes(self, record: bytes, signature: Signature) -> bool:
        """Return whether a trusted signer has signed the record."""
        return any(
            verifier.by == signature.by and verifier.holds(record, signature.value) for verifier in self.verifiers
        )


def signer_of(spec: str, resolved: bytes | None = None) -> Ed25519Signer | HashSigner:
    """Return the signer of a spec: ``ed25519:file:PATH`` of a private key, ``hash:file:PATH`` or ``hash:env:NAME`` of a 32-byte key."""
    kind, _, rest = spec.partition(":")
    if kind == "ed25519" and (resolved is not None or rest.startswith("file:")):
        return Ed25519Signer(
            spec, Secret(resolved) if resolved is not None else _private_in(rest.removeprefix("file:"))
        )
    if kind == "hash" and (resolved is not None or rest.startswith(("file:", "env:"))):
        return HashSigner(spec, Secret(resolved) if resolved is not None else _shared(rest))
    raise ConfigError(
        "invalid spec of a signing key", hint=f"valid specs: {_KNOWN}; relight keys new --signing FILE writes a key"
    )


def trust_of(specs: str | Sequence[str], resolved: Sequence[bytes] | None = None) -> Trust:
    """Return the trusted signers of these specs. Several in one text are separated by spaces.

    A spec is ``ed25519:`` and a public key in base64, ``ed25519:file:PATH``, or ``hash:…`` as for signing.
    """
    names = specs.split() if isinstance(specs, str) else list(specs)
    verifiers: list[Verifier] = []
    for number, spec in enumerate(names):
        kind, _, rest = spec.partition(":")
        known = None if resolved is None else resolved[number]
        if kind == "ed25519":
            verifiers.append(Ed25519Verifier(spec, known if known is not None else _public(rest)))
        elif kind == "hash":
            verifiers.append(HashSigner(spec, Secret(known) if known is not None else _shared(rest)))
        else:
            raise ConfigError("invalid spec of a trusted signer", hint=f"valid specs: ed25519:PUBLIC KEY, {_KNOWN}")
    return Trust(verifiers)


def write_signing_key(path: str) -> str:
    """Write a new Ed25519 key to a new file that only its owner can read. Return the public key as a spec for ``trust_of``."""
    import secrets

    from relight.keys.files import write_secret

    private = secrets.token_bytes(32)
    write_secret(path, f"{PRIVATE}{base64.b64encode(private).decode()}\n")
    return f"{PUBLIC}{base64.b64encode(Ed25519Signer('', Secret(private)).public).decode()}"


def _private_in(path: str) -> Secret:
    text = read_small_file(path).reveal()
    if not text.startswith(PRIVATE.encode()):
        raise ConfigError("this is not a signing key", where=path, hint="relight keys new --signing FILE writes one")
    return parse_key(Secret(text.removeprefix(PRIVATE.encode())), path)


def _public(rest: str) -> bytes:
    text = rest
    if rest.startswith("file:"):
        path = os.path.expanduser(rest.removeprefix("file:"))
        try:
            with open(path, encoding="ascii") as file:
                text = file.read(4096).strip().removeprefix(PUBLIC)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"the public key cannot be read: {type(error).__name__}", where=path) from None
    try:
        public = base64.b64decode(text, validate=True)
    except ValueError:
        public = b""
    if len(public) != 32:
        raise ConfigError(
            "this is not a public key of 32 bytes in base 64", hint="relight keys new --signing FILE prints it"
        )
    return public


def _shared(rest: str) -> Secret:
    from relight.keys.chain import resolve

    provider: Any = resolve(rest)
    if not isinstance(provider, HeldKey):
        raise ConfigError("the key of a keyed hash must be in a file or a variable", hint=f"valid specs: {_KNOWN}")
    return Secret(hkdf(provider.resolved() or b"", b"", b"relight keyed hash", 32))


def _signer_id(kind: str, public: bytes) -> str:
    return f"{kind}:{blake3(public).hexdigest()[:16]}"
