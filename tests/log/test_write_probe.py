"""The write probe raises the first error of a store, not the error of its own clean-up."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from relight.doctor.facts_store import collect_store
from relight.errors import StoreUnavailable
from relight.log.write_probe import probe
from relight.store import LocalStore
from relight.store.durable import sync_dir
from relight.testing.disks import FailNth


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_the_first_error_of_a_probe_is_raised(tmp_path: Path, code: int) -> None:
    """On a read-only store the message was "deleting a directory failed", of the probe's clean-up, in place of the mkdir that failed."""
    store = LocalStore(tmp_path, disk=FailNth(1, code, "mkdir", forever=True))
    with pytest.raises(StoreUnavailable, match="making a directory failed"):
        probe(store, "demo")


def test_a_probe_reports_a_deletion_that_fails(tmp_path: Path) -> None:
    """A store that can be written but not deleted from fails the probe."""
    with pytest.raises(StoreUnavailable, match="deleting failed"):
        probe(LocalStore(tmp_path, disk=FailNth(1, errno.EACCES, "unlink")), "demo")


def test_doctor_names_the_first_error(tmp_path: Path) -> None:
    """``relight doctor`` shows the error of the write, too."""
    trouble = collect_store(LocalStore(tmp_path, disk=FailNth(1, errno.EROFS, "mkdir", forever=True)), quick=True).probe
    assert trouble is not None and trouble.what.startswith("making a directory failed")


def test_the_first_error_of_a_directory_sync_is_raised(tmp_path: Path) -> None:
    """An fsync that fails is the cause, also if the close after it fails."""

    class Failing(FailNth):
        def close(self, fd: int) -> None:
            super().close(fd)
            raise OSError(errno.EBADF, "Bad file descriptor")

    with pytest.raises(StoreUnavailable, match="EIO"):
        sync_dir(Failing(1, errno.EIO, "fsync"), str(tmp_path))
