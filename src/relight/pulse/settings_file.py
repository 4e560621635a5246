"""``relight.toml``: the file that a training process and whoever watches over it both read, each its own table."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from relight.errors import ConfigError

FILE = "relight.toml"
PLACE = "RELIGHT_SETTINGS"
"""Names another file than the one in the working directory."""
_BYTES_MAX = 1 << 20


def read_table(name: str, path: Path | None = None) -> tuple[dict[str, Any], Path]:
    """One table of the file, and the file. Empty if none is named, by ``path`` or ``RELIGHT_SETTINGS``, and there is none here.

    ``ConfigError`` for what cannot be read, is no TOML, or has something else under that name.
    """
    if path is None:
        named = os.environ.get(PLACE, "")
        path = Path(named or FILE)
        if not named and not path.is_file():
            return {}, path
    try:
        if path.stat().st_size > _BYTES_MAX:
            raise ConfigError(f"a settings file of more than {_BYTES_MAX >> 20} MiB", where=str(path))
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}", where=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"it is no TOML: {error}", where=str(path)) from None
    table = told.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"[{name}] is a table", where=str(path))
    return table, path
