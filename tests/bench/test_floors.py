"""Plain actions that measure what a machine needs. They must process all bytes, or the measured floors are too low."""

from __future__ import annotations

from pathlib import Path

import pytest

from relight.bench import floors

PIECE = floors.PIECE_BYTES


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [1, PIECE, 2 * PIECE + 7])
def test_all_bytes_are_copied(size: int, threads: int) -> None:
    """All bytes are copied from ordinary pages into huge ones, with any number of threads."""
    source, target = floors.bytes_in_ordinary_pages(size), floors.random_bytes(size)
    target[:] = bytes(size)
    floors.copy(target, source, threads)
    assert target == source


@pytest.mark.parametrize("size", [4096, 20_000, 3 * floors.READ_BYTES + 5])
def test_written_bytes_are_read_back(tmp_path: Path, size: int) -> None:
    """Directly, too, where neither the file nor the memory is a multiple of a page."""
    path, block = tmp_path / "floor", floors.random_bytes(size)
    for direct in (False, True) if floors.direct_works(tmp_path) else (False,):
        floors.write(path, block, size, direct=direct)
        assert path.stat().st_size == (-(-size // 4096) * 4096 if direct else size)
        into, seen = floors.bytes_in_ordinary_pages(size), []
        floors.read(path, size, 2, into=into, then=lambda piece, seen=seen: seen.append(len(piece)))
        whole = size // 4096 * 4096  # the bytes after it repeat the block's start
        assert into[:whole] == block[:whole]
        assert sum(seen) == size
