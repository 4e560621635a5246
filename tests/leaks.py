"""A watch over every test: no secret that it had may be found in a file, an event, an error, a command line, the log or what was printed.

Secrets are those that this process makes (``Secret``), and the keys in key files that the test leaves, whoever wrote them.
"""

from __future__ import annotations

import base64
import binascii
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relight.errors import RelightError
from relight.format.cipher import Secret
from relight.keys.files import HEAD
from relight.keys.signing import PRIVATE
from relight.observe import subscribe

LONG = 16
"""Shorter ones would be found by accident."""
FILE_BYTES_MAX, KEY_FILE_BYTES_MAX = 64 << 20, 256
HEADS = (HEAD.encode(), PRIVATE.encode())


@dataclass
class Watched:
    """Of one test."""

    secrets: set[bytes] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    folder: Path | None = None


NOTED = pytest.StashKey[Watched]()


def forms(secret: bytes) -> set[bytes]:
    """As it may be found: itself, in hexadecimal, in base 64, as Python shows bytes."""
    return {secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode()}


@pytest.fixture(autouse=True)
def noted_secrets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every secret, error, event and command line of the test; ``leaks`` looks through them when it has ended."""
    watched = request.node.stash[NOTED] = Watched()
    if "tmp_path" in request.fixturenames:
        watched.folder = request.getfixturevalue("tmp_path")
    make, fail, start = Secret.__init__, RelightError.__init__, subprocess.Popen.__init__

    def noted(self: Secret, value: bytes) -> None:
        make(self, value)
        if len(value) >= LONG and len(set(value)) > 4:
            watched.secrets.add(bytes(value))

    def told(self: RelightError, *args: Any, **options: Any) -> None:
        fail(self, *args, **options)
        watched.said.append(f"{self!r} {self}")

    def started(self: subprocess.Popen[Any], args: Any, *more: Any, **options: Any) -> None:
        watched.said.append(str(args))
        start(self, args, *more, **options)

    monkeypatch.setattr(Secret, "__init__", noted)
    monkeypatch.setattr(RelightError, "__init__", told)
    monkeypatch.setattr(subprocess.Popen, "__init__", started)
    undo = subscribe(lambda event: watched.said.append(repr(event)))
    yield
    undo()


def leaks(watched: Watched, printed: Iterable[tuple[str, str]]) -> list[str]:
    """Where secrets of the test are; ``printed`` is what was caught of its output and logs, by name."""
    files = list(_files(watched.folder)) if watched.folder is not None else []
    secrets = watched.secrets | {secret for path in files if (secret := _key_in(path))}
    if not secrets:
        return []
    looked_for = set().union(*map(forms, secrets))
    texts = {"errors, events and command lines": "\n".join(watched.said).encode(errors="replace")}
    texts |= {name: text.encode(errors="replace") for name, text in printed}
    found = [where for where, data in texts.items() if any(one in data for one in looked_for)]
    for path in files:
        data = path.read_bytes()
        kept = data.startswith(HEADS) or data.strip() in secrets  # there it is, and belongs
        if not kept and any(one in data for one in looked_for):
            found.append(str(path))
    return found


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < FILE_BYTES_MAX:
            yield path


def _key_in(path: Path) -> bytes | None:
    if path.stat().st_size > KEY_FILE_BYTES_MAX:
        return None
    data = path.read_bytes()
    head = next((one for one in HEADS if data.startswith(one)), None)
    if head is None:
        return None
    try:
        secret = base64.b64decode(data.removeprefix(head).strip(), validate=True)
    except binascii.Error:
        return None
    return secret if len(secret) >= LONG and len(set(secret)) > 4 else None
