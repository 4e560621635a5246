"""Keys of Google Cloud KMS and Azure Key Vault: the key never leaves the service, and each failure states what to do."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.encryption.cloud_key_servers import GOOGLE_KEY, Service, azure_vault, google_kms, service_account
from tests.encryption.test_keys import BOUND_TO, RING, opens

from relight.errors import ConfigError, StoreUnavailable, WrongKey, extra_hint
from relight.keys import Keychain, resolve, services
from relight.store import MemoryStore
from relight.store.encrypted import EncryptedStore
from relight.testing.store_suite import refuses

ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDKMS"


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """Start Google Cloud KMS with the key ``GOOGLE_KEY``, and set the credentials of a service account."""
    pytest.importorskip("google.auth", reason="needs google-auth")
    with google_kms(GOOGLE_KEY, GOOGLE_KEY + "2") as service:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(service_account(tmp_path, service.address)))
        monkeypatch.setenv(ENDPOINT, f"{service.address}/")
        yield service


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """Start Azure Key Vault with a key ``store``, and set the environment of a managed identity."""
    pytest.importorskip("azure.identity", reason="needs azure-identity")
    with azure_vault("store", "other") as service:
        for name in ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{service.address}/identity")
        monkeypatch.setenv("IDENTITY_HEADER", "one-of-this-machine")
        yield service


def store_is_opened(spec: str, other: str) -> None:
    """Check that a store that ``spec`` encrypted is opened by it, and not by ``other``."""
    store = EncryptedStore(MemoryStore(), Keychain.from_specs(spec))
    store.put_once("run/log/0", b"by a key of the service")
    assert EncryptedStore(store.inner, Keychain.from_specs(spec)).get("run/log/0", 99) == b"by a key of the service"
    refuses(WrongKey, lambda: EncryptedStore(store.inner, Keychain.from_specs(other)).get("run/log/0", 99))


def test_google_cloud_kms(google: Service) -> None:
    """The key's purpose is bound as additional data. A key that is missing, and one that wrapped something else, are refused."""
    spec = f"gcpkms:{GOOGLE_KEY}"
    opens(resolve(spec), spec)
    store_is_opened(spec, spec + "2")
    error = refuses(WrongKey, lambda: resolve(spec + "3").wrap(RING, BOUND_TO))
    assert "404 NOT_FOUND" in error.what


