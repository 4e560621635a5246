"""Security settings of a store: encryption keys, signer, trusted signers, and the anchor that records the log's end."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from relight.errors import ConfigError
from relight.keys.chain import Keychain
from relight.keys.signing import Ed25519Signer, HashSigner, Trust, signer_of, trust_of
from relight.settings.environment import environment


@dataclass(frozen=True, slots=True)
class StoreSecurity:
    """Security settings; None and "" for none. All stores of a run share them, in all processes."""

    keys: Keychain | None = None
    signer: Ed25519Signer | HashSigner | None = None
    trust: Trust | None = None
    anchor: str = ""

    @classmethod
    def from_settings(
        cls,
        encrypt: str | Sequence[str] | None = None,
        sign: str | None = None,
        trust: str | Sequence[str] | None = None,
        anchor: str | os.PathLike[str] | None = None,
    ) -> StoreSecurity:
        """Return the given settings. For each None, use the environment's."""
        for what, value in (("sign", sign), ("anchor", anchor)):
            if value is not None and not isinstance(value, (str, os.PathLike)):
                raise ConfigError(f"{what}= takes a text, not {type(value).__name__}")
        for what, specs in (("encrypt", encrypt), ("trust", trust)):
            # its value may be a secret: only its type is shown
            if specs is not None and not isinstance(specs, (str, list, tuple)):
                raise ConfigError(
                    f"{what}= takes a text, or a list of them, not {type(specs).__name__}", hint=f'{what}="file:PATH"'
                )
        now = environment()
        keys = encrypt if encrypt is not None else now.key
        signing = sign if sign is not None else now.sign
        trusted = trust if trust is not None else now.trust
        return cls(
            Keychain.from_specs(keys) if keys else None,
            signer_of(signing) if signing else None,
            trust_of(trusted) if trusted else None,
            _absolute(os.fspath(anchor) if anchor is not None else now.anchor),
        )

    def __bool__(self) -> bool:
        return self.keys is not None or self.signer is not None or self.trust is not None or bool(self.anchor)

    def to_wire(self) -> dict[str, Any]:
        """Return specs and secrets for another Relight process. Only send this over a private channel."""
        return {
            "keys": self.keys.to_wire() if self.keys is not None else None,
            "signer": (self.signer.spec, self.signer.resolved()) if self.signer is not None else None,
            "trust": [(verifier.spec, verifier.resolved()) for verifier in self.trust.verifiers]
            if self.trust is not None
            else None,
            "anchor": self.anchor,
        }

    @classmethod
    def from_wire(cls, message: dict[str, Any]) -> StoreSecurity:
        """Return the settings that another process sent."""
        keys, signer, trust = message["keys"], message["signer"], message["trust"]
        return cls(
            Keychain.from_wire(keys) if keys is not None else None,
            signer_of(*signer) if signer is not None else None,
            trust_of([spec for spec, _ in trust], [value for _, value in trust]) if trust is not None else None,
            message["anchor"],
        )

    def to_line(self) -> bytes:
        """Return the settings with their secrets as one line, for the standard input of a child process.

        Other processes could read them in its arguments or its environment.
        """
        return base64.b64encode(msgspec.msgpack.encode(self.to_wire())) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> StoreSecurity:
        """Return the settings that the parent process sent; none for an empty line."""
        return cls.from_wire(msgspec.msgpack.decode(base64.b64decode(line))) if line.strip() else cls()


def _absolute(anchor: str) -> str:
    """Return the anchor as an absolute path or URL, because other processes have other working directories."""
    return (
        anchor
        if not anchor or "://" in anchor or anchor.startswith("stripe:")
        else os.path.abspath(os.path.expanduser(anchor))
    )
