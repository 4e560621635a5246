"""Training text that every Python has: the source of its standard library.

Files are read in sorted order, so a Python installation gives the same bytes every time. An installation without source
(only compiled files, or a zip of them) still has docstrings: those of the built-in types and of modules written in C.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

BYTES_MIN = 50_000
"""Bytes of text that training needs at least."""

BYTES_MAX = 2_000_000

_BUILT_IN = (
    "builtins", "itertools", "math", "time", "errno", "marshal", "posix", "sys", "_codecs", "_collections", "_functools",
    "_io", "_operator", "_sre", "_string", "_struct", "_thread", "_weakref", "_datetime", "_socket", "array", "cmath", "select",
    "zlib", "unicodedata", "_decimal", "_json", "_random", "_hashlib", "_ssl", "mmap", "resource",
)  # fmt: skip


def read_text(limit: int = BYTES_MAX, *, stdlib: Path | None = None, zips: list[str] | None = None) -> bytes:
    """Return at most ``limit`` bytes of text: source files, then source in a zipped library, then docstrings, until it is enough.

    ``stdlib`` and ``zips`` replace the places to search, for tests.
    """
    folder = Path(sysconfig.get_path("stdlib")) if stdlib is None else stdlib
    archives = [entry for entry in sys.path if entry.endswith(".zip")] if zips is None else zips
    text = _join(_files(folder), limit)
    if len(text) < BYTES_MIN:
        text += _join(_zipped(archives), limit - len(text))
    if len(text) < BYTES_MIN:
        text += _join(_docstrings(), limit - len(text))
    if len(text) < BYTES_MIN:
        raise RuntimeError(
            f"this Python carries only {len(text)} bytes of text in {folder}: no source and no docstrings"
        )
    return text


def _join(pieces: Iterator[bytes], limit: int) -> bytes:
    text = bytearray()
    for piece in pieces:
        text += piece
        if len(text) >= limit:
            break
    return bytes(text[:limit])


def _files(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.glob("*.py")):
        if not path.name.startswith("_sysconfigdata"):  # one long table with paths of this Python's build
            yield path.read_bytes().replace(b"\r\n", b"\n")


def _zipped(archives: list[str]) -> Iterator[bytes]:
    for archive in archives:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                for name in sorted(opened.namelist()):
                    if name.endswith(".py") and "/" not in name:
                        yield opened.read(name).replace(b"\r\n", b"\n")


def _docstrings() -> Iterator[bytes]:
    for module_name in _BUILT_IN:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        for name, value in sorted(vars(module).items()):
            members = sorted(vars(value).items()) if isinstance(value, type) else []
            for path, member_value in [(name, value), *((f"{name}.{member}", item) for member, item in members)]:
                text = (
                    inspect.getdoc(member_value)
                    if callable(member_value) or inspect.isdatadescriptor(member_value)
                    else None
                )
                if text:
                    yield f"{module_name}.{path}:\n{text}\n\n".encode()