def test_a_machine_of_google_cloud(tmp_path: Path) -> None:
    """Without a file, the token is that of the machine's service account."""
    pytest.importorskip("google.auth", reason="needs google-auth")
    program = (
        "from relight.keys import resolve; from relight.format.cipher import Secret\n"
        f"key = resolve('gcpkms:{GOOGLE_KEY}'); wrapped, parameters = key.wrap(Secret(bytes(32)), b'x')\n"
        "print(key.unwrap(wrapped, parameters, b'x', '').reveal() == bytes(32))"
    )
    given = {name: value for name, value in os.environ.items() if not name.startswith("GOOGLE_")}
    with google_kms(GOOGLE_KEY) as service:
        host = service.address.removeprefix("http://")
        given |= {ENDPOINT: service.address, "GCE_METADATA_HOST": host, "GCE_METADATA_IP": host, "HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.stdout == "True\n", done.stderr
    assert any("/service-accounts/" in request for request in service.requests)


def test_azure_key_vault(azure: Service) -> None:
    """A slot names the key's version, so that it is opened after a rotation of the key. Without a valid one it is refused."""
    spec = f"azurekeyvault:{azure.address}/keys/store"
    opens(resolve(spec), spec)
    store_is_opened(spec, spec.replace("store", "other"))
    key = resolve(spec)
    wrapped, parameters = key.wrap(RING, BOUND_TO)
    azure.rotate()
    assert key.unwrap(wrapped, parameters, BOUND_TO, "").reveal() == RING.reveal()
    again, newer = key.wrap(RING, BOUND_TO)
    assert newer != parameters
    refuses(WrongKey, lambda: key.unwrap(wrapped, newer, BOUND_TO, ""))
    pinned = resolve(f"{spec}/{parameters['version']}")
    assert pinned.wrap(RING, BOUND_TO)[1] == parameters and pinned.fits(key.kind, "")
    for version in ("", "../../secrets/x", "a" * 65, 7):
        refuses(WrongKey, lambda version=version: key.unwrap(again, {"version": version}, BOUND_TO, ""))  # type: ignore[misc]
    refuses(WrongKey, lambda: key.unwrap(again, {}, BOUND_TO, ""))
    assert "404 KeyNotFound" in refuses(WrongKey, lambda: resolve(f"{spec}2").wrap(RING, BOUND_TO)).what


@pytest.fixture(params=["google", "azure"])
def either(request: pytest.FixtureRequest) -> tuple[Service, str]:
    """Start one of both services. Return it and the spec of its key."""
    service: Service = request.getfixturevalue(request.param)
    return (
        service,
        f"gcpkms:{GOOGLE_KEY}" if request.param == "google" else f"azurekeyvault:{service.address}/keys/store",
    )


BROKEN: dict[str, tuple[type[Exception], int, bytes, dict[str, str]]] = {
    "forbidden": (WrongKey, 403, b'{"error": {"code": "Forbidden", "status": "PERMISSION_DENIED"}}', {}),
    "disabled": (WrongKey, 400, b'{"error": {"code": 400, "status": "FAILED_PRECONDITION"}}', {}),
    "not this token": (StoreUnavailable, 401, b'{"error": {"code": "Unauthorized", "status": "UNAUTHENTICATED"}}', {}),
    "busy": (StoreUnavailable, 429, b'{"error": 7}', {}),
    "out of service": (StoreUnavailable, 503, b"<html>", {}),
    "a redirect": (StoreUnavailable, 307, b"elsewhere", {"Location": "http://keys.example/"}),
    "a page": (StoreUnavailable, 200, b"<html>log in</html>", {}),
    "an empty object": (StoreUnavailable, 200, b"{}", {}),
    "another type": (StoreUnavailable, 200, b"[1]", {}),
    "not base 64": (StoreUnavailable, 200, b'{"plaintext": "!", "ciphertext": "!", "value": "!", "kid": "a/b/1"}', {}),
    "another kid": (StoreUnavailable, 200, b'{"kid": "a/../..", "value": "AAAA", "plaintext": 7, "ciphertext": 7}', {}),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_service_that_answers_badly(how: str, either: tuple[Service, str]) -> None:
    """A refusal is ``WrongKey``; an invalid answer is an unavailable store. No message has the token or the key."""
    service, spec = either
    kind, status, body, headers = BROKEN[how]
    key = resolve(spec)
    wrapped, parameters = key.wrap(RING, BOUND_TO)
    service.broken = status, body, headers
    calls: list[Callable[[], object]] = [lambda: key.wrap(RING, BOUND_TO)]
    if how != "another kid":
        calls.append(lambda: key.unwrap(wrapped, parameters, BOUND_TO, "the slot"))
    for call in calls:
        error = refuses(kind, call)  # type: ignore[type-var]
        assert service.token not in str(error)


def test_a_service_without_a_token(either: tuple[Service, str]) -> None:
    """If the cloud issues no token, the error states that, and no key is sent."""
    service, spec = either
    service.gives_token = False
    error = refuses(StoreUnavailable, lambda: resolve(spec).wrap(RING, BOUND_TO))
    assert "issues no token" in error.what and error.hint
    assert not [request for request in service.requests if "wrapkey" in request or "encrypt" in request]


def test_a_service_that_is_unreachable(either: tuple[Service, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused connection is an unavailable store. Plain HTTP to another machine is refused before a token is requested."""
    service, spec = either
    host = service.address.removeprefix("http://")
    far = spec.replace(host, "127.0.0.1:9")
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    assert "does not answer" in refuses(StoreUnavailable, lambda: resolve(far).wrap(RING, BOUND_TO)).what
    service.requests.clear()
    monkeypatch.setenv(ENDPOINT, "http://kms.lab")
    error = refuses(ConfigError, lambda: resolve(spec.replace(host, "vault.lab")).wrap(RING, BOUND_TO))
    assert "TLS" in error.what and not service.requests


@pytest.mark.parametrize(
    "spec",
    [
        "gcpkms:training", "gcpkms:projects/p/locations/l/keyRings/r/cryptoKeys/k/cryptoKeyVersions/1", "gcpkms:projects/p/locations/l?x/keyRings/r/cryptoKeys/k",
        "azurekeyvault:name", "azurekeyvault:name.vault.azure.net/secrets/x", "azurekeyvault:u@name/keys/k", "azurekeyvault:name/keys/k/v/w",
    ],
)  # fmt: skip
def test_specs_that_name_no_key(spec: str) -> None:
    """A spec that does not name a key of the service is refused, with the form that does."""
    error = refuses(ConfigError, lambda: resolve(spec))
    assert error.hint.startswith("use ")


@pytest.mark.parametrize(
    ("spec", "extra"), [(f"gcpkms:{GOOGLE_KEY}", "gcpkms"), ("azurekeyvault:a.vault.azure.net/keys/k", "azurekeyvault")]
)
def test_without_the_library_the_error_names_the_extra(spec: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a cloud's library is not installed, the hint has the command that installs it."""

    def missing(name: str) -> object:
        if name.startswith(("google", "azure")):
            raise ImportError(name)
        return importlib.import_module(name)

    monkeypatch.setattr(services, "importlib", type("importlib", (), {"import_module": staticmethod(missing)}))
    error = refuses(ConfigError, lambda: resolve(spec).wrap(RING, BOUND_TO))
    assert error.hint == extra_hint(extra)
