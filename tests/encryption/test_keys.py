"""Sources of keys: each kind of spec unwraps what it wrapped, refuses other slots, and never shows its secret."""

from __future__ import annotations

import base64
import datetime
import os
import pickle
import resource
import signal
import ssl
import subprocess
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.encryption.vault_server import TOKEN, vault

from relight.errors import ConfigError, StoreUnavailable, WrongKey
from relight.format.cipher import Secret
from relight.keys import Keychain, Provider, resolve, services, write_key_file
from relight.keys.files import HEAD
from relight.keys.providers import Passphrase
from relight.store import MemoryStore
from relight.store.encrypted import EncryptedStore
from relight.testing.store_suite import refuses

RING = Secret(bytes(range(32)))
BOUND_TO = b"the slot of the key"


def opens(provider: Provider, spec: str) -> None:
    """Check that the key unwraps what it wrapped, and so does another key of the same spec; but not for another slot,
    and not after a change.
    """
    wrapped, parameters = provider.wrap(RING, BOUND_TO)
    again = resolve(spec)
    assert again.unwrap(wrapped, parameters, BOUND_TO, "here").reveal() == RING.reveal()
    assert again.fits(provider.kind, provider.kek) and again.kek == provider.kek
    refuses(WrongKey, lambda: again.unwrap(wrapped, parameters, b"another's", "here"))
    changed = bytes([*wrapped[:-5], wrapped[-5] ^ 1, *wrapped[-4:]])
    refuses(WrongKey, lambda: again.unwrap(changed, parameters, BOUND_TO, "here"))
    assert RING.reveal() not in wrapped


