"""Keys that never leave a key service, which wraps and unwraps ring keys.

The services are AWS KMS, the transit engine of Vault or OpenBao, Google Cloud KMS, and Azure Key Vault. Each is asked by
the cloud's own library, or by its documented REST interface with a token of the cloud's own library.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import ipaddress
import os
import re
from typing import Any
from urllib.parse import urljoin, urlsplit

import msgspec

from relight.decode import from_json_bytes
from relight.errors import ConfigError, StoreUnavailable, WrongKey, extra_hint
from relight.format.cipher import Secret, hkdf
from relight.keys.providers import NamedKey, WrapParameters
from relight.settings.environment import environment, variable_of

_TIMEOUT_S = 10
PLAIN = variable_of("environment.keys_over_http")
_GOOGLE = "https://cloudkms.googleapis.com"
_GOOGLE_KEY = re.compile(r"projects/[^/?#]+/locations/[^/?#]+/keyRings/[^/?#]+/cryptoKeys/[^/?#]+")
_AZURE_KEY = re.compile(r"((?:https?://)?[^/?#@]+)/keys/([0-9A-Za-z-]+)(?:/([0-9A-Za-z]+))?")
_AZURE_API, _AZURE_ALGORITHM = "7.4", "RSA-OAEP-256"
_AZURE_DOMAINS = ("vault.azure.cn", "vault.usgovcloudapi.net", "managedhsm.azure.net")
"""Domains with tokens of their own; the others, such as those of private links, have that of ``vault.azure.net``."""


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


class GoogleKmsKey(NamedKey):
    """``gcpkms:projects/P/locations/L/keyRings/R/cryptoKeys/K``, a symmetric key of Google Cloud KMS.

    Credentials are those that google-auth finds: a file, workload identity, the machine's service account. Another
    address is that of ``CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDKMS``, as for gcloud.
    """

    kind = "gcpkms"

    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        self._name = spec.partition(":")[2]
        if not _GOOGLE_KEY.fullmatch(self._name):
            hint = "use gcpkms:projects/P/locations/L/keyRings/R/cryptoKeys/K, without a version"
            raise ConfigError(f"{spec!r} does not name a key of Google Cloud KMS", hint=hint)

    def wrap(self, key: Secret, associated_data: bytes) -> tuple[bytes, WrapParameters]:
        """See ``Provider``. Cost: one request, and one for a token."""
        bound = base64.b64encode(associated_data).decode()
        text = base64.b64encode(key.reveal()).decode()
        answer = self._ask("encrypt", self.spec, plaintext=text, additionalAuthenticatedData=bound)
        return _decoded(answer, "ciphertext", self.spec), {}

    def unwrap(self, wrapped: bytes, parameters: WrapParameters, associated_data: bytes, where: str) -> Secret:
        """See ``Provider``. Cost: that of ``wrap``. The service keeps a key's earlier versions, and knows which one to use."""
        bound = base64.b64encode(associated_data).decode()
        text = base64.b64encode(wrapped).decode()
        answer = self._ask("decrypt", where or self.spec, ciphertext=text, additionalAuthenticatedData=bound)
        return Secret(_decoded(answer, "plaintext", self.spec))

    def _ask(self, call: str, where: str, **body: str) -> dict[str, Any]:
        auth, errors, transport, requests = _library(
            "gcpkms", "google.auth", "google.auth.exceptions", "google.auth.transport.requests", "requests"
        )
        address = os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDKMS") or _GOOGLE
        check_private(address, self.spec)
        try:
            credentials, _ = auth.default(scopes=["https://www.googleapis.com/auth/cloudkms"])
            with transport.AuthorizedSession(credentials, refresh_timeout=_TIMEOUT_S) as session:
                url = f"{address.rstrip('/')}/v1/{self._name}:{call}"
                answer = session.post(url, json=body, timeout=_TIMEOUT_S, allow_redirects=False)
        except errors.GoogleAuthError as error:
            raise _no_token("Google Cloud", error, self.spec, "set GOOGLE_APPLICATION_CREDENTIALS") from None
        except requests.RequestException as error:
            raise StoreUnavailable(f"Google Cloud KMS does not answer: {type(error).__name__}", where=where) from None
        return _answer_of("Google Cloud KMS", answer, where)


