"""Resolve key specs, and hold a process's keys."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

from relight.errors import ConfigError
from relight.format.cipher import Secret
from relight.keys.dumps import keep_out_of_core_dumps
from relight.keys.files import parse_key, read_small_file
from relight.keys.providers import HeldKey, Passphrase, Provider
from relight.keys.services import KmsKey, VaultKey

SETTING = "RELIGHT_KEY"
_KNOWN = "file:PATH, env:NAME, passphrase:env:NAME, passphrase:file:PATH, keyring:SERVICE/USER, kms:KEY, vault:MOUNT/KEY"


class Keychain:
    """Key-encryption keys of a process. The first wraps new slots; any may open existing ones."""

    def __init__(self, providers: Sequence[Provider]) -> None:
        if not providers:
            raise ConfigError("a key chain without a key")
        self.providers = tuple(providers)
        keep_out_of_core_dumps()

    def __repr__(self) -> str:
        return f"Keychain({[one.spec for one in self.providers]!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_again, (tuple(one.spec for one in self.providers),))

    @classmethod
    def from_specs(cls, specs: str | Sequence[str]) -> Keychain:
        """Return the keys of these specs. Several in one text are separated by spaces. Keys are read now, except those of key services."""
        found = specs.split() if isinstance(specs, str) else list(specs)
        if not found or not all(isinstance(one, str) for one in found):
            raise ConfigError("which key? A spec is a text", hint=f"there are {_KNOWN}")
        return cls([resolve(one) for one in found])

    def to_wire(self) -> list[tuple[str, bytes | None]]:
        """Return specs and secrets for another Relight process. Only send this over a private channel."""
        return [(one.spec, one.resolved()) for one in self.providers]

    @classmethod
    def from_wire(cls, told: Sequence[tuple[str, bytes | None]]) -> Keychain:
        """Return the keys that another process sent."""
        return cls([resolve(spec) if value is None else _held(spec, Secret(value)) for spec, value in told])


def keychain_from_settings() -> Keychain | None:
    """Return the keys of ``RELIGHT_KEY``; None if it is not set."""
    specs = os.environ.get(SETTING, "").strip()
    return Keychain.from_specs(specs) if specs else None


def resolve(spec: str) -> Provider:
    """Return the key of ``spec``. Raise ``ConfigError`` if the spec is invalid or the key is missing; errors never contain the value."""
    kind, _, rest = spec.partition(":")
    if not rest:
        raise ConfigError("invalid key spec: it must name a kind and a place", hint=f"valid specs: {_KNOWN}")
    if kind == "file":
        return HeldKey(spec, parse_key(read_small_file(rest), rest))
    if kind == "env":
        return HeldKey(spec, parse_key(_variable(rest), f"the environment variable {rest}"))
    if kind == "passphrase":
        return Passphrase(spec, _passphrase(rest))
    if kind == "keyring":
        return HeldKey(spec, parse_key(_from_keyring(rest), spec))
    if kind == "kms":
        return KmsKey(spec)
    if kind == "vault":
        return VaultKey(spec)
    from importlib.metadata import entry_points  # it takes some time to import

    for plugin in entry_points(group="relight.keys", name=kind):
        found: Provider = plugin.load()(spec)
        return found
    raise ConfigError("invalid key spec: unknown kind", hint=f"valid specs: {_KNOWN}")


def _again(specs: Sequence[str]) -> Keychain:
    return Keychain.from_specs(specs)


def _held(spec: str, value: Secret) -> Provider:
    return Passphrase(spec, value) if spec.startswith("passphrase:") else HeldKey(spec, value)


def _variable(name: str) -> Secret:
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"the environment variable {name[:80]} is not set")
    return Secret(value.encode())


def _passphrase(rest: str) -> Secret:
    kind, _, name = rest.partition(":")
    if kind == "env" and name:
        return _variable(name)
    if kind == "file" and name:
        found = read_small_file(name)
        if not found.reveal():
            raise ConfigError("an empty passphrase", where=name)
        return found
    raise ConfigError("a passphrase is never written out", hint="passphrase:env:NAME or passphrase:file:PATH says where it is")


def _from_keyring(rest: str) -> Secret:
    service, _, user = rest.rpartition("/")
    if not service or not user:
        raise ConfigError("a key in a keyring is keyring:SERVICE/USER")
    try:
        library = importlib.import_module("keyring")
    except ImportError:
        raise ConfigError("keys in an operating system's keyring need the library keyring", hint="pip install keyring") from None
    try:
        found = library.get_password(service, user)
    except library.errors.KeyringError as error:
        raise ConfigError(f"the keyring does not answer: {type(error).__name__}", where=f"keyring:{rest}") from None
    if not found:
        hint = f"keyring set {service} {user}, with what relight keys new writes"
        raise ConfigError("the keyring has no such key", where=f"keyring:{rest}", hint=hint)
    return Secret(found.encode())
