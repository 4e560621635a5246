"""The copies of the ranks' stderr take little space, however much a job prints."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from relight.supervise.stderr_files import KEPT_BYTES, release_printed

LINE = b"step 1234: loss 0.123456\n"
MANY = 8 * KEPT_BYTES // len(LINE)


def used(path: Path) -> int:
    """Return the bytes that a file takes on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return 512 * path.stat().st_blocks


def test_what_was_printed_takes_no_space(tmp_path: Path) -> None:
    """The rank continues to write, and its last lines are there. A file that was not printed, or not completely, loses nothing."""
    paths = [tmp_path / name for name in ("printed", "partly", "unread")]
    for path in paths:
        path.write_bytes(LINE * MANY)
    size = len(LINE) * MANY
    with paths[0].open("rb") as printed, paths[1].open("rb") as partly, paths[0].open("r+b") as rank:
        printed.seek(size)
        partly.seek(3 * KEPT_BYTES)
        rank.seek(size)
        release_printed(map(str, [*paths, tmp_path / "none"]))
        rank.write(LINE)
        rank.flush()
        assert printed.readline() == LINE
        assert partly.read() == (LINE * MANY)[3 * KEPT_BYTES :]
    assert used(paths[0]) < 2 * KEPT_BYTES and paths[0].stat().st_size == size + len(LINE)
    assert paths[0].read_bytes()[-KEPT_BYTES:] == (LINE * (MANY + 1))[-KEPT_BYTES:]
    assert paths[2].read_bytes() == LINE * MANY


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, ""), FileNotFoundError(errno.ENOENT, ""), MemoryError()])
def test_a_refused_call_does_not_end_a_job(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poll of the ranks continues without descriptors, memory or /proc."""
    path = tmp_path / "stderr"
    path.write_bytes(LINE * MANY)

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "listdir", refuse)
    release_printed([str(path)])
    assert path.read_bytes() == LINE * MANY
