"""Key-encryption keys: they wrap and unwrap ring keys."""

from __future__ import annotations

import base64
import os
import secrets
import threading
from typing import TYPE_CHECKING, Protocol

from relight.errors import ConfigError, WrongKey
from relight.format.cipher import NONCE_BYTES, Secret, hkdf, unwrap, wrap

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

_DERIVING = threading.Lock()
"""Only one derivation at a time: two parallel ones deadlock in the library's lane threads (cryptography 50.0.2)."""
os.register_at_fork(after_in_child=_DERIVING._at_fork_reinit)  # type: ignore[attr-defined]
WrapParameters = dict[str, str | int]
"""Parameters of a slot's wrapping that unwrapping needs, such as salt and cost."""
ARGON_MEMORY_KIB, ARGON_PASSES, ARGON_LANES = 64 << 10, 3, 4
"""Cost of one passphrase guess: RFC 9106's second recommendation."""
_ARGON_MEMORY_MAX_KIB, _ARGON_PASSES_MAX, _ARGON_LANES_MAX = 256 << 10, 8, 16
SCRYPT_N, SCRYPT_R, SCRYPT_P = 1 << 17, 8, 1
"""Cost of a guess if OpenSSL has no Argon2id: 128 MiB."""
_SCRYPT_N_MAX, _SCRYPT_R_MAX, _SCRYPT_P_MAX = 1 << 18, 8, 4


class Provider(Protocol):
    """A key-encryption key."""

    spec: str
    """Name of the key, such as ``file:PATH``; not secret."""
    kind: str

    @property
    def kek(self) -> str:
        """Id of the key, 16 hexadecimal digits, used in the names of its slots."""

    def fits(self, kind: str, kek: str) -> bool:
        """Return whether this key may open a slot of that kind and id."""

    def wrap(self, key: Secret, associated_data: bytes) -> tuple[bytes, WrapParameters]:
        """Return the wrapped ring key, bound to ``associated_data``, and the parameters for unwrapping."""

    def unwrap(self, wrapped: bytes, parameters: WrapParameters, associated_data: bytes, where: str) -> Secret:
        """Return the ring key. Raise ``WrongKey`` if it was wrapped by another key, or with other associated data."""

    def resolved(self) -> bytes | None:
        """Return the secret for a process that cannot read the spec's source; None if every process can."""


class HeldKey:
    """A 32-byte key from a file, an environment variable or an operating system's keyring."""

    def __init__(self, spec: str, key: Secret) -> None:
        self.spec, self.kind, self._key = spec, spec.partition(":")[0], key

    def __repr__(self) -> str:
        return f"HeldKey({self.spec!r})"

    @property
    def kek(self) -> str:
        """See ``Provider``. Computed from the key itself, independent of its source."""
        return hkdf(self._key.reveal(), b"", b"relight key id", 8).hex()

    def fits(self, kind: str, kek: str) -> bool:
        """See ``Provider``."""
        return kek == self.kek

    def wrap(self, key: Secret, associated_data: bytes) -> tuple[bytes, WrapParameters]:
        """See ``Provider``."""
        return wrap(self._key, secrets.token_bytes(NONCE_BYTES), key.reveal(), associated_data), {}

    def unwrap(self, wrapped: bytes, parameters: WrapParameters, associated_data: bytes, where: str) -> Secret:
        """See ``Provider``."""
        return unwrap(self._key, wrapped, associated_data, where)

    def resolved(self) -> bytes | None:
        """See ``Provider``."""
        return self._key.reveal()


class NamedKey:
    """A key that is identified by its spec. It may have several specs, so it may open any slot of its kind."""

    kind: str

    def __init__(self, spec: str) -> None:
        self.spec = spec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec!r})"

    @property
    def kek(self) -> str:
        """See ``Provider``."""
        return hkdf(self.spec.encode(), b"", b"relight key id", 8).hex()

    def fits(self, kind: str, kek: str) -> bool:
        """See ``Provider``."""
        return kind == self.kind

    def resolved(self) -> bytes | None:
        """See ``Provider``."""
        return None


