"""No pair of key and nonce is used twice:

a short form of ``make nonces``, and a check that it would detect a repetition.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.encryption import nonces

from relight.format import cipher
from relight.store import encrypted


@pytest.fixture(autouse=True)
def _put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cipher, "_aes", cipher._aes)


def test_killed_saves_repeat_no_pair(tmp_path: Path) -> None:
    """Some hundred saves, by attempts that are killed, and by forks that continue with their parent's state."""
    report = nonces.run(300, 7, tmp_path)
    assert report["twice"] == 0
    assert report["killed"] > 40 and report["forks"] >= 5 and report["pairs"] > 2000


def test_the_ledger_would_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without random salts and data keys, repeated names and forks repeat pairs."""
    real = encrypted.secrets

    class Careless:
        @staticmethod
        def token_bytes(length: int) -> bytes:
            return bytes(length) if length == encrypted.SALT_BYTES == encrypted.KEY_BYTES else real.token_bytes(length)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    monkeypatch.setattr(encrypted, "secrets", Careless())
    assert nonces.run(200, 7, tmp_path)["twice"] > 0