def test_a_key_in_a_file(tmp_path: Path) -> None:
    """The file is readable by its owner only, never overwritten, and refused if other users may read it."""
    path = tmp_path / "a.key"
    write_key_file(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    opens(resolve(f"file:{path}"), f"file:{path}")
    assert "overwritten" in refuses(ConfigError, lambda: write_key_file(str(path))).what
    path.chmod(0o640)
    assert "chmod 600" in refuses(ConfigError, lambda: resolve(f"file:{path}")).hint
    refuses(ConfigError, lambda: write_key_file(str(tmp_path / "not" / "there")))
    refuses(ConfigError, lambda: resolve(f"file:{tmp_path / 'none'}"))


def test_texts_that_are_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 bytes in base64 or hexadecimal, with or without the comment line, and nothing else."""
    key = os.urandom(32)
    ids = set()
    for text in (
        key.hex(),
        base64.b64encode(key).decode(),
        f"relight-key-1:{base64.b64encode(key).decode()}",
        f" {key.hex()}\n",
    ):
        monkeypatch.setenv("A_KEY", text)
        ids.add(resolve("env:A_KEY").kek)
    assert len(ids) == 1
    opens(resolve("env:A_KEY"), "env:A_KEY")
    for text in ("short", key[:31].hex(), base64.b64encode(key + b"x").decode(), "é" * 32, "relight-key-2:xx"):
        monkeypatch.setenv("A_KEY", text)
        error = refuses(ConfigError, lambda: resolve("env:A_KEY"))
        assert text not in str(error), "what was found instead may be a secret"
    monkeypatch.delenv("A_KEY")
    refuses(ConfigError, lambda: resolve("env:A_KEY"))
    long = tmp_path / "long"
    long.write_bytes(b"x" * 5000)
    long.chmod(0o600)
    refuses(ConfigError, lambda: resolve(f"file:{long}"))


def test_a_passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Argon2id with a salt for each slot, from a variable or a file. The cost that a slot requests is bounded."""
    monkeypatch.setenv("WORDS", "correct horse battery staple")
    words = resolve("passphrase:env:WORDS")
    opens(words, "passphrase:env:WORDS")
    (wrapped, parameters), (other, _) = words.wrap(RING, BOUND_TO), words.wrap(RING, BOUND_TO)
    assert wrapped != other
    (tmp_path / "words").write_text("correct horse battery staple\n")
    (tmp_path / "words").chmod(0o600)
    filed = resolve(f"passphrase:file:{tmp_path / 'words'}")
    assert (
        filed.fits(words.kind, words.kek) and filed.unwrap(wrapped, parameters, BOUND_TO, "").reveal() == RING.reveal()
    )
    assert isinstance(words, Passphrase)
    refuses(WrongKey, lambda: Passphrase("x", Secret(b"another")).unwrap(wrapped, parameters, BOUND_TO, ""))
    for wrong in (
        {"memory_kib": 1 << 30},
        {"passes": 10**9},
        {"lanes": 0},
        {"kdf": "md5"},
        {"salt": "!"},
        {"salt": ""},
        {"passes": "3"},
    ):
        refuses(WrongKey, lambda wrong=wrong: words.unwrap(wrapped, {**parameters, **wrong}, BOUND_TO, ""))  # type: ignore[misc]
    for spec in ("passphrase:correct horse", "passphrase:env:", "passphrase:env:NOT_SET"):
        refuses(ConfigError, lambda spec=spec: resolve(spec))  # type: ignore[misc]


def test_a_passphrase_without_argon2(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an OpenSSL without Argon2: scrypt, recorded in the slot and bounded.

    An OpenSSL with Argon2 opens the slot, too.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.kdf import argon2

    def refused(**given: int) -> None:
        raise UnsupportedAlgorithm("no Argon2id")

    words = Passphrase("x", Secret(b"correct horse battery staple"))
    with_argon = words.wrap(RING, BOUND_TO)
    with monkeypatch.context() as without:
        without.setattr(argon2, "Argon2id", refused)
        wrapped, parameters = words.wrap(RING, BOUND_TO)
        assert parameters["kdf"] == "scrypt" and parameters["n"] == 1 << 17
        assert words.unwrap(wrapped, parameters, BOUND_TO, "").reveal() == RING.reveal()
        assert "argon2id" in str(refuses(ConfigError, lambda: words.unwrap(*with_argon, BOUND_TO, "")))
    assert words.unwrap(wrapped, parameters, BOUND_TO, "").reveal() == RING.reveal()
    refuses(WrongKey, lambda: Passphrase("x", Secret(b"another")).unwrap(wrapped, parameters, BOUND_TO, ""))
    for wrong in (
        {"n": 1 << 30},
        {"n": (1 << 17) - 1},
        {"n": 2},
        {"r": 0},
        {"p": 10**9},
        {"p": True},
        {"salt": ""},
        {"salt": "!"},
    ):
        refuses(WrongKey, lambda wrong=wrong: words.unwrap(wrapped, {**parameters, **wrong}, BOUND_TO, ""))  # type: ignore[misc]


def test_an_operating_systems_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret of ``keyring`` for a service and a user.

    Without the library or the entry, the error states what to do.
    """
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert "pip install" in refuses(ConfigError, lambda: resolve("keyring:relight/me")).hint

    class KeyringError(Exception):
        pass

    passwords = {("relight", "me"): os.urandom(32).hex()}
    module = types.ModuleType("keyring")
    module.errors = types.SimpleNamespace(KeyringError=KeyringError)  # type: ignore[attr-defined]
    module.get_password = lambda service, user: passwords.get((service, user))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "keyring", module)
    opens(resolve("keyring:relight/me"), "keyring:relight/me")
    assert "keyring set" in refuses(ConfigError, lambda: resolve("keyring:relight/you")).hint
    refuses(ConfigError, lambda: resolve("keyring:relight"))


def test_aws_kms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key never leaves the service. Its purpose is bound as its encryption context."""
    import boto3
    from moto import mock_aws

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        client = boto3.client("kms")
        spec = f"kms:{client.create_key()['KeyMetadata']['KeyId']}"
        opens(resolve(spec), spec)
        store = EncryptedStore(MemoryStore(), Keychain.from_specs(spec))
        store.put_once("run/log/0", b"by a key of the service")
        assert EncryptedStore(store.inner, Keychain.from_specs(spec)).get("run/log/0", 99) == b"by a key of the service"
        other = f"kms:{client.create_key()['KeyMetadata']['KeyId']}"
        refuses(WrongKey, lambda: EncryptedStore(store.inner, Keychain.from_specs(other)).get("run/log/0", 99))
        gone = resolve("kms:00000000-0000-0000-0000-000000000000")
        refuses(WrongKey, lambda: gone.wrap(RING, BOUND_TO))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    refuses(StoreUnavailable, lambda: resolve(spec).wrap(RING, BOUND_TO))


def test_vault_transit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key never leaves the service; a token that it does not know is refused, and is in no message."""
    with vault("training", "other") as address:
        monkeypatch.setenv("VAULT_ADDR", address)
        monkeypatch.setenv("VAULT_TOKEN", TOKEN)
        opens(resolve("vault:transit/training"), "vault:transit/training")
        wrapped, parameters = resolve("vault:transit/training").wrap(RING, BOUND_TO)
        refuses(WrongKey, lambda: resolve("vault:transit/other").unwrap(wrapped, parameters, BOUND_TO, ""))
        refuses(WrongKey, lambda: resolve("vault:transit/none").wrap(RING, BOUND_TO))
        monkeypatch.setenv("VAULT_TOKEN", "hvs.another-token-0000")
        error = refuses(WrongKey, lambda: resolve("vault:transit/training").wrap(RING, BOUND_TO))
        assert "hvs." not in str(error)
    refuses(StoreUnavailable, lambda: resolve("vault:transit/training").wrap(RING, BOUND_TO))
    refuses(ConfigError, lambda: resolve("vault:training"))


@pytest.mark.parametrize("spec", ["", "file", "file:", ":", "secret", "0" * 64, "AAAA:BBBB", "ftp://x"])
def test_invalid_specs(spec: str) -> None:
    """An invalid spec is refused and not repeated in the error, because it may be a secret key."""
    error = refuses(ConfigError, lambda: Keychain.from_specs([spec]))
    assert not spec or len(spec) < 6 or spec not in str(error)


def test_secrets_are_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are neither in a repr nor in a pickle. A pickled store has the specs, which are resolved again."""
    key = os.urandom(32)
    monkeypatch.setenv("A_KEY", key.hex())
    monkeypatch.setenv("WORDS", "a passphrase of this test")
    chain = Keychain.from_specs("env:A_KEY passphrase:env:WORDS")
    store = EncryptedStore(MemoryStore(), chain)
    store.put_once("x", b"y")
    assert store._ring is not None
    secret = [key, store._ring.key.reveal(), b"passphrase of"]
    shown = repr(chain) + repr(store) + repr(chain.providers) + repr(store._ring) + repr(store._data_key) + repr(RING)
    assert not any(value.hex() in shown or repr(value)[2:-1] in shown for value in secret)
    pickled = pickle.dumps(chain)
    assert key not in pickled and b"passphrase of" not in pickled
    assert pickle.loads(pickled).providers[0].kek == chain.providers[0].kek
    with pytest.raises(TypeError):
        pickle.dumps(RING)
    received = Keychain.from_wire(chain.to_wire())
    monkeypatch.delenv("A_KEY")
    monkeypatch.delenv("WORDS")
    assert EncryptedStore(store.inner, received).get("x", 9) == b"y", (
        "another process of ours needs neither file nor variable"
    )


def test_no_core_dump_holds_a_key(tmp_path: Path) -> None:
    """A process with keys leaves no core dump, unless configured to."""
    write_key_file(str(tmp_path / "k"))
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)\n"
        f"from relight.keys import Keychain; Keychain.from_specs('file:{tmp_path / 'k'}')\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0])"
    )
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]

    def limit(**environment: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    assert limit() in (0, 1)
    assert limit(RELIGHT_CORE_DUMPS="1") == most


def test_a_real_core_dump_is_searched(tmp_path: Path) -> None:
    """A process with a key that has encrypted something is aborted:

    it leaves no core dump. With core dumps enabled the key is in the dump; otherwise the test would show nothing.
    """
    pattern = Path("/proc/sys/kernel/core_pattern")
    if not pattern.exists() or pattern.read_text().strip() != "core":
        pytest.skip("core dumps are not written to the working directory")
    write_key_file(str(tmp_path / "k"))
    program = (
        "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)\n"
        "from relight.keys import Keychain; from relight.store.memory import MemoryStore; from relight.store.encrypted import EncryptedStore\n"
        f"store = EncryptedStore(MemoryStore(), Keychain.from_specs('file:{tmp_path / 'k'}'))\n"
        "store.put_once('x', b'y'); os.abort()"
    )

    def dumped(folder: Path, **environment: str) -> list[Path]:
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=folder,
            env={**os.environ, **environment},
            capture_output=True,
            check=False,
        )
        assert done.returncode == -signal.SIGABRT, done.stderr
        return list(folder.iterdir())

    assert dumped(tmp_path / "keeps") == []
    if resource.getrlimit(resource.RLIMIT_CORE)[1] != resource.RLIM_INFINITY:
        pytest.skip("this machine limits core dumps: what one holds cannot be seen")
    secret = base64.b64decode((tmp_path / "k").read_bytes().removeprefix(HEAD.encode()))
    left = dumped(tmp_path / "leaves", RELIGHT_CORE_DUMPS="1")
    assert left and secret in left[0].read_bytes()
    left[0].unlink()


