"""Check every test: none of its secrets may be in a file, an event, an error, a command line, the log or the output.

This includes processes that the test started. Secrets are the ``Secret`` objects of this process, the keys in the key files that
the test leaves, and the values of environment variables with ``TOKEN``, ``SECRET``, ``PASSWORD`` or ``PASSPHRASE`` in their
names, of this process or one that it started.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
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
"""Least bytes of a secret. Shorter ones would match by accident."""
KEY_FILE_BYTES_MAX, PIECE_BYTES = 256, 1 << 20
SAYS_SO = re.compile(r"TOKEN|SECRET|PASSWORD|PASSPHRASE")
HEADS = (HEAD.encode(), PRIVATE.encode())


@dataclass
class Watched:
    """The secrets and the output of one test."""

    secrets: set[bytes] = field(default_factory=set)
    output: list[str] = field(default_factory=list)
    folder: Path | None = None


NOTED = pytest.StashKey[Watched]()


def forms(secret: bytes) -> set[bytes]:
    """Return the forms in which a secret may appear: raw, hexadecimal, base 64, and as Python shows bytes."""
    return {secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode()}


@pytest.fixture(autouse=True)
def noted_secrets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Collect every secret, error, event and command line of the test. ``leaks`` searches them after the test."""
    watched = request.node.stash[NOTED] = Watched()
    if "tmp_path" in request.fixturenames:
        watched.folder = request.getfixturevalue("tmp_path")
    make, fail, start, communicate = (
        Secret.__init__,
        RelightError.__init__,
        subprocess.Popen.__init__,
        subprocess.Popen.communicate,
    )

    def note(value: bytes) -> None:
        if len(value) >= LONG and len(set(value)) > 4:
            watched.secrets.add(bytes(value))

    outside = dict(os.environ)

    def note_settings(environment: Mapping[Any, Any]) -> None:
        """Collect secrets from settings, except those of the user who runs the tests."""
        for name, value in environment.items():
            if SAYS_SO.search(os.fsdecode(name).upper()) and outside.get(os.fsdecode(name)) != os.fsdecode(value):
                note(os.fsencode(value))

    def noted(self: Secret, value: bytes) -> None:
        make(self, value)
        note(value)

    def failed(self: RelightError, *args: Any, **options: Any) -> None:
        fail(self, *args, **options)
        watched.output.append(f"{self!r} {self}")

    def started(self: subprocess.Popen[Any], args: Any, *more: Any, **options: Any) -> None:
        watched.output.append(str(args))
        note_settings(options.get("env") or {})
        start(self, args, *more, **options)

    def communicated(self: subprocess.Popen[Any], *given: Any, **options: Any) -> tuple[Any, Any]:
        outputs = communicate(self, *given, **options)
        watched.output += [text if isinstance(text, str) else text.decode(errors="replace") for text in outputs if text]
        return outputs

    monkeypatch.setattr(Secret, "__init__", noted)
    monkeypatch.setattr(RelightError, "__init__", failed)
    monkeypatch.setattr(subprocess.Popen, "__init__", started)
    monkeypatch.setattr(subprocess.Popen, "communicate", communicated)
    undo = subscribe(lambda event: watched.output.append(repr(event)))
    yield
    undo()
    note_settings(os.environ)


def leaks(watched: Watched, printed: Iterable[tuple[str, str]]) -> list[str]:
    """Return the places with secrets of the test. ``printed``: its captured output and logs, by name."""
    files = list(_files(watched.folder)) if watched.folder is not None else []
    secrets = watched.secrets | {secret for path in files if (secret := _key_in(path))}
    if not secrets:
        return []
    searched = set().union(*map(forms, secrets))
    texts = {"errors, events and command lines": "\n".join(watched.output).encode(errors="replace")}
    texts |= {name: text.encode(errors="replace") for name, text in printed}
    places = [where for where, data in texts.items() if any(form in data for form in searched)]
    for path in files:
        if not _is_kept(path, secrets) and _holds(path, searched):
            places.append(str(path))
    return places


def _is_kept(path: Path, secrets: set[bytes]) -> bool:
    """Return whether ``path`` is a key file, where a secret belongs."""
    if path.stat().st_size > KEY_FILE_BYTES_MAX:
        return False
    data = path.read_bytes()
    return data.startswith(HEADS) or data.strip() in secrets


def _holds(path: Path, looked_for: set[bytes]) -> bool:
    """Return whether the file contains one of ``looked_for``.

    Holes are skipped, and one piece is in memory at a time.
    """
    overlap, tail = max(map(len, looked_for)), b""
    with open(path, "rb", buffering=0) as file:
        offset = 0
        while True:
            try:
                begin = os.lseek(file.fileno(), offset, os.SEEK_DATA)
            except OSError:
                return False  # nothing but a hole, or the end
            tail = b"" if begin != offset else tail
            data = tail + os.pread(file.fileno(), PIECE_BYTES, begin)
            if any(form in data for form in looked_for):
                return True
            if len(data) == len(tail):
                return False
            offset, tail = begin + len(data) - len(tail), data[-overlap:]


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path


def _key_in(path: Path) -> bytes | None:
    if path.stat().st_size > KEY_FILE_BYTES_MAX:
        return None
    data = path.read_bytes()
    head = next((known for known in HEADS if data.startswith(known)), None)
    if head is None:
        return None
    try:
        secret = base64.b64decode(data.removeprefix(head).strip(), validate=True)
    except binascii.Error:
        return None
    return secret if len(secret) >= LONG and len(set(secret)) > 4 else None
