"""Versions of Relight and of its main dependencies, for ``relight --version``."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from relight.version import FORMAT, VERSION

NEIGHBOURS = ("torch", "numpy", "blake3", "msgspec")


def versions() -> dict[str, str | None]:
    """Return the versions by name, without importing anything; None for what is not installed."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    facts: dict[str, str | None] = {"relight": VERSION, "format": str(FORMAT), "python": platform.python_version()}
    return facts | {name: _installed(name) for name in NEIGHBOURS} | {"system": system}


def _installed(name: str) -> str | None:
    """Return a package's version without importing it; None if it is not installed."""
    try:
        return installed(name)
    except PackageNotFoundError:
        return None
