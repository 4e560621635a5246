"""Keys for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from relight.keys import Keychain, write_key_file


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    """Return the spec of a new key."""
    write_key_file(str(tmp_path / "the.key"))
    return f"file:{tmp_path / 'the.key'}"


@pytest.fixture
def keychain(key_file: str) -> Keychain:
    """Return the key chain of ``key_file``."""
    return Keychain.from_specs(key_file)
