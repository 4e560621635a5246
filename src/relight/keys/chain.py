"""Resolve key specs, and hold a process's keys."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence

from relight.errors import ConfigError
from relight.format.cipher import Secret
from relight.keys.dumps import keep_out_of_core_dumps
from relight.keys.files import parse_key, read_small_file
from relight.keys.providers import HeldKey, Passphrase, Provider
from relight.keys.services import AzureKey, GoogleKmsKey, KmsKey, VaultKey
from relight.settings.environment import environment, variable_of

SETTING = variable_of("environment.key")
_KNOWN = (
    "file:PATH, env:NAME, passphrase:env:NAME, passphrase:file:PATH, keyring:SERVICE/USER, kms:KEY, vault:MOUNT/KEY, "
    "gcpkms:projects/…/cryptoKeys/KEY, azurekeyvault:NAME.vault.azure.net/keys/KEY"
)
_SERVICES: dict[str, Callable[[str], Provider]] = {
    service.kind: service for service in (KmsKey, VaultKey, GoogleKmsKey, AzureKey)
}


class Keychain:
    """Key-encryption keys of a process. The first wraps new slots; any may open existing ones."""

    def __init__(self, providers: Sequence[Provider]) -> None:
        if not providers:
            raise ConfigError("the key chain has no key")
        self.providers = tuple(providers)
        keep_out_of_core_dumps()

    def __repr__(self) -> str:
        return f"Keychain({[provider.spec for provider in self.providers]!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_from_specs, (tuple(provider.spec for provider in self.providers),))

    @classmethod
    def from_specs(cls, specs: str | Sequence[str]) -> Keychain:
        """Return the keys of these specs. Several in one text are separated by spaces. Keys are read now, except those of key services."""
        names = specs.split() if isinstance(specs, str) else list(specs)
        if not names or not all(isinstance(spec, str) for spec in names):
            raise ConfigError("a key's spec is missing, or is not a text", hint=f"valid specs: {_KNOWN}")
        return cls([resolve(spec) for spec in names])

    def to_wire(self) -> list[tuple[str, bytes | None]]:
        """Return specs and secrets for another Relight process. Only send this over a private channel."""
        return [(provider.spec, provider.resolved()) for provider in self.providers]

    @classmethod
    def from_wire(cls, message: Sequence[tuple[str, bytes | None]]) -> Keychain:
        """Return the keys that another process sent."""
        return cls([resolve(spec) if value is None else _provider_with(spec, Secret(value)) for spec, value in message])


def keychain_from_settings() -> Keychain | None:
    """Return the keys of ``RELIGHT_KEY``; None if it is not set."""
    specs = environment().key
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
    service = _SERVICES.get(kind)
    if service is not None:
        return service(spec)
    from importlib.metadata import entry_points  # it takes some time to import

    for plugin in entry_points(group="relight.keys", name=kind):
        provider: Provider = plugin.load()(spec)
        return provider
    raise ConfigError("invalid key spec: unknown kind", hint=f"valid specs: {_KNOWN}")


def _from_specs(specs: Sequence[str]) -> Keychain:
    return Keychain.from_specs(specs)


def _provider_with(spec: str, value: Secret) -> Provider:
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
        passphrase = read_small_file(name)
        if not passphrase.reveal():
            raise ConfigError("the passphrase is empty", where=name)
        return passphrase
    raise ConfigError(
        "a spec must not have the passphrase itself", hint="use passphrase:env:NAME or passphrase:file:PATH"
    )


def _from_keyring(rest: str) -> Secret:
    service, _, user = rest.rpartition("/")
    if not service or not user:
        raise ConfigError("invalid spec of a key in a keyring", hint="use keyring:SERVICE/USER")
    try:
        library = importlib.import_module("keyring")
    except ImportError:
        raise ConfigError(
            "keys in an operating system's keyring need the library keyring", hint="pip install keyring"
        ) from None
    try:
        text = library.get_password(service, user)
    except library.errors.KeyringError as error:
        raise ConfigError(f"the keyring does not answer: {type(error).__name__}", where=f"keyring:{rest}") from None
    if not text:
        hint = f"run keyring set {service} {user}, with a key that relight keys new has written"
        raise ConfigError("the keyring has no such key", where=f"keyring:{rest}", hint=hint)
    return Secret(text.encode())
