"""Keys that never leave a key service, which wraps and unwraps ring keys: AWS KMS, and the transit engine of Vault or OpenBao."""

from __future__ import annotations

import base64
import contextlib
import importlib
import ipaddress
import os
from typing import Any
from urllib.parse import urljoin, urlsplit

from relight.errors import ConfigError, StoreUnavailable, WrongKey
from relight.format.cipher import Secret, hkdf
from relight.keys.providers import NamedKey, WrapParameters
from relight.settings.environment import environment, variable_of

_TIMEOUT_S = 10
PLAIN = variable_of("environment.keys_over_http")


class KmsKey(NamedKey):
    """``kms:KEY``, with a key's id, ARN or alias. Region, credentials and endpoint are those that boto3 finds."""

    kind = "kms"

    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        self._id = spec.partition(":")[2]

    def wrap(self, key: Secret, associated_data: bytes) -> tuple[bytes, WrapParameters]:
        """See ``Provider``. Cost: one request."""
        answer = self._ask(
            "encrypt", KeyId=self._id, Plaintext=key.reveal(), EncryptionContext=_context(associated_data)
        )
        return bytes(answer["CiphertextBlob"]), {}

    def unwrap(self, wrapped: bytes, parameters: WrapParameters, associated_data: bytes, where: str) -> Secret:
        """See ``Provider``. Cost: one request."""
        return Secret(
            self._ask(
                "decrypt", where, KeyId=self._id, CiphertextBlob=wrapped, EncryptionContext=_context(associated_data)
            )["Plaintext"]
        )

    def _ask(self, call: str, where: str = "", **options: Any) -> Any:
        boto3, config, errors = _library("kms", "boto3", "botocore.config", "botocore.exceptions")
        try:
            client = boto3.client("kms", config=config.Config(connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S))
            check_private(client.meta.endpoint_url, self.spec)
            return getattr(client, call)(**options)
        except errors.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in ("InvalidCiphertextException", "IncorrectKeyException"):
                raise WrongKey("KMS reports that this key does not open it", where=where or self.spec) from None
            gone = code in (
                "NotFoundException",
                "DisabledException",
                "KMSInvalidStateException",
                "AccessDeniedException",
            )
            raise (WrongKey if gone else StoreUnavailable)(f"KMS refuses: {code}", where=where or self.spec) from None
        except errors.BotoCoreError as error:
            raise StoreUnavailable(f"KMS does not answer: {type(error).__name__}", where=self.spec) from None


class VaultKey(NamedKey):
    """``vault:MOUNT/KEY`` of the transit engine.

    Address, token and namespace are those of ``VAULT_ADDR``, ``VAULT_TOKEN`` and ``VAULT_NAMESPACE``; a private CA that of
    ``VAULT_CACERT`` or ``VAULT_CAPATH``; a client certificate that of ``VAULT_CLIENT_CERT`` and ``VAULT_CLIENT_KEY``.
    """

    kind = "vault"

    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        self._mount, _, self._name = spec.partition(":")[2].rpartition("/")
        if not self._mount or not self._name:
            raise ConfigError(f"{spec!r} does not name a key of Vault", hint="use vault:transit/KEY")

    def wrap(self, key: Secret, associated_data: bytes) -> tuple[bytes, WrapParameters]:
        """See ``Provider``. Cost: one request.

        A hash of ``associated_data`` precedes the key, because some Vault key types do not support associated data.
        """
        text = base64.b64encode(_bound(associated_data) + key.reveal()).decode()
        return str(self._ask("encrypt_data", plaintext=text)["ciphertext"]).encode(), {}

    def unwrap(self, wrapped: bytes, parameters: WrapParameters, associated_data: bytes, where: str) -> Secret:
        """See ``Provider``. Cost: one request."""
        answer = self._ask("decrypt_data", where, ciphertext=wrapped.decode("ascii", "replace"))
        data = base64.b64decode(str(answer["plaintext"]))
        if not data.startswith(_bound(associated_data)):
            raise WrongKey("this slot was written for another store or ring key", where=where)
        return Secret(data[len(_bound(associated_data)) :])

    def _ask(self, call: str, where: str = "", **options: Any) -> Any:
        hvac, requests = _library("vault", "hvac", "requests")
        try:
            session = _session(requests, self.spec)
            client = hvac.Client(timeout=_TIMEOUT_S, session=session, verify=session.verify, cert=session.cert)
            check_private(client.url, self.spec)
            answer = getattr(client.secrets.transit, call)(name=self._name, mount_point=self._mount, **options)
            return answer["data"]
        except (hvac.exceptions.InvalidRequest, hvac.exceptions.Forbidden, hvac.exceptions.InvalidPath) as error:
            raise WrongKey(f"Vault refuses: {type(error).__name__}", where=where or self.spec) from None
        except (hvac.exceptions.VaultError, requests.RequestException) as error:
            raise StoreUnavailable(f"Vault does not answer: {type(error).__name__}", where=self.spec) from None
        except OSError as error:  # requests raises it for a certificate file that does not exist
            raise ConfigError(
                f"TLS to Vault failed: {error}"[:300], where=self.spec, hint="correct VAULT_CACERT or VAULT_CAPATH"
            ) from None


def check_private(url: str, spec: str) -> None:
    """Raise ``ConfigError`` if ``url`` is plain http to another machine: the network would carry tokens and keys unencrypted.

    Allowed are https, loopback addresses, and everything if ``RELIGHT_KEYS_OVER_HTTP=1``.
    """
    parts = urlsplit(url)
    if parts.scheme == "https" or environment().keys_over_http:
        return
    name = (parts.hostname or "").lower()
    with contextlib.suppress(ValueError):
        if name == "localhost" or ipaddress.ip_address(name).is_loopback:
            return
    raise ConfigError(
        f"the key service at {parts.scheme or '?'}://{parts.hostname or '?'} has no TLS: the network could read tokens and keys",
        where=spec,
        hint=f"set its https address (VAULT_ADDR, AWS_ENDPOINT_URL_KMS), or set {PLAIN}=1 if the network is private",
    )


def _session(requests: Any, spec: str) -> Any:
    """Return a session that follows redirects only to addresses that ``check_private`` allows, because it sends Vault's token there.

    hvac applies neither Vault's variables nor its own arguments for TLS to a given session, so this function applies the variables.
    """

    class Session(requests.Session):  # type: ignore[misc]
        def get_redirect_target(self, response: Any) -> str | None:
            target: str | None = super().get_redirect_target(response)
            if target is not None:
                check_private(urljoin(response.url, target), spec)
            return target

    session = Session()
    session.verify = os.environ.get("VAULT_CACERT") or os.environ.get("VAULT_CAPATH") or True
    if cert := os.environ.get("VAULT_CLIENT_CERT"):
        session.cert = (cert, os.environ["VAULT_CLIENT_KEY"]) if os.environ.get("VAULT_CLIENT_KEY") else cert
    return session


def _library(extra: str, *names: str) -> list[Any]:
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError:
        raise ConfigError(
            f"keys of this kind need the library {names[0]}", hint=f"pip install 'relight[{extra}]'"
        ) from None


def _context(associated_data: bytes) -> dict[str, str]:
    return {"relight": base64.b64encode(associated_data).decode()}


def _bound(associated_data: bytes) -> bytes:
    return hkdf(associated_data, b"", b"relight bound", 32)
