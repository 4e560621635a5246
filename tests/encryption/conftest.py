"""Keys for tests; and a watch over each: no secret that any of them had may be found in a file, an event, a log, an error or what was printed."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relight.errors import RelightError
from relight.format.cipher import Secret
from relight.keys import Keychain, write_key_file
from relight.keys.files import HEAD
from relight.keys.signing import PRIVATE
from relight.observe import subscribe

LONG = 16
"""Shorter ones would be found by accident."""


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    """The spec of a fresh key."""
    write_key_file(str(tmp_path / "the.key"))
    return f"file:{tmp_path / 'the.key'}"


@pytest.fixture
def keychain(key_file: str) -> Keychain:
    """The same, resolved."""
    return Keychain.of(key_file)


def forms(secret: bytes) -> set[bytes]:
    """As it may be found: itself, in hexadecimal, in base 64, as Python shows bytes."""
    return {secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode()}


@pytest.fixture(autouse=True)
def nothing_leaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> Iterator[None]:
    """Every secret that this process makes, and every error and event; looked through when the test has ended."""
    secrets: set[bytes] = set()
    said: list[str] = []
    make, fail = Secret.__init__, RelightError.__init__

    def noted(self: Secret, value: bytes) -> None:
        make(self, value)
        if len(value) >= LONG and len(set(value)) > 4:
            secrets.add(bytes(value))

    def told(self: RelightError, *args: Any, **options: Any) -> None:
        fail(self, *args, **options)
        said.append(f"{self!r} {self}")

    monkeypatch.setattr(Secret, "__init__", noted)
    monkeypatch.setattr(RelightError, "__init__", told)
    undo = subscribe(lambda event: said.append(repr(event)))
    yield
    undo()
    printed = capfd.readouterr()
    looked_for = set().union(*map(forms, secrets)) if secrets else set()
    texts = {"errors and events": "\n".join(said).encode(), "the log": caplog.text.encode(), "output": (printed.out + printed.err).encode()}
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 64 << 20:
            data = path.read_bytes()
            kept = data.startswith((HEAD.encode(), PRIVATE.encode())) or data.strip() in secrets  # there it is, and belongs
            if not kept:
                texts[str(path)] = data
    found = [where for where, data in texts.items() if any(one in data for one in looked_for)]
    assert not found, f"secrets in {found}"