class AzureKey(NamedKey):
    """``azurekeyvault:NAME.vault.azure.net/keys/KEY``, an RSA key of Azure Key Vault or Managed HSM.

    Credentials are those that azure-identity finds: environment, workload identity, managed identity, the Azure CLI.
    """

    kind = "azurekeyvault"

    def __init__(self, spec: str) -> None:
        super().__init__(spec)
        parts = _AZURE_KEY.fullmatch(spec.partition(":")[2])
        if parts is None:
            hint = "use azurekeyvault:NAME.vault.azure.net/keys/KEY"
            raise ConfigError(f"{spec!r} does not name a key of Azure Key Vault", hint=hint)
        self._address = parts[1] if "://" in parts[1] else f"https://{parts[1]}"
        self._name, self._version = parts[2], parts[3] or ""

    def wrap(self, key: Secret, associated_data: bytes) -> tuple[bytes, WrapParameters]:
        """See ``Provider``. Cost: one request, and one for a token.

        A hash of ``associated_data`` precedes the key, because RSA does not support associated data. The slot has the
        key's version: after a rotation of the key, its newest version does not unwrap what an earlier one wrapped.
        """
        answer = self._ask("wrapkey", self._version, _bound(associated_data) + key.reveal(), self.spec)
        version = str(answer.get("kid", "")).rpartition("/")[2]
        if not _is_version(version):
            raise StoreUnavailable("Azure Key Vault names no version of the key", where=self.spec)
        return _decoded(answer, "value", self.spec), {"version": version}

    def unwrap(self, wrapped: bytes, parameters: WrapParameters, associated_data: bytes, where: str) -> Secret:
        """See ``Provider``. Cost: that of ``wrap``."""
        version = str(parameters.get("version", ""))
        if not _is_version(version):
            raise WrongKey("the slot names no version of the key", where=where)
        data = _decoded(self._ask("unwrapkey", version, wrapped, where or self.spec), "value", self.spec)
        if not data.startswith(_bound(associated_data)):
            raise WrongKey("this slot was written for another store or ring key", where=where)
        return Secret(data[len(_bound(associated_data)) :])

    def _ask(self, call: str, version: str, value: bytes, where: str) -> dict[str, Any]:
        identity, errors, requests = _library("azurekeyvault", "azure.identity", "azure.core.exceptions", "requests")
        check_private(self._address, self.spec)
        host = urlsplit(self._address).hostname or ""
        domain = next((domain for domain in _AZURE_DOMAINS if host.endswith(f".{domain}")), "vault.azure.net")
        try:
            with identity.DefaultAzureCredential() as credential:
                token = credential.get_token(f"https://{domain}/.default").token
        except errors.AzureError as error:
            hint = "assign a managed identity to the machine, or set AZURE_TENANT_ID, AZURE_CLIENT_ID and its secret"
            raise _no_token("Azure", error, self.spec, hint) from None
        url = "/".join(filter(None, (self._address, "keys", self._name, version, call))) + f"?api-version={_AZURE_API}"
        body = {"alg": _AZURE_ALGORITHM, "value": base64.urlsafe_b64encode(value).decode().rstrip("=")}
        headers = {"Authorization": f"Bearer {token}"}
        try:
            answer = requests.post(url, json=body, headers=headers, timeout=_TIMEOUT_S, allow_redirects=False)
        except requests.RequestException as error:
            raise StoreUnavailable(f"Azure Key Vault does not answer: {type(error).__name__}", where=where) from None
        return _answer_of("Azure Key Vault", answer, where)


def _is_version(text: str) -> bool:
    return text.isascii() and text.isalnum() and len(text) <= 64


def _no_token(cloud: str, error: Exception, spec: str, hint: str) -> StoreUnavailable:
    return StoreUnavailable(f"{cloud} issues no token: {type(error).__name__}", where=spec, hint=hint, retryable=False)


def _answer_of(service: str, answer: Any, where: str) -> dict[str, Any]:
    """Return the object in an answer. Raise ``WrongKey`` if the service refuses the key or what it wrapped."""
    try:
        value = from_json_bytes(answer.content, dict[str, Any])
    except msgspec.MsgspecError:
        value = {}
    if answer.status_code == 200:
        return value
    error = value.get("error")
    code = error.get("status") or error.get("code") if isinstance(error, dict) else ""
    what = f"HTTP status {answer.status_code} {str(code or '')[:60]}".rstrip()
    if answer.status_code in (400, 403, 404):
        raise WrongKey(f"{service} refuses: {what}", where=where)
    raise StoreUnavailable(f"{service} does not answer properly: {what}", where=where)


def _decoded(answer: dict[str, Any], field: str, spec: str) -> bytes:
    """Return the bytes in a field of an answer, in either alphabet of base 64."""
    text = answer.get(field)
    try:
        if not isinstance(text, str) or not text:
            raise ValueError
        return base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        raise StoreUnavailable(f"the key service does not answer properly: no {field!r}", where=spec) from None


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
        hint=f"set its https address (such as VAULT_ADDR, AWS_ENDPOINT_URL_KMS), or set {PLAIN}=1 if the network is private",
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
        raise ConfigError(f"keys of this kind need the library {names[0]}", hint=extra_hint(extra)) from None


def _context(associated_data: bytes) -> dict[str, str]:
    return {"relight": base64.b64encode(associated_data).decode()}


def _bound(associated_data: bytes) -> bytes:
    return hkdf(associated_data, b"", b"relight bound", 32)