@pytest.mark.parametrize(
    "address",
    ["http://vault.lab:8200", "http://10.0.0.7:8200", "http://localhost.evil.example", "HTTP://[2001:db8::1]:8200"],
)
def test_a_key_service_is_not_asked_over_plain_http(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """The token and the key would be readable on the network: such an address is refused before anything is sent, unless it is permitted."""
    monkeypatch.setenv("VAULT_ADDR", address)
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)
    error = refuses(ConfigError, lambda: resolve("vault:transit/training").wrap(RING, BOUND_TO))
    assert "TLS" in str(error) and services.PLAIN in str(error)
    with pytest.raises(ConfigError):
        services.check_private(address, "kms:training")
    monkeypatch.setenv(services.PLAIN, "1")
    services.check_private(address, "kms:training")


def test_a_key_service_does_not_redirect_to_plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect carries the token along, so it is checked like the address itself."""

    class Away(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(307)
            self.send_header("Location", "http://vault.lab:8200/v1/transit/encrypt/training")
            self.end_headers()

        do_PUT = do_POST

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Away) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("VAULT_ADDR", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("VAULT_TOKEN", TOKEN)
        assert "vault.lab" in str(refuses(ConfigError, lambda: resolve("vault:transit/training").wrap(RING, BOUND_TO)))
        server.shutdown()


def private_authority(folder: Path) -> Path:
    """A certificate of ``localhost`` that signs itself, and its key in ``key.pem``."""
    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")]),
    )
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(7)
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(*pem))
    (folder / "ca.pem").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return folder / "ca.pem"


@pytest.mark.parametrize("variable", ["VAULT_CACERT", "VAULT_CAPATH"])
def test_a_vault_with_a_private_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Vault's own variables name the authority of its certificate; without them it is refused."""
    ca = private_authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca, tmp_path / "key.pem")
    authorities = tmp_path / "authorities"
    authorities.mkdir()
    hashed = subprocess.run(
        ["openssl", "x509", "-hash", "-noout", "-in", ca], capture_output=True, text=True, check=True
    ).stdout.strip()
    (authorities / f"{hashed}.0").write_bytes(ca.read_bytes())
    for name in ("VAULT_CACERT", "VAULT_CAPATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    with vault("training", tls=context) as address:
        monkeypatch.setenv("VAULT_ADDR", address)
        monkeypatch.setenv("VAULT_TOKEN", TOKEN)
        refuses(StoreUnavailable, lambda: resolve("vault:transit/training").wrap(RING, BOUND_TO))
        monkeypatch.setenv(variable, str(ca if variable == "VAULT_CACERT" else authorities))
        opens(resolve("vault:transit/training"), "vault:transit/training")
        monkeypatch.setenv(variable, str(tmp_path / "none"))
        assert "VAULT_CACERT" in str(
            refuses(ConfigError, lambda: resolve("vault:transit/training").wrap(RING, BOUND_TO))
        )
