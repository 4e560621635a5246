"""The directory of ``--keep``, which a drill, a proof or the demo fills."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from relight.errors import ConfigError


def make_kept_directory(path: Path) -> None:
    """Make the directory of ``--keep`` if it does not exist.

    Raise ``ConfigError`` if this process cannot write there, or if it is not empty: checkpoints of another script would be restored.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_empty = not os.listdir(path)
        if is_empty:
            with tempfile.TemporaryFile(dir=path):
                pass
    except OSError as error:
        raise ConfigError(
            f"writing to the directory of --keep failed: {error.strerror or error}",
            where=str(path),
            hint="name a directory that you can write to",
        ) from error
    if not is_empty:
        raise ConfigError("the directory of --keep is not empty", where=str(path), hint="name a new directory")
