"""Real file systems that are full, read-only or out of inodes. Without the right to mount, the tests are skipped."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.commit import Attempt
from relight.errors import NoSpace, RelightError, StoreUnavailable
from relight.log import Log, fold
from relight.store import LocalStore
from relight.testing.disks import CHANGING, DiskCall, HookedDisk
from relight.testing.scenario import RUN, Fact, check, examine, perform, save

pytestmark = pytest.mark.crash


def _run(*command: str) -> None:
    tool = shutil.which(command[0])
    if tool is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run([tool, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)} is not permitted here: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(where: Path, *options: str) -> Iterator[Path]:
    """Mount, and unmount afterwards."""
    where.mkdir()
    _run("mount", *options, str(where))
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def _used(path: Path) -> int:
    stat = os.statvfs(path)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def _begin(root: Path) -> tuple[LocalStore, Attempt, list[Fact]]:
    store = LocalStore(root / "store")
    attempt, facts = Attempt.begin(store, RUN), list[Fact]()
    perform(save(attempt, "real/before", 1), facts)
    return store, attempt, facts


def test_small_file_systems_of_every_size(tmp_path: Path) -> None:
    """On a real file system with n free pages, saves raise ``NoSpace`` until one fits.

    The space is freed and the run continues.
    """
    outcomes = []
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "none") as root:
        store, attempt, facts = _begin(root)
        for pages in range(24):
            used = _used(root)
            _run("mount", "-o", f"remount,size={used + pages * 4096}", str(root))
            try:
                perform(save(attempt, f"real/struck/{pages}", 2 + pages), facts)
                outcomes.append("fits")
            except NoSpace:
                outcomes.append("full")
                assert _used(root) <= used, "room was not given back"
                assert len(fold(attempt.view()).live) == 1 + outcomes.count("fits")
            _run("mount", "-o", "remount,size=4m", str(root))
        assert examine(store, Log(store, RUN), facts) == []
        assert check(store, facts, 0) == []
    assert outcomes[0] == "full"
    assert outcomes[-1] == "fits"


class _Strikes(HookedDisk):
    """Does something before its n-th changing call."""

    def __init__(self, n: int, strike: object) -> None:
        super().__init__()
        self.n, self.seen, self.strike = n, 0, strike

    def around(self, call: DiskCall, go, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.seen += call.name in CHANGING
        if call.name in CHANGING and self.seen == self.n:
            self.strike()  # type: ignore[operator]
        return go(*args, **kwargs)


def test_remounted_read_only_in_mid_save(tmp_path: Path) -> None:
    """A file system that becomes read-only during a save: a typed error, nothing lost, and the run continues once it is writable."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=16m", "none") as root:
        store, attempt, facts = _begin(root)
        tried = 0
        for n in range(1, 60, 4):

            def freeze() -> None:
                # While a file is open for writing, the kernel refuses the remount. Then another n remounts.
                subprocess.run(["mount", "-o", "remount,ro", str(root)], capture_output=True, check=False)

            disk = _Strikes(n, freeze)
            struck = LocalStore(root / "store", disk=disk)
            second = Attempt.begin(store, RUN)
            second._place = second._place._replace(store=struck)
            failed = False
            try:
                perform(save(second, f"real/ro/{n}", 10 + n), facts)
            except RelightError as error:
                failed = True
                assert isinstance(error, StoreUnavailable)
            tried += failed
            assert examine(store, Log(store, RUN), facts) == [], (
                "what was there is readable while the disk is read-only"
            )
            _run("mount", "-o", "remount,rw", str(root))
            perform(save(Attempt.begin(store, RUN), f"real/rw/{n}", 11 + n), facts)
        assert check(store, facts, 0) == []
        assert tried >= 3, f"only {tried} saves met a read-only file system"


def test_no_inodes_left(tmp_path: Path) -> None:
    """A file system without inodes: ``NoSpace``, nothing lost, and the run continues once it has inodes again."""
    image = tmp_path / "image"
    image.write_bytes(bytes(8 << 20))
    _run("mkfs.ext4", "-q", "-F", "-N", "64", str(image))
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as root:
        store, attempt, facts = _begin(root)
        filler = []
        full = 0
        with contextlib.suppress(OSError):
            while True:
                (root / f"filler{len(filler)}").touch()
                filler.append(root / f"filler{len(filler)}")
        for freed in range(9):
            for path in filler[:freed]:
                path.unlink(missing_ok=True)
            try:
                perform(save(attempt, f"real/inodes/{freed}", 2 + freed), facts)
                break
            except NoSpace:
                full += 1
                assert len(fold(attempt.view()).live) == 1
        assert full >= 2
        for path in filler:
            path.unlink(missing_ok=True)
        assert check(store, facts, 0) == []


def test_ext4_that_is_full(tmp_path: Path) -> None:
    """A real ext4 that runs full over many saves: ``NoSpace`` in the end, all that was acknowledged restores, and pruning makes room again."""
    from relight.policy import keep
    from relight.reclaim import execute, plan_prune

    image = tmp_path / "image"
    image.write_bytes(bytes(3 << 20))
    _run("mkfs.ext4", "-q", "-F", "-b", "1024", str(image))
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as root:
        store, attempt, facts = _begin(root)
        with pytest.raises(NoSpace):
            for step in range(2, 2000):
                perform(save(attempt, f"real/ext4/{step}", step), facts)
        assert examine(store, Log(store, RUN), facts) == []
        saved = len(fold(attempt.view()).live)
        report = execute(plan_prune(store, RUN, keep(last=2)), store, epoch=attempt.epoch)
        assert len(report.deleted) == saved - 2
        facts.append(("retiring", *report.retired))
        assert check(store, facts, 0) == []