class Passphrase(NamedKey):
    """Argon2id of a passphrase, or scrypt if OpenSSL has no Argon2id, with a salt for each slot.

    Its id does not depend on the passphrase, as such an id would help to guess it.
    """

    kind = "passphrase"

    def __init__(self, spec: str, passphrase: Secret) -> None:
        super().__init__(spec)
        self._passphrase = passphrase

    def wrap(self, key: Secret, associated_data: bytes) -> tuple[bytes, WrapParameters]:
        """See ``Provider``. Cost: 0.1 s and 64 MiB; with scrypt 0.5 s and 128 MiB."""
        salt = base64.b64encode(secrets.token_bytes(16)).decode()
        parameters: WrapParameters = {
            "kdf": "argon2id",
            "salt": salt,
            "memory_kib": ARGON_MEMORY_KIB,
            "passes": ARGON_PASSES,
            "lanes": ARGON_LANES,
        }
        if not _has_argon():
            parameters = {"kdf": "scrypt", "salt": salt, "n": SCRYPT_N, "r": SCRYPT_R, "p": SCRYPT_P}
        return wrap(
            self._derived(parameters, ""), secrets.token_bytes(NONCE_BYTES), key.reveal(), associated_data
        ), parameters

    def unwrap(self, wrapped: bytes, parameters: WrapParameters, associated_data: bytes, where: str) -> Secret:
        """See ``Provider``. Cost: that of ``wrap``. The cost parameters in a slot are bounded."""
        return unwrap(self._derived(parameters, where), wrapped, associated_data, where)

    def resolved(self) -> bytes | None:
        """See ``Provider``."""
        return self._passphrase.reveal()

    def _derived(self, parameters: WrapParameters, where: str) -> Secret:
        from cryptography.exceptions import UnsupportedAlgorithm

        try:
            kdf = _derivation(parameters, base64.b64decode(str(parameters.get("salt")), validate=True))
        except ValueError:
            raise WrongKey("the slot's salt is malformed", where=where) from None
        except UnsupportedAlgorithm:
            what = f"the OpenSSL of the library cryptography does not support {parameters.get('kdf')}"
            raise ConfigError(what, hint="upgrade the library cryptography") from None
        if kdf is None:
            raise WrongKey("the slot needs a key derivation that this version of Relight does not support", where=where)
        with _DERIVING:
            return Secret(kdf.derive(self._passphrase.reveal()))


def _derivation(parameters: WrapParameters, salt: bytes) -> Argon2id | Scrypt | None:
    """Return the key derivation with a slot's parameters; None if it is unknown, or its cost exceeds the bounds."""
    from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    def number(name: str, least: int, most: int) -> int:
        value = parameters.get(name)
        return value if type(value) is int and least <= value <= most else 0

    if parameters.get("kdf") == "argon2id":
        memory, passes = number("memory_kib", 8 << 10, _ARGON_MEMORY_MAX_KIB), number("passes", 1, _ARGON_PASSES_MAX)
        lanes = number("lanes", 1, _ARGON_LANES_MAX)
        return (
            Argon2id(salt=salt, length=32, iterations=passes, lanes=lanes, memory_cost=memory)
            if memory and passes and lanes
            else None
        )
    if parameters.get("kdf") == "scrypt" and len(salt) >= 8:
        n, r, p = number("n", 1 << 14, _SCRYPT_N_MAX), number("r", 8, _SCRYPT_R_MAX), number("p", 1, _SCRYPT_P_MAX)
        return Scrypt(salt=salt, length=32, n=n, r=r, p=p) if n and r and p and n & (n - 1) == 0 else None
    return None


def _has_argon() -> bool:
    """Return whether OpenSSL has Argon2id (3.2 and later)."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

    try:
        Argon2id(salt=bytes(16), length=32, iterations=1, lanes=1, memory_cost=8)
    except UnsupportedAlgorithm:
        return False
    return True
