"""Every hostile store of the tables is refused by name, or its hostile item is skipped by name.

Nothing else happens.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import cases_files
import cases_log
import cases_part
import cases_root
import cases_stored
import cases_tree
import pytest
from case import Case
from examine import Peak, Scattered, Seen, examine, save_once_more, unprintable
from forge import RUN, STEPS, Forge, values, write

from relight.errors import RelightError
from relight.store import Disk, LocalStore

CASES = [
    *cases_log.CASES,
    *cases_root.CASES,
    *cases_part.CASES,
    *cases_tree.CASES,
    *cases_files.CASES,
    *cases_stored.CASES,
]
SECONDS_MAX = 3.0
BYTES_MAX = 64 << 20


class Quick(Disk):
    """A disk without the waiting."""

    def fsync(self, fd: int) -> None:
        """Not here."""


def snapshot(folder: Path) -> dict[str, str]:
    """Return the files below ``folder``. Follows no links and opens only regular files."""
    files = {}
    for path in sorted(folder.rglob("*")):
        kind = path.lstat()
        regular = path.is_file() and not path.is_symlink() and kind.st_size < 1 << 30
        files[str(path.relative_to(folder))] = (
            hashlib.sha1(path.read_bytes()).hexdigest() if regular else oct(kind.st_mode)
        )  # noqa: S324
    return files


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_problems_of_a_hostile_store_are_reported_and_skipped(case: Case, tmp_path: Path) -> None:
    """For any store, a reader is fast, bounded in memory, reports the problem, and returns only saved bytes."""
    forge = Forge()
    case.make(forge)
    root = tmp_path / "store"
    (tmp_path / "outside").mkdir()
    write(forge.files, root)
    if case.after:
        case.after(root)
    before = snapshot(tmp_path)
    store = LocalStore(root, disk=Quick(), direct=False)
    started = time.process_time()
    with Peak() as peak:
        seen = examine(store, RUN)
    took_s = time.process_time() - started
    check(case, seen)
    assert snapshot(tmp_path) == before, "reading changed something"
    assert took_s < SECONDS_MAX, f"{took_s:.2f} s"
    assert peak.extra < BYTES_MAX, f"{peak.extra >> 20} MiB"
    assert examine(store, RUN, sink=Scattered).newest == case.newest
    check_resumes(case, store, tmp_path)


def check(case: Case, seen: Seen) -> None:
    """The right checkpoint, its own bytes, the damage named, nothing that could drive a terminal."""
    assert seen.newest == case.newest, seen.text
    assert case.named in seen.text, seen.text
    for checkpoint, tensors in seen.good:
        assert set(tensors.values()) <= set(values(STEPS[checkpoint.id[0]]).values()), "bytes that were never saved"
    for error in seen.raised:
        assert str(error), "an error without a word"
        for text in (error.what, error.where, *error.details):
            assert not unprintable(text), repr(text)
            assert len(text) < 2000, f"{len(text)} characters: {text[:200]}"
    for finding in [*seen.log_findings, *(finding for findings in seen.findings.values() for finding in findings)]:
        assert not unprintable(finding.detail), repr(finding)
        assert not unprintable(finding.file), repr(finding)
        assert len(finding.detail) < 2000, finding.detail[:200]
    if seen.refused is not None:
        return
    for checkpoint, _ in seen.bad:
        assert seen.findings[checkpoint.id], f"{checkpoint.id} cannot be read, and verify finds nothing wrong with it"
    if case.newest == "c" and not case.named:
        assert not seen.findings["c" * 10], seen.findings


def check_resumes(case: Case, store: LocalStore, tmp_path: Path) -> None:
    """The run resumes, or the error states why not. Nothing is written outside."""
    outside = snapshot(tmp_path / "outside")
    if case.resumes:
        saved = save_once_more(store, RUN)
        seen = examine(store, RUN)
        assert seen.good[0][0].id == saved
        if case.newest is not None:
            assert seen.good[1][0].id[0] == case.newest, "what was good before is good no more"
    else:
        with pytest.raises(RelightError):
            save_once_more(store, RUN)
    assert snapshot(tmp_path / "outside") == outside


def test_there_are_cases_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """The tables hold at least 150 cases, no two of one name."""
    with capsys.disabled():
        print(f"\n{len(CASES)} hostile stores")
    assert len({case.name for case in CASES}) == len(CASES) >= 150
