"""The directories that supervisors share with their ranks, and what is removed of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relight.heartbeat import SETTING
from relight.heartbeat.heartbeat_page import read_beat
from relight.supervise.decide import SuperviseRules
from relight.supervise.limits import HangTimeouts
from relight.supervise.shared_pages import MARKER, directories, left_in, sweep_memory
from relight.supervise.supervisor import Supervisor


def test_what_another_supervisor_needs_is_not_swept(tmp_path: Path) -> None:
    """Another container shares the memory directory, but its process ids are unknown here.

    Only directories that no supervisor has locked are removed.
    """
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
    foreign = Path(watched.begin([0], {})[0][SETTING]).parent
    left = foreign.with_name("relight-run-4194303-left0000")
    left.mkdir(0o700)
    (left / MARKER).touch()
    try:
        hidden = foreign.with_name(f"relight-run-4194302-{foreign.name.rpartition('-')[2]}")
        foreign.rename(hidden)  # as if its process id were unknown here
        Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path).close()
        assert hidden.exists() and not left.exists()
        hidden.rename(foreign)
    finally:
        watched.close()
    assert not foreign.exists()


def test_only_directories_of_own_supervisors_are_removed(tmp_path: Path) -> None:
    """A sweep removes the directory of a killed supervisor, and no store, link or foreign directory of a similar
    name."""
    kept = [
        "relight-run-20261126",
        "relight-run-424242-lr0.1",
        "relight-run-42-baseline",
        "relight-run-4194303-٣٤٥٦abcd",
        "relight-run-٤٢-abcdefgh",
    ]
    for name in kept:
        (tmp_path / name).mkdir(0o700)
        (tmp_path / name / "data").write_bytes(b"x")
    for name, mode, marked in (
        ("relight-run-4194303-openopen", 0o755, True),
        ("relight-run-4194303-unmarked", 0o700, False),
    ):
        (tmp_path / name).mkdir(mode)
        (tmp_path / name).chmod(mode)
        if marked:
            (tmp_path / name / MARKER).touch()
    (tmp_path / "target").mkdir(0o700)
    (tmp_path / "target" / MARKER).touch()
    (tmp_path / "relight-run-4194303-linklink").symlink_to(tmp_path / "target")
    (tmp_path / "relight-run-4194303-deaddead").mkdir(0o700)
    (tmp_path / "relight-run-4194303-deaddead" / MARKER).touch()
    before = {path.name for path in tmp_path.iterdir()}
    assert [path.name for path in left_in(tmp_path)] == ["relight-run-4194303-deaddead"]
    assert [path.name for path in sweep_memory(tmp_path)] == ["relight-run-4194303-deaddead"]
    assert {path.name for path in tmp_path.iterdir()} == before - {"relight-run-4194303-deaddead"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_of_another_user_is_neither_removed_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's directory counts as no supervisor's, dead or alive."""
    monkeypatch.setattr("relight.supervise.shared_pages.MEMORY", str(tmp_path))
    for pid in (4194303, os.getpid()):
        folder = tmp_path / f"relight-run-{pid}-othersdi"
        folder.mkdir(0o700)
        (folder / MARKER).touch()
        os.chown(folder, 65534, 65534)
    assert sweep_memory(tmp_path) == [] and os.getpid() not in directories()


def test_a_page_that_is_not_a_regular_file_has_no_heartbeat(tmp_path: Path) -> None:
    """A heartbeat page that is a pipe or a device is not read, because it might have no end."""
    os.mkfifo(tmp_path / "heartbeat-0")
    (tmp_path / "heartbeat-1").symlink_to("/dev/zero")
    assert read_beat(tmp_path / "heartbeat-0") is None and read_beat(tmp_path / "heartbeat-1") is None
