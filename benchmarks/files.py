"""Size of a folder's files, and whether they are in the page cache."""

from __future__ import annotations

from pathlib import Path

from relight.bench.cache import drop_cache, files, read_through, resident

__all__ = ["allocated", "drop_cache", "files", "read_through", "resident"]


def allocated(folder: Path) -> int:
    """Bytes of the blocks that the files take."""
    return sum(path.stat().st_blocks * 512 for path in files(folder))
