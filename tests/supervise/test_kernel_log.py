"""Kernel messages that may explain the end of a job."""

import os
from pathlib import Path

import pytest

from relight.supervise import kernel_log
from relight.supervise.kernel_log import lines_about

OWN = "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm python: reading directory lblock 0"
DISK = "blk_update_request: I/O error, dev sda, sector 2048 op 0x0:(READ)"
OTHER = "XFS (sdb): Corruption of in-memory data (0x8) detected. Shutting down filesystem."
LOOP = "XFS (loop0): User initiated shutdown received."
NFS = "nfs: server filer not responding, still trying"
REMOVED = "Buffer I/O error on dev sdz, logical block 0, async page read"


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str] | None]:
    """Devices under each path of the test, on a machine that has sda, sda1, sdb and loop0."""
    for name in ("sda", "sda1", "sdb", "loop0"):
        (tmp_path / name).mkdir()
    under: dict[str, set[str] | None] = {"/data": {"sda1", "sda"}, "/dev/shm": set(), "/": None}
    monkeypatch.setattr(kernel_log, "_BLOCK", tmp_path)
    monkeypatch.setattr(kernel_log, "_disks_under", under.__getitem__)
    return under


def test_a_failed_disk_that_the_job_does_not_use_explains_nothing(disks: dict[str, set[str] | None]) -> None:
    """Messages about another disk are left out. Those about a server, or about a disk that is gone, stay."""
    assert lines_about((OWN, DISK, OTHER, LOOP, NFS, REMOVED), ("/data", "/dev/shm"), ()) == (OWN, DISK, NFS, REMOVED)


def test_where_the_disks_are_not_known_only_loop_devices_are_left_out(disks: dict[str, set[str] | None]) -> None:
    """In a container, ``/`` is an overlay: it could be on any disk."""
    assert lines_about((OWN, DISK, OTHER, LOOP, NFS), ("/data", "/"), ()) == (OWN, DISK, OTHER, NFS)
    disks["/data"] = {"loop0"}
    assert lines_about((LOOP,), ("/data", "/"), ()) == (LOOP,)


def test_a_killed_process_of_another_job_explains_nothing() -> None:
    """The kernel names the process by its id."""
    lines = (
        "Out of memory: Killed process 4711 (python)",
        "Out of memory: Killed process 47112 (python)",
        "oom-kill:constraint=CONSTRAINT_MEMCG",
    )
    assert lines_about(lines, (), (4711,)) == (lines[0], lines[2])


def test_the_disk_of_a_directory_is_found(tmp_path: Path) -> None:
    """The real machine's: a partition comes with its disk, a file system in memory has none."""
    assert kernel_log._disks_under("/dev/shm") == set()
    assert kernel_log._disks_under(str(tmp_path / "absent")) is None
    disks = kernel_log._disks_under(str(tmp_path))
    if os.major(os.stat(tmp_path).st_dev):
        assert disks and all((Path("/sys/class/block") / name).exists() for name in disks)
    else:
        assert not disks
